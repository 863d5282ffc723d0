"""What a rank says when it ends, and which of them."""

import errno
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mcore_dsa.train import launch
from mcore_dsa.train.board import Board, Failure
from mcore_dsa.train.ending import Requests, Status, sentences_of
from mcore_dsa.train.waiting import _collective_of, _stack


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def run(code: str, *modules: str, **names: object) -> BaseException:
    """What a line of the last of some modules raises, as it comes out of the first."""
    call: Callable[[], object] = partial(exec, compile(code, "line", "exec"), {"__name__": modules[-1], **names})
    for module in reversed(modules[:-1]):
        call = partial(exec, compile("call()", "line", "exec"), {"__name__": module, "call": call})
    try:
        call()
    except BaseException as caught:
        return caught
    raise AssertionError(code)


def refused(text: str, cause: BaseException | None = None) -> BaseException:
    """As the package does it."""
    return run("raise ValueError(text) from cause", "mcore_dsa.train.job", text=text, cause=cause)


RANKS = "drift in layer 7; accepted is the same on every rank"
LOOP, JOB = "mcore_dsa.train.loop", "mcore_dsa.train.job"

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/full")


@pytest.mark.parametrize(
    ("error", "lines", "status"),
    [
        (refused("one is 1; accepted is 2\ntwo is 2; accepted is 1"), 2, Status.REFUSED),
        (refused("a good sentence", FULL), ["a good sentence"], Status.REFUSED),
        (refused("data has ''; accepted are names\ndata has ''; accepted are names"), 1, Status.REFUSED),
        # What somebody else refuses, or this package runs into, is an error with its place.
        (raised(ValueError("a good sentence")), 1, Status.FAILED),
        (run("a, b = [1]", JOB), ["ValueError at line:1: not enough values to unpack (expected 2, got 1)"], 1),
        (run("int('x')", JOB, LOOP), 1, Status.FAILED),
        (refused(""), ["ValueError at line:1"], Status.FAILED),
        (run("raise ValueError(text)", JOB, LOOP, "mcore_dsa.watch", text=RANKS), [RANKS], Status.FAILED),
        (run("raise ValueError(text)", LOOP, "mcore_dsa.verified", "mcore_dsa.agreement", text=RANKS), [RANKS], 1),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 1, Status.FAILED),
        (OSError(errno.EIO, "Input/output error"), ["a file: Input/output error"], Status.REFUSED),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), ["x: No such file"], Status.REFUSED),
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


@pytest.mark.parametrize("under_way", [False, True])
def test_once_a_step_is_done_none_is_refused(under_way: bool) -> None:
    in_step = run("raise ValueError(text)", JOB, LOOP, "mcore_dsa.agreement", text="a weight is not finite")
    assert sentences_of(in_step, under_way=under_way) == (["a weight is not finite"], 1 if under_way else 2)
    # A checkpoint that the disk does not take is.
    assert sentences_of(refused("cannot be written"), under_way=under_way)[1] == Status.REFUSED


OF_ONE, OF_TWO = ["all_reduce"], ["all_gather_into_tensor", "reduce_scatter_tensor", "_all_gather_base"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", OF_ONE + OF_TWO)
def test_who_waits_in_a_collective_is_its_caller(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever wraps the collective in this version of torch."""
    found = []

    def looked_at(*_: object) -> bool:
        collective, frame = _collective_of([_stack(sys._getframe(1))])
        found.append((collective, frame and frame.f_code.co_name))
        return True

    def caller() -> None:
        getattr(dist, name)(*[torch.zeros(1)] * (1 if name in OF_ONE else 2))

    monkeypatch.setattr(distributed_c10d, "_rank_not_in_group", looked_at)
    caller()
    ((collective, called_by),) = found
    assert called_by == "caller"
    assert collective in distributed_c10d.__all__ or collective == name


@pytest.mark.parametrize(
    ("later", "numbers", "requests"),
    [
        (1.0, (signal.SIGTERM, signal.SIGTERM, signal.SIGHUP), 1),
        (9.0, (signal.SIGTERM, signal.SIGTERM, signal.SIGTERM), 3),
        (1.0, (signal.SIGTERM, signal.SIGINT), 2),
        (1.0, (signal.SIGINT, signal.SIGINT), 1),
    ],
)
def test_one_stop_may_come_twice(
    later: float, numbers: tuple[int, ...], requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: later * next(now))
    asked = Requests()
    assert sum(asked.add(number) for number in numbers) == asked.count == requests


def last_words(
    numbers: Sequence[int],
    codes: Mapping[int, int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> tuple[int, str]:
    """What a launcher ends with whose ranks have ended with `codes`, by process, once it got these signals; and why."""
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(
        psutil, "Process", lambda: SimpleNamespace(children=lambda: [SimpleNamespace(pid=pid) for pid in codes])
    )
    monkeypatch.setattr(os, "kill", lambda *what: sent.append(what))
    forward = launch._Forward()

    def code_of(pid: int) -> int:
        # The other signals come while it waits.
        for number in numbers[1:]:
            forward(number, None)
        return codes[pid]

    monkeypatch.setattr(launch, "_code_of", code_of)
    with pytest.raises(SystemExit) as ended:
        forward(numbers[0], None)
    return int(str(ended.value.code)), capsys.readouterr().err.strip().removeprefix("mcore_dsa.train: error: ")


@pytest.mark.parametrize(
    ("numbers", "codes", "status", "word"),
    [
        ([signal.SIGTERM], {}, 143, "ended at once by SIGTERM; what no checkpoint has is lost"),
        ([signal.SIGTERM], {7: -15, 8: -15}, 143, "ended at once by SIGTERM; what no checkpoint has is lost"),
        ([signal.SIGTERM, signal.SIGTERM], {7: 75}, 75, ""),
        ([signal.SIGTERM], {7: 75, 8: 2}, 2, ""),
    ],
)
def test_a_launcher_that_ends_at_once_says_so(
    numbers: list[int],
    codes: dict[int, int],
    status: int,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert last_words(numbers, codes, monkeypatch, capsys) == (status, word)


@pytest.mark.parametrize(
    ("codes", "status", "word"),
    [
        ({0: 1, 1: -9}, 1, "rank 1 was ended by SIGKILL, as the system does when memory runs out"),
        ({0: -11, 1: -11}, 139, "rank 1 was ended by SIGSEGV"),
        ({0: -15, 1: 2}, 2, ""),
    ],
)
def test_a_launcher_says_what_ended_a_rank(
    codes: dict[int, int], status: int, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {rank: ProcessFailure(rank, 1, code, "/none") for rank, code in codes.items()}
    # The last one came first.
    failures[1].timestamp -= 1
    assert launch.ended(ChildFailedError("train", failures)) == status
    assert capsys.readouterr().err.strip().removeprefix("mcore_dsa.train: error: ") == word


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
