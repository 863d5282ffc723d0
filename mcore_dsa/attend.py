"""Attention restricted to the selected tokens: absorbed multi-latent form, with a backward pass that recomputes.

Shapes by suffix: S rows (queries), T tokens (keys), B batch, H heads, C latent channels, K selected pools a row,
W token slots of a row, R rows of one chunk, I items of one chunk (its rows, each once for every sample), X all tokens
of all samples.

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

from mcore_dsa.checks import check_device, kind_of
from mcore_dsa.kpool import PoolLayout, check_selection, expand_unchecked, raise_if_unseen
from mcore_dsa.precision import full_precision

DEFAULT_ATTEND_BYTES = 256 * 2**20
MASKED_ATTENTION_KEYS = 12_288

_HEADS = 4
_LANES = 16
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def sparse_attention(
    q_SBHC: Tensor,
    kv_TBC: Tensor,
    selection_BSK: Tensor,
    layout: PoolLayout,
    position_S: Tensor,
    *,
    softmax_scale: float,
    always_select_tail: bool,
    attend_bytes: int = DEFAULT_ATTEND_BYTES,
) -> Tensor:
    """`softmax(scale * q . kv[tokens]) @ kv[tokens]` over the tokens of each row's selected pools and of its tail.

    Args:
        q_SBHC: floating `[s, b, heads, c]`, queries with the K up-projection absorbed.
        kv_TBC: floating `[t, b, c]`, the latent that all heads share as key and as value.
        selection_BSK: int32 `[b, s, budget]`, pool ids, ascending, -1 behind them.
        layout: the pools of `kv_TBC`.
        position_S: integer `[s]`, the token each row stands at.
        softmax_scale: factor of the logits.
        always_select_tail: whether a row attends its own incomplete pool too.
        attend_bytes: bytes either pass may hold beyond inputs, outputs and one fp32 accumulator of the shape of kv.

    Returns: `[s, b, heads, c]` in the dtype of the queries, differentiable once in q and kv. A row without tokens gives
    zeros and zero gradients. Products, softmax and sums run in fp32, or fp64 if an input is: a product of bf16 matrices
    on a CPU rounds its result, here the logits, to bf16. The gradient of a key adds what its rows contribute in row
    order. A kv that is not contiguous is copied once, outside the budget.

    Raises: TypeError or ValueError for an argument of another kind, a budget too small for one row of every sample, ids
    that are not ascending, and an id that is not a visible complete pool of its row.
    """
    dtype = _check_latents(q_SBHC, kv_TBC)
    _check_selection(q_SBHC, kv_TBC, selection_BSK, layout, position_S)
    _check_scale(softmax_scale)
    if not isinstance(always_select_tail, bool):
        raise TypeError(f"always_select_tail is {always_select_tail!r}; accepted is a bool")
    slots = selection_BSK.shape[2] * layout.pool_size + (layout.pool_size - 1 if always_select_tail else 0)
    call = _plan(q_SBHC, kv_TBC, dtype, slots, layout, softmax_scale, always_select_tail, attend_bytes)
    out_SBHC: Tensor = _SparseAttention.apply(  # type: ignore[no-untyped-call]
        q_SBHC, kv_TBC.contiguous(), selection_BSK, position_S, call
    )
    return out_SBHC


def masked_attention(q_SBHC: Tensor, kv_TBC: Tensor, token_BSW: Tensor, *, softmax_scale: float) -> Tensor:
    """The oracle of `sparse_attention`: dense logits under a mask, differentiated by autograd. For tests.

    Args:
        q_SBHC, kv_TBC, softmax_scale: as in `sparse_attention`.
        token_BSW: int32 or int64 `[b, s, width]`, token ids of each row in any order, -1 in unused slots.

    Returns: as `sparse_attention`.

    Raises: TypeError or ValueError for an argument of another kind, and ValueError above 12,288 keys.
    """
    dtype = _check_latents(q_SBHC, kv_TBC)
    _check_scale(softmax_scale)
    rows, (tokens, batch) = q_SBHC.shape[0], kv_TBC.shape[:2]
    if tokens > MASKED_ATTENTION_KEYS:
        raise ValueError(
            f"kv_TBC has {tokens} keys; accepted are at most {MASKED_ATTENTION_KEYS}: masked_attention is an oracle "
            "that holds rows x keys; sparse_attention has no such limit"
        )
    if not isinstance(token_BSW, Tensor) or token_BSW.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"token_BSW is {kind_of(token_BSW)}; accepted is a torch.int32 or torch.int64 tensor")
    if token_BSW.ndim != 3 or token_BSW.shape[:2] != (batch, rows) or q_SBHC.shape[1] != batch:
        raise ValueError(
            f"q_SBHC has shape {tuple(q_SBHC.shape)}, kv_TBC {tuple(kv_TBC.shape)} and token_BSW "
            f"{tuple(token_BSW.shape)}; accepted are [s, b, heads, c], [t, b, c] and [b, s, width]"
        )
    check_device(q_SBHC.device, kv_TBC=kv_TBC, token_BSW=token_BSW)
    if bool(((token_BSW < -1) | (token_BSW >= tokens)).any()):
        raise ValueError(f"token_BSW holds ids outside [-1, {tokens}); accepted are token ids and -1")
    # Column `tokens` is where unused slots go.
    seen_BST = torch.zeros(batch, rows, tokens + 1, dtype=torch.bool, device=q_SBHC.device)
    seen_BST.scatter_(2, torch.where(token_BSW < 0, tokens, token_BSW).long(), True)
    hidden_B1ST = ~seen_BST[..., :tokens].unsqueeze(1)
    with full_precision(q_SBHC.device.type):
        q_BHSC = q_SBHC.to(dtype).permute(1, 2, 0, 3)
        kv_B1TC = kv_TBC.to(dtype).transpose(0, 1).unsqueeze(1)
        # The lowest finite number: -inf in all of a row would make its softmax and its gradients NaN.
        logits_BHST = (softmax_scale * (q_BHSC @ kv_B1TC.mT)).masked_fill(hidden_B1ST, torch.finfo(dtype).min)
        out_BHSC = logits_BHST.softmax(-1).masked_fill(hidden_B1ST, 0.0) @ kv_B1TC
    return out_BHSC.permute(2, 0, 1, 3).to(q_SBHC.dtype)


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
    if isinstance(attend_bytes, bool) or not isinstance(attend_bytes, int):
        raise TypeError(f"attend_bytes is {attend_bytes!r}; accepted is an integer number of bytes")
    heads, slots = _round_up(q_SBHC.shape[2], _HEADS), _round_up(slots, _LANES)
    channels = _round_up(kv_TBC.shape[2], _LANES)
    pads = channels != kv_TBC.shape[2]
    converts = pads or kv_TBC.dtype != dtype
    size = dtype.itemsize
    # The latents and their gradients; the latents as gathered; the gradients without padding.
    wide = 2 * size + (kv_TBC.element_size() if converts else 0) + (size if pads else 0)
    item = slots * (channels * wide + heads * 3 * size) + heads * channels * 3 * size
    # Token ids as int32 and int64 and the scratch that index_add_ sorts them in; sums over slots; pool ids.
    item += slots * 120 + heads * 16 + 512
    row, fixed = item * layout.batch, channels * size + 4096
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
        ctx: Any, q_SBHC: Tensor, kv_TBC: Tensor, selection_BSK: Tensor, position_S: Tensor, call: _Call
    ) -> Tensor:
        out_SBHC = q_SBHC.new_zeros(q_SBHC.shape)
        faults = torch.zeros(2, dtype=torch.bool, device=q_SBHC.device)
        with full_precision(q_SBHC.device.type):
            buffers = _Buffers.of(kv_TBC, call, len(q_SBHC), backward=False)
            for rows in call.chunks(len(q_SBHC)):
                slots, fault = _slots(selection_BSK[:, rows], position_S[rows], call)
                faults |= fault
                chunk = buffers.first(len(slots.token_IW))
                chunk.attend(q_SBHC[rows], kv_TBC, slots, call)
                mixed_IHC = torch.bmm(chunk.weights_IHW, chunk.latent_IWC, out=chunk.mixed_IHC)
                _store(out_SBHC[rows], mixed_IHC.masked_fill_(slots.empty_I11, 0.0))
        unseen, disordered = faults.unbind()
        raise_if_unseen(unseen)
        if bool(disordered):
            raise ValueError("selection_BSK repeats or disorders pool ids; accepted are ascending ids, -1 behind them")
        ctx.save_for_backward(q_SBHC, kv_TBC, selection_BSK, position_S)
        ctx.call = call
        return out_SBHC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, out_grad_SBHC: Tensor) -> tuple[Tensor | None, ...]:
        q_SBHC, kv_TBC, selection_BSK, position_S = ctx.saved_tensors
        call: _Call = ctx.call
        tokens, batch, channels = kv_TBC.shape
        q_grad_SBHC = q_SBHC.new_zeros(q_SBHC.shape) if ctx.needs_input_grad[0] else None
        # One row more than kv: there goes what unused slots contribute.
        sum_XC = kv_TBC.new_zeros(tokens * batch + 1, channels, dtype=call.dtype) if ctx.needs_input_grad[1] else None
        with full_precision(q_SBHC.device.type):
            buffers = _Buffers.of(kv_TBC, call, len(q_SBHC), backward=True)
            for rows in call.chunks(len(q_SBHC)):
                slots, _ = _slots(selection_BSK[:, rows], position_S[rows], call)
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
        return q_grad_SBHC, kv_grad_TBC, None, None, None


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


def _slots(selection_BRK: Tensor, position_R: Tensor, call: _Call) -> tuple[_Slots, Tensor]:
    """The slots of a chunk's rows, and a bool pair: an id that is not visible, ids that do not ascend."""
    token_BRW, unseen = expand_unchecked(
        selection_BRK, call.layout, position_R, always_select_tail=call.always_select_tail
    )
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


def _check_latents(q_SBHC: Tensor, kv_TBC: Tensor) -> torch.dtype:
    """Refuse anything but queries and latents that fit; return the dtype in which they are to be multiplied."""
    for name, tensor, ndim in (("q_SBHC", q_SBHC, 4), ("kv_TBC", kv_TBC, 3)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} is {kind_of(tensor)}; accepted is a tensor of {', '.join(map(str, _DTYPES))}")
        if tensor.ndim != ndim:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted are {ndim} dimensions")
    if q_SBHC.shape[3] != kv_TBC.shape[2] or 0 in (q_SBHC.shape[2], q_SBHC.shape[3]):
        raise ValueError(
            f"q_SBHC has shape {tuple(q_SBHC.shape)} and kv_TBC {tuple(kv_TBC.shape)}; accepted are equal last "
            "dimensions, at least one channel and one head"
        )
    return torch.promote_types(torch.promote_types(q_SBHC.dtype, kv_TBC.dtype), torch.float32)


def _check_selection(
    q_SBHC: Tensor, kv_TBC: Tensor, selection_BSK: Tensor, layout: PoolLayout, position_S: Tensor
) -> None:
    check_selection(selection_BSK, layout, position_S)
    check_device(layout.device, q_SBHC=q_SBHC, kv_TBC=kv_TBC)
    rows, batch, tokens = position_S.shape[0], layout.batch, layout.num_tokens
    if q_SBHC.shape[:2] != (rows, batch):
        raise ValueError(f"q_SBHC has shape {tuple(q_SBHC.shape)}; accepted is [{rows}, {batch}, heads, channels]")
    if kv_TBC.shape[:2] != (tokens, batch):
        raise ValueError(f"kv_TBC has shape {tuple(kv_TBC.shape)}; accepted is [{tokens}, {batch}, channels]")


def _check_scale(softmax_scale: float) -> None:
    is_number = isinstance(softmax_scale, float | int) and not isinstance(softmax_scale, bool)
    if not is_number or not math.isfinite(softmax_scale):
        raise ValueError(f"softmax_scale is {softmax_scale!r}; accepted is a finite number")
