"""Sparse attention by rows: outputs, and the gradients of queries. One program takes one item and 16 of its heads.

Letters of shapes: `mcore_dsa/__init__.py`. An item is a row of one sample, numbered `row * batch + sample`.

The slots of an item are the tokens of its selected pools, in order, then those of its tail: as many as it can fill,
whatever the budget. Pools of a segment lie side by side, so that a row's position and what it sees tell where each
begins. Ids are followed only where the row can see them: what else a caller brings leads nowhere.

All tiles are `HEADS` x `SLOTS`, whatever the call holds: the bits of a head depend on its own query, latents and ids.
Logits are kept times log2(e), for `exp2`. Weights are fp32; as operands beside bf16 values they are split in two bf16
numbers, which together leave out at most 2**-17 of each.
"""

from __future__ import annotations

import triton
import triton.language as tl

# 16 heads are the rows of the smallest matrix instruction; with more heads or slots an SM holds one program, not two.
HEADS = 16
SLOTS = 32
LOG2_E = 1.4426950408889634

INTEGERS = ["rows", "batch", "heads", "budget"]


@triton.jit
def add_product(total, weights, values, SPLIT: tl.constexpr):
    """`total + weights @ values`: fp32 weights, values of the operands' dtype."""
    if SPLIT:
        high = weights.to(tl.bfloat16)
        low = (weights - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(low.to(values.dtype), values, total, input_precision="ieee")
        total = tl.dot(high.to(values.dtype), values, total, input_precision="ieee")
    else:
        total = tl.dot(weights, values, total, input_precision="ieee")
    return total


@triton.jit
def load_matrix(base_ptr, line, used, C: tl.constexpr, C_PADDED: tl.constexpr, OPERAND: tl.constexpr):
    """Lines of `C` channels, zeros where unused and behind the last channel."""
    channel = tl.arange(0, C_PADDED)
    mask = used[:, None]
    if C != C_PADDED:
        mask = mask & (channel < C)[None, :]
    return tl.load(base_ptr + line[:, None] * C + channel[None, :], mask=mask, other=0.0).to(OPERAND)


@triton.jit
def find_slots(selection_ptr, start, columns, slots, first, visible, origin, J: tl.constexpr, SLOTS: tl.constexpr):
    """Tokens of the slots from `start` on, and which of them hold one; the tail's stand in the column behind the last.

    Args:
        selection_ptr: the item's ids.
        columns, slots: how many the item can fill.
        first, visible: id of the first pool that the row sees, and how many.
        origin: token where that pool begins.
    """
    slot = start + tl.arange(0, SLOTS)
    column = slot // J
    pool = tl.load(selection_ptr + column, mask=column < columns, other=-1)
    rank = tl.where(column < columns, pool - first, visible)
    used = (slot < slots) & (rank >= 0) & ((rank < visible) | (column == columns))
    return origin + rank * J + slot % J, used


@triton.jit
def store_heads(base_ptr, line, used, value, C: tl.constexpr, C_PADDED: tl.constexpr):
    channel = tl.arange(0, C_PADDED)
    mask = used[:, None] & (channel < C)[None, :]
    tl.store(base_ptr + line[:, None] * C + channel[None, :], value.to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=INTEGERS)
def attend_kernel(
    q_ptr, kv_ptr, selection_ptr, position_ptr, first_ptr, visible_ptr, tail_ptr,
    out_ptr, norm_ptr,
    rows, batch, heads, budget, scale,
    J: tl.constexpr, TAIL: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, OPERAND: tl.constexpr, SPLIT: tl.constexpr,
):
    """Outputs, and the base-2 logarithm of each head's sum of exponentials; +inf where there is no token."""
    groups = tl.cdiv(heads, HEADS)
    item = tl.program_id(0).to(tl.int64) // groups
    head = tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS)
    row, sample = item // batch, item % batch
    place = sample * rows + row
    visible, tail = tl.load(visible_ptr + place), tl.load(tail_ptr + place)
    first, origin = tl.load(first_ptr + place), tl.load(position_ptr + row) + 1 - tail - visible * J
    columns = tl.minimum(visible, budget).to(tl.int32)
    slots = columns * J
    if TAIL:
        slots += tail.to(tl.int32)
    selection_ptr += place * budget

    line = item * heads + head
    q = load_matrix(q_ptr, line, head < heads, C, C_PADDED, OPERAND)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    norm = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, C_PADDED], tl.float32)
    tokens = 0
    for start in range(0, slots, SLOTS):
        token, used = find_slots(selection_ptr, start, columns, slots, first, visible, origin, J, SLOTS)
        kv = load_matrix(kv_ptr, token * batch + sample, used, C, C_PADDED, OPERAND)
        logits = tl.dot(q, tl.trans(kv), input_precision="ieee") * scale
        logits = tl.where(used[None, :], logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 1))
        # Before the first token there is no peak to subtract.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - shift[:, None])
        fade = tl.exp2(peak - shift)
        norm = norm * fade + tl.sum(weights, 1)
        mixed = add_product(mixed * fade[:, None], weights, kv, SPLIT)
        peak = higher
        tokens += tl.sum(used.to(tl.int32))
    some = tokens > 0
    store_heads(out_ptr, line, head < heads, tl.where(some, mixed / norm[:, None], 0.0), C, C_PADDED)
    tl.store(norm_ptr + line, tl.where(some, peak + tl.log2(norm), float("inf")), mask=head < heads)


@triton.jit(do_not_specialize=INTEGERS)
def query_grad_kernel(
    q_ptr, kv_ptr, selection_ptr, position_ptr, first_ptr, visible_ptr, tail_ptr,
    out_ptr, norm_ptr, out_grad_ptr, q_grad_ptr, delta_ptr,
    rows, batch, heads, budget, scale,
    J: tl.constexpr, TAIL: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, OPERAND: tl.constexpr, SPLIT: tl.constexpr,
):
    """Gradients of queries, without the scale's own log2(e), and `delta`, the sum of weights x their gradients.

    A weight's logit has the gradient `weight * (its gradient - delta)`. The loop takes `guess`, the product of output
    and its gradient, for `delta`: they differ by the output's own rounding. `delta` is summed beside it, and what the
    difference makes, `weights @ kv` times it, is mended at the end by the output: rounded again, of next to nothing.
    """
    groups = tl.cdiv(heads, HEADS)
    item = tl.program_id(0).to(tl.int64) // groups
    head = tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS)
    row, sample = item // batch, item % batch
    place = sample * rows + row
    visible, tail = tl.load(visible_ptr + place), tl.load(tail_ptr + place)
    first, origin = tl.load(first_ptr + place), tl.load(position_ptr + row) + 1 - tail - visible * J
    columns = tl.minimum(visible, budget).to(tl.int32)
    slots = columns * J
    if TAIL:
        slots += tail.to(tl.int32)
    selection_ptr += place * budget

    line = item * heads + head
    q = load_matrix(q_ptr, line, head < heads, C, C_PADDED, OPERAND)
    out_grad = load_matrix(out_grad_ptr, line, head < heads, C, C_PADDED, OPERAND)
    out = load_matrix(out_ptr, line, head < heads, C, C_PADDED, tl.float32)
    guess = tl.sum(out * out_grad.to(tl.float32), 1)
    norm = tl.load(norm_ptr + line, mask=head < heads, other=float("inf"))
    delta = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, C_PADDED], tl.float32)
    for start in range(0, slots, SLOTS):
        token, used = find_slots(selection_ptr, start, columns, slots, first, visible, origin, J, SLOTS)
        kv = load_matrix(kv_ptr, token * batch + sample, used, C, C_PADDED, OPERAND)
        logits = tl.dot(q, tl.trans(kv), input_precision="ieee") * scale
        weights = tl.where(used[None, :], tl.exp2(logits - norm[:, None]), 0.0)
        weight_grad = tl.dot(out_grad, tl.trans(kv), input_precision="ieee")
        delta += tl.sum(weights * weight_grad, 1)
        mixed = add_product(mixed, weights * (weight_grad - guess[:, None]), kv, SPLIT)
    out = load_matrix(out_ptr, line, head < heads, C, C_PADDED, tl.float32)
    q_grad = (mixed - (delta - guess)[:, None] * out) * (scale * 0.6931471805599453)
    store_heads(q_grad_ptr, line, head < heads, q_grad, C, C_PADDED)
    tl.store(delta_ptr + line, delta, mask=head < heads)
