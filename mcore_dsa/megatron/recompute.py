"""A forward's selection kept for its recomputation, in the checkpointed function itself.

`mcore_dsa.patches` wraps a `Carrier` around every function that Megatron checkpoints. The carrier lives as long as the
autograd node that is to call it again: there is nothing to recognise (order, step, evaluation, a forward that is never
differentiated) and nothing to clean up. Where no carrier runs, a recomputation selects again.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mcore_dsa.replay import recomputing
from mcore_dsa.source import SelectionSource


class Carrier:
    """A function that brings what was selected in its first call to its later ones.

    Attributes:
        again: whether the call that runs, or ran last, is a recomputation.
        held: selections on their way, by module and by which of its calls inside this function.
        sources: of the same calls, where their selections come from.
        born_again: whether some other recomputation made it: it knows nothing of the first pass.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._calls = 0
        self._seen: Counter[Hashable] = Counter()
        self.held: dict[Hashable, Tensor] = {}
        self.sources: dict[Hashable, SelectionSource] = {}
        self.born_again = recomputing()

    @property
    def again(self) -> bool:
        return self._calls > 1

    def __call__(self, *arguments: Any) -> Any:
        self._calls += 1
        self._seen.clear()
        outer, _running.carrier = current(), self
        try:
            return self._function(*arguments)
        finally:
            _running.carrier = outer

    def place(self, module: Hashable) -> Place:
        """Where this call of `module` keeps its selection, or finds the one of the first pass; ask once a call."""
        self._seen[module] += 1
        return Place(self, (module, self._seen[module]))


@dataclass(frozen=True, eq=False)
class Place:
    """One module's one call inside a checkpointed function."""

    carrier: Carrier
    key: Hashable

    def source(self, present: SelectionSource) -> SelectionSource:
        """`present` in the first pass, and in a recomputation again, whatever is replayed by then."""
        return self.carrier.sources.setdefault(self.key, present)

    def keep(self, selection_BOK: Tensor) -> None:
        self.carrier.held[self.key] = selection_BOK

    def take(self, shape: tuple[int, ...]) -> Tensor | None:
        """The selection of the first pass, which is then no longer held; None in the first pass, or where it is gone.

        Raises: RuntimeError where it is one of another shape.
        """
        if not self.carrier.again or (kept := self.carrier.held.pop(self.key, None)) is None:
            return None
        if kept.shape != shape:
            raise RuntimeError(
                f"a recomputation selects for {list(shape)}; accepted is what its first pass selected for, "
                f"{list(kept.shape)}"
            )
        return kept


_running = threading.local()


def current() -> Carrier | None:
    """The innermost carrier that runs on this thread; a backward pass may run on another than its forward."""
    carrier: Carrier | None = getattr(_running, "carrier", None)
    return carrier


def held_bytes(own_bytes: int, *, layers: int, stages: int, chunks: int) -> int:
    """The most that the selections of one rank take at a time, `own_bytes` each.

    Args:
        layers: of the whole model. stages: of the pipeline. chunks: of each stage, 1 without virtual stages.

    Source: of Megatron's schedules, `forward_backward_pipelining_without_interleaving` begins backward once `stages`
    micro-batches are in flight on the first stage, `..._with_interleaving` after `2 * (stages - 1) + (chunks - 1) *
    stages` passes through a chunk, and one more.
    """
    in_flight = stages if chunks == 1 else 2 * (stages - 1) + (chunks - 1) * stages + 1
    return -(-layers // (stages * chunks)) * in_flight * own_bytes
