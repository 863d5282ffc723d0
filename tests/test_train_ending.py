"""How a run ends: on a signal, by a fault of one rank, while one waits for another; and what it says last."""

import errno
import os
import re
import resource
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
    raises,
    stops,
)
from train_runs import FLAG, losses, start, tiny

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


class Faulted:
    """A run of `ranks` ranks beside one without faults, gone on with after each fault."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.straight, self.run_dir, self.ranks = folder / "straight", folder / "run", ranks
        start(tiny(self.straight, RUN), ranks)

    def fault(self, step: int, what: Callable[[], None], options: str = "--resume", *, of: int) -> Ended:
        """What becomes of it where one rank does something in the middle of a step."""
        return attended(self.run_dir, self.ranks, RUN, options, fault=partial(in_step, step, what), of_rank=of)

    def end(self) -> None:
        """The last steps, and that all are those of the run without faults."""
        start(tiny(self.run_dir, RUN, "--resume"), self.ranks)
        assert losses(self.run_dir) == losses(self.straight)
        # Nothing began anew.
        assert not self.run_dir.with_name("run.1").exists()


SHOWN = "--logging.progress true --logging.tensorboard true"


def assert_stopped(asked: Ended, ranks: int, *, without_tensorboard: bool) -> None:
    assert asked.statuses == [75] * ranks
    said = asked.stderr[0].splitlines()
    assert "mcore_dsa.train: stopped after step 1, with a checkpoint in" in said[-1]
    # Without a terminal progress is a line now and then.
    assert "\r" not in asked.stderr[0]
    assert any(line.startswith("train:") and "1/4 [" in line for line in said)
    assert any("TensorBoard" in line and "goes on without" in line for line in said) == without_tensorboard


# What a rank says that waits for another at the second step.
WAITS = r"rank \d has waited \d s at step 2 in \w+ \(\w+, \w+.py:\d+\) for rank {}, "


def test_four_ranks_go_on_bit_for_bit_after_every_fault_of_the_last(tmp_path: Path) -> None:
    run, last = Faulted(tmp_path, 4), 3
    assert_stopped(run.fault(1, is_asked_to_stop, SHOWN, of=last), 4, without_tensorboard=False)

    raised = run.fault(2, raises, "--resume auto", of=last)
    assert raised.statuses == [1] * 4
    assert re.fullmatch(rf"rank {last}: RuntimeError at attended_runs.py:\d+: a bit has flipped", raised.last_word())

    hung, waits = run.fault(2, hangs, of=last), WAITS.format(last)
    assert hung.statuses == [1] * 4
    assert re.fullmatch(rf"{waits}which is at step 2 in hangs, attended_runs.py:\d+", hung.last_word())
    # Said before it ends the run, and not by each rank that waits.
    assert len(re.findall(f"waiting: {waits}", "".join(hung.stderr))) == 1

    stopped = run.fault(2, stops, of=last)
    assert stopped.statuses == [1, 1, 1, None]
    assert re.fullmatch(rf"{waits}silent since .*", stopped.last_word())

    killed = run.fault(3, is_killed, of=last)
    assert killed.statuses == [1, 1, 1, -9]
    assert re.fullmatch(rf"rank \d, at step 3, has lost rank {last}, silent since .*", killed.last_word())

    full = run.fault(3, disk_is_full, of=last)
    assert full.statuses == [2] * 4
    assert re.search(r"checkpoint .*cannot be written.*OSError", full.last_word())
    run.end()


def test_two_ranks_go_on_bit_for_bit_after_faults_of_the_first(tmp_path: Path) -> None:
    """Which prints for all, and of whom none is left to print where it is gone."""
    run = Faulted(tmp_path, 2)
    # Its TensorBoard is broken.
    assert_stopped(run.fault(1, is_interrupted_without_tensorboard, SHOWN, of=0), 2, without_tensorboard=True)

    raised = run.fault(2, raises, of=0)
    assert raised.statuses == [1, 1]
    assert re.fullmatch(r"RuntimeError at attended_runs.py:\d+: a bit has flipped", raised.last_word())

    killed = run.fault(3, is_killed, of=0)
    assert killed.statuses == [-9, 1]
    assert re.fullmatch(r"rank 1, at step 3, has lost rank 0, silent since .*", killed.last_word())
    run.end()


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


def test_a_refusal_of_one_rank_or_of_another_group_is_told_to_all(tmp_path: Path) -> None:
    # Two tensor-parallel groups, of which the second cannot read its flag.
    ended = attended(tmp_path / "run", 4, RUN, flags=lambda rank: "1" if rank < 2 else "perhaps")
    assert ended.statuses == [2] * 4
    assert f"{FLAG} is 'perhaps'; accepted are" in ended.last_word()
    ended = attended(tmp_path / "run", 4, RUN, "--data nowhere")
    assert ended.statuses == [2] * 4
    assert (
        ended.last_word() == "data has 'nowhere', which does not exist; accepted are files and folders on this machine"
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
