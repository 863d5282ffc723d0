"""Attention restricted to the selected tokens: absorbed multi-latent form, with a backward pass that recomputes.

Letters of shapes: `mcore_dsa/__init__.py`.

An item is one product of heads x slots x channels, each extent padded to a multiple of `_HEADS` or `_LANES`. Its bits
then do not depend on the chunk it is computed in, nor on the number of threads (measured on a CPU with AVX-512 and MKL
at 1, 2 and 3 threads: 0 of 240 random shapes differ; unpadded, 30% do). Elsewhere equal calls give equal bits, and
another byte budget may not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from mcore_dsa.backends.protocol import Kept
from mcore_dsa.kpool import PoolLayout, RowBounds, expand_unchecked, raise_if_unseen
from mcore_dsa.precision import full_precision

_HEADS = 4
_LANES = 16


def attend(
    q_SBHC: Tensor,
    kv_TBC: Tensor,
    selection_BSK: Tensor,
    layout: PoolLayout,
    bounds: RowBounds,
    *,
    softmax_scale: float,
    always_select_tail: bool,
    attend_bytes: int,
    kept: Kept | None = None,
) -> Tensor:
    """`mcore_dsa.sparse_attention` for arguments that fit, of rows that are located."""
    dtype = torch.promote_types(torch.promote_types(q_SBHC.dtype, kv_TBC.dtype), torch.float32)
    slots = selection_BSK.shape[2] * layout.pool_size + (layout.pool_size - 1 if always_select_tail else 0)
    call = _plan(q_SBHC, kv_TBC, dtype, slots, layout, softmax_scale, always_select_tail, attend_bytes)
    kept = Kept(selection_BSK, lambda selection: selection) if kept is None else kept
    out_SBHC: Tensor = _SparseAttention.apply(  # type: ignore[no-untyped-call]
        q_SBHC, kv_TBC, selection_BSK, bounds, call, kept
    )
    return out_SBHC


@dataclass(frozen=True)
class _Call:
    """What both passes of one call know beside the tensors that autograd saves.

    `heads`, `slots` and `channels` are the padded extents of an item, `step` is the number of rows in a chunk. Where
    `converts`, latents are gathered as they are before they are padded and brought to `dtype`.
    """

    layout: PoolLayout
    softmax_scale: float
    always_select_tail: bool
    dtype: torch.dtype
    heads: int
    slots: int
    channels: int
    converts: bool
    step: int

    def chunks(self, rows: int) -> Iterator[slice]:
        """Consecutive slices of the rows; none where no row can have a token."""
        if self.slots and self.layout.num_tokens and self.layout.batch:
            for begin in range(0, rows, self.step):
                yield slice(begin, min(begin + self.step, rows))


def _plan(
    q_SBHC: Tensor,
    kv_TBC: Tensor,
    dtype: torch.dtype,
    slots: int,
    layout: PoolLayout,
    softmax_scale: float,
    always_select_tail: bool,
    attend_bytes: int,
) -> _Call:
    """The call, in chunks as long as backward, the greedier pass, can hold. Raises ValueError if that is no row."""
    fixed, row = _pass_bytes(
        layout.batch, q_SBHC.shape[2], kv_TBC.shape[2], kv_TBC.element_size(), dtype.itemsize, slots
    )
    heads, slots = _round_up(q_SBHC.shape[2], _HEADS), _round_up(slots, _LANES)
    channels = _round_up(kv_TBC.shape[2], _LANES)
    converts = channels != kv_TBC.shape[2] or kv_TBC.dtype != dtype
    if attend_bytes < fixed + row:
        raise ValueError(
            f"attend_bytes is {attend_bytes}; accepted are at least {fixed + row}, which hold one row of "
            f"{layout.batch} samples with {slots} token slots (padded)"
        )
    step = (attend_bytes - fixed) // max(1, row)
    return _Call(layout, softmax_scale, always_select_tail, dtype, heads, slots, channels, converts, step)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_SBHC: Tensor, kv_TBC: Tensor, selection_BSK: Tensor, bounds: RowBounds, call: _Call, kept: Kept
    ) -> Tensor:
        out_SBHC = q_SBHC.new_zeros(q_SBHC.shape)
        faults = torch.zeros(2, dtype=torch.bool, device=q_SBHC.device)
        with full_precision(q_SBHC.device.type):
            buffers = _Buffers.of(kv_TBC, call, len(q_SBHC), backward=False)
            for rows in call.chunks(len(q_SBHC)):
                slots, fault = _slots(selection_BSK[:, rows], bounds.take(rows), call)
                faults |= fault
                chunk = buffers.first(len(slots.token_IW))
                chunk.attend(q_SBHC[rows], kv_TBC, slots, call)
                mixed_IHC = torch.bmm(chunk.weights_IHW, chunk.latent_IWC, out=chunk.mixed_IHC)
                _store(out_SBHC[rows], mixed_IHC.masked_fill_(slots.empty_I11, 0.0))
        unseen, disordered = faults.unbind()
        raise_if_unseen(unseen)
        if bool(disordered):
            raise ValueError("selection_BSK repeats or disorders pool ids; accepted are ascending ids, -1 behind them")
        # Saved as tensors, bounds and layout too: what is changed in place before backward is then refused.
        ctx.save_for_backward(
            q_SBHC,
            kv_TBC,
            kept.selection_BOK,
            call.layout.pool_token_BP,
            bounds.position_S,
            bounds.first_BS,
            bounds.visible_BS,
            bounds.tail_BS,
        )
        ctx.call, ctx.restore = call, kept.restore
        return out_SBHC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad_SBHC: Tensor) -> tuple[Tensor | None, ...]:
        q_SBHC, kv_TBC, selection_BOK, _, *of_rows = ctx.saved_tensors
        call: _Call = ctx.call
        bounds, selection_BSK = RowBounds(*of_rows), ctx.restore(selection_BOK)
        tokens, batch, channels = kv_TBC.shape
        q_grad_SBHC = q_SBHC.new_zeros(q_SBHC.shape) if ctx.needs_input_grad[0] else None
        # One row more than kv: there goes what unused slots contribute.
        sum_XC = kv_TBC.new_zeros(tokens * batch + 1, channels, dtype=call.dtype) if ctx.needs_input_grad[1] else None
        with full_precision(q_SBHC.device.type):
            buffers = _Buffers.of(kv_TBC, call, len(q_SBHC), backward=True)
            for rows in call.chunks(len(q_SBHC)):
                slots, _ = _slots(selection_BSK[:, rows], bounds.take(rows), call)
                chunk = buffers.first(len(slots.token_IW))
                chunk.attend(q_SBHC[rows], kv_TBC, slots, call)
                chunk.differentiate(out_grad_SBHC[rows])
                if q_grad_SBHC is not None:
                    mixed_IHC = torch.bmm(chunk.logit_grad_IHW, chunk.latent_IWC, out=chunk.mixed_IHC)
                    mixed_IHC.mul_(call.softmax_scale).masked_fill_(slots.empty_I11, 0.0)
                    _store(q_grad_SBHC[rows], mixed_IHC)
                if sum_XC is not None:
                    _add_in_row_order(sum_XC, slots, chunk.latent_grad())
        kv_grad_TBC = None if sum_XC is None else sum_XC[:-1].unflatten(0, (tokens, batch)).to(kv_TBC.dtype)
        return q_grad_SBHC, kv_grad_TBC, None, None, None, None


@dataclass(frozen=True)
class _Slots:
    """The token slots of one chunk.

    Attributes:
        token_IW: int64, rows of the latents flattened over tokens and samples; an unused slot repeats a token of its
            item, so that what it reads is finite wherever the item's own tokens are.
        unused_IW: bool, slots that hold no token.
        empty_I11: bool, items without any token.
        batch: samples of a row.
    """

    token_IW: Tensor
    unused_IW: Tensor
    empty_I11: Tensor
    batch: int


def _slots(selection_BRK: Tensor, bounds: RowBounds, call: _Call) -> tuple[_Slots, Tensor]:
    """The slots of a chunk's rows, and a bool pair: an id that is not visible, ids that do not ascend."""
    token_BRW, unseen = expand_unchecked(selection_BRK, call.layout, bounds, always_select_tail=call.always_select_tail)
    before, after = selection_BRK[..., :-1], selection_BRK[..., 1:]
    disordered = ((after >= 0) & ((before < 0) | (after <= before))).any()
    batch, rows, width = token_BRW.shape
    token_IW = pad(token_BRW, (0, call.slots - width), value=-1).transpose(0, 1).flatten(0, 1)
    unused_IW = token_IW < 0
    last_I1 = token_IW.amax(1, keepdim=True)
    token_IW = torch.where(unused_IW, last_I1, token_IW).clamp_(min=0).long()
    sample_I1 = torch.arange(batch, device=token_IW.device).repeat(rows).unsqueeze(1)
    slots = _Slots(token_IW.mul_(batch).add_(sample_I1), unused_IW, (last_I1 < 0).unsqueeze(2), batch)
    return slots, torch.stack((unseen, disordered))


@dataclass(frozen=True)
class _Buffers:
    """Memory of one chunk, allocated once for a pass. Padding heads and channels hold zeros throughout.

    `gathered_IWC` has the dtype and channels of kv, and is `latent_IWC` itself where these need no conversion.
    """

    gathered_IWC: Tensor
    latent_IWC: Tensor
    query_IHC: Tensor
    mixed_IHC: Tensor
    logits_IHW: Tensor
    weights_IHW: Tensor
    out_grad_IHC: Tensor
    logit_grad_IHW: Tensor
    latent_grad_IWC: Tensor

    @classmethod
    def of(cls, kv_TBC: Tensor, call: _Call, rows: int, *, backward: bool) -> _Buffers:
        items = min(rows, call.step) * kv_TBC.shape[1]
        own = items if backward else 0
        wide, tall, flat = (call.slots, call.channels), (call.heads, call.channels), (call.heads, call.slots)

        def new(items: int, extents: tuple[int, int]) -> Tensor:
            return kv_TBC.new_zeros(items, *extents, dtype=call.dtype)

        latent_IWC = new(items, wide)
        return cls(
            gathered_IWC=kv_TBC.new_empty(items, call.slots, kv_TBC.shape[2]) if call.converts else latent_IWC,
            latent_IWC=latent_IWC,
            query_IHC=new(items, tall),
            mixed_IHC=new(items, tall),
            logits_IHW=new(items, flat),
            weights_IHW=new(items, flat),
            out_grad_IHC=new(own, tall),
            logit_grad_IHW=new(own, flat),
            latent_grad_IWC=new(own, wide),
        )

    def first(self, items: int) -> _Buffers:
        return _Buffers(**{field.name: getattr(self, field.name)[:items] for field in fields(self)})

    def attend(self, q_RBHC: Tensor, kv_TBC: Tensor, slots: _Slots, call: _Call) -> None:
        """Fill `latent`, `query` (times the scale) and `weights`: zeros in unused slots, NaN in empty items."""
        gathered_XC = self.gathered_IWC.flatten(0, 1)
        torch.index_select(kv_TBC.flatten(0, 1), 0, slots.token_IW.flatten(), out=gathered_XC)
        if call.converts:
            self.latent_IWC[..., : kv_TBC.shape[2]] = self.gathered_IWC
        _load(self.query_IHC, q_RBHC)
        self.query_IHC.mul_(call.softmax_scale)
        torch.bmm(self.query_IHC, self.latent_IWC.mT, out=self.logits_IHW)
        self.logits_IHW.masked_fill_(slots.unused_IW.unsqueeze(1), -math.inf)
        torch.softmax(self.logits_IHW, -1, out=self.weights_IHW)

    def differentiate(self, out_grad_RBHC: Tensor) -> None:
        """Fill `logit_grad` with the gradient of the scaled logits: `p * (dp - sum(p * dp))`. Spends `logits`."""
        _load(self.out_grad_IHC, out_grad_RBHC)
        torch.bmm(self.out_grad_IHC, self.latent_IWC.mT, out=self.logit_grad_IHW)
        delta_IH1 = torch.mul(self.weights_IHW, self.logit_grad_IHW, out=self.logits_IHW).sum(-1, keepdim=True)
        self.logit_grad_IHW.sub_(delta_IH1).mul_(self.weights_IHW)

    def latent_grad(self) -> Tensor:
        """What every slot contributes to the gradient of its latent, as value and as key, `[i, w, c]`."""
        torch.bmm(self.weights_IHW.mT, self.out_grad_IHC, out=self.latent_grad_IWC)
        self.latent_grad_IWC.baddbmm_(self.logit_grad_IHW.mT, self.query_IHC)
        return self.latent_grad_IWC[..., : self.gathered_IWC.shape[2]]


def _add_in_row_order(sum_XC: Tensor, slots: _Slots, latent_grad_IWC: Tensor) -> None:
    """Add every slot's gradient to its token's sum, row after row, so that no chunk and no thread moves a bit."""
    target_IW = slots.token_IW.masked_fill(slots.unused_IW, len(sum_XC) - 1)
    if sum_XC.device.type == "cpu":
        # The CPU kernel adds equal indices in the order they come in: 12 times faster than row by row at 16 channels.
        sum_XC.index_add_(0, target_IW.flatten(), latent_grad_IWC.flatten(0, 1))
    else:
        # There index_add_ is atomic. This sorts the indices, stably, and adds equal ones one after the other (of 32
        # channels or fewer: those of a chunk first); torch itself takes it for a deterministic index_add_.
        sum_XC.index_put_((target_IW.flatten(),), latent_grad_IWC.flatten(0, 1), accumulate=True)


def _load(buffer_IHC: Tensor, x_RBHC: Tensor) -> None:
    rows, batch, heads, channels = x_RBHC.shape
    buffer_IHC[:, :heads, :channels].unflatten(0, (rows, batch)).copy_(x_RBHC)


def _store(x_RBHC: Tensor, buffer_IHC: Tensor) -> None:
    rows, batch, heads, channels = x_RBHC.shape
    x_RBHC.copy_(buffer_IHC[:, :heads, :channels].unflatten(0, (rows, batch)))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def smallest_attend_bytes(*, batch: int, heads: int, channels: int, dtype: torch.dtype, slots: int) -> int:
    """The least `attend_bytes` that works: backward of one row of every sample, queries and latents of `dtype`."""
    return sum(
        _pass_bytes(batch, heads, channels, dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize, slots)
    )


def _pass_bytes(batch: int, heads: int, channels: int, kv_size: int, size: int, slots: int) -> tuple[int, int]:
    """Bytes of backward, the greedier pass: once, and for each row."""
    padded, heads, slots = _round_up(channels, _LANES), _round_up(heads, _HEADS), _round_up(slots, _LANES)
    pads = padded != channels
    converts = pads or kv_size != size
    # The latents and their gradients; the latents as gathered; the gradients without padding.
    wide = 2 * size + (kv_size if converts else 0) + (size if pads else 0)
    item = slots * (padded * wide + heads * 3 * size) + heads * padded * 3 * size
    # Token ids as int32 and int64 and the scratch that index_add_ sorts them in; sums over slots; pool ids.
    item += slots * 120 + heads * 16 + 512
    return padded * size + 4096, item * batch
