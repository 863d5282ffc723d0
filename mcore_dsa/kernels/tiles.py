"""Sizes of tiles: what scratch, byte budgets and plans follow from, also where Triton is not installed."""

from __future__ import annotations

# Registers decide the shape of a product: 8 rows of 32 heads on 64 pools leave room for two programs a multiprocessor
# of sm_90.
POOLS = 64
# Pools whose greatest score stands beside theirs.
GROUP = 32
PAIR_HEADS = 256
MOST_ROWS = 8
# Index heads that a tile is compiled for, and looked at, without a card.
MOST_HEADS = 64
# Slots of a row whose contributions to latents one program computes; with more, an SM holds fewer programs.
CELL_SLOTS = 16
# Slots that add to one pool whose places a program looks up together; it then has two contributions under way.
CHAIN = 8


def rows_of_tile(heads: int) -> int:
    """Rows of a tile, so that with their heads they make `PAIR_HEADS` columns of the product.

    Raises: ValueError for more heads than `MOST_HEADS`.
    """
    if heads > MOST_HEADS:
        raise ValueError(f"heads is {heads}; accepted are 1 to {MOST_HEADS}")
    return min(MOST_ROWS, PAIR_HEADS // power_of_2(heads))


def power_of_2(size: int) -> int:
    """The least that is not less."""
    return 1 << (size - 1).bit_length()
