"""The comparison with unsharded losses: whoever asks for it gets an answer, however often the run is cut short."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from harness import run_ranks
from train_runs import FLAG, tiny

from mcore_dsa.train.attendance import Attendance

EVERY = "--checkpoint.save_every 1"


class AskedToStop(Attendance):
    """One whose last rank is asked to stop when the comparison begins."""

    def at(self, doing: str) -> None:
        if doing == "the start of unsharded" and dist.get_rank() == dist.get_world_size() - 1:
            self.stop._asked = True


def job(run_dir: Path, options: str, attendance: Attendance | None = None) -> tuple[bool | None, list[str]] | str:
    """Whether the losses were the same, and what was done for it; or what the job ended with."""
    from mcore_dsa.train.ending import Stopped
    from mcore_dsa.train.job import prepare, train

    done: list[str] = []
    attendance = attendance or Attendance()
    at: Callable[[str], None] = attendance.at
    attendance.at = lambda doing: (done.append(doing), at(doing))  # type: ignore[assignment, return-value]
    try:
        summary = train(prepare(tiny(run_dir, EVERY, options), dist.get_world_size()), attendance)
    except (Stopped, ValueError) as error:
        return str(error)
    return summary.unsharded_losses_bit_identical, [doing for doing in done if not doing.startswith("the ")]


def cut_short(folder: Path) -> dict[str, Any]:
    from mcore_dsa import patches
    from mcore_dsa.train import comparison

    patches.apply()
    run_dir, told = folder / "run", {}
    auto, two = "--compare-unsharded --resume auto", "--training.steps 2 --training.decay_steps 4"
    told["no comparison"] = job(run_dir, two)
    told["stopped"] = job(run_dir, auto, AskedToStop())
    told["again"] = job(run_dir, auto)
    told["known"] = job(run_dir, auto)
    known = comparison.stored(run_dir, 4)
    # As a later run of the same folder, or one that was never asked, would find it.
    told["of more steps"] = comparison.stored(run_dir, 5)
    comparison.store(run_dir, replace(known, identical=False))
    told["different"] = job(run_dir, auto)
    if dist.get_rank() == 0:
        (run_dir / "comparison.json").write_text("{")
    dist.barrier()
    told["of all"] = job(run_dir, auto)
    if dist.get_rank() == 0:
        (run_dir / "comparison.json").unlink()
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        (run_dir / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:-9], *lines[2:]]))
    dist.barrier()
    told["without a loss"] = job(run_dir, auto)
    return told


@pytest.mark.parametrize("ranks", [2])
def test_a_comparison_that_is_cut_short_is_made_by_the_next_process(ranks: int, tmp_path: Path) -> None:
    of_ranks = run_ranks(cut_short, ranks, tmp_path, env={FLAG: "1"})
    assert all(told == of_ranks[0] for told in of_ranks)
    told = of_ranks[0]
    assert told["no comparison"] == (None, ["step 1", "step 2"])
    assert told["stopped"] == "stopped after step 3 of the comparison"
    # Of the steps of the process that was stopped, and once.
    assert told["again"] == (True, ["step 3", "step 4"])
    assert told["known"] == (True, [])
    assert (told["of more steps"].done, told["of more steps"].identical) == (0, None)
    assert told["different"] == (False, [])
    assert told["of all"] == (True, ["step 1", "step 2", "step 3", "step 4"])
    assert told["without a loss"] == (
        f"{tmp_path}/run/metrics.jsonl lacks the loss of step 2; accepted to compare are those of steps 1 ... 4"
    )
