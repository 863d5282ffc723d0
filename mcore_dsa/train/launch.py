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
from typing import TYPE_CHECKING

import psutil

from mcore_dsa.train.ending import SAME_STOP_S, Requests, as_stop, say

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# `timeout --signal INT` sends it twice in a moment; nobody presses keys so fast.
_SAME_KEYS_S = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Start the ranks and wait for them.

    Returns: 0, or the status of the ranks; 128 + n where signal n ended one of them.
    """
    forward = _Forward()
    for number in _SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    # Of the signals that torchrun would take for itself, one that nobody sends.
    os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    # Ranks that are left when one has failed say what they know well before.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "15")
    # The ranks say what there is to say: not the stores and sockets that their ends close.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.disable(logging.ERROR)
    # Seconds, in which a signal is answered as well.
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        torchrun.main(None if arguments is None else list(arguments))
    except ChildFailedError as error:
        return ended(error)
    return 0


def ended(error: ChildFailedError) -> int:
    """What the launcher ends with after this, which it says of a rank that could not."""
    rank, first = error.get_first_failure()
    if first.exitcode < 0:
        say([f"rank {rank} was ended by {_name_of(-first.exitcode)}"])
    return status_of([failure.exitcode for failure in error.failures.values()])


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
        self._requests = Requests()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # Who presses Ctrl-C twice means it.
        if not self._requests.add(number, same_s=_SAME_KEYS_S if number == signal.SIGINT else SAME_STOP_S):
            return
        again = self._requests.count > 1
        children = [child.pid for child in psutil.Process().children()]
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if again else as_stop(number))
        codes = [_code_of(pid) for pid in children]
        status = 128 + number if again or not codes else status_of(codes)
        if status > 128:
            signals = f"a second {_name_of(number)}" if again else _name_of(status - 128)
            say([f"ended at once by {signals}; what no checkpoint has is lost"])
        sys.exit(status)


def _name_of(number: int) -> str:
    """A signal, with what sends it most often where that is no person."""
    reason = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return signal.Signals(number).name + reason


def _code_of(pid: int) -> int:
    """How a child ended, once it has; it stays for torchrun to collect."""
    with contextlib.suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
