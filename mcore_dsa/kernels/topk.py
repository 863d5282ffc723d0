"""The greatest scores of every row, exactly: a bound from group maxima, a radix select, an ordered compaction.

Letters of shapes: `mcore_dsa/__init__.py`.

The `budget`-th greatest of the maxima of groups of 32 is a lower bound of the cut, for that many scores reach it. Only
groups that reach it are read: of 131,072 Gaussian scores at a budget of 512 an eighth. The cut itself is found digit by
digit, eight bits at a time; what is above it, and of what equals it the first, is written in the order of columns. No
atomic decides an order, and nothing depends on how many survive.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mcore_dsa.kernels.scoring import GROUP, POOLS, Block

# Values a program has in hand: at most 2**16 - 1, for two counts of them share an int32.
BLOCK = 1024
OPTIONS = {"num_warps": 4, "num_stages": 2}


@triton.jit
def _read(order_ptr, list_ptr, item, count, LISTED: tl.constexpr, GROUP: tl.constexpr):
    """Columns and values of `item`; with `LISTED` these are counted through the groups on the list."""
    inside = item < count
    column = item
    if LISTED:
        column = tl.load(list_ptr + item // GROUP, mask=inside, other=0).to(tl.int32) * GROUP + item % GROUP
    return column, tl.load(order_ptr + column, mask=inside, other=0)


@triton.jit
def _cut(order_ptr, list_ptr, count, want, LISTED: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The `want`-th greatest of `count >= want` values, and how many that equal it are among the `want` greatest."""
    lane, digits = tl.arange(0, BLOCK), tl.arange(0, 256)
    cut = (want * 0).to(tl.uint32)
    for turn in tl.static_range(4):
        histogram = tl.zeros([256], tl.int32)
        for item in tl.range(0, count, BLOCK):
            _, value = _read(order_ptr, list_ptr, item + lane, count, LISTED, GROUP)
            value = value >> (24 - 8 * turn)
            histogram += tl.histogram(
                (value & 255).to(tl.int32), 256, mask=(item + lane < count) & ((value >> 8) == cut)
            )
        # Non-increasing in the digit.
        reaching = tl.cumsum(histogram, 0, reverse=True)
        digit = tl.sum((reaching >= want).to(tl.int32), 0) - 1
        want -= tl.sum(tl.where(digits > digit, histogram, 0), 0)
        cut = (cut << 8) | digit.to(tl.uint32)
    return cut, want


@triton.jit
def _list_groups(peak_ptr, begin, end, budget, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Put the groups that can hold one of the `budget` greatest on a list over their own maxima; returns how many."""
    lane = tl.arange(0, BLOCK)
    bound = (begin * 0 + 1).to(tl.uint32)
    if end - begin >= budget:
        found, _ = _cut(peak_ptr + begin, peak_ptr, end - begin, budget, False, GROUP, BLOCK)
        bound = tl.maximum(bound, found)
    listed = begin * 0
    for group in tl.range(begin, end, BLOCK):
        peak = tl.load(peak_ptr + group + lane, mask=group + lane < end, other=0)
        reaches = (peak >= bound).to(tl.int32)
        run = tl.cumsum(reaches, 0)
        # Everything of this block has been read when a sum over it is known, and nothing before it is read again.
        tl.store(peak_ptr + listed + run - 1, (group + lane).to(tl.uint32), mask=reaches != 0)
        listed += tl.sum(reaches, 0)
    tl.debug_barrier()
    return listed


@triton.jit(do_not_specialize=["spot", "budget", "begin", "tiles", "width", "head", "first_pool_id", "more"])
def select_kernel(
    order_ptr,
    peak_ptr,
    first_ptr,
    visible_ptr,
    out_ptr,
    spot,
    budget,
    begin,
    tiles,
    width,
    head,
    first_pool_id,
    more,
    POOLS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Take tiles `begin ... begin + tiles - 1` into the selection of every row of a strip, one program a row.

    What the row selected of earlier tiles stands in the first `head` columns, its ids in the output; with `more` they
    are left there for the next call. Rows that see no more than `budget` take everything. `spot` is the
    strip's first row in the bounds and in the output.
    """
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    first, visible = tl.load(first_ptr + spot + row), tl.load(visible_ptr + spot + row)
    out_ptr += (spot + row) * budget
    order_ptr += row * width
    peak_ptr += row * width // GROUP
    if visible <= budget:
        if begin == 0:
            for item in tl.range(0, budget, BLOCK):
                place = item + lane
                pool_id = tl.where(place < visible, first_pool_id + first + place, -1)
                tl.store(out_ptr + place, pool_id, mask=place < budget)
        return
    mine = tl.minimum((first + visible + POOLS - 1) // POOLS - first // POOLS - begin, tiles)
    if mine <= 0:
        return
    kept = tl.where(begin == 0, 0, head)
    listed = _list_groups(peak_ptr, (head - kept) // GROUP, (head + mine * POOLS) // GROUP, budget, GROUP, BLOCK)
    cut, equals = _cut(order_ptr, peak_ptr, listed * GROUP, budget, True, GROUP, BLOCK)

    block_id = first_pool_id + (first // POOLS + begin) * POOLS - head
    above, level = begin * 0, begin * 0
    for item in tl.range(0, listed * GROUP, BLOCK):
        column, value = _read(order_ptr, peak_ptr, item + lane, listed * GROUP, True, GROUP)
        pool_id = tl.load(out_ptr + column, mask=column < tl.minimum(kept, budget), other=0)
        pool_id = tl.where(column < kept, pool_id, block_id + column)
        is_level = (value == cut) & (item + lane < listed * GROUP)
        both = (value > cut).to(tl.int32) + (is_level.to(tl.int32) << 16)
        run = tl.cumsum(both, 0) - both
        level_here = level + (run >> 16)
        place = above + (run & 0xFFFF) + tl.minimum(level_here, equals)
        taken = (value > cut) | (is_level & (level_here < equals))
        # No place is beyond its column, and columns up to here have been read.
        tl.store(out_ptr + place, pool_id, mask=taken)
        if more != 0:
            tl.store(order_ptr + place, value, mask=taken)
        total = tl.sum(both, 0)
        above += total & 0xFFFF
        level += total >> 16
    if more != 0:
        _peaks_of_kept(order_ptr, peak_ptr, budget, head, GROUP, BLOCK)


@triton.jit
def _peaks_of_kept(order_ptr, peak_ptr, budget, head, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Give the kept columns their group maxima, and zeros behind the last of them."""
    tl.debug_barrier()
    lane, group = tl.arange(0, BLOCK), tl.arange(0, BLOCK // GROUP)
    for item in tl.range(0, head, BLOCK):
        value = tl.load(order_ptr + item + lane, mask=item + lane < budget, other=0)
        tl.store(order_ptr + item + lane, value, mask=(item + lane >= budget) & (item + lane < head))
        peak = tl.max(tl.reshape(value, [BLOCK // GROUP, GROUP]), 1)
        tl.store(peak_ptr + item // GROUP + group, peak, mask=item // GROUP + group < head // GROUP)


def select(
    order_RM: Tensor,
    peak_RM: Tensor,
    first_BS: Tensor,
    visible_BS: Tensor,
    selection_BSK: Tensor,
    block: Block,
    *,
    first_pool_id: int,
    more: bool,
) -> None:
    """Take the scores of a block into the selection of its rows; see `select_kernel`.

    Arguments as of `scoring.score`; with `more` another block follows. Overwrites `order_RM` and `peak_RM`.
    """
    select_kernel[(block.rows,)](
        order_RM,
        peak_RM,
        first_BS,
        visible_BS,
        selection_BSK,
        block.sample * first_BS.shape[1] + block.at,
        selection_BSK.shape[2],
        block.begin,
        block.tiles,
        order_RM.shape[1],
        block.head,
        first_pool_id,
        int(more),
        POOLS=POOLS,
        GROUP=GROUP,
        BLOCK=BLOCK,
        **OPTIONS,
    )
