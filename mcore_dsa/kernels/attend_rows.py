"""Sparse attention by rows: outputs, and the gradients of queries. A program takes one item and some of its heads.

Letters of shapes: `mcore_dsa/__init__.py`. Items: `items.py`. An item's slots are the tokens of its selected pools, in
order, then those of its tail: as many as it can fill, whatever the budget.

Tiles are of one size whatever the call holds: the bits of a head depend on its own query, latents and ids. Heads stand
in the columns of products, of which the narrowest matrix instructions take 8. Logits are kept times log2(e), for
`exp2`. Weights are fp32; as operands beside bf16 values they are split in two bf16 numbers, which together leave out at
most 2**-16 of each.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mcore_dsa.kernels.items import POINTERS, find_pools, load_item

HEADS = 16
# With more, an SM holds one program instead of two: the forward takes 196 registers, queries' gradients 186 (sm_90a).
SLOTS = 32
GRAD_SLOTS = 16


def grad_warps(pool_size: int) -> int:
    """Warps of a program of `query_grad_kernel`: four, where a pool is one token, spill 144 bytes (sm_90a)."""
    return 8 if pool_size == 1 else 4


INTEGERS = ["rows", "batch", "budget", "heads"]


@triton.jit
def add_product(total, values, weights, SPLIT: tl.constexpr):
    """`total + values @ weights`: values of the operands' dtype, fp32 weights."""
    if SPLIT:
        high = weights.to(tl.bfloat16)
        low = (weights - high.to(tl.float32)).to(tl.bfloat16)
        total = tl.dot(values, low.to(values.dtype), total, input_precision="ieee")
        total = tl.dot(values, high.to(values.dtype), total, input_precision="ieee")
    else:
        total = tl.dot(values, weights, total, input_precision="ieee")
    return total


@triton.jit
def load_matrix(
    base_ptr, line, used, C: tl.constexpr, C_PADDED: tl.constexpr, OPERAND: tl.constexpr, VOLATILE: tl.constexpr = False
):
    """Lines of `C` channels, zeros where unused and behind the last channel."""
    channel = tl.arange(0, C_PADDED)
    mask = used[:, None]
    if C != C_PADDED:
        mask = mask & (channel < C)[None, :]
    matrix = tl.load(base_ptr + line[:, None] * C + channel[None, :], mask=mask, other=0.0, volatile=VOLATILE)
    return matrix.to(OPERAND)


@triton.jit
def load_latents(
    kv_ptr, selection_ptr, start, columns, slots, first, visible, origin, sample, batch,
    J: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr, SLOTS: tl.constexpr, OPERAND: tl.constexpr,
):  # fmt: skip
    """The latents of an item's slots from `start` on, zeros where a slot holds no token, and which hold one."""
    slot = start + tl.arange(0, SLOTS)
    rank, seen = find_pools(selection_ptr, slot // J, columns, first, visible)
    used = seen & (slot < slots)
    token = origin + rank * J + slot % J
    return load_matrix(kv_ptr, token * batch + sample, used, C, C_PADDED, OPERAND), used


@triton.jit
def store_heads(base_ptr, line, used, value, C: tl.constexpr, C_PADDED: tl.constexpr):
    channel = tl.arange(0, C_PADDED)
    mask = used[:, None] & (channel < C)[None, :]
    tl.store(base_ptr + line[:, None] * C + channel[None, :], value.to(base_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def attend_kernel(
    q_ptr, kv_ptr, selection_ptr, position_ptr, first_ptr, visible_ptr, tail_ptr,
    out_ptr, norm_ptr,
    rows, batch, budget, heads, scale,
    J: tl.constexpr, TAIL: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, OPERAND: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Outputs, and the base-2 logarithm of each head's sum of exponentials; -inf where there is no token."""
    groups = tl.cdiv(heads, HEADS)
    item = tl.program_id(0).to(tl.int64) // groups
    head = tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS)
    sample, place, first, visible, origin, columns, tail = load_item(
        position_ptr, first_ptr, visible_ptr, tail_ptr, item, rows, batch, budget, J, TAIL
    )
    selection_ptr += place * budget
    slots = columns * J + tail

    line = item * heads + head
    q = load_matrix(q_ptr, line, head < heads, C, C_PADDED, OPERAND)
    peak = tl.full([HEADS], float("-inf"), tl.float32)
    norm = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([C_PADDED, HEADS], tl.float32)
    tokens = 0
    for start in range(0, slots, SLOTS):
        kv, used = load_latents(
            kv_ptr, selection_ptr, start, columns, slots, first, visible, origin, sample, batch,
            J, C, C_PADDED, SLOTS, OPERAND,
        )  # fmt: skip
        logits = tl.dot(kv, tl.trans(q), input_precision="ieee") * scale
        logits = tl.where(used[:, None], logits, float("-inf"))
        higher = tl.maximum(peak, tl.max(logits, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(logits - shift[None, :])
        fade = tl.exp2(peak - shift)
        norm = norm * fade + tl.sum(weights, 0)
        mixed = add_product(mixed * fade[None, :], tl.trans(kv), weights, SPLIT)
        peak = higher
        tokens += tl.sum(used.to(tl.int32))
    norm = tl.where(tokens > 0, norm, 1.0)
    store_heads(out_ptr, line, head < heads, tl.trans(mixed / norm[None, :]), C, C_PADDED)
    tl.store(norm_ptr + line, peak + tl.log2(norm), mask=head < heads)


@triton.jit(do_not_specialize=INTEGERS, do_not_specialize_on_alignment=POINTERS)
def query_grad_kernel(
    q_ptr, kv_ptr, selection_ptr, position_ptr, first_ptr, visible_ptr, tail_ptr,
    out_ptr, norm_ptr, out_grad_ptr, q_grad_ptr, delta_ptr,
    rows, batch, budget, heads, scale,
    J: tl.constexpr, TAIL: tl.constexpr, C: tl.constexpr, C_PADDED: tl.constexpr,
    HEADS: tl.constexpr, SLOTS: tl.constexpr, OPERAND: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, unless there is no pointer, and `delta`, the sum of weights x their gradients.

    A weight's logit has the gradient `weight * (its gradient - delta)`. The loop takes `guess` for `delta`, the product
    of the output and its gradient: they differ by the output's rounding alone. `delta` is summed beside it, and what
    the difference makes, `weights @ kv` times it, is taken off at the end, where the output may stand for the mixture.
    """
    groups = tl.cdiv(heads, HEADS)
    item = tl.program_id(0).to(tl.int64) // groups
    head = tl.program_id(0) % groups * HEADS + tl.arange(0, HEADS)
    sample, place, first, visible, origin, columns, tail = load_item(
        position_ptr, first_ptr, visible_ptr, tail_ptr, item, rows, batch, budget, J, TAIL
    )
    selection_ptr += place * budget
    slots = columns * J + tail

    line = item * heads + head
    q = load_matrix(q_ptr, line, head < heads, C, C_PADDED, OPERAND)
    out_grad = load_matrix(out_grad_ptr, line, head < heads, C, C_PADDED, OPERAND)
    out = load_matrix(out_ptr, line, head < heads, C, C_PADDED, tl.float32)
    guess = tl.sum(out * out_grad.to(tl.float32), 1)
    norm = tl.load(norm_ptr + line, mask=head < heads, other=0.0)
    delta = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([C_PADDED, HEADS], tl.float32)
    for start in range(0, slots, SLOTS):
        kv, used = load_latents(
            kv_ptr, selection_ptr, start, columns, slots, first, visible, origin, sample, batch,
            J, C, C_PADDED, SLOTS, OPERAND,
        )  # fmt: skip
        logits = tl.dot(kv, tl.trans(q), input_precision="ieee") * scale
        weights = tl.where(used[:, None], tl.exp2(logits - norm[None, :]), 0.0)
        weight_grad = tl.dot(kv, tl.trans(out_grad), input_precision="ieee")
        delta += tl.sum(weights * weight_grad, 0)
        if q_grad_ptr is not None:
            mixed = add_product(mixed, tl.trans(kv), weights * (weight_grad - guess[None, :]), SPLIT)
    tl.store(delta_ptr + line, delta, mask=head < heads)
    if q_grad_ptr is not None:
        # Read once more, and volatile, lest the compiler keep it in registers through the loop.
        out = load_matrix(out_ptr, line, head < heads, C, C_PADDED, tl.float32, VOLATILE=True)
        q_grad = (tl.trans(mixed) - (delta - guess)[:, None] * out) * (scale * 0.6931471805599453)
        # A row without tokens has no gradient, whatever comes to its output.
        q_grad = tl.where((norm == float("-inf"))[:, None], 0.0, q_grad)
        store_heads(q_grad_ptr, line, head < heads, q_grad, C, C_PADDED)
