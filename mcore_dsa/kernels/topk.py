"""The greatest scores of every row, exactly: a bound from group maxima, a radix select, an ordered compaction.

Letters of shapes: `mcore_dsa/__init__.py`.

The `budget`-th greatest of the maxima of groups of 32 is a lower bound of the cut, for that many scores reach it. Only
groups that reach it are read, once: of 131,072 Gaussian scores at a budget of 512 an eighth, of which some 550 survive.
Survivors move to the front in the order of columns; the cut is found among them digit by digit, eight bits at a time,
and what is above it, and of what equals it the first, is written in that order. No atomic decides an order, and nothing
overflows, however many survive.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mcore_dsa.kernels.scoring import Block
from mcore_dsa.kernels.tiles import GROUP, POOLS

# Values a program has in hand: at most 2**16 - 1, for two counts of them share an int32.
BLOCK = 1024
OPTIONS = {"num_warps": 4, "num_stages": 2}


@triton.jit
def _cut(order_ptr, count, want, BLOCK: tl.constexpr):
    """The `want`-th greatest of `count >= want` values, and how many that equal it are among the `want` greatest."""
    lane, digits = tl.arange(0, BLOCK), tl.arange(0, 256)
    cut = (want * 0).to(tl.uint32)
    for turn in tl.static_range(4):
        histogram = tl.zeros([256], tl.int32)
        for item in tl.range(0, count, BLOCK):
            inside = item + lane < count
            value = tl.load(order_ptr + item + lane, mask=inside, other=0) >> (24 - 8 * turn)
            histogram += tl.histogram((value & 255).to(tl.int32), 256, mask=inside & ((value >> 8) == cut))
        # Non-increasing in the digit.
        reaching = tl.cumsum(histogram, 0, reverse=True)
        digit = tl.sum((reaching >= want).to(tl.int32), 0) - 1
        want -= tl.sum(tl.where(digits > digit, histogram, 0), 0)
        cut = (cut << 8) | digit.to(tl.uint32)
    return cut, want


@triton.jit
def _list_groups(peak_ptr, begin, end, budget, BLOCK: tl.constexpr):
    """Put the groups that can hold one of the `budget` greatest on a list over their own maxima.

    Returns: how many there are, and the bound that one of the greatest reaches.
    """
    lane = tl.arange(0, BLOCK)
    bound = (begin * 0 + 1).to(tl.uint32)
    if end - begin >= budget:
        found, _ = _cut(peak_ptr + begin, end - begin, budget, BLOCK)
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
    return listed, bound


@triton.jit
def _compact(order_ptr, column_ptr, list_ptr, listed, bound, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """Move what reaches the bound to the front, in place, and its columns beside it; returns how many survive."""
    lane = tl.arange(0, BLOCK)
    survivors = listed * 0
    for item in tl.range(0, listed * GROUP, BLOCK):
        inside = item + lane < listed * GROUP
        group = tl.load(list_ptr + (item + lane) // GROUP, mask=inside, other=0).to(tl.int32)
        column = group * GROUP + lane % GROUP
        value = tl.load(order_ptr + column, mask=inside, other=0)
        reaches = (value >= bound).to(tl.int32)
        run = tl.cumsum(reaches, 0)
        tl.store(order_ptr + survivors + run - 1, value, mask=reaches != 0)
        tl.store(column_ptr + survivors + run - 1, column, mask=reaches != 0)
        survivors += tl.sum(reaches, 0)
    tl.debug_barrier()
    return survivors


@triton.jit(do_not_specialize=["spot", "budget", "begin", "tiles", "width", "head", "first_pool_id", "more"])
def select_kernel(
    order_ptr,
    peak_ptr,
    column_ptr,
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
    column_ptr += row * width
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
    end = (head + mine * POOLS) // GROUP
    listed, bound = _list_groups(peak_ptr, (head - kept) // GROUP, end, budget, BLOCK)
    survivors = _compact(order_ptr, column_ptr, peak_ptr, listed, bound, GROUP, BLOCK)
    cut, equals = _cut(order_ptr, survivors, budget, BLOCK)

    block_id = first_pool_id + (first // POOLS + begin) * POOLS - head
    above, level = begin * 0, begin * 0
    for item in tl.range(0, survivors, BLOCK):
        inside = item + lane < survivors
        value = tl.load(order_ptr + item + lane, mask=inside, other=0)
        column = tl.load(column_ptr + item + lane, mask=inside, other=0)
        pool_id = tl.load(out_ptr + column, mask=inside & (column < kept), other=0)
        pool_id = tl.where(column < kept, pool_id, block_id + column)
        is_level = inside & (value == cut)
        both = (value > cut).to(tl.int32) + (is_level.to(tl.int32) << 16)
        run = tl.cumsum(both, 0) - both
        level_here = level + (run >> 16)
        place = above + (run & 0xFFFF) + tl.minimum(level_here, equals)
        taken = (value > cut) | (is_level & (level_here < equals))
        # No place is beyond its item or its column; those up to here have been read, by every warp.
        tl.debug_barrier()
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
    column_RM: Tensor,
    first_BS: Tensor,
    visible_BS: Tensor,
    selection_BSK: Tensor,
    block: Block,
    *,
    first_pool_id: int,
    more: bool,
) -> None:
    """Take the scores of a block into the selection of its rows; see `select_kernel`.

    Arguments as of `scoring.score`; with `more` another block follows. Overwrites `order_RM`, `peak_RM`
    and `column_RM`, int32 scratch as wide as the orders.
    """
    select_kernel[(block.rows,)](
        order_RM,
        peak_RM,
        column_RM,
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
