"""A thread beside each rank's training that sees who does not come, and says so before a collective's time is up.

Each rank writes where it is to the store of the launcher, once an interval, whatever its main thread does. A rank that
has not moved for some time while it is in a collective reads where the others are, and names those it waits for. A
rank is stopped, gone or never started if it writes no more; all is counted in intervals of one's own, so that a
job that is suspended as a whole finds nobody missing when it goes on.
"""

from __future__ import annotations

import linecache
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

import torch.distributed as dist

from mcore_dsa.train.board import Beat, Board, Failure
from mcore_dsa.train.ending import Status

_logger = logging.getLogger(__name__)

_DISTRIBUTED = str(Path(dist.__file__).parent)
# Where `deprecated` wraps a function.
_WRAPPERS = {"typing_extensions", "warnings", "_py_warnings"}
# How code waits for a collective that it started before, or for a device that does.
_WAITS = re.compile(r"\.(wait|synchronize|item|tolist)\(")
# Beats that a rank may miss on a busy machine before it counts as silent.
MISSED = 4


class Watch:
    """Where this rank is, told to the others, and what is heard of them.

    Args:
        board: of the run.
        end: called by the thread, once, with a failure of another rank or one that it has found itself; it does not
            come back.
    """

    def __init__(self, board: Board, end: Callable[[Failure], None]) -> None:
        self._board, self._end = board, end
        self._main = threading.main_thread().ident or 0
        self._say_after = self._end_after = float("inf")
        self._interval = 1.0
        self._phase, self._doing = 0, "the start"
        self._count = self._still = 0
        self._mark: object = None
        self._heard: dict[int, tuple[int, int]] = {}
        self._beats: list[Beat | None] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Tell and listen from here on."""
        self._thread.start()

    def wait_for(self, *, say_after_s: float, end_after_s: float) -> None:
        """From here on say so after a wait of `say_after_s`, and end after one of all ranks for `end_after_s`."""
        self._interval = min(1.0, say_after_s / 8)
        self._say_after, self._end_after = say_after_s, end_after_s

    def at(self, doing: str) -> None:
        """The next phase begins; every rank goes through the same ones."""
        self._doing = doing
        self._phase += 1

    def close(self) -> None:
        """Neither tell nor listen any longer."""
        self._closed.set()
        self._thread.join()

    def lost(self) -> str:
        """Whom nothing is heard of, and where they were; empty where all are."""
        return self._describe_all(self._silent())

    def listen(self) -> None:
        """Read where the others are."""
        self._beats = self._board.beats()
        for rank, beat in enumerate(self._beats):
            count = -1 if beat is None else beat.count
            if self._heard.get(rank, (None, 0))[0] != count:
                self._heard[rank] = count, self._count

    def found(self, line: str) -> Failure:
        """What this rank has found, as what ends the run."""
        return Failure(rank=self._board.rank, lines=[line], status=Status.FAILED)

    @property
    def doing(self) -> str:
        """The phase that this rank is in."""
        return self._doing

    @property
    def interval(self) -> float:
        """Seconds between two beats."""
        return self._interval

    def _run(self) -> None:
        said = False
        # The first beat at once: a rank that ends soon has begun all the same.
        while True:
            try:
                self._tick()
                failure = self._board.failure()
                if failure is None:
                    said, failure = self._judge(said)
            except dist.DistError as error:
                if self._closed.is_set():
                    return
                text = " ".join(str(error).split())[:200]
                failure = self.found(f"rank {self._board.rank} has lost {self._board.keeper}: {text}")
            if failure is not None:
                self._end(failure)
                return
            if self._closed.wait(self._interval):
                return

    def _tick(self) -> None:
        self._count += 1
        beat = self._beat(moved=True)
        self._board.beat(beat)
        # Each rank reading all of them is a square of messages, so only who waits does, and the more ranks the rarer.
        every = 1 + self._board.size // 32
        if 2 * self._still * self._interval >= self._say_after and self._count % every == 0:
            self.listen()

    def _judge(self, said: bool) -> tuple[bool, Failure | None]:
        """Whether a wait has been spoken of, and what ends the run."""
        waited = self._still * self._interval
        if waited < self._say_after or not self._others():
            return False, None
        beat, late = self._beat(), self._silent() or self._behind()
        # On a device the host may wait anywhere.
        if not beat.collective and not late:
            return False, None
        late = late or [rank for rank in self._others() if (other := self._beats[rank]) and not other.collective]
        # All of them are in collectives: then these are not the same.
        late = late or self._others()
        where = f"in {beat.collective} ({beat.place})" if beat.collective else f"in {beat.place}"
        line = (
            f"rank {self._board.rank} has waited {waited:.0f} s at {beat.doing} {where} for {self._describe_all(late)}"
        )
        if not said and self._speaks():
            _logger.warning("%s", line)
        stillness = [
            self._count - self._heard[rank][1] if other is None or self._is_silent(rank) else other.still
            for rank, other in enumerate(self._beats)
            if rank != self._board.rank
        ]
        if min([self._still, *stillness]) * self._interval < self._end_after:
            return True, None
        return True, self._board.fail(self.found(line))

    def _others(self) -> list[int]:
        """The other ranks, none before they have been read of."""
        return [rank for rank in range(len(self._beats)) if rank != self._board.rank]

    def _silent(self) -> list[int]:
        return [rank for rank in self._others() if self._beats[rank] is None or self._is_silent(rank)]

    def _behind(self) -> list[int]:
        return [rank for rank in self._others() if (beat := self._beats[rank]) and beat.phase < self._phase]

    def _speaks(self) -> bool:
        """Whether this is the first of the ranks that wait: one of them says it, not all."""
        waiting = [
            rank for rank, beat in enumerate(self._beats) if beat and beat.collective and not self._is_silent(rank)
        ]
        return self._board.rank <= min([*waiting, self._board.size])

    def _is_silent(self, rank: int) -> bool:
        heard = self._heard.get(rank)
        return heard is not None and self._count - heard[1] >= MISSED * (1 + self._board.size // 32)

    def _describe_all(self, ranks: Sequence[int]) -> str:
        more = f" and {len(ranks) - 4} others" if len(ranks) > 4 else ""
        return ", ".join(self._describe(rank) for rank in ranks[:4]) + more

    def _describe(self, rank: int) -> str:
        beat = self._beats[rank]
        if beat is None:
            return f"rank {rank}, which has not started"
        if self._is_silent(rank):
            return f"rank {rank}, silent since {beat.doing} ({beat.place})"
        where = f"in {beat.collective} ({beat.place})" if beat.collective else f"in {beat.place}"
        return f"rank {rank}, which is at {beat.doing} {where}"

    def _beat(self, *, moved: bool = False) -> Beat:
        """This rank's beat; with `moved`, counted as one more that found the main thread where it was, or not."""
        frames = sys._current_frames()
        # A frame that holds itself would keep the tensors of all others until the next garbage collection.
        del frames[threading.get_ident()]
        # On a device backward runs in threads of its own.
        stacks = [_stack(frames.pop(self._main, None)), *map(_stack, frames.values())]
        collective, frame = _collective_of(stacks)
        if moved:
            mark = (self._phase, id(frame), frame.f_lasti if frame else 0)
            self._still = self._still + 1 if mark == self._mark else 0
            self._mark = mark
        return Beat(
            count=self._count,
            phase=self._phase,
            doing=self._doing,
            place=_place(frame),
            collective=collective,
            still=self._still,
        )


def _stack(frame: FrameType | None) -> list[FrameType]:
    """A thread's frames from the innermost on."""
    stack = []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return stack


def _collective_of(stacks: Sequence[Sequence[FrameType]]) -> tuple[str, FrameType | None]:
    """The collective that one of the threads is in, and the frame that called it; else the first thread's frame."""
    for number, stack in enumerate(stacks):
        inside = 0
        while inside < len(stack) and _is_torchs(stack[inside]):
            inside += 1
        # The outermost of these frames is a decorator's.
        names = [frame.f_code.co_name for frame in stack[:inside] if frame.f_code.co_name != "wrapper"]
        if names and inside < len(stack):
            return names[-1], stack[inside]
        line = linecache.getline(stack[0].f_code.co_filename, stack[0].f_lineno) if stack else ""
        if number == 0 and (match := _WAITS.search(line)):
            return match[1], stack[0]
    return "", stacks[0][0] if stacks[0] else None


def _is_torchs(frame: FrameType) -> bool:
    is_distributed = os.path.dirname(frame.f_code.co_filename) == _DISTRIBUTED
    return is_distributed or frame.f_globals.get("__name__") in _WRAPPERS


def _place(frame: FrameType | None) -> str:
    if frame is None:
        return "no place"
    return f"{frame.f_code.co_name}, {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
