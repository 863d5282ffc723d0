"""The greatest scores of every row under a total order, over blocks of columns that come one after another.

Shapes by suffix: R rows, C columns of a block (behind what is kept of earlier blocks), K budget.

Scores are ordered as int32, which makes -0.0 equal 0.0 and puts every NaN last; of equal scores the smaller column
wins. Under a total order blocks merge exactly: what is beaten inside a block is beaten by all.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INVISIBLE = -(1 << 31)
# Added to an order, it makes +inf the greatest int32, so that a positive NaN wraps round to the bottom.
_NAN_WRAP = 0x7FFFFFFF - 0x7F800000
_NAN = -0x7F800000 + _NAN_WRAP - 1

# Bytes a (row, column) takes: scores 4, signs 4, chosen or not 1, the copy of values and indices that torch.topk works
# on 16; where scores tie at the cut, also which do, 3, and a running count of them, 4.
COLUMN_BYTES = 32
# Bytes a (row, kept column) takes: topk's values and indices 12, places 8; slots, old and new, and what is gathered for
# them 33, orders, old and new, 8.
KEPT_BYTES = 61


class RunningTopK:
    """The best `budget` columns of up to `rows` rows. Fill `block`, call `merge`, block after block; read `slots`.

    Owns its buffers: a strip of scores is some 100 KiB, and fresh memory of that size costs page faults on every use.
    """

    def __init__(self, *, rows: int, columns: int, budget: int, device: torch.device) -> None:
        size = rows * (columns + budget)
        self._budget = budget
        self._scores = torch.empty(size, dtype=torch.float32, device=device)
        self._signs = torch.empty(size, dtype=torch.int32, device=device)
        self._chosen = torch.empty(size, dtype=torch.bool, device=device)
        self._values = torch.empty(rows, budget, dtype=torch.int32, device=device)
        self._indices = torch.empty(rows, budget, dtype=torch.int64, device=device)
        self._places = torch.empty(rows * budget, 1, dtype=torch.int64, device=device)
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

    def merge(self, first: int, columns: int, end_R: Tensor, least_end: int, *, last: bool) -> None:
        """Take the filled block in, whose columns are slots `first ... first + columns - 1`.

        `end_R` is the slot each row sees no more, `least_end` the least of them; scores there are not read. A first
        block has at least `budget` columns. `slots` is then int64 `[rows, budget]`, the best so far in ascending order,
        valid until the next `reset`. Nothing can be merged after a block said to be the `last`.
        """
        kept, rows, budget = self._kept, self._rows, self._budget
        order = _order_(self._whole(self._scores, columns), self._whole(self._signs, columns))
        if (edge := max(first, least_end)) < first + columns:
            slot_C = torch.arange(edge, first + columns, device=order.device)
            order[:, kept + edge - first :].masked_fill_(slot_C >= end_R.unsqueeze(1), _INVISIBLE)
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
