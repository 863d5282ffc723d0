"""What goes wrong in a run: told on every rank, and the run that goes on afterwards is one that nothing went wrong in.

One process on each rank runs job after job in one folder: each goes on from the last good checkpoint, does a step, and
has one of the faults in the next. A run that is over without a word, or goes on with another loss or weight, is found
at the end, when the whole of it is compared with a run without faults.
"""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_train import assert_equal_runs
from train_runs import FLAG, tiny

from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.settings import DRIFT_VARIABLE, VERIFY_VARIABLE
from mcore_dsa.source import Scored

type Strike = Callable[[Any, pytest.MonkeyPatch], None]


class Fault(NamedTuple):
    """What strikes the last rank, and what all of them say; on the last one itself it may be what it raised."""

    strike: Strike
    said: str
    verify: bool = False
    before: bool = False


def indexer(trainer: Any) -> Any:
    return trainer._attentions[0].indexer


def written(name: str, value: float) -> Strike:
    """A write that moves no version."""
    return lambda trainer, _: indexer(trainer).get_parameter(name).data.view(-1)[5].add_(value)


def loaded(value: float) -> Strike:
    """A write that moves one."""

    def strike(trainer: Any, _: pytest.MonkeyPatch) -> None:
        with torch.no_grad():
            indexer(trainer).linear_wk.weight.view(-1)[3] = value

    return strike


def after(of: Any, name: str, change: Callable[[Any], object]) -> Strike:
    """From here on, what a method gives is changed before anybody sees it."""

    def strike(_: Any, patch: pytest.MonkeyPatch) -> None:
        original = getattr(of, name)

        def changed(*arguments: Any, **options: Any) -> Any:
            given = original(*arguments, **options)
            change(given)
            return given

        patch.setattr(of, name, changed)

    return strike


def keys_of_projections(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    after(type(indexer(trainer)), "forward", lambda projections: projections.key_LBD[3, 1].fill_(torch.nan))(
        None, patch
    )


def best_pool_left_out(selection_BOK: torch.Tensor) -> None:
    """The last own row of sample 0 takes a pool that it sees and did not take."""
    row = selection_BOK[0, -1]
    row[-1] = next(pool for pool in range(len(row) + 1) if pool not in row.tolist())
    row.copy_(row.sort().values)


def raising(at: int) -> Strike:
    """Selecting raises the `at`-th time from here on."""

    def strike(_: Any, patch: pytest.MonkeyPatch) -> None:
        original, calls = TorchBackend.select, iter(range(1, 99))

        def select(*arguments: Any, **options: Any) -> Any:
            if next(calls) == at:
                raise MemoryError("no memory left")
            return original(*arguments, **options)

        patch.setattr(TorchBackend, "select", staticmethod(select))

    return strike


def disk_is_full(_: Any, patch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch.setattr(os, "fsync", full)


def moment_is_infinite(trainer: Any, patch: pytest.MonkeyPatch) -> None:
    (optimizer,) = trainer.optimizer.chained_optimizers

    def spoil(_: Any) -> None:
        next(iter(optimizer.optimizer.state.values()))["exp_avg_sq"].data.view(-1)[0] = torch.inf

    after(type(trainer.optimizer), "step", spoil)(None, patch)


DRIFT = r"^drift in layer 1, forward \d+ \(.*\): "
VERIFIED = r"^selections in layer 1 of the query-shard group \(ranks within it\): rank \d: "
AGREED = r"^settings of the query-shard group \(ranks within it\): "
FAULTS = {
    "a weight": Fault(
        written("linear_wq_b.weight", 1e-3), rf"{DRIFT}weight linear_wq_b.weight is .* on ranks \[LAST\]"
    ),
    "another ape": Fault(
        written("index_kpool_compress_ape", 1.0), rf"{DRIFT}weight index_kpool_compress_ape is .* on ranks \[LAST\]"
    ),
    "another dtype": Fault(lambda trainer, _: indexer(trainer).bfloat16(), rf"{AGREED}weights is .* on ranks \[LAST\]"),
    "a gather's buffer": Fault(
        after(Scored, "gathered", lambda keys_TBX: keys_TBX[20, 1, 3].add_(1)),
        rf"{DRIFT}keys in tokens 20 \.\.\. 20 is .* on ranks \[LAST\]; accepted.*; pool keys in pools 5 \.\.\. 5",
    ),
    "NaN in a weight": Fault(
        written("linear_weights_proj.weight", torch.nan),
        rf"{DRIFT}weight linear_weights_proj.weight holds NaN or infinity on ranks \[LAST\]; accepted are finite",
    ),
    "infinity that is loaded": Fault(
        loaded(torch.inf), rf"{AGREED}rank LAST: the indexer's linear_wk.weight is not finite; accepted are finite"
    ),
    "no memory to select": Fault(
        raising(1),
        r"^ranks \[LAST\] of the query-shard group raised in the middle of a call; accepted|^no memory left$",
    ),
    "a selection": Fault(
        after(Scored, "own_rows", best_pool_left_out),
        rf"{VERIFIED}rank LAST selects something else than rank 0 in row 31 of sample 0; accepted are equal",
        verify=True,
    ),
    "keys that are NaN": Fault(
        keys_of_projections, rf"{VERIFIED}NaN or infinity is among the keys in row \d+ of sample 1", verify=True
    ),
    "no memory to select again": Fault(raising(2), rf"{VERIFIED}MemoryError: no memory left$", verify=True),
    "a full disk": Fault(disk_is_full, r"^the checkpoint in .*/step_\d+ cannot be written, .* bytes are free there: "),
    "a moment": Fault(
        moment_is_infinite, r"^weights after step \d+: exp_avg_sq of the optimizer is not finite on ranks"
    ),
    "another flag": Fault(
        lambda _, patch: patch.setenv(FLAG, "off"), rf"{AGREED}{FLAG} is .*'off' on ranks \[LAST\]", before=True
    ),
}
STEPS = len(FAULTS) + 1
# One layer and one micro batch, and one set of Megatron's groups for all jobs: a job takes a fraction of a second.
RUN = f"--training.steps {STEPS} --training.decay_steps {STEPS} --model.num_layers 1 --training.micro_batch_size 4"


def job(options: str, run_dir: Path, fault: Fault | None = None, at: int = 0) -> str:
    """What a job in the folder says that goes on as far as it comes."""
    from mcore_dsa.train.job import prepare, train
    from mcore_dsa.train.loop import Trainer

    strikes = fault is not None and dist.get_rank() == dist.get_world_size() - 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VERIFY_VARIABLE, "96" if fault is not None and fault.verify else "off")
        step = Trainer.train_step

        def train_step(self: Trainer) -> Any:
            if strikes and self.step + 1 == at and not fault.before:
                fault.strike(self, patch)
            return step(self)

        patch.setattr(Trainer, "train_step", train_step)
        if strikes and fault.before:
            fault.strike(None, patch)
        try:
            train(prepare(tiny(run_dir, RUN, options), dist.get_world_size()))
        except (ValueError, RuntimeError, MemoryError) as error:
            return str(error)
    return ""


def one_fault_after_the_other(options: str, folder: Path) -> list[str]:
    from mcore_dsa import patches
    from mcore_dsa.train.job import parallel_state

    patches.apply()
    run_dir, told = folder / "run", []
    assert job(options, folder / "straight") == ""
    begin, parallel_state.destroy_model_parallel = parallel_state.initialize_model_parallel, lambda: None
    parallel_state.initialize_model_parallel = lambda **sizes: (
        None if parallel_state.model_parallel_is_initialized() else begin(**sizes)
    )
    for number, fault in enumerate(FAULTS.values(), 1):
        told.append(job(f"{options} --checkpoint.save_every 1 --resume auto", run_dir, fault, at=number + 1))
        # The first job begins the run; one that never comes to a step leaves it where it is.
        latest = (run_dir / "checkpoints" / "latest").read_text()
        assert latest == f"step_{number - fault.before:08d}", told
    assert job(f"{options} --resume", run_dir) == ""
    return told


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_fault_is_told_to_all_and_costs_no_bit(ranks: int, tmp_path: Path) -> None:
    """Of all faults together in less time than one of them may take to end a run."""
    env = {FLAG: "1", DRIFT_VARIABLE: "1"}
    of_ranks = run_ranks(one_fault_after_the_other, ranks, f"--parallel.tensor {ranks}", tmp_path, env=env, timeout=60)
    for number, (name, fault) in enumerate(FAULTS.items()):
        said = fault.said.replace("LAST", str(ranks - 1))
        for told in of_ranks:
            assert re.search(said, told[number]), (name, told[number])
    assert_equal_runs(tmp_path / "straight", tmp_path / "run")
