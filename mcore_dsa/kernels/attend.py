"""Attention restricted to the selected tokens, in Triton: absorbed multi-latent form, backward recomputes.

Letters of shapes: `mcore_dsa/__init__.py`. Forward keeps a number a head and row, the logarithm of its sum of
exponentials, and its output. Backward goes over the rows twice: by item for the gradients of queries
(`attend_rows.py`), by cell for those of latents (`attend_cells.py`), from lists of who attended each
(`inverse_lists.py`). No float is added atomically, and no unused slot costs work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_dsa.kernels.attend_cells import PART, STEP, add_parts_kernel, latent_grad_kernel
from mcore_dsa.kernels.attend_rows import GRAD_SLOTS, HEADS, SLOTS, attend_kernel, query_grad_kernel
from mcore_dsa.kernels.inverse_lists import ENTRY_BYTES, InverseLists, Strip
from mcore_dsa.kernels.items import Items, find_faults, launch
from mcore_dsa.kpool import PoolLayout, RowBounds, raise_if_unseen

LOG2_E = 1.4426950408889634
# A tile of latents, a mixture of as many channels a head: what fits the registers of one program.
MOST_CHANNELS = 512
# Compiled for fp32, a thread spills up to 21 KB: that is for the interpreter, where rounding does not hide an error.
DTYPES = (torch.bfloat16, torch.float32) if triton.knobs.runtime.interpret else (torch.bfloat16,)


class Kept(Protocol):
    """As `backends.protocol.Kept`."""

    @property
    def selection_BOK(self) -> Tensor: ...

    @property
    def restore(self) -> Callable[[Tensor], Tensor]: ...


class LatentShards(Protocol):
    """As `backends.protocol.LatentShards`."""

    @property
    def gather(self) -> Callable[[Tensor], Tensor]: ...

    @property
    def reduce(self) -> Callable[[Tensor], Tensor]: ...


def attend(
    q_SBHC: Tensor,
    kv_LBC: Tensor,
    selection_BSK: Tensor,
    layout: PoolLayout,
    bounds: RowBounds,
    *,
    softmax_scale: float,
    always_select_tail: bool,
    attend_bytes: int,
    kept: Kept | None = None,
    shards: LatentShards | None = None,
) -> Tensor:
    """`mcore_dsa.sparse_attention` for arguments that fit, of rows that are located.

    bf16 queries and latents; under Triton's interpreter fp32 as well.
    `attend_bytes` bounds the lists of backward, but for a single pool's, of at most `ENTRY_BYTES` a row and a sum of
    `[pool_size, c]` fp32 for every `PART` rows. Beyond it: the number a head and row that forward keeps and another in
    backward, 8 bytes a row of every sample, 48 a token.

    Raises: TypeError for other dtypes; ValueError for more channels than 512, too small an `attend_bytes`, and a
    selection that is none.
    """
    if q_SBHC.dtype != kv_LBC.dtype or q_SBHC.dtype not in DTYPES:
        accepted = ", ".join(map(str, DTYPES))
        raise TypeError(
            f"q_SBHC is {q_SBHC.dtype} and kv_TBC is {kv_LBC.dtype}; accepted is one of {accepted} for both in Triton"
        )
    if kv_LBC.shape[2] > MOST_CHANNELS:
        raise ValueError(f"channels is {kv_LBC.shape[2]}; accepted are at most {MOST_CHANNELS}")
    smallest = PART * ENTRY_BYTES
    if attend_bytes < smallest:
        raise ValueError(
            f"attend_bytes is {attend_bytes}; accepted are at least {smallest}, which hold a list of {PART} rows"
        )
    call = _Call(layout, always_select_tail, softmax_scale, attend_bytes, kept, shards)
    out_SBHC: Tensor = _SparseAttention.apply(q_SBHC, kv_LBC, selection_BSK, bounds, call)
    return out_SBHC


def smallest_attend_bytes(*, batch: int, heads: int, channels: int, dtype: torch.dtype, slots: int) -> int:
    """The least `attend_bytes` that works, the same for every shape."""
    return PART * ENTRY_BYTES


@dataclass(frozen=True)
class _Call:
    """What both passes of one call know beside the tensors that autograd saves."""

    layout: PoolLayout
    tail: bool
    softmax_scale: float
    attend_bytes: int
    kept: Kept | None
    shards: LatentShards | None

    def latents(self, kv_LBC: Tensor) -> Tensor:
        """Those of all tokens, as kernels read them."""
        return (kv_LBC if self.shards is None else self.shards.gather(kv_LBC)).contiguous()

    def constants(self, kv_TBC: Tensor) -> dict[str, Any]:
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


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_SBHC: Tensor, kv_LBC: Tensor, selection_BSK: Tensor, bounds: RowBounds, call: _Call
    ) -> Tensor:
        items = Items.of(selection_BSK, call.layout, bounds, tail=call.tail)
        q, kv_TBC = q_SBHC.contiguous(), call.latents(kv_LBC)
        heads = q.shape[2]
        out_SBHC = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        norm_SBH = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        fault_2 = find_faults(items)
        launch(
            attend_kernel,
            len(items) * triton.cdiv(heads, HEADS),
            *(q, kv_TBC, *items.pointers, out_SBHC, norm_SBH, *items.sizes, heads, call.softmax_scale * LOG2_E),
            **items.constants | call.constants(kv_TBC) | {"HEADS": HEADS, "SLOTS": SLOTS},
        )
        unseen, disordered = fault_2.cpu()
        raise_if_unseen(unseen)
        if bool(disordered):
            raise ValueError("selection_BSK repeats or disorders pool ids; accepted are ascending ids, -1 behind them")
        # Bounds and layout are saved for their versions: written in place between the passes, they are an error.
        ctx.save_for_backward(
            q_SBHC,
            kv_LBC,
            selection_BSK if call.kept is None else call.kept.selection_BOK,
            out_SBHC,
            norm_SBH,
            call.layout.segment_end_BN,
            bounds.position_S,
            bounds.first_BS,
            bounds.visible_BS,
            bounds.tail_BS,
        )
        ctx.call = call
        return out_SBHC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad_SBHC: Tensor) -> tuple[Tensor | None, ...]:
        q_SBHC, kv_LBC, selection_BOK, out_SBHC, norm_SBH, segment_end_BN, *of_rows = ctx.saved_tensors
        call: _Call = ctx.call
        selection_BSK = selection_BOK if call.kept is None else call.kept.restore(selection_BOK)
        items = Items.of(selection_BSK, call.layout, RowBounds(*of_rows), tail=call.tail)
        q, kv_TBC, out_grad = q_SBHC.contiguous(), call.latents(kv_LBC), out_grad_SBHC.contiguous()
        heads, constants = q.shape[2], items.constants | call.constants(kv_TBC)
        q_grad_SBHC, delta_SBH = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(norm_SBH)
        launch(
            query_grad_kernel,
            len(items) * triton.cdiv(heads, HEADS),
            *(q, kv_TBC, *items.pointers, out_SBHC, norm_SBH, out_grad, q_grad_SBHC, delta_SBH),
            *(*items.sizes, heads, call.softmax_scale * LOG2_E),
            **constants | {"HEADS": HEADS, "SLOTS": GRAD_SLOTS},
        )
        kv_grad_LBC = None
        if ctx.needs_input_grad[1]:
            inputs = _Inputs(q, kv_TBC, out_grad, norm_SBH, delta_SBH, _cell_ends(segment_end_BN, kv_TBC.shape[0]))
            kv_grad_LBC = _latent_grad(call, items, inputs)
            if call.shards is not None:
                kv_grad_LBC = call.shards.reduce(kv_grad_LBC)
        return q_grad_SBHC if ctx.needs_input_grad[0] else None, kv_grad_LBC, None, None, None


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


def _latent_grad(call: _Call, items: Items, inputs: _Inputs) -> Tensor:
    """The gradient of the latents of all tokens, in their dtype; zeros where no row attends."""
    tokens, _, channels = inputs.kv_TBC.shape
    kv_grad_TBC = torch.zeros_like(inputs.kv_TBC)
    lists = InverseLists(items, tokens, PART)
    for strip in lists.strips(call.attend_bytes, call.layout.pool_size * channels * 4):
        _add_strip(call, items, inputs, lists, strip, kv_grad_TBC)
    return kv_grad_TBC


def _add_strip(
    call: _Call, items: Items, inputs: _Inputs, lists: InverseLists, strip: Strip, kv_grad_TBC: Tensor
) -> None:
    """Fill the gradients of a strip's cells."""
    tokens, batch, channels = kv_grad_TBC.shape
    pool_size = call.layout.pool_size
    list_start_X, part_start_X, sum_start_X = lists.start_3X
    sum_XC = torch.empty(strip.sums * pool_size, channels, dtype=torch.float32, device=kv_grad_TBC.device)
    sizes = {"J": pool_size, "J_PADDED": max(8, triton.next_power_of_2(pool_size))}
    constants = call.constants(inputs.kv_TBC)
    launch(
        latent_grad_kernel,
        len(strip.part_cell_X),
        *(inputs.q_SBHC, inputs.kv_TBC, inputs.out_grad_SBHC, inputs.norm_SBH, inputs.delta_SBH, items.position_S),
        *(strip.item_X, strip.part_cell_X, list_start_X, part_start_X, sum_start_X, inputs.cell_end_BT),
        *(sum_XC, kv_grad_TBC, strip.low, tokens, batch, inputs.q_SBHC.shape[2], call.softmax_scale * LOG2_E),
        **sizes | constants | {"PART": PART, "STEP": STEP},
    )
    launch(
        add_parts_kernel,
        strip.high - strip.low if strip.sums else 0,
        *(part_start_X, sum_start_X, inputs.cell_end_BT, sum_XC, kv_grad_TBC, strip.low, tokens, batch),
        **sizes | {"C": channels, "C_PADDED": constants["C_PADDED"]},
    )
