"""What the ranks of a run tell one another outside collectives, through the store that their launcher keeps.

A collective needs every rank; this needs the launcher alone, and so can say which rank is missing, and why. Of a
launcher that keeps no store, as torchrun does, rank 0 keeps it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, Self

from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

_FAILURE = "failure"
_SAID = "said"
_LEFT = "left"
# What tells a rank of the others, whoever starts it.
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a run ends: the first error of any rank.

    Attributes:
        rank: whose.
        lines: what it says, a line for each fault.
        status: what all ranks end with.
        trace: where it was raised, empty for what needs none.
    """

    rank: int
    lines: list[str]
    status: int
    trace: str = ""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """Where a rank is, written by it every interval.

    Attributes:
        count: beats so far; a process that is stopped or gone adds none.
        phase: how many phases of the run it has begun: comparable between ranks.
        doing: the phase in words.
        place: function and line of its main thread.
        collective: name of the collective that it waits in, empty where it is in none.
        still: of the last beats, how many found it where it was.
    """

    count: int
    phase: int
    doing: str
    place: str
    collective: str
    still: int


class Board:
    """One rank's connection. No call but `leave` waits for another rank, so that threads may share it.

    Attributes:
        rank: of this process.
        size: ranks of the run.
        keeper: who keeps the store.
    """

    def __init__(self, store: Store, rank: int, size: int, *, keeper: str = "the launcher") -> None:
        self._store = store
        self.rank = rank
        self.size = size
        self.keeper = keeper

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The board of the run that `VARIABLES` describe."""
        rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        agents = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        store = TCPStore(
            environ["MASTER_ADDR"],
            int(environ["MASTER_PORT"]),
            world_size=size,
            is_master=rank == 0 and not agents,
            timeout=timedelta(seconds=60),
            wait_for_workers=False,
            multi_tenant=True,
        )
        # Workers that are started again find the store of those before them.
        own = PrefixStore(f"mcore_dsa/{environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        return cls(own, rank, size, keeper="the launcher" if agents else "rank 0")

    def fail(self, failure: Failure) -> Failure:
        """Tell every rank why this one ends.

        Returns: the first failure that any rank has told.
        """
        told = self._store.compare_set(_FAILURE, "", json.dumps(asdict(failure)))
        return Failure(**json.loads(told))

    def failure(self) -> Failure | None:
        """The first failure that any rank has told."""
        return Failure(**json.loads(self._store.get(_FAILURE))) if self._store.check([_FAILURE]) else None

    def claim_last_word(self) -> bool:
        """Whether it is this rank that prints the failure, and no other has."""
        return bool(self._store.add(_SAID, 1) == 1)

    def last_word_claimed(self) -> bool:
        """Whether some rank prints the failure."""
        return bool(self._store.check([_SAID]))

    def leave(self, *, wait_s: float) -> None:
        """This rank has nothing more to ask; rank 0, if it keeps the store, stays that long for those that may."""
        until = time.monotonic() + wait_s
        # The keeper may have gone first.
        with suppress(DistError):
            left = self._store.add(_LEFT, 1)
            while self.keeper == f"rank {self.rank}" and left < self.size and time.monotonic() < until:
                time.sleep(0.05)
                left = self._store.add(_LEFT, 0)

    def beat(self, beat: Beat) -> None:
        """Write where this rank is."""
        self._store.set(f"beat/{self.rank}", json.dumps(asdict(beat)))

    def beats(self) -> list[Beat | None]:
        """Where each rank is, None for one that has not begun."""
        keys = [f"beat/{rank}" for rank in range(self.size)]
        # `get` waits for what is not there; the keys of the ranks that have begun are read in one exchange.
        if self._store.check(keys):
            texts: list[Any] = list(self._store.multi_get(keys))
        else:
            texts = [self._store.get(key) if self._store.check([key]) else None for key in keys]
        return [None if text is None else Beat(**json.loads(text)) for text in texts]
