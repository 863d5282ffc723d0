"""How a process of a run ends: on a signal after the step, with its launcher, or with one line that says why.

Statuses: 0 done, 1 failed, 2 refused, 75 stopped on request with everything saved; 128 + n ended by signal n.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import errno
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from enum import IntEnum
from pathlib import Path
from types import TracebackType

# Linux's name for "signal me when my parent ends".
_PR_SET_PDEATHSIG = 1
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PROGRAM = "mcore_dsa.train"
# What no library looks for and goes on: these are the reason, whatever was raised in their wake.
_DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EFBIG}
# Where a ValueError says that ranks came apart, which no argument mends and another try may.
_CAME_APART = {"mcore_dsa.watch", "mcore_dsa.verified", "mcore_dsa.megatron.replicas"}
_STEPS = {"mcore_dsa.train.loop"}
# A process may be told one stop twice: by who stops a whole job, systemd or SLURM, and by its launcher.
SAME_STOP_S = 5.0


class Status(IntEnum):
    """What a process ends with.

    Attributes:
        DONE: every step is done.
        FAILED: an error ended the run, or unsharded losses were asked for and differ.
        REFUSED: the run cannot start, or cannot go on, as it was asked for.
        STOPPED: a signal asked for the end, and a checkpoint has every step; sysexits' "try again later".
    """

    DONE = 0
    FAILED = 1
    REFUSED = 2
    STOPPED = os.EX_TEMPFAIL


class Stopped(Exception):
    """A signal, to any rank, asked for the end, and the step that was running is done and saved."""

    def __init__(self, after: str) -> None:
        super().__init__(f"stopped after {after}")


class Requests:
    """Requests to end, of which one may come as the same signal twice.

    Attributes:
        count: how many there were.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last = (0, 0.0)

    def add(self, number: int, *, same_s: float = SAME_STOP_S) -> bool:
        """Whether a signal is a request, and not the last one again, no more than `same_s` later."""
        now, (last, since) = time.monotonic(), self._last
        if self.count and as_stop(number) == last and now - since <= same_s:
            return False
        self.count += 1
        self._last = as_stop(number), now
        return True


class StopRequest:
    """Whether a signal has asked this process to end; a second request ends it at once.

    Python runs a handler between two operations of the main thread, which may wait in a collective for good. So a
    thread reads the signals from the pipe into which the interpreter writes them as they come.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def __init__(self) -> None:
        self._requests = Requests()
        self._asked = False
        self._ignored = False

    def __call__(self) -> bool:
        """Whether one came."""
        return self._asked

    def install(self) -> None:
        """Take the signals from here on; for the main thread."""
        read, write = socket.socketpair()
        write.setblocking(False)
        signal.set_wakeup_fd(write.fileno(), warn_on_full_buffer=False)
        for number in self.SIGNALS:
            # `nohup` has a process ignore the end of its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=self._in_child)
        threading.Thread(target=self._read, args=(read, write), name="signals", daemon=True).start()

    def ignore(self) -> None:
        """From here on a signal changes nothing: the process is ending, as fast as it can."""
        self._ignored = True

    def _read(self, read: socket.socket, write: socket.socket) -> None:
        # `write` lives as long as this thread does.
        for number in iter(lambda: read.recv(1), b""):
            if self._ignored or number[0] not in self.SIGNALS:
                continue
            if self._requests.add(number[0]) and self._requests.count > 1:
                os._exit(128 + number[0])
            self._asked = True

    def _in_child(self) -> None:
        # Such a process writes files of a checkpoint: its signals are not for the parent's pipe, nor to cut it short
        # when torchrun sends them to all of a rank's processes.
        signal.set_wakeup_fd(-1)
        for number in self.SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def as_stop(number: int) -> int:
    """The signal that a process takes this one for: what a terminal's end asks for is what SIGTERM does."""
    return signal.SIGTERM if number == signal.SIGHUP else number


def die_with_launcher(launcher: int) -> None:
    """Be killed when the process that started this one ends, on Linux: nobody would be left to stop it.

    Args:
        launcher: that process; where it has ended before this call, this one ends with it.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGKILL)


def sentences_of(error: BaseException, *, under_way: bool = False) -> tuple[list[str], Status]:
    """What an error says, a line for each fault, and what a process ends with for it.

    Refused is what this package refuses, and what a file or a disk does not do: not an error of anything else, which
    has a place to tell, nor ranks that came apart.

    Args:
        under_way: whether the run has done a step, after which a step finds nothing that could have been asked for
            otherwise.
    """
    # Once, though of two paths perhaps.
    said = list(dict.fromkeys(line for line in str(error).splitlines() if line.strip()))
    if isinstance(error, ValueError) and said and _is_raised_here(error):
        came_apart = _CAME_APART | (_STEPS if under_way else set())
        return said, Status.FAILED if _modules_of(error) & came_apart else Status.REFUSED
    for cause in causes(error):
        if not isinstance(cause, OSError) or not cause.strerror:
            continue
        if cause.errno in _DISK_FAULTS or (cause is error and cause.filename is not None):
            return [f"{cause.filename or 'a file'}: {cause.strerror}"], Status.REFUSED
    if failures := getattr(error, "failures", None):
        told = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in failures.items())
        return [f"the checkpoint cannot be read: {told}"], Status.REFUSED
    text = " ".join(str(error).split())
    place = _place_of(error)
    return [f"{type(error).__name__}{place}{f': {text}' if text else ''}"], Status.FAILED


def say(lines: list[str]) -> None:
    """The last words of a run, on stderr."""
    # Whoever read them may be gone.
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        print("\n".join(f"{_PROGRAM}: error: {line}" for line in lines), file=sys.stderr, flush=True)


def leave_record(lines: list[str]) -> None:
    """Leave what ended this process where torchrun looks for it, so that its table says the same."""
    path = os.environ.get(_ERROR_FILE)
    if path:
        text = "; ".join(lines)
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and the errors of ranks that it lists."""
    seen: set[int] = set()
    todo: list[BaseException] = [error]
    while todo:
        one = todo.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += [cause for cause in (one.__cause__, one.__context__) if cause is not None]
        # torch's CheckpointException: by rank, an error and where it was raised.
        failures = getattr(one, "failures", None)
        if isinstance(failures, dict):
            todo += [value[0] for value in failures.values() if isinstance(value, tuple) and value]


def _is_raised_here(error: BaseException) -> bool:
    """Whether a `raise` of this package is where an error comes from; not what an operation in it runs into."""
    trace = _innermost(error)
    if trace is None or not trace.tb_frame.f_globals.get("__name__", "").startswith("mcore_dsa."):
        return False
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _modules_of(error: BaseException) -> set[str]:
    """Those through which an error came."""
    modules, trace = set(), error.__traceback__
    while trace is not None:
        modules.add(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next
    return modules


def _place_of(error: BaseException) -> str:
    trace = _innermost(error)
    return f" at {Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}" if trace is not None else ""


def _innermost(error: BaseException) -> TracebackType | None:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace
