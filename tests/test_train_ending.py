"""How a run ends: on a signal, by a fault of one rank, while one waits for another; and what it says last."""

import errno
import os
import re
import resource
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from attended_runs import (
    Ended,
    attended,
    hangs,
    in_step,
    is_asked_to_stop,
    is_interrupted,
    is_killed,
    is_killed_in_the_save,
    is_told_to_end_at_once,
    killed_with_launcher,
    raises,
    stops,
    writes_to_a_weight,
)
from test_train import assert_equal_runs
from test_train_launch import assert_gone
from train_runs import FLAG, start, tiny

# Four steps, a checkpoint of each; a wait is spoken of after 1.5 s and ends the run after 2.
RUN = "--training.steps 4 --checkpoint.save_every 1 --waiting.say_after_s 1.5 --waiting.end_after_s 2"


def is_interrupted_without_tensorboard() -> None:
    """As `is_interrupted`, and nothing can be written to TensorBoard from here on."""
    from torch.utils import tensorboard

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    tensorboard.SummaryWriter.add_scalar = fail
    is_interrupted()


def disk_is_full() -> None:
    """From here on no file of this rank grows beyond 16 KiB."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, 2**14))


type Strike = Callable[..., Ended]


def asked_to_stop(fault: Strike, ranks: int) -> None:
    """One rank is asked, the last or the first."""
    shown = "--logging.progress true --logging.tensorboard true"
    asked = (
        fault(1, is_interrupted_without_tensorboard, shown, of=0) if ranks == 2 else fault(1, is_asked_to_stop, shown)
    )
    assert asked.statuses == [75] * ranks
    said = asked.stderr[0].splitlines()
    assert "mcore_dsa.train: stopped after step 1, with a checkpoint in" in said[-1]
    # Without a terminal progress is a line now and then.
    assert "\r" not in asked.stderr[0]
    assert any(line.startswith("train:") and "1/4 [" in line for line in said)
    # rank 0 of the two had its TensorBoard broken.
    assert any("TensorBoard" in line and "goes on without" in line for line in said) == (ranks == 2)


def waits_for_a_rank(fault: Strike, last: int) -> None:
    """One that hangs, and one that is stopped."""
    hung = fault(2, hangs)
    assert hung.statuses == [1] * (last + 1)
    waits = rf"rank \d has waited \d s at step 2 in \w+ \(\w+, \w+.py:\d+\) for rank {last}, "
    assert re.fullmatch(rf"{waits}which is at step 2 in hangs, attended_runs.py:\d+", hung.last_word())
    # Said before it ends the run, and not by each rank that waits.
    assert len(re.findall(f"waiting: {waits}", "".join(hung.stderr))) == 1

    stopped = fault(2, stops)
    assert stopped.statuses == [1] * last + [None]
    assert re.fullmatch(rf"{waits}silent since .*", stopped.last_word())


def ends_without_a_word(fault: Strike, last: int, whose: int) -> None:
    """A rank that is killed, and one that is told to end at once."""
    # In the step, and in the save after it.
    where, kill = ("step 3", is_killed) if whose == 0 else ("the checkpoint of step 3", is_killed_in_the_save)
    killed = fault(3, kill, of=whose)
    assert sorted(status or 0 for status in killed.statuses) == [-9] + [1] * last
    assert re.fullmatch(rf"rank \d, at {where}, has lost rank {whose}, silent since .*", killed.last_word())

    at_once = fault(3, is_told_to_end_at_once)
    assert at_once.statuses == [1] * last + [128 + signal.SIGTERM]
    assert re.fullmatch(rf"rank \d, at step 3, has lost rank {last}, silent since .*", at_once.last_word())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_goes_on_bit_for_bit_after_every_fault(ranks: int, tmp_path: Path) -> None:
    straight, run_dir, last = tmp_path / "straight", tmp_path / "run", ranks - 1
    start(tiny(straight, RUN), ranks)

    def fault(step: int, what: Callable[[], None], options: str = "--resume", *, of: int = last) -> Ended:
        return attended(run_dir, ranks, RUN, options, fault=partial(in_step, step, what), of_rank=of)

    asked_to_stop(fault, ranks)

    raised = fault(2, raises, "--resume auto")
    assert raised.statuses == [1] * ranks
    assert re.fullmatch(rf"rank {last}: RuntimeError at attended_runs.py:\d+: a bit has flipped", raised.last_word())

    waits_for_a_rank(fault, last)
    ends_without_a_word(fault, last, 0 if ranks == 2 else last)

    assert_gone(killed_with_launcher(run_dir, ranks, RUN, "--resume", step=3))

    # Of another stage of the pipeline, or another replica: no tensor-parallel group has both.
    other = "--parallel.tensor 1 --parallel.pipeline 2" if ranks == 2 else ""
    flags = attended(run_dir, ranks, RUN, "--resume", other, flags=lambda rank: "1" if rank < ranks // 2 else "perhaps")
    assert flags.statuses == [2] * ranks
    assert re.search(rf"^rank [{ranks // 2}-{last}]: {FLAG} is 'perhaps'; accepted are ", flags.last_word())

    # Of four ranks, `test_faults.py` and `test_saving.py`.
    if ranks == 2:
        drifted = fault(3, writes_to_a_weight)
        assert drifted.statuses == [1] * ranks
        assert re.search(
            rf"drift between replicas of weights: \S+wq_b.weight is .* on ranks \[{last}\]", drifted.last_word()
        )

        full = fault(3, disk_is_full)
        assert full.statuses == [2] * ranks
        assert re.search(r"checkpoint .*cannot be written.*OSError", full.last_word())

    start(tiny(run_dir, RUN, "--resume"), ranks)
    assert_equal_runs(straight, run_dir)
    # Nothing began anew.
    assert not (tmp_path / "run.1").exists()


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_never_starts_is_named(ranks: int, tmp_path: Path) -> None:
    ended = attended(tmp_path / "run", ranks, RUN, absent=[1])
    assert [status for status in ended.statuses if status is not None] == [1] * (ranks - 1)
    word = ended.last_word()
    assert re.fullmatch(
        r"rank \d has waited \d s at the start in init_process_group \(_process_group, job.py:\d+\) for rank 1, "
        "which has not started",
        word,
    )


def test_ranks_that_no_torchrun_started_hear_of_each_other(tmp_path: Path) -> None:
    """The store is rank 0's, which ends last."""
    asked = attended(tmp_path / "run", 2, RUN, torchrun=False, fault=partial(in_step, 1, is_asked_to_stop), of_rank=1)
    assert asked.statuses == [75, 75]
    refused = attended(tmp_path / "run", 2, RUN, torchrun=False, flags=lambda rank: "1" if rank else "perhaps")
    assert refused.statuses == [2, 2]
    assert refused.last_word().startswith(f"{FLAG} is 'perhaps'; accepted are ")


def test_a_refusal_is_one_line_and_shows_where_with_debug(tmp_path: Path) -> None:
    word = "training.warmup_steps is 4; accepted is less than training.decay_steps, 4"
    for options, traces in (("", 0), ("--debug", 1)):
        ended = attended(tmp_path / "run", 2, RUN, "--training.warmup_steps 4", options)
        assert ended.statuses == [2, 2]
        assert ended.last_word() == word
        assert "mcore_dsa" not in ended.stderr[1]
        assert ended.stderr[0].count("Traceback") == traces
