"""What the kernels of attention read of rows, and how they are launched.

Letters of shapes: `mcore_dsa/__init__.py`. An item is a row of one sample, numbered `row * batch + sample`. The pools
of a segment lie side by side: a row's position and what it sees tell where each begins, and no table is looked up. Ids
are followed only where the row can see them, so that whatever a caller brings, nothing beyond its segment is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_dsa.kpool import PoolLayout, RowBounds

# Pointers of `Items`: a piece of a call's rows begins anywhere, and need not be compiled for anew.
POINTERS = ["selection_ptr", "position_ptr", "first_ptr", "visible_ptr", "tail_ptr"]
# Subnormal numbers are kept.
OPTIONS = {"num_stages": 2, "enable_reflect_ftz": False}


@dataclass(frozen=True, eq=False)
class Items:
    """The rows of a call, of every sample, and their selection: contiguous, as kernels read them."""

    selection_BSK: Tensor
    position_S: Tensor
    first_BS: Tensor
    visible_BS: Tensor
    tail_BS: Tensor
    pool_size: int
    tail: bool

    @classmethod
    def of(cls, selection_BSK: Tensor, layout: PoolLayout, bounds: RowBounds, *, tail: bool) -> Items:
        position_S, first_BS, visible_BS, tail_BS = (
            x.contiguous() for x in (bounds.position_S, bounds.first_BS, bounds.visible_BS, bounds.tail_BS)
        )
        return cls(selection_BSK.contiguous(), position_S, first_BS, visible_BS, tail_BS, layout.pool_size, tail)

    def __len__(self) -> int:
        return self.first_BS.numel()

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        return self.selection_BSK, self.position_S, self.first_BS, self.visible_BS, self.tail_BS

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, samples, columns."""
        batch, rows, budget = self.selection_BSK.shape
        return rows, batch, budget

    @property
    def constants(self) -> dict[str, Any]:
        return {"J": self.pool_size, "TAIL": self.tail}


def launch(kernel: Any, programs: int, *arguments: Any, num_warps: int = 4, **constants: Any) -> None:
    """Run as many programs of a kernel."""
    if programs:
        kernel[(programs,)](*arguments, num_warps=num_warps, **OPTIONS, **constants)


@triton.jit
def load_item(
    position_ptr, first_ptr, visible_ptr, tail_ptr, item, rows, batch, budget, J: tl.constexpr, TAIL: tl.constexpr
):
    """What is known of an item.

    Returns: its sample, its place in tensors `[b, s]`; of the pools it sees the first's id, their number, the first's
    first token; how many columns of the selection it can fill; how many tokens of its tail it attends.
    """
    row, sample = item // batch, item % batch
    place = sample * rows + row
    visible, tail = tl.load(visible_ptr + place), tl.load(tail_ptr + place)
    origin = tl.load(position_ptr + row) + 1 - tail - visible * J
    columns = tl.minimum(visible, budget).to(tl.int32)
    attended = tail.to(tl.int32)
    if not TAIL:
        attended = attended * 0
    return sample, place, tl.load(first_ptr + place), visible, origin, columns, attended


@triton.jit
def find_pools(selection_ptr, column, columns, first, visible):
    """For columns of an item, how many pools of its segment lie before theirs, and whether it sees that.

    The tail stands in the column behind the last that the item can fill, and in its segment behind the pools it sees.
    """
    pool = tl.load(selection_ptr + column, mask=column < columns, other=-1)
    rank = tl.where(column < columns, pool - first, visible)
    return rank, (rank >= 0) & ((rank < visible) | (column == columns))


@triton.jit(do_not_specialize=["rows", "batch", "budget"], do_not_specialize_on_alignment=POINTERS)
def fault_kernel(
    selection_ptr, first_ptr, visible_ptr, fault_ptr, rows, batch, budget, COLUMNS: tl.constexpr
):  # fmt: skip
    """For one row of one sample: 1 if it cannot see an id, 2 if ids do not ascend with -1 behind them, 3 for both."""
    place = tl.program_id(0).to(tl.int64)
    first, visible = tl.load(first_ptr + place), tl.load(visible_ptr + place)
    selection_ptr += place * budget
    unseen = tl.zeros([COLUMNS], tl.int1)
    disordered = tl.zeros([COLUMNS], tl.int1)
    for start in range(0, budget, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        pool = tl.load(selection_ptr + column, mask=column < budget, other=-1)
        before = tl.load(selection_ptr + column - 1, mask=(column > 0) & (column < budget), other=-1)
        rank = pool - first
        unseen = unseen | ((pool >= 0) & ((rank < 0) | (rank >= visible)))
        behind = (column > 0) & (pool >= 0) & ((before < 0) | (pool <= before))
        disordered = disordered | behind | (pool < -1)
    fault = tl.max(unseen.to(tl.int32), 0) + 2 * tl.max(disordered.to(tl.int32), 0)
    tl.store(fault_ptr + place, fault.to(tl.int8))


def find_faults(items: Items) -> Tensor:
    """A bool pair on the device: an id that its row cannot see, and ids that do not ascend with -1 behind them."""
    fault_X = torch.zeros(len(items), dtype=torch.int8, device=items.first_BS.device)
    arguments = items.selection_BSK, items.first_BS, items.visible_BS, fault_X, *items.sizes
    launch(fault_kernel, len(items), *arguments, num_warps=1, COLUMNS=128)
    return torch.stack([(fault_X & 1).any(), (fault_X & 2).any()])
