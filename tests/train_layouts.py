"""A layout of the job against one rank with equal weights: the losses, and the gradient of every parameter.

One rank takes a step, saves and goes on; each layout loads that through the distributed checkpoint, whose exactness is
`test_resharding.py`'s, and takes the same steps on the same samples, or the first of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import megatron_ranks
from megatron.core import parallel_state
from torch import Tensor, nn
from train_runs import FLAG, tiny, trainer_of, whole

from mcore_dsa.train.config import JobConfig

# How far a gradient may lie from one rank's, in units of what a step in the last place of every weight does to it: both
# are sums over the same products of relative errors of 2**-24. 2.2 at TP=4, 1.0 at TP=2, 0.5 at DP=2, 1.4 at most
# with CP (M); a pipeline alone changes no sum, and no bit. Messages paired wrong are 3e7 of them.
ROUNDINGS = 4.0

COMMON = (
    "--model.hidden_dropout 0 --training.micro_batch_size 1 --training.global_batch_size 4"
    " --training.steps 3 --training.decay_steps 3 --training.clip_grad 0 --parallel.tensor 1"
)


@dataclass
class Run:
    """The losses of the steps after the loaded one, their gradient norms, and the first one's whole gradients."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]


def whole_gradients(trainer: Any) -> dict[str, Tensor]:
    """By the names that one rank's model has, of this rank's pipeline stage and experts."""
    first_expert = parallel_state.get_expert_model_parallel_rank() * len(local_experts(trainer.chunks[0]))
    gradients = {}
    for chunk in trainer.chunks:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                # The distributed optimizer has reduced this rank's part alone.
                own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=group)
        numbers = [layer.layer_number for layer in chunk.module.decoder.layers]
        for name, parameter in chunk.module.named_parameters():
            if parameter.requires_grad:
                head, _, tail = name.removeprefix("decoder.layers.").partition(".")
                placed = f"decoder.layers.{numbers[int(head)] - 1}.{tail}" if head.isdigit() else name
                head, expert, tail = placed.partition("local_experts.")
                if expert:
                    number, _, tail = tail.partition(".")
                    placed = f"{head}{expert}{first_expert + int(number)}.{tail}"
                gradients[placed] = whole(name, parameter, parameter.main_grad)
    return gradients


def local_experts(chunk: nn.Module) -> list[nn.Module]:
    """Those of one layer."""
    return next((list(module.local_experts) for module in chunk.modules() if hasattr(module, "local_experts")), [])


def steps_of(trainer: Any) -> Run:
    gradients: list[dict[str, Tensor]] = []
    update = trainer.optimizer.step

    def record() -> Any:
        gradients.append(whole_gradients(trainer))
        return update()

    trainer.optimizer.step = record
    reports = [trainer.train_step() for _ in range(trainer.config.training.steps - 1)]
    trainer.optimizer.step = update
    return Run([report.loss for report in reports], [report.gradient_norm for report in reports], gradients[0])


def save_and_go_on(config: JobConfig) -> tuple[Run, Run]:
    """The steps that follow the saved one, and those of weights that rounding has moved."""
    from mcore_dsa.train.checkpointing import save_checkpoint

    trainer, digest = trainer_of(config)
    trainer.train_step()
    run_dir = Path(config.run_dir)
    save_checkpoint(trainer, run_dir, digest)
    run = steps_of(trainer)
    moved, _ = trainer_of(config)
    restore(moved, run_dir)
    move_by_one_place(moved)
    return run, steps_of(moved)


def load(config: JobConfig, run_dir: Path, p2p: dict[str, bool]) -> Run:
    trainer, _ = trainer_of(config)
    vars(trainer.chunks[0].config).update(p2p)
    for chunk in trainer.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    restore(trainer, run_dir)
    return steps_of(trainer)


def restore(trainer: Any, run_dir: Path) -> None:
    """All of it; of a model with experts the weights alone, for Megatron cannot load its optimizer on other ranks."""
    from megatron.core import dist_checkpointing

    from mcore_dsa.train.checkpointing import load_checkpoint
    from mcore_dsa.train.stored import latest_checkpoint

    checkpoint = latest_checkpoint(run_dir)
    if trainer.config.model.num_moe_experts is None:
        load_checkpoint(trainer, checkpoint)
        return
    names = ["model"] if len(trainer.chunks) == 1 else [f"model{index}" for index in range(len(trainer.chunks))]
    state = {name: chunk.module.sharded_state_dict() for name, chunk in zip(names, trainer.chunks, strict=True)}
    loaded = dist_checkpointing.load(state, str(checkpoint.folder))
    for name, chunk in zip(names, trainer.chunks, strict=True):
        chunk.module.load_state_dict(loaded[name])
    trainer.step = checkpoint.step


@torch.no_grad()
def move_by_one_place(trainer: Any) -> None:
    """Each weight goes up or down by one unit in its last place."""
    generator = torch.Generator().manual_seed(5)
    for parameter in trainer.chunks[0].parameters():
        up = torch.rand(parameter.shape, generator=generator) < 0.5
        parameter.copy_(parameter.nextafter(torch.where(up, torch.inf, -torch.inf)))


@dataclass
class Reference:
    """One rank's run of a model, and how far its gradients move with the last place of its weights."""

    model: str
    run_dir: Path
    run: Run
    rounding: dict[str, float]


def distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm())


def reference_of(model: str, folder: Path) -> Reference:
    """`model` are options of the job, as all layouts share them."""
    run_dir = folder / "one"
    ((run, moved),) = megatron_ranks(save_and_go_on, 1, tiny(run_dir, COMMON, model))
    rounding = {name: distance(moved.gradients[name], gradient) for name, gradient in run.gradients.items()}
    return Reference(model, run_dir, run, rounding)


def run_layout(
    reference: Reference,
    options: str = "",
    *,
    tp: int = 1,
    pp: int = 1,
    vp: int | None = None,
    cp: int = 1,
    dp: int = 1,
    ep: int = 1,
    p2p: dict[str, bool] | None = None,
) -> tuple[Run, dict[str, float]]:
    """What its ranks agree on, and each gradient's distance to one rank's in roundings."""
    spread = f"--parallel.tensor {tp} --parallel.pipeline {pp} --parallel.virtual_pipeline {vp or 'null'}"
    spread += f" --parallel.context {cp} --parallel.expert {ep}"
    config = tiny(reference.run_dir.with_name("spread"), COMMON, reference.model, spread, options)
    sizes = {"tp": tp, "pp": pp, "vp": vp, "cp": cp, "ep": ep}
    ranks = tp * pp * cp * dp
    runs = megatron_ranks(load, ranks, config, reference.run_dir, p2p or {}, **sizes, env={FLAG: "1"})
    gradients: dict[str, Tensor] = {}
    for run in runs:
        assert (run.losses, run.norms) == (runs[0].losses, runs[0].norms)
        for name, gradient in run.gradients.items():
            assert torch.equal(gradients.setdefault(name, gradient), gradient), name
    assert gradients.keys() == reference.run.gradients.keys()
    errors = {
        name: distance(gradient, reference.run.gradients[name]) / reference.rounding[name]
        for name, gradient in gradients.items()
    }
    return Run(runs[0].losses, runs[0].norms, gradients), errors


def assert_as_one_rank(reference: Reference, run: Run, errors: dict[str, float], *, exact: bool) -> None:
    assert max(errors.values()) <= (0.0 if exact else ROUNDINGS), max(errors, key=errors.__getitem__)
    steps = len(run.losses)
    assert steps > 0
    # Means and norms of what was compared above, each rounded once more: some units of 2**-24 = 6e-8.
    assert run.losses == pytest.approx(reference.run.losses[:steps], rel=1e-6)
    assert run.norms == pytest.approx(reference.run.norms[:steps], rel=2e-6)
