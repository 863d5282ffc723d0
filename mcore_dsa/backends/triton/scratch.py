"""Scratch of the kernels under byte budgets, by arithmetic alone: nothing here needs Triton.

Letters of shapes: `mcore_dsa/__init__.py`; a strip's buffers have one column M a pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mcore_dsa.checks import check_positive
from mcore_dsa.kernels.tiles import CELL_SLOTS, GROUP, POOLS, rows_of_tile
from mcore_dsa.workspace import Buffer, Workspace

# Rows that go through the kernels together, one program of the top-k each; a call of a sharded layer has as many.
STRIP_ROWS = 1024
# A strip that holds this many tiles of pools a row reads what it kept of earlier ones some percent of its time.
_GOOD_TILES = 128
# Kernels count a strip's elements in int32.
_ELEMENTS = 2**31 - 1


@dataclass(frozen=True)
class Strip:
    """What goes through the kernels together.

    Attributes:
        rows: at most so many.
        tiles: tiles of pools a row that are scored before the best of them are taken.
        head: columns before them for what is kept of earlier tiles; none where a row's tiles all fit.
    """

    rows: int
    tiles: int
    head: int

    @property
    def workspace(self) -> Workspace:
        width = self.head + self.tiles * POOLS
        return Workspace(
            {
                "order_RM": Buffer((self.rows, width), torch.uint32),
                "peak_RM": Buffer((self.rows, width // GROUP), torch.uint32),
                "column_RM": Buffer((self.rows, width), torch.int32),
            }
        )


def strip_for(heads: int, budget: int, score_bytes: int, *, pools: int) -> Strip:
    """The strip for rows that see up to `pools` pools: as many rows as hold all their tiles, or many of them.

    Raises: ValueError for a budget that holds none.
    """
    if score_bytes < (needed := smallest_score_bytes(heads, budget)):
        raise ValueError(f"score_bytes is {score_bytes}; accepted for this geometry is {needed} or more")
    # A row's first pool may lie anywhere in its first tile.
    whole = (max(pools, 1) + 2 * POOLS - 2) // POOLS
    head, rows = _round_up(budget, GROUP), STRIP_ROWS
    good = max(_GOOD_TILES, 4 * _least_tiles(budget))
    while True:
        if _tiles_held(rows, 0, score_bytes) >= whole:
            return Strip(rows, whole, 0)
        tiles = _tiles_held(rows, head, score_bytes)
        if tiles >= good or rows == rows_of_tile(heads):
            return Strip(rows, tiles, head)
        rows = max(rows // 2, rows_of_tile(heads))


def smallest_score_bytes(heads: int, budget: int) -> int:
    """The least `score_bytes` that works: a tile of rows, and the fewest tiles of pools that fill the budget."""
    check_positive("budget", budget)
    strip = Strip(rows_of_tile(heads), _least_tiles(budget), _round_up(budget, GROUP))
    return strip.workspace.nbytes


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _least_tiles(budget: int) -> int:
    """Tiles in which every row that sees more than `budget` pools sees that many."""
    return -(-budget // POOLS) + 1


def _tiles_held(rows: int, head: int, score_bytes: int) -> int:
    empty, one = (Strip(rows, tiles, head).workspace.nbytes for tiles in (0, 1))
    return min((score_bytes - empty) // (one - empty), (_ELEMENTS // rows - head) // POOLS)


def attend_workspace(items: int, columns: int, slots: int, channels: int) -> Workspace:
    """The scratch of attention's backward for some items; linear in them."""
    width = _round_up(max(slots, 1), CELL_SLOTS)
    return Workspace(
        {
            "slot_grad_IWC": Buffer((items, width, channels), torch.float32),
            "cell_IK": Buffer((items, columns), torch.int32),
            # Sorted, and their indices; CUDA works on another copy of both.
            "sort": Buffer((items, columns, 3), torch.int64, inside=True),
        }
    )


def smallest_attend_bytes(*, batch: int, channels: int, slots: int) -> int:
    """Backward of one row of every sample."""
    return attend_workspace(batch, slots + 1, slots, channels).nbytes
