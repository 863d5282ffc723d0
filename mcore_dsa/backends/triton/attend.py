"""Attention restricted to the selected tokens, in Triton: absorbed multi-latent form, both passes.

Letters of shapes: `mcore_dsa/__init__.py`. Forward keeps a number a head and row, the logarithm of its sum of
exponentials, and its output. Backward goes over the rows twice: by item for the gradients of queries
(`kernels/attend_rows.py`), by cell for those of latents (`kernels/attend_cells.py`), from lists of who attended each
(`kernels/inverse_lists.py`). No float is added atomically, and no unused slot costs work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_dsa.backends.protocol import AttentionCall
from mcore_dsa.kernels.attend_cells import PART, STEP, add_parts_kernel, latent_grad_kernel
from mcore_dsa.kernels.attend_rows import GRAD_SLOTS, HEADS, SLOTS, attend_kernel, query_grad_kernel
from mcore_dsa.kernels.inverse_lists import ENTRY_BYTES, InverseLists, Strip
from mcore_dsa.kernels.items import Items, find_faults, launch
from mcore_dsa.kernels.operands import on_16_bytes

LOG2_E = 1.4426950408889634
# A tile of latents, a mixture of as many channels a head: what fits the registers of one program.
MOST_CHANNELS = 512
# Compiled for fp32, a thread spills up to 21 KB: that is for the interpreter, where rounding does not hide an error.
DTYPES = (torch.bfloat16, torch.float32) if triton.knobs.runtime.interpret else (torch.bfloat16,)


def selection_faults(selection_BSK: Tensor, call: AttentionCall) -> Tensor:
    return find_faults(_items(selection_BSK, call))


def smallest_attend_bytes() -> int:
    """The same for every shape: what holds a part of a list."""
    return PART * ENTRY_BYTES


def attend(
    q_SBHC: Tensor, kv_TBC: Tensor, selection_BSK: Tensor, call: AttentionCall, out_SBHC: Tensor
) -> tuple[Tensor, ...]:
    """As `Backend.attend`, for bf16 queries and latents; under Triton's interpreter fp32 as well.

    `attend_bytes` bounds the lists of backward, but for a single pool's, of at most `ENTRY_BYTES` a row and a sum of
    `[pool_size, c]` fp32 for every `PART` rows. Beyond it: the number a head and row that forward keeps and another in
    backward, 8 bytes a row of every sample, 48 a token.

    Raises: TypeError for other dtypes; ValueError for more channels than 512, and too small an `attend_bytes`.
    """
    _check(q_SBHC, kv_TBC, call)
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
    # Backward reads where segments end, and is to see that nobody wrote there.
    return out_SBHC, norm_SBH, call.layout.segment_end_BN


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
    out_SBHC, norm_SBH, segment_end_BN = saved
    items = _items(selection_BSK, call)
    q, kv, out_grad = (on_16_bytes(x) for x in (q_SBHC, kv_TBC, out_grad_SBHC))
    delta_SBH = torch.empty_like(norm_SBH)
    # `delta` comes with it, whoever asks.
    q_grad = torch.empty_like(q) if q_grad_SBHC is None else q_grad_SBHC
    assert q_grad.is_contiguous()
    launch(
        query_grad_kernel,
        len(items) * triton.cdiv(q.shape[2], HEADS),
        *(q, kv, *items.pointers, out_SBHC, norm_SBH, out_grad, q_grad, delta_SBH),
        *(*items.sizes, q.shape[2], call.softmax_scale * LOG2_E),
        **items.constants | _constants(kv) | {"HEADS": HEADS, "SLOTS": GRAD_SLOTS},
    )
    if sum_XC is not None:
        inputs = _Inputs(q, kv, out_grad, norm_SBH, delta_SBH, _cell_ends(segment_end_BN, kv.shape[0]))
        lists = InverseLists(items, kv.shape[0], PART)
        for strip in lists.strips(call.attend_bytes, call.layout.pool_size * kv.shape[2] * 4):
            _add_strip(call, items, inputs, lists, strip, sum_XC)


def _check(q_SBHC: Tensor, kv_TBC: Tensor, call: AttentionCall) -> None:
    if q_SBHC.dtype != kv_TBC.dtype or q_SBHC.dtype not in DTYPES:
        accepted = ", ".join(map(str, DTYPES))
        raise TypeError(
            f"q_SBHC is {q_SBHC.dtype} and kv_TBC is {kv_TBC.dtype}; accepted is one of {accepted} for both in Triton"
        )
    if kv_TBC.shape[2] > MOST_CHANNELS:
        raise ValueError(f"channels is {kv_TBC.shape[2]}; accepted are at most {MOST_CHANNELS}")
    if call.attend_bytes < smallest_attend_bytes():
        raise ValueError(
            f"attend_bytes is {call.attend_bytes}; accepted are at least {smallest_attend_bytes()}, which hold a list "
            f"of {PART} rows"
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


@dataclass(frozen=True, eq=False)
class _Inputs:
    """What the gradient of latents is computed from beside the items."""

    q_SBHC: Tensor
    kv_TBC: Tensor
    out_grad_SBHC: Tensor
    norm_SBH: Tensor
    delta_SBH: Tensor
    cell_end_BT: Tensor


def _cell_ends(segment_end_BN: Tensor, tokens: int) -> Tensor:
    """Of every token the end of the segment that it lies in, or of the next."""
    token_BT = torch.arange(tokens, device=segment_end_BN.device).expand(len(segment_end_BN), -1).contiguous()
    segment_BT = torch.searchsorted(segment_end_BN, token_BT, right=True)
    return segment_end_BN.gather(1, segment_BT.clamp_(max=segment_end_BN.shape[1] - 1))


def _add_strip(
    call: AttentionCall, items: Items, inputs: _Inputs, lists: InverseLists, strip: Strip, sum_XC: Tensor
) -> None:
    """Add the gradients of a strip's cells."""
    tokens, batch, channels = inputs.kv_TBC.shape
    pool_size = call.layout.pool_size
    list_start_X, part_start_X, part_sum_start_X = lists.start_3X
    part_sum_XC = torch.empty(strip.sums * pool_size, channels, dtype=torch.float32, device=sum_XC.device)
    sizes = {"J": pool_size, "J_PADDED": max(8, triton.next_power_of_2(pool_size))}
    constants = _constants(inputs.kv_TBC)
    launch(
        latent_grad_kernel,
        len(strip.part_cell_X),
        *(inputs.q_SBHC, inputs.kv_TBC, inputs.out_grad_SBHC, inputs.norm_SBH, inputs.delta_SBH, items.position_S),
        *(strip.item_X, strip.part_cell_X, list_start_X, part_start_X, part_sum_start_X, inputs.cell_end_BT),
        *(part_sum_XC, sum_XC, strip.low, tokens, batch, inputs.q_SBHC.shape[2], call.softmax_scale * LOG2_E),
        **sizes | constants | {"PART": PART, "STEP": STEP},
    )
    launch(
        add_parts_kernel,
        strip.high - strip.low if strip.sums else 0,
        *(part_start_X, part_sum_start_X, inputs.cell_end_BT, part_sum_XC, sum_XC, strip.low, tokens, batch),
        **sizes | {"C": channels, "C_PADDED": constants["C_PADDED"]},
    )
