"""What a run says of itself: errors in a line, progress without a terminal, and pictures that are worth no run."""

import errno
import io
import logging
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from train_runs import metrics, tiny

from mcore_dsa.train.board import Board, Failure
from mcore_dsa.train.ending import Status, sentences_of


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full")


@pytest.mark.parametrize(
    ("error", "lines", "status"),
    [
        (ValueError("one is 1; accepted is 2\ntwo is 2; accepted is 1"), 2, Status.REFUSED),
        (raised(ValueError("a good sentence"), FULL), ["a good sentence"], Status.REFUSED),
        (FULL, ["/full: No space left on device"], Status.REFUSED),
        (raised(RuntimeError("PytorchStreamWriter failed"), FULL), ["/full: No space left on device"], Status.REFUSED),
        (CheckpointException("write", {1: (FULL, None)}), ["/full: No space left on device"], Status.REFUSED),
        # A file that a library looked for is not what went wrong.
        (raised(RuntimeError("no"), FileNotFoundError(2, "No such file", "x")), 1, Status.FAILED),
        (KeyError("step"), ["KeyError: 'step'"], Status.FAILED),
        (AssertionError(), ["AssertionError"], Status.FAILED),
    ],
    ids=repr,
)
def test_an_error_is_a_line_that_names_its_file_or_field(
    error: BaseException, lines: int | list[str], status: Status
) -> None:
    said, ends_with = sentences_of(error)
    assert ends_with == status
    assert len(said) == lines if isinstance(lines, int) else said == lines
    assert all("\n" not in line for line in said)


def test_an_unknown_error_says_where_it_was_raised() -> None:
    (line,), _ = sentences_of(raised(RuntimeError("a  bit\nhas flipped")))
    assert line.startswith("RuntimeError at test_train_says.py:")
    assert line.endswith(": a bit has flipped")


def test_the_first_failure_is_everyones_and_one_rank_has_the_last_word() -> None:
    store = dist.HashStore()
    boards = [Board(store, rank, 3) for rank in range(3)]
    assert [board.failure() for board in boards] == [None] * 3
    failures = [Failure(rank=rank, lines=[str(rank)], status=rank) for rank in range(3)]
    assert [boards[rank].fail(failures[rank]) for rank in (1, 0, 2)] == [failures[1]] * 3
    assert [board.failure() for board in boards] == [failures[1]] * 3
    assert not boards[0].last_word_claimed()
    assert [boards[rank].claim_last_word() for rank in (2, 0, 1, 2)] == [True, False, False, False]
    assert boards[0].last_word_claimed()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_without_a_terminal_progress_is_a_line_now_and_then(
    stream: type[io.StringIO], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = stream()
    monkeypatch.setattr(sys, "stderr", shown)
    steps = 200
    write_log(tmp_path, steps, "--logging.progress true")
    text = shown.getvalue()
    assert f"{steps}/{steps}" in text
    assert "loss 1.000" in text
    if stream is io.StringIO:
        assert "\r" not in text
        assert text.endswith("\n")
        assert 1 <= len(text.splitlines()) < steps / 10
    else:
        assert "\r" in text


def write_log(run_dir: Path, steps: int, *options: str) -> None:
    from mcore_dsa.train.loop import StepReport
    from mcore_dsa.train.report import RunLog

    config = tiny(run_dir, f"--training.steps {steps}", *options)
    with RunLog(config, done=0, title="train") as log:
        for step in range(1, steps + 1):
            log(
                StepReport(
                    step=step,
                    loss=1.0,
                    learning_rate=1.0,
                    gradient_norm=1.0,
                    stop=False,
                    seconds=1.0,
                    indexer_seconds=0.1,
                )
            )


@pytest.mark.parametrize("fails", ["at first", "later", "at the end"])
def test_a_failing_tensorboard_does_not_end_training(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch.utils import tensorboard

    def fail(*args: Any, **options: Any) -> None:
        raise FULL

    if fails == "at first":
        (tmp_path / "tensorboard").write_text("a file")
    else:
        monkeypatch.setattr(tensorboard.SummaryWriter, "add_scalar" if fails == "later" else "close", fail)
    with caplog.at_level(logging.WARNING):
        write_log(tmp_path, 3, "--logging.tensorboard true")
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    warnings = [record.getMessage() for record in caplog.records if record.name == "mcore_dsa.train.report"]
    assert len(warnings) == 1
    assert "the run goes on without" in warnings[0]
