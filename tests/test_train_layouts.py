"""Every layout of the job against one rank with equal weights: the losses, and the gradient of every parameter.

One rank takes a step and saves; each layout loads that through the distributed checkpoint, whose exactness is
`test_resharding.py`'s, and takes the same steps on the same samples.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import megatron_ranks
from megatron.core import parallel_state
from torch import Tensor
from train_runs import FLAG, tiny, trainer_of, whole

from mcore_dsa.train.config import JobConfig

STEPS = 3
# How far a gradient may lie from one rank's, in units of what a step in the last place of every weight does to it: both
# are sums over the same products of relative errors of 2**-24. 2.2 at TP=4, 1.0 at TP=2, 0.5 at DP=2 (M); a pipeline
# alone changes no sum, and no bit. Messages paired wrong are 3e7 of them.
ROUNDINGS = 4.0

COMMON = (
    "--model.hidden_dropout 0 --training.micro_batch_size 1 --training.global_batch_size 8"
    f" --training.steps {1 + STEPS} --training.clip_grad 0 --parallel.tensor 1"
)
HOSTS = {
    "gpt": "--model.num_layers 4",
    "hybrid": "--model.host hybrid --model.hybrid_layer_pattern D-D-D-D- --model.num_layers 8",
}


@dataclass
class Run:
    """The losses of the steps after the loaded one, their gradient norms, and the first one's whole gradients."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]


def whole_gradients(trainer: Any) -> dict[str, Tensor]:
    """By the names that one rank's model has, of this rank's pipeline stage."""
    group = parallel_state.get_data_parallel_group()
    gradients = {}
    for chunk in trainer.chunks:
        for bucket in (bucket for buffer in chunk.buffers for bucket in buffer.buckets):
            # The distributed optimizer has reduced this rank's part alone.
            own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=group)
        numbers = [layer.layer_number for layer in chunk.module.decoder.layers]
        for name, parameter in chunk.module.named_parameters():
            if parameter.requires_grad:
                head, _, tail = name.removeprefix("decoder.layers.").partition(".")
                placed = f"decoder.layers.{numbers[int(head)] - 1}.{tail}" if head.isdigit() else name
                gradients[placed] = whole(name, parameter, parameter.main_grad)
    return gradients


def steps_of(trainer: Any) -> Run:
    gradients: list[dict[str, Tensor]] = []
    update = trainer.optimizer.step

    def record() -> Any:
        gradients.append(whole_gradients(trainer))
        return update()

    trainer.optimizer.step = record
    reports = [trainer.train_step() for _ in range(STEPS)]
    return Run([report.loss for report in reports], [report.gradient_norm for report in reports], gradients[0])


def save(config: JobConfig) -> None:
    from mcore_dsa.train.checkpointing import save_checkpoint

    trainer, digest = trainer_of(config)
    trainer.train_step()
    save_checkpoint(trainer, Path(config.run_dir), digest)


def load(config: JobConfig, run_dir: Path, p2p: dict[str, bool]) -> Run:
    from mcore_dsa.train.checkpointing import latest_checkpoint, load_checkpoint

    trainer, _ = trainer_of(config)
    vars(trainer.chunks[0].config).update(p2p)
    for chunk in trainer.chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(torch.nan)
    load_checkpoint(trainer, latest_checkpoint(run_dir))
    return steps_of(trainer)


def load_moved(config: JobConfig, run_dir: Path) -> Run:
    """Each weight goes up or down by one unit in its last place."""
    from mcore_dsa.train.checkpointing import latest_checkpoint, load_checkpoint

    trainer, _ = trainer_of(config)
    load_checkpoint(trainer, latest_checkpoint(run_dir))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in trainer.chunks[0].parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            parameter.copy_(parameter.nextafter(torch.where(up, torch.inf, -torch.inf)))
    return steps_of(trainer)


@dataclass
class Reference:
    """One rank's run, and how far its gradients move with the last place of its weights."""

    run_dir: Path
    run: Run
    rounding: dict[str, float]


def distance(left: Tensor, right: Tensor) -> float:
    return float((left.double() - right.double()).norm())


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    found = {}
    for host, model in HOSTS.items():
        run_dir = tmp_path_factory.mktemp(host) / "one"
        config = tiny(run_dir, COMMON, model)
        megatron_ranks(save, 1, config)
        again = tiny(run_dir.with_name("again"), COMMON, model)
        (run,) = megatron_ranks(load, 1, again, run_dir, {})
        (moved,) = megatron_ranks(load_moved, 1, again, run_dir)
        rounding = {name: distance(moved.gradients[name], gradient) for name, gradient in run.gradients.items()}
        found[host] = Reference(run_dir, run, rounding)
    return found


def run_layout(
    reference: Reference,
    host: str,
    options: str,
    *,
    tp: int = 1,
    pp: int = 1,
    vp: int | None = None,
    dp: int = 1,
    p2p: dict[str, bool] | None = None,
) -> tuple[Run, dict[str, float]]:
    """What its ranks agree on, and each gradient's distance to one rank's in roundings."""
    spread = f"--parallel.tensor {tp} --parallel.pipeline {pp} --parallel.virtual_pipeline {vp or 'null'}"
    config = tiny(reference.run_dir.with_name("spread"), COMMON, HOSTS[host], spread, options)
    runs = megatron_ranks(
        load, tp * pp * dp, config, reference.run_dir, p2p or {}, tp=tp, pp=pp, vp=vp, env={FLAG: "1"}
    )
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


GPT_LAYOUTS: list[dict[str, int]] = [
    {"tp": 2},
    {"tp": 4},
    {"dp": 2},
    {"pp": 2},
    {"pp": 2, "vp": 2},
    {"tp": 2, "dp": 2},
    {"tp": 2, "pp": 2},
    {"dp": 2, "pp": 2},
    {"tp": 2, "pp": 2, "vp": 2},
]
HYBRID_LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("D-D-D-D-", {"tp": 2}),
    ("D-D-|D-D-", {"pp": 2}),
    ("D-|D-|D-|D-", {"pp": 2, "vp": 2}),
    ("D|-|D|-|D|-|D|-", {"pp": 4, "vp": 2}),
]


def assert_as_one_rank(reference: Reference, run: Run, errors: dict[str, float], *, exact: bool) -> None:
    assert max(errors.values()) <= (0.0 if exact else ROUNDINGS), max(errors, key=errors.__getitem__)
    # Means and norms of what was compared above, each rounded once more: some units of 2**-24 = 6e-8.
    assert run.losses == pytest.approx(reference.run.losses, rel=1e-6)
    assert run.norms == pytest.approx(reference.run.norms, rel=2e-6)


@pytest.mark.parametrize("sizes", GPT_LAYOUTS, ids=str)
def test_a_layout_has_the_gradients_and_losses_of_one_rank(
    sizes: dict[str, int], references: dict[str, Reference]
) -> None:
    run, errors = run_layout(references["gpt"], "gpt", "", **sizes)
    assert_as_one_rank(references["gpt"], run, errors, exact=sizes.keys() <= {"pp", "vp"})


@pytest.mark.parametrize(("pattern", "sizes"), HYBRID_LAYOUTS, ids=str)
def test_a_hybrid_layout_has_the_gradients_and_losses_of_one_rank(
    pattern: str, sizes: dict[str, int], references: dict[str, Reference]
) -> None:
    run, errors = run_layout(references["hybrid"], "hybrid", f"--model.hybrid_layer_pattern {pattern}", **sizes)
    assert_as_one_rank(references["hybrid"], run, errors, exact="tp" not in sizes)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputation_in_a_pipeline_changes_no_bit(recompute: str, references: dict[str, Reference]) -> None:
    run, errors = run_layout(references["gpt"], "gpt", f"--training.recompute {recompute}", pp=2, vp=2)
    assert_as_one_rank(references["gpt"], run, errors, exact=True)


def test_batches_of_messages_train_wrong_between_two_stages_of_chunks(references: dict[str, Reference]) -> None:
    """What `KPoolDSATransformerConfig` refuses; where this fails, Megatron has mended it."""
    batched = {"overlap_p2p_comm": False, "batch_p2p_comm": True}
    _, errors = run_layout(references["gpt"], "gpt", "", pp=2, vp=2, p2p=batched)
    assert max(errors.values()) > 1e3 * ROUNDINGS
    for right in ({"pp": 2}, {"pp": 2, "vp": 2}):
        single = {"overlap_p2p_comm": False, "batch_p2p_comm": right == {"pp": 2}}
        run, errors = run_layout(references["gpt"], "gpt", "", p2p=single, **right)
        assert_as_one_rank(references["gpt"], run, errors, exact=True)
