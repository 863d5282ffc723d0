"""What a rank says when it ends, and which of them."""

import errno
import os

import pytest
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

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
