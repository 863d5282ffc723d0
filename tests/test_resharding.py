"""What two tensor-parallel ranks saved continues on one and on four, through Megatron's distributed checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import megatron_ranks
from megatron.core import parallel_state
from models import gathered
from torch import Tensor, nn
from train_runs import FLAG, tiny, trainer_of, whole

from mcore_dsa.train.config import JobConfig

# How far logits under another tensor-parallel size may lie apart, in units of what one step in the last place of every
# weight does to them: both are sums over the same products of errors of 2**-24. 0.45 of it (M).
ROUNDINGS = 3.0


@dataclass
class State:
    """Whole weights and logits on a batch, put together from all ranks, and the losses of the steps that follow."""

    weights: dict[str, Tensor]
    logits_BSV: Tensor
    losses: list[float]
    # How far the logits move where every weight takes a neighbouring value.
    rounding: float


def whole_weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: whole(name, parameter, parameter.detach()) for name, parameter in module.named_parameters()}


@torch.no_grad()
def logits(module: nn.Module, rows: int) -> Tensor:
    tokens_BS = torch.randint(256, (2, rows), generator=torch.Generator().manual_seed(3))
    return gathered(module(tokens_BS, None, None), -1)


@torch.no_grad()
def rounding(module: nn.Module, rows: int) -> float:
    """Each weight goes up or down by one unit in its last place, the same on every rank where it is replicated."""
    right, moved = logits(module, rows), []
    for number, parameter in enumerate(module.parameters()):
        sharded = getattr(parameter, "tensor_model_parallel", False)
        rank = parallel_state.get_tensor_model_parallel_rank() if sharded else 0
        up = torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1000 * number + rank)) < 0.5
        moved.append(parameter.clone())
        parameter.copy_(parameter.nextafter(torch.where(up, torch.inf, -torch.inf)))
    other = logits(module, rows)
    for parameter, value in zip(module.parameters(), moved, strict=True):
        parameter.copy_(value)
    return float((other - right).abs().max())


def continued(trainer: Any) -> State:
    module, rows = trainer.chunks[0].module, trainer.config.training.sequence_length
    weights, right, scale = whole_weights(module), logits(module, rows), rounding(module, rows)
    return State(weights, right, [trainer.train_step().loss for _ in range(2)], scale)


def save(config: JobConfig) -> State:
    from mcore_dsa.train.checkpointing import save_checkpoint

    trainer, digest = trainer_of(config)
    for _ in range(2):
        trainer.train_step()
    save_checkpoint(trainer, Path(config.run_dir), digest)
    return continued(trainer)


def load(config: JobConfig, run_dir: Path) -> State:
    from mcore_dsa.train.checkpointing import load_checkpoint
    from mcore_dsa.train.stored import latest_checkpoint

    trainer, _ = trainer_of(config)
    for parameter in trainer.chunks[0].parameters():
        parameter.data.fill_(torch.nan)
    load_checkpoint(trainer, latest_checkpoint(run_dir))
    assert trainer.step == 2
    return continued(trainer)


@pytest.mark.parametrize(("host", "sizes"), [("gpt", (1, 4)), ("hybrid", (1,))])
def test_two_ranks_continue_on_one_and_on_four(host: str, sizes: tuple[int, ...], tmp_path: Path) -> None:
    options = "--model.hidden_dropout 0"
    if host == "hybrid":
        options += " --model.host hybrid --model.hybrid_layer_pattern D-D- --model.num_layers 4"
    run_dir = tmp_path / "two"
    on = {FLAG: "1"}
    saved, other = megatron_ranks(save, 2, tiny(run_dir, options), tp=2, env=on)
    assert saved.losses == other.losses
    indexer = [name for name in saved.weights if ".indexer." in name]
    assert len(indexer) == 2 * 7
    assert 0 < saved.rounding < 1e-4 * float(saved.logits_BSV.abs().max())
    for size in sizes:
        config = tiny(tmp_path / str(size), options, f"--parallel.tensor {size}")
        for loaded in megatron_ranks(load, size, config, run_dir, tp=size, env=on):
            assert loaded.weights.keys() == saved.weights.keys()
            for name, value in saved.weights.items():
                assert torch.equal(loaded.weights[name], value), name
            error = float((loaded.logits_BSV - saved.logits_BSV).abs().max())
            assert error <= ROUNDINGS * saved.rounding
            # Without the moments of the optimizer the second one is another.
            assert loaded.losses == pytest.approx(saved.losses, rel=1e-6)
