"""For every cell the items that attend its tokens, in row order: what the gradients of latents are summed by.

Letters of shapes: `mcore_dsa/__init__.py`. A cell is the stretch of `pool_size` tokens, of one segment, from a token
where a pool begins or would if the segment went on; it is numbered `sample * tokens + its first token`. An item attends
a pool's cell up to its end, and its tail's up to its own token.

Lists are made for some cells at a time, as many as the byte budget holds, and never cut: the budget moves no bit.
Lengths are added atomically, which integers do not mind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_dsa.kernels.items import Items, find_pools, launch, load_item

COLUMNS = 64
# An item's number, a cell's, the stable sort of these with its indices, on CUDA both twice and a copy, items in order.
ENTRY_BYTES = 48


@triton.jit
def find_cells(
    selection_ptr, position_ptr, first_ptr, visible_ptr, tail_ptr, item, start, rows, batch, budget, tokens,
    J: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cells in an item's columns from `start` on, the tail's in the last, and which columns hold one."""
    sample, place, first, visible, origin, columns, tail = load_item(
        position_ptr, first_ptr, visible_ptr, tail_ptr, item, rows, batch, budget, J, TAIL
    )
    column = start + tl.arange(0, COLUMNS)
    rank, seen = find_pools(selection_ptr + place * budget, column, columns, first, visible)
    used = seen & ((column < columns) | ((column == columns) & (tail > 0)))
    return sample * tokens + origin + rank * J, used


@triton.jit
def count_columns(visible_ptr, item, rows, batch, budget):
    """Columns that an item can fill, that of the tail included."""
    visible = tl.load(visible_ptr + item % batch * rows + item // batch)
    return tl.minimum(visible, budget).to(tl.int32) + 1


@triton.jit(do_not_specialize=["rows", "batch", "budget", "tokens"])
def count_kernel(
    selection_ptr, position_ptr, first_ptr, visible_ptr, tail_ptr, count_ptr, rows, batch, budget, tokens,
    J: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Count one item in the cells that it attends."""
    item = tl.program_id(0).to(tl.int64)
    for start in range(0, count_columns(visible_ptr, item, rows, batch, budget), COLUMNS):
        cell, used = find_cells(
            selection_ptr, position_ptr, first_ptr, visible_ptr, tail_ptr, item, start, rows, batch, budget, tokens,
            J, TAIL, COLUMNS,
        )  # fmt: skip
        tl.atomic_add(count_ptr + cell, 1, mask=used)


@triton.jit(do_not_specialize=["rows", "batch", "budget", "tokens", "low", "high"])
def collect_kernel(
    selection_ptr, position_ptr, first_ptr, visible_ptr, tail_ptr, place_ptr, key_ptr, entry_ptr,
    rows, batch, budget, tokens, low, high,
    J: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """How many cells from `low` below `high` one item attends, into `place`; or, from that place on, these cells."""
    item = tl.program_id(0).to(tl.int64)
    place = tl.zeros([], tl.int64)
    if STORE:
        place += tl.load(place_ptr + item)
    for start in range(0, count_columns(visible_ptr, item, rows, batch, budget), COLUMNS):
        cell, used = find_cells(
            selection_ptr, position_ptr, first_ptr, visible_ptr, tail_ptr, item, start, rows, batch, budget, tokens,
            J, TAIL, COLUMNS,
        )  # fmt: skip
        here = used & (cell >= low) & (cell < high)
        through = tl.cumsum(here.to(tl.int32), 0)
        if STORE:
            tl.store(key_ptr + place + through - 1, (cell - low).to(tl.int32), mask=here)
            tl.store(entry_ptr + place + through - 1, (item + tl.zeros_like(cell)).to(tl.int32), mask=here)
        place += tl.sum(here.to(tl.int32), 0)
    if not STORE:
        tl.store(place_ptr + item, place)


@dataclass(frozen=True, eq=False)
class Strip:
    """The lists of the cells from `low` below `high`, one behind the other, and the parts they are cut in.

    Attributes:
        item_X: int32.
        part_cell_X: int64, the cell of every part.
        sums: parts of those lists that have several.
    """

    low: int
    high: int
    item_X: Tensor
    part_cell_X: Tensor
    sums: int


class InverseLists:
    """Where each cell's list begins, on the device; the lists themselves come strip by strip.

    Attributes:
        start_3X: int64, cell after cell and one more: entries, parts, and parts of lists with several, before its own.
    """

    def __init__(self, items: Items, tokens: int, part: int) -> None:
        """Lists for latents of `tokens` tokens, cut in parts of `part` entries; waits for the device once."""
        self._items, self._tokens = items, tokens
        self._device = items.first_BS.device
        _, batch, _ = items.sizes
        count_X = torch.zeros(tokens * batch, dtype=torch.int32, device=self._device)
        arguments = *items.pointers, count_X, *items.sizes, tokens
        launch(count_kernel, len(items), *arguments, num_warps=1, COLUMNS=COLUMNS, **items.constants)
        self._parts_X = (count_X + (part - 1)) // part
        self.start_3X = torch.zeros(3, len(count_X) + 1, dtype=torch.int64, device=self._device)
        several_X = self._parts_X.masked_fill(self._parts_X == 1, 0)
        for start_X, own_X in zip(self.start_3X, (count_X, self._parts_X, several_X), strict=True):
            torch.cumsum(own_X, 0, out=start_X[1:])
        self._host_3X = self.start_3X.cpu()

    def strips(self, scratch_bytes: int, sum_bytes: int) -> Iterator[Strip]:
        """Strips of whole lists that take at most `scratch_bytes`, or of one list.

        Args:
            sum_bytes: what one part of a list with several takes beside its entries.
        """
        bytes_X = self._host_3X[0] * ENTRY_BYTES + self._host_3X[1] * 8 + self._host_3X[2] * sum_bytes
        low, last = 0, len(bytes_X) - 1
        while low < last and bytes_X[low] < bytes_X[last]:
            within = int(torch.searchsorted(bytes_X, bytes_X[low] + scratch_bytes, right=True)) - 1
            high = max(low + 1, within)
            yield self._strip(low, high)
            low = high

    def _strip(self, low: int, high: int) -> Strip:
        entries, parts, sums = (self._host_3X[:, high] - self._host_3X[:, low]).tolist()
        place_X = torch.empty(len(self._items), dtype=torch.int64, device=self._device)
        key_X, item_X = (torch.empty(entries, dtype=torch.int32, device=self._device) for _ in range(2))
        self._collect(place_X, key_X, item_X, low, high, STORE=False)
        place_X = place_X.cumsum(0) - place_X
        self._collect(place_X, key_X, item_X, low, high, STORE=True)
        item_X = item_X[torch.sort(key_X, stable=True).indices]
        cell_X = torch.arange(low, high, device=self._device)
        part_cell_X = torch.repeat_interleave(cell_X, self._parts_X[low:high], output_size=parts)
        return Strip(low, high, item_X, part_cell_X, sums)

    def _collect(self, place_X: Tensor, key_X: Tensor, item_X: Tensor, low: int, high: int, *, STORE: bool) -> None:
        items = self._items
        arguments = *items.pointers, place_X, key_X, item_X, *items.sizes, self._tokens, low, high
        constants = items.constants | {"COLUMNS": COLUMNS, "STORE": STORE}
        launch(collect_kernel, len(items), *arguments, num_warps=1, **constants)
