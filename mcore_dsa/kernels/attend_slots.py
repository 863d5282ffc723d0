"""Gradients of latents: what every slot of a row contributes, then their sums, token by token, in the order of rows.

Letters of shapes: `mcore_dsa/__init__.py`. Items: `items.py`. A cell is the stretch of `pool_size` tokens, of one
segment, from a token where a pool begins or would if the segment went on; it is numbered `sample * tokens + its first
token`. Every column of an item's selection attends one cell, and the tail one more, up to the row's own token.

Columns are sorted by cell, stably, so that those of one cell stand in the order of rows, and one program adds them to
what rows before have come to. No other program touches its tokens: no float is added out of turn, and it moves no bit
how many rows go through at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mcore_dsa.kernels.attend_rows import add_product, load_latents, load_matrix
from mcore_dsa.kernels.items import POINTERS, find_pools, load_item

# With more, an SM holds fewer programs.
GRAD_HEADS = 16
COLUMNS = 64
# Tokens of a cell that a program adds up: 16 of 512 channels spill on sm_100, and 4 are the published pool.
CELL_TOKENS = 4
# Behind every cell.
NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit(
    do_not_specialize=["from_item", "tiles", "width", "rows", "batch", "budget", "heads"],
    do_not_specialize_on_alignment=POINTERS,
)
def slot_grad_kernel(
    q_ptr, kv_ptr, selection_ptr, position_ptr, first_ptr, visible_ptr, tail_ptr,
    norm_ptr, out_grad_ptr, delta_ptr, slot_grad_ptr,
    from_item, tiles, width, rows, batch, budget, heads, scale,
    J: tl.constexpr, TAIL: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, OPERAND: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """What a tile of one item's slots contributes, as value and as key, into lines `[item, slot]` of `C` channels."""
    here = tl.program_id(0) // tiles
    start = tl.program_id(0) % tiles * SLOTS
    item = from_item.to(tl.int64) + here
    sample, place, first, visible, origin, columns, tail = load_item(
        position_ptr, first_ptr, visible_ptr, tail_ptr, item, rows, batch, budget, J, TAIL
    )
    if start >= columns * J + tail:
        return
    kv, used = load_latents(
        kv_ptr, selection_ptr + place * budget, start, columns, columns * J + tail, first, visible, origin, sample,
        batch, J, C, C_PADDED, SLOTS, OPERAND,
    )  # fmt: skip
    total = tl.zeros([C_PADDED, SLOTS], tl.float32)
    for begin in range(0, heads, HEADS):
        head = begin + tl.arange(0, HEADS)
        line = item * heads + head
        q = load_matrix(q_ptr, line, head < heads, C, C_PADDED, OPERAND)
        out_grad = load_matrix(out_grad_ptr, line, head < heads, C, C_PADDED, OPERAND)
        norm = tl.load(norm_ptr + line, mask=head < heads, other=0.0)
        delta = tl.load(delta_ptr + line, mask=head < heads, other=0.0)
        logits = tl.dot(q, tl.trans(kv), input_precision="ieee") * scale
        # What columns of unused slots come to is stored nowhere.
        weights = tl.where(used[None, :], tl.exp2(logits - norm[:, None]), 0.0)
        weight_grad = tl.dot(out_grad, tl.trans(kv), input_precision="ieee")
        logit_grad = weights * (weight_grad - delta[:, None]) * (scale * 0.6931471805599453)
        total = add_product(total, tl.trans(out_grad), weights, SPLIT)
        total = add_product(total, tl.trans(q), logit_grad, SPLIT)
    channel = tl.arange(0, C_PADDED)
    line = here.to(tl.int64) * width + start + tl.arange(0, SLOTS)
    mask = used[None, :] & (channel < C)[:, None]
    tl.store(slot_grad_ptr + line[None, :] * C + channel[:, None], total, mask=mask)


@triton.jit(
    do_not_specialize=["from_item", "columns", "rows", "batch", "budget", "tokens"],
    do_not_specialize_on_alignment=POINTERS,
)
def cell_kernel(
    selection_ptr, position_ptr, first_ptr, visible_ptr, tail_ptr, cell_ptr,
    from_item, columns, rows, batch, budget, tokens,
    J: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The cell of each of an item's columns, that of the tail included; `NOWHERE` where there is none."""
    here = tl.program_id(0).to(tl.int64)
    sample, place, first, visible, origin, filled, tail = load_item(
        position_ptr, first_ptr, visible_ptr, tail_ptr, from_item + here, rows, batch, budget, J, TAIL
    )
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        rank, seen = find_pools(selection_ptr + place * budget, column, filled, first, visible)
        used = seen & ((column < filled) | ((column == filled) & (tail > 0)))
        cell = tl.where(used, sample * tokens + origin + rank * J, NOWHERE)
        tl.store(cell_ptr + here * columns + column, cell.to(tl.int32), mask=column < columns)


@triton.jit(
    do_not_specialize=["count", "from_item", "columns", "width", "tokens", "batch"],
    do_not_specialize_on_alignment=["position_ptr"],
)
def add_kernel(
    cell_ptr, entry_ptr, slot_grad_ptr, position_ptr, sum_ptr,
    count, from_item, columns, width, tokens, batch,
    J: tl.constexpr, TOKENS: tl.constexpr, CHAIN: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
):  # fmt: skip
    """Add to `TOKENS` of a cell's tokens what the columns that attend it contribute, the first of them first.

    Cells stand sorted, and with each the column it is of, numbered `item * columns + column`. The programs of a cell's
    first entry go through all of them, `CHAIN` at a time: what is loaded for those of another cell is zeros, and a sum
    that began at zero is never -0.0.
    """
    parts: tl.constexpr = (J + TOKENS - 1) // TOKENS
    entry = tl.program_id(0) // parts
    cell = tl.load(cell_ptr + entry)
    before = tl.load(cell_ptr + entry - 1, mask=entry > 0, other=NOWHERE)
    if (cell == NOWHERE) | (cell == before):
        return
    j = tl.program_id(0) % parts * TOKENS + tl.arange(0, TOKENS)
    channel = tl.arange(0, C_PADDED)
    sample, token = cell // tokens, cell % tokens + j
    place = sum_ptr + (token.to(tl.int64) * batch + sample)[:, None] * C + channel[None, :]
    mine = (channel < C)[None, :] & (j < J)[:, None]
    total = tl.load(place, mask=mine & (token < tokens)[:, None], other=0.0)
    touched = token < 0
    ahead_X = tl.arange(0, CHAIN)
    here = cell
    while here == cell:
        follows_X = tl.load(cell_ptr + entry + ahead_X, mask=entry + ahead_X < count, other=NOWHERE) == cell
        column_X = tl.load(entry_ptr + entry + ahead_X, mask=follows_X, other=0)
        item_X = column_X // columns
        line_X = item_X * width + column_X % columns * J
        # All of a pool, of the tail's cell the tail, and of another cell nothing.
        last_X = tl.where(follows_X, tl.load(position_ptr + (from_item + item_X) // batch), -1)
        for step in tl.static_range(CHAIN):
            line = tl.sum(tl.where(ahead_X == step, line_X, 0), 0) + j
            seen = token <= tl.sum(tl.where(ahead_X == step, last_X, 0), 0)
            total += tl.load(slot_grad_ptr + line[:, None] * C + channel[None, :], mask=mine & seen[:, None], other=0.0)
            touched = touched | seen
        entry += CHAIN
        here = tl.load(cell_ptr + entry, mask=entry < count, other=NOWHERE)
    tl.store(place, total, mask=mine & touched[:, None])
