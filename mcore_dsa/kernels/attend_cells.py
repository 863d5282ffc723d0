"""Gradients of latents, cell by cell, from lists of the rows that attended each: no float is added out of turn.

Letters of shapes: `mcore_dsa/__init__.py`. Cells, and their lists of items: `inverse_lists.py`. A list is cut in parts
of `PART` items, counted from its start, and a part in steps of `STEP` (item, head) lines. One program sums a part, step
after step; another adds the parts of a cell, one after the other. A list alone tells that tree: neither the rest of the
pack nor the byte budget moves a bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mcore_dsa.kernels.attend_rows import add_product, load_matrix

# Of 8 heads 1,024 lines a part, whose sum takes less than a hundredth of the bytes of its queries.
PART = 128
STEP = 16


@triton.jit
def load_cell(cell, tokens, cell_end_ptr, J: tl.constexpr, J_PADDED: tl.constexpr):
    """Sample, tokens, and which of these are the cell's: those of its segment."""
    sample, token = cell // tokens, cell % tokens + tl.arange(0, J_PADDED)
    return sample, token, (tl.arange(0, J_PADDED) < J) & (token < tl.load(cell_end_ptr + cell))


@triton.jit
def store_cell(base_ptr, line, used, value, ADD: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr):
    """Store `value`, `[c, j]`, as lines of `C` channels, or add it to what stands there."""
    channel = tl.arange(0, C_PADDED)
    mask = used[None, :] & (channel < C)[:, None]
    place = base_ptr + line[None, :] * C + channel[:, None]
    if ADD:
        value += tl.load(place, mask=mask, other=0.0)
    tl.store(place, value, mask=mask)


@triton.jit(do_not_specialize=["low", "tokens", "batch", "heads"])
def latent_grad_kernel(
    q_ptr, kv_ptr, out_grad_ptr, norm_ptr, delta_ptr, position_ptr,
    item_ptr, part_cell_ptr, list_start_ptr, part_start_ptr, part_sum_start_ptr, cell_end_ptr,
    part_sum_ptr, sum_ptr,
    low, tokens, batch, heads, scale,
    J: tl.constexpr, J_PADDED: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
    PART: tl.constexpr, STEP: tl.constexpr, OPERAND: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One part of one cell's list: added to the gradient where it is the only one, else one of the sums to be added."""
    cell = tl.load(part_cell_ptr + tl.program_id(0))
    sample, token, used = load_cell(cell, tokens, cell_end_ptr, J, J_PADDED)
    start, end = tl.load(list_start_ptr + cell), tl.load(list_start_ptr + cell + 1)
    part = tl.program_id(0) + tl.load(part_start_ptr + low) - tl.load(part_start_ptr + cell)
    lines = (tl.minimum(end - start - part * PART, PART) * heads).to(tl.int32)
    item_ptr += start - tl.load(list_start_ptr + low) + part * PART

    latent_line = token * batch + sample
    kv = load_matrix(kv_ptr, latent_line, used, C, C_PADDED, OPERAND)
    total = tl.zeros([C_PADDED, J_PADDED], tl.float32)
    for step in range(0, lines, STEP):
        place = step + tl.arange(0, STEP)
        valid = place < lines
        item = tl.load(item_ptr + place // heads, mask=valid, other=0).to(tl.int64)
        line = item * heads + place % heads
        q = load_matrix(q_ptr, line, valid, C, C_PADDED, OPERAND)
        out_grad = load_matrix(out_grad_ptr, line, valid, C, C_PADDED, OPERAND)
        norm = tl.load(norm_ptr + line, mask=valid, other=0.0)
        delta = tl.load(delta_ptr + line, mask=valid, other=0.0)
        position = tl.load(position_ptr + item // batch, mask=valid, other=-1)
        # A row that attends a cell attends its tokens up to its own: all of a pool, and of the tail's cell the tail.
        # What the columns behind the cell come to is stored nowhere.
        seen = token[None, :] <= position[:, None]
        logits = tl.dot(q, tl.trans(kv), input_precision="ieee") * scale
        weights = tl.where(seen, tl.exp2(logits - norm[:, None]), 0.0)
        weight_grad = tl.dot(out_grad, tl.trans(kv), input_precision="ieee")
        logit_grad = weights * (weight_grad - delta[:, None]) * (scale * 0.6931471805599453)
        total = add_product(total, tl.trans(out_grad), weights, SPLIT)
        total = add_product(total, tl.trans(q), logit_grad, SPLIT)

    if tl.load(part_start_ptr + cell + 1) - tl.load(part_start_ptr + cell) == 1:
        store_cell(sum_ptr, latent_line, used, total, True, C, C_PADDED)
    else:
        line = (tl.load(part_sum_start_ptr + cell) - tl.load(part_sum_start_ptr + low) + part) * J
        store_cell(part_sum_ptr, line + tl.arange(0, J_PADDED), tl.arange(0, J_PADDED) < J, total, False, C, C_PADDED)


@triton.jit(do_not_specialize=["low", "tokens", "batch"])
def add_parts_kernel(
    part_start_ptr, part_sum_start_ptr, cell_end_ptr, part_sum_ptr, sum_ptr,
    low, tokens, batch,
    J: tl.constexpr, J_PADDED: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of a cell whose list has several parts their sums, in order."""
    cell = tl.program_id(0) + low
    parts = (tl.load(part_start_ptr + cell + 1) - tl.load(part_start_ptr + cell)).to(tl.int32)
    if parts > 1:
        sample, token, used = load_cell(cell, tokens, cell_end_ptr, J, J_PADDED)
        line = (tl.load(part_sum_start_ptr + cell) - tl.load(part_sum_start_ptr + low)) * J + tl.arange(0, J_PADDED)
        total = tl.zeros([J_PADDED, C_PADDED], tl.float32)
        for part in range(parts):
            total += load_matrix(part_sum_ptr, line + part * J, used, C, C_PADDED, tl.float32)
        store_cell(sum_ptr, token * batch + sample, used, tl.trans(total), True, C, C_PADDED)
