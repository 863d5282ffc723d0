"""What stands beside a rank's training from its first line to its last word."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback

import torch.distributed as dist

from mcore_dsa.train.board import VARIABLES, Board, Failure
from mcore_dsa.train.ending import (
    Status,
    StopRequest,
    causes,
    leave_record,
    say,
    sentences_of,
)
from mcore_dsa.train.waiting import MISSED, Watch

# Seconds that the watch gives the main thread to come out by itself, the other ranks rank 0 to print why, and rank 0
# the others to hear of it where it keeps their store.
_MAIN_S = 1.0
_RANK_0_S = 5.0
_OTHERS_S = 10.0


class Attendance:
    """Signals, the other ranks, and how this one ends.

    Args:
        debug: whether a refusal shows where it was raised.

    Attributes:
        stop: whether a signal has asked for the end.
    """

    def __init__(self, *, debug: bool = False) -> None:
        self.stop = StopRequest()
        self._debug = debug
        self._rank = int(os.environ.get("RANK", "0"))
        self._board: Board | None = None
        self._watch: Watch | None = None
        self._main_ends = threading.Event()
        self._under_way = False
        # Neither thread may end the process while the other prints.
        self._printing = threading.Lock()

    def begin(self) -> None:
        """Attend to this process from here on; for the main thread of a rank, or of a process that is none."""
        self.stop.install()
        if all(name in os.environ for name in VARIABLES):
            self._board = Board.from_environment()
            self._watch = Watch(self._board, self._end_with)
            self._watch.start()

    def wait_for(self, *, say_after_s: float, end_after_s: float) -> None:
        """As `Watch.wait_for`."""
        if self._watch is not None:
            self._watch.wait_for(say_after_s=say_after_s, end_after_s=end_after_s)

    def at(self, doing: str) -> None:
        """As `Watch.at`."""
        if self._watch is not None:
            self._watch.at(doing)

    def under_way(self) -> None:
        """A step is done: what one finds from here on is no refusal of what was asked for."""
        self._under_way = True

    def close(self) -> None:
        """The run is over, and well: whoever ends from here on is missed by nobody."""
        self.stop.ignore()
        if self._board is not None and self._watch is not None:
            self._watch.close()
            self._board.leave(wait_s=_OTHERS_S)

    def failed(self, error: BaseException) -> int:
        """Tell all ranks what ended this one, see to it that one of them prints it, and return the status to end with.

        The process group is to be left as it is: others would read its end before they read why.
        """
        self.stop.ignore()
        self._main_ends.set()
        lines, status = sentences_of(error, under_way=self._under_way)
        trace = "".join(traceback.format_exception(error)) if self._debug or status == Status.FAILED else ""
        mine = Failure(rank=self._rank, lines=lines, status=status, trace=trace)
        if self._board is None or self._watch is None:
            return self._print(mine)
        try:
            cause = self._cause(self._board, self._watch) if _comes_of_another_rank(error) else None
            failure = self._board.fail(cause or mine)
            return self._last_word(self._board, failure, lines)
        except dist.DistError:
            return self._print(mine)

    def _cause(self, board: Board, watch: Watch) -> Failure | None:
        """Why a collective failed, if another rank says so or is silent."""
        for _ in range(MISSED + 2):
            if (failure := board.failure()) is not None:
                return failure
            watch.listen()
            time.sleep(watch.interval)
        lost = watch.lost()
        return watch.found(f"rank {board.rank}, at {watch.doing}, has lost {lost}") if lost else None

    def _end_with(self, failure: Failure) -> None:
        """End this process from the watch's thread, if its main thread does not come out of what it waits for."""
        if self._main_ends.wait(_MAIN_S) or self._board is None:
            return
        try:
            status = self._last_word(self._board, failure, [])
        except dist.DistError:
            status = self._print(failure)
        os._exit(status)

    def _last_word(self, board: Board, failure: Failure, own: list[str]) -> int:
        """Print a failure if rank 0 does not, or if this is rank 0."""
        until = time.monotonic() + (_RANK_0_S if board.rank else 0.0)
        with self._printing:
            while not board.last_word_claimed():
                if time.monotonic() >= until and board.claim_last_word():
                    status = self._print(failure, own)
                    break
                time.sleep(0.05)
            else:
                leave_record(failure.lines)
                status = failure.status
        board.leave(wait_s=_OTHERS_S)
        return status

    def _print(self, failure: Failure, own: list[str] | None = None) -> int:
        sys.stderr.write(failure.trace)
        # What rank 0 finds as well is said of the run; a line that names its rank needs no other name.
        of_all = self._rank == 0 and (failure.rank == 0 or failure.lines == own)
        lines = [
            line if of_all or line.startswith("rank ") else f"rank {failure.rank}: {line}" for line in failure.lines
        ]
        say(lines)
        leave_record(lines)
        return failure.status


def _comes_of_another_rank(error: BaseException) -> bool:
    """Whether this is what a collective says when a rank at its other end is gone, or its time is up.

    Or a checkpoint that could not be read, whose reasons rank 0 alone knows.
    """
    return any(
        isinstance(cause, dist.DistError) or "gloo/" in str(cause) or getattr(cause, "failures", None) == {}
        for cause in causes(error)
    )
