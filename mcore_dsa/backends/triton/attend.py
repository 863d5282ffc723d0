"""Attention restricted to the selected tokens, in Triton: absorbed multi-latent form, both passes.

Letters of shapes: `mcore_dsa/__init__.py`. Forward keeps a number a head and row, the logarithm of its sum of
exponentials, and its output. Backward goes over the rows twice: for the gradients of queries
(`kernels/attend_rows.py`), and some rows at a time for those of latents (`kernels/attend_slots.py`). No float is added
atomically, and no unused slot costs work. Nothing waits for the device, but in backward for the rows' bounds where they
are not on the host yet (`RowBounds.on_host`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_dsa.backends.protocol import AttentionCall
from mcore_dsa.backends.triton.scratch import attend_workspace, smallest_attend_bytes
from mcore_dsa.kernels.attend_rows import GRAD_SLOTS, HEADS, SLOTS, attend_kernel, grad_warps, query_grad_kernel
from mcore_dsa.kernels.attend_slots import (
    CELL_TOKENS,
    COLUMNS,
    GRAD_HEADS,
    add_kernel,
    cell_kernel,
    slot_grad_kernel,
)
from mcore_dsa.kernels.items import Items, find_faults, launch
from mcore_dsa.kernels.operands import on_16_bytes
from mcore_dsa.kernels.tiles import CELL_SLOTS, CHAIN

LOG2_E = 1.4426950408889634
# A tile of latents, a mixture of as many channels a head: what fits the registers of one program.
MOST_CHANNELS = 512
# Compiled for fp32, a thread spills up to 21 KB: that is for the interpreter, where rounding does not hide an error.
DTYPES = (torch.bfloat16, torch.float32) if triton.knobs.runtime.interpret else (torch.bfloat16,)


def selection_faults(selection_BSK: Tensor, call: AttentionCall) -> Tensor:
    return find_faults(_items(selection_BSK, call))


def attend(
    q_SBHC: Tensor, kv_TBC: Tensor, selection_BSK: Tensor, call: AttentionCall, out_SBHC: Tensor
) -> tuple[Tensor, ...]:
    """As `Backend.attend`, for bf16 queries and latents; under Triton's interpreter fp32 as well.

    Beyond `attend_bytes`: the number a head and row that forward keeps, and another in backward; copies of queries,
    latents and output gradients that are strided or begin elsewhere than at a multiple of 16 bytes.

    Raises: TypeError for other dtypes; ValueError for more channels than 512, and too small an `attend_bytes`.
    """
    _check(q_SBHC, kv_TBC, selection_BSK.shape[2], call)
    assert out_SBHC.is_contiguous()
    items, q, kv = _items(selection_BSK, call), on_16_bytes(q_SBHC), on_16_bytes(kv_TBC)
    heads = q.shape[2]
    norm_SBH = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    launch(
        attend_kernel,
        len(items) * triton.cdiv(heads, HEADS),
        *(q, kv, *items.pointers, out_SBHC, norm_SBH, *items.sizes, heads, call.softmax_scale * LOG2_E),
        **items.constants | _constants(kv) | {"HEADS": HEADS, "SLOTS": SLOTS},
    )
    return out_SBHC, norm_SBH


def attend_backward(
    q_SBHC: Tensor,
    kv_TBC: Tensor,
    selection_BSK: Tensor,
    call: AttentionCall,
    saved: tuple[Tensor, ...],
    out_grad_SBHC: Tensor,
    q_grad_SBHC: Tensor | None,
    sum_XC: Tensor | None,
) -> None:
    """As `Backend.attend_backward`."""
    out_SBHC, norm_SBH = saved
    items = _items(selection_BSK, call)
    q, kv, out_grad = (on_16_bytes(x) for x in (q_SBHC, kv_TBC, out_grad_SBHC))
    delta_SBH = torch.empty_like(norm_SBH)
    assert q_grad_SBHC is None or q_grad_SBHC.is_contiguous()
    launch(
        query_grad_kernel,
        len(items) * triton.cdiv(q.shape[2], HEADS),
        *(q, kv, *items.pointers, out_SBHC, norm_SBH, out_grad, q_grad_SBHC, delta_SBH),
        *(*items.sizes, q.shape[2], call.softmax_scale * LOG2_E),
        num_warps=grad_warps(call.layout.pool_size),
        **items.constants | _constants(kv) | {"HEADS": HEADS, "SLOTS": GRAD_SLOTS},
    )
    if sum_XC is not None:
        _add_latent_grads(call, items, (q, kv, norm_SBH, out_grad, delta_SBH), sum_XC)


def _add_latent_grads(call: AttentionCall, items: Items, of_rows: tuple[Tensor, ...], sum_XC: Tensor) -> None:
    """Add the gradients of latents to `sum_XC`, as many rows at a time as `attend_bytes` holds, one after the other."""
    q, kv, norm, out_grad, delta = of_rows
    (rows, batch, budget), (tokens, _, channels) = items.sizes, kv.shape
    assert tokens * batch < 2**31 - 1
    # Of these columns and slots, no row fills more.
    columns = min(budget, call.bounds.max_visible) + 1
    slots = (columns - 1) * call.layout.pool_size + _tail_slots(call)
    one = attend_workspace(batch, columns, slots, channels).nbytes
    step = min(rows, call.attend_bytes // one)
    held = attend_workspace(batch * step, columns, slots, channels).allocate(kv.device)
    cell, slot_grad = held["cell_IK"], held["slot_grad_IWC"]
    tiles = slot_grad.shape[1] // CELL_SLOTS
    for row in range(0, rows, max(step, 1)):
        count, first = batch * min(step, rows - row), batch * row
        launch(
            slot_grad_kernel,
            count * tiles,
            *(q, kv, *items.pointers, norm, out_grad, delta, slot_grad, first, tiles, slot_grad.shape[1]),
            *(*items.sizes, q.shape[2], call.softmax_scale * LOG2_E),
            **items.constants | _constants(kv) | {"HEADS": GRAD_HEADS, "SLOTS": CELL_SLOTS},
        )
        arguments = *items.pointers, cell, first, columns, *items.sizes, tokens
        launch(cell_kernel, count, *arguments, num_warps=1, COLUMNS=COLUMNS, **items.constants)
        sorted_X, entry_X = cell[:count].flatten().sort(stable=True)
        pool_size = call.layout.pool_size
        of_a_program = min(CELL_TOKENS, triton.next_power_of_2(pool_size))
        launch(
            add_kernel,
            len(sorted_X) * triton.cdiv(pool_size, of_a_program),
            *(sorted_X, entry_X, slot_grad, items.position_S, sum_XC),
            *(len(sorted_X), first, columns, slot_grad.shape[1], tokens, batch),
            J=pool_size,
            TOKENS=of_a_program,
            CHAIN=CHAIN,
            C=channels,
            C_PADDED=triton.next_power_of_2(channels),
        )


def _tail_slots(call: AttentionCall) -> int:
    return call.layout.pool_size - 1 if call.always_select_tail else 0


def _check(q_SBHC: Tensor, kv_TBC: Tensor, budget: int, call: AttentionCall) -> None:
    if q_SBHC.dtype != kv_TBC.dtype or q_SBHC.dtype not in DTYPES:
        accepted = ", ".join(map(str, DTYPES))
        raise TypeError(
            f"q_SBHC is {q_SBHC.dtype} and kv_TBC is {kv_TBC.dtype}; accepted is one of {accepted} for both in Triton"
        )
    if kv_TBC.shape[2] > MOST_CHANNELS:
        raise ValueError(f"channels is {kv_TBC.shape[2]}; accepted are at most {MOST_CHANNELS}")
    batch, slots = call.layout.batch, budget * call.layout.pool_size + _tail_slots(call)
    smallest = smallest_attend_bytes(batch=batch, channels=kv_TBC.shape[2], slots=slots)
    if call.attend_bytes < smallest:
        raise ValueError(
            f"attend_bytes is {call.attend_bytes}; accepted are at least {smallest}, which hold one row of {batch} "
            f"samples with {slots} token slots"
        )


def _items(selection_BSK: Tensor, call: AttentionCall) -> Items:
    return Items.of(selection_BSK, call.layout, call.bounds, tail=call.always_select_tail)


def _constants(kv_TBC: Tensor) -> dict[str, Any]:
    """What all kernels of attention are compiled for beside the pool size."""
    channels, low = kv_TBC.shape[2], kv_TBC.dtype == torch.bfloat16
    # Triton's interpreter multiplies the bits of bf16 as if they were integers.
    narrow = low and not triton.knobs.runtime.interpret
    return {
        "C": channels,
        "C_PADDED": max(16, triton.next_power_of_2(channels)),
        "OPERAND": tl.bfloat16 if narrow else tl.float32,
        "SPLIT": low,
    }
