"""torchrun, ended as the ranks end: `python -m mcore_dsa.train.launch` with torchrun's options, then the job's.

torchrun ends with 1 and a traceback of its own however its ranks end, gives them 30 seconds after a signal, and forgets
them at a second one. Here SIGTERM, SIGINT and SIGHUP go to the ranks, which have as long as they need; a second one
kills them; and the launcher ends with what they end with.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Collection, Sequence
from types import FrameType

import psutil
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks and wait for them.

    Returns: 0, or the status of the ranks; 128 + n where signal n ended one of them.
    """
    # Of the signals that torchrun would take for itself, one that nobody sends.
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    # Ranks that are left when one has failed say what they know well before.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "15")
    # The ranks say what there is to say: not the stores and sockets that their ends close.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.ERROR)
    forward = _Forward()
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    try:
        torchrun.main(None if arguments is None else list(arguments))
    except ChildFailedError as error:
        return status_of([failure.exitcode for failure in error.failures.values()])
    return 0


def status_of(codes: Collection[int]) -> int:
    """What a launcher ends with whose ranks have ended with `codes`, negative where a signal ended them."""
    # A rank that fails ends the others, and a failure counts for more than a refusal or a stop.
    own = [code for code in codes if code > 0]
    if own:
        return min(own)
    return max((128 - code for code in codes if code < 0), default=0)


class _Forward:
    """Hands signals to the ranks, and ends this process when they have."""

    def __init__(self) -> None:
        self._seen = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._seen += 1
        # Ranks take a terminal's end for what it means to this process.
        told = signal.SIGKILL if self._seen > 1 else signal.SIGTERM if number == signal.SIGHUP else number
        children = [child.pid for child in psutil.Process().children()]
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, told)
        codes = [_code_of(pid) for pid in children]
        sys.exit(status_of(codes) if codes and self._seen == 1 else 128 + number)


def _code_of(pid: int) -> int:
    """How a child ended, once it has; it stays for torchrun to collect."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
