"""The greatest scores of every row under a total order, over blocks of columns that come one after another.

Letters of shapes: `mcore_dsa/__init__.py`; columns M of a block stand behind what is kept of earlier blocks.

Scores are ordered as int32, which makes -0.0 equal 0.0 and puts every NaN last; of equal scores the smaller column
wins. Under a total order blocks merge exactly: what is beaten inside a block is beaten by all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_dsa.ranges import ranged
from mcore_dsa.workspace import Buffer, Workspace

_INVISIBLE = -(1 << 31)
# Added to an order, it makes +inf the greatest int32, so that a positive NaN wraps round to the bottom.
_NAN_WRAP = 0x7FFFFFFF - 0x7F800000
_NAN = -0x7F800000 + _NAN_WRAP - 1


def topk_workspace(rows: int, columns: int, budget: int) -> Workspace:
    """What a `RunningTopK` holds, and the most that its operations take beside it; linear in `columns`."""
    wide, kept = (rows, columns + budget), (rows, budget)
    return Workspace(
        {
            "scores": Buffer((rows * (columns + budget),), torch.float32),
            "signs": Buffer((rows * (columns + budget),), torch.int32),
            "chosen": Buffer((rows * (columns + budget),), torch.bool),
            "values": Buffer(kept, torch.int32),
            "indices": Buffer(kept, torch.int64),
            "places": Buffer((rows * budget, 1), torch.int64),
            # Values and indices on which torch.topk works.
            "topk": Buffer((*wide, 2), torch.int64, inside=True),
            # Where scores tie at the cut: which do, and a running count of them.
            "level": Buffer((*wide, 3), torch.bool, inside=True),
            "level so far": Buffer(wide, torch.int32, inside=True),
            # Slots, old and new, and what is gathered for them; orders, old and new.
            "slots": Buffer((*kept, 4), torch.int64, inside=True),
            "from earlier": Buffer(kept, torch.bool, inside=True),
            "orders": Buffer((*kept, 2), torch.int32, inside=True),
        }
    )


class RunningTopK:
    """The best `budget` columns of up to `rows` rows. Fill `block`, call `merge`, block after block; read `slots`.

    Owns its buffers: a strip of scores is some 100 KiB, and fresh memory of that size costs page faults on every use.
    """

    def __init__(self, *, rows: int, columns: int, budget: int, device: torch.device) -> None:
        held = topk_workspace(rows, columns, budget).allocate(device)
        self._budget = budget
        self._scores, self._signs, self._chosen = held["scores"], held["signs"], held["chosen"]
        self._values, self._indices, self._places = held["values"], held["indices"], held["places"]
        self._row = torch.arange(rows, device=device).unsqueeze(1)
        self.reset(rows)

    def reset(self, rows: int) -> None:
        """Begin with `rows` other rows."""
        self._rows = rows
        self._order_RK: Tensor | None = None
        self.slots: Tensor | None = None

    def block(self, columns: int) -> Tensor:
        """fp32 `[rows, columns]` to be filled with the scores of the next columns; not initialised."""
        return self._whole(self._scores, columns)[:, self._kept :]

    @ranged("top-k")
    def merge(self, first: int, columns: int, end_R: Tensor, least_end: int, *, last: bool) -> None:
        """Take the filled block in, whose columns are slots `first ... first + columns - 1`.

        `end_R` is the slot each row sees no more, `least_end` the least of them; scores there are not read. A first
        block has at least `budget` columns. `slots` is then int64 `[rows, budget]`, the best so far in ascending order,
        valid until the next `reset`. Nothing can be merged after a block said to be the `last`.
        """
        kept, rows, budget = self._kept, self._rows, self._budget
        order = _order_(self._whole(self._scores, columns), self._whole(self._signs, columns))
        if (edge := max(first, least_end)) < first + columns:
            slot_M = torch.arange(edge, first + columns, device=order.device)
            order[:, kept + edge - first :].masked_fill_(slot_M >= end_R.unsqueeze(1), _INVISIBLE)
        if self._order_RK is not None:
            order[:, :kept] = self._order_RK
        chosen = self._whole(self._chosen, columns)
        torch.topk(order, budget, dim=1, sorted=False, out=(self._values[:rows], self._indices[:rows]))
        _leftmost_greatest_(chosen, order, self._values[:rows].amin(1, keepdim=True), budget)
        column_RK = torch.nonzero(chosen.flatten(), out=self._places[: rows * budget]).view(rows, budget)
        column_RK.sub_(self._row[:rows] * chosen.shape[1])
        self._order_RK = None if last else order.gather(1, column_RK)
        slots = column_RK.add(first - kept) if kept or not last else column_RK.add_(first)
        if self.slots is not None:
            old_RK = self.slots.gather(1, column_RK.clamp(max=budget - 1))
            slots = torch.where(column_RK < kept, old_RK, slots)
        self.slots = slots

    @property
    def _kept(self) -> int:
        return 0 if self.slots is None else self._budget

    def _whole(self, buffer: Tensor, columns: int) -> Tensor:
        width = self._kept + columns
        return buffer[: self._rows * width].view(self._rows, width)


def _order_(scores: Tensor, signs: Tensor) -> Tensor:
    """The scores as int32 whose order is the contract's. Overwrites both."""
    bits = scores.view(torch.int32)
    torch.bitwise_right_shift(bits, 31, out=signs)
    magnitude = bits.bitwise_and_(0x7FFFFFFF)
    return magnitude.bitwise_xor_(signs).sub_(signs).add_(_NAN_WRAP).clamp_min_(_NAN)


def _leftmost_greatest_(chosen: Tensor, order: Tensor, threshold_R1: Tensor, budget: int) -> None:
    """Set `chosen` at the `budget` greatest of each row, of equals on the left; the threshold is the least of them."""
    torch.ge(order, threshold_R1, out=chosen)
    surplus = chosen.sum(1, keepdim=True, dtype=torch.int32) - budget
    if bool(surplus.any()):
        level = order == threshold_R1
        level_so_far = level.cumsum(1, dtype=torch.int32)
        wanted = level_so_far[:, -1:] - surplus
        chosen &= ~(level & (level_so_far > wanted))
