"""Attention restricted to the selected tokens: absorbed multi-latent form, with a backward pass that recomputes.

Letters of shapes: `mcore_dsa/__init__.py`. Items and their slots: `slots.py`.

An item is one product of heads x slots x channels, each extent padded to a multiple of `_HEADS` or `LANES`. Its bits
then do not depend on the chunk it is computed in, nor on the number of threads (measured on a CPU with AVX-512 and MKL
at 1, 2 and 3 threads: 0 of 240 random shapes differ; unpadded, 30% do). Elsewhere equal calls give equal bits, and
another byte budget may not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mcore_dsa.backends.protocol import Kept, LatentShards
from mcore_dsa.backends.torch.slots import LANES, SlotClass, Slots, find_faults, round_up, slot_classes
from mcore_dsa.kpool import PoolLayout, RowBounds, raise_if_unseen
from mcore_dsa.precision import full_precision
from mcore_dsa.ranges import ranged
from mcore_dsa.workspace import Buffer, Workspace

_HEADS = 4


@ranged("attention")
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
    shards: LatentShards | None = None,
) -> Tensor:
    """`mcore_dsa.sparse_attention` for arguments that fit, of rows that are located."""
    budget, tail_slots = selection_BSK.shape[2], layout.pool_size - 1 if always_select_tail else 0
    item = _Item(q_SBHC.shape[2], kv_TBC.shape[2], q_SBHC.dtype, kv_TBC.dtype)
    slots = round_up(budget * layout.pool_size + tail_slots, LANES)
    smallest = item.workspace(layout.batch, slots, backward=True).nbytes
    if attend_bytes < smallest:
        raise ValueError(
            f"attend_bytes is {attend_bytes}; accepted are at least {smallest}, which hold one row of "
            f"{layout.batch} samples with {slots} token slots (padded)"
        )
    classes = slot_classes(bounds, budget=budget, pool_size=layout.pool_size, tail_slots=tail_slots)
    shards = LatentShards(lambda kv: kv, lambda grad: grad) if shards is None else shards
    call = _Call(item, layout, classes, tail_slots, softmax_scale, attend_bytes, shards)
    kept = Kept(selection_BSK, lambda selection: selection) if kept is None else kept
    out_SBHC: Tensor = _SparseAttention.apply(  # type: ignore[no-untyped-call]
        q_SBHC, kv_TBC, selection_BSK, bounds, call, kept
    )
    return out_SBHC


def smallest_attend_bytes(*, batch: int, heads: int, channels: int, dtype: torch.dtype, slots: int) -> int:
    """The least `attend_bytes` that works: backward of one row of every sample, queries and latents of `dtype`."""
    item = _Item(heads, channels, dtype, dtype)
    return item.workspace(batch, round_up(slots, LANES), backward=True).nbytes


@dataclass(frozen=True)
class _Item:
    """What the scratch of an item follows from beside its slots."""

    heads: int
    channels: int
    query_dtype: torch.dtype
    latent_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(torch.promote_types(self.query_dtype, self.latent_dtype), torch.float32)

    def workspace(self, items: int, slots: int, *, backward: bool) -> Workspace:
        """The scratch of a pass over items of one class; linear in `items`.

        Padding heads and channels hold zeros throughout. `gathered_IWC`, the latents as they come, is there where they
        need padding or conversion.
        """
        heads, channels = round_up(self.heads, _HEADS), round_up(self.channels, LANES)
        pads = channels != self.channels
        own = items if backward else 0
        converted = items if pads or self.latent_dtype != self.dtype else 0
        new = partial(Buffer, dtype=self.dtype)
        tall = partial(new, zeroed=pads or heads != self.heads)
        return Workspace(
            {
                **Slots.workspace(items, slots).buffers,
                "gathered_IWC": Buffer((converted, slots, self.channels), self.latent_dtype),
                "latent_IWC": new((items, slots, channels), zeroed=pads),
                "query_IHC": tall((items, heads, channels)),
                "mixed_IHC": new((items, heads, channels)),
                "logits_IHW": new((items, heads, slots)),
                "weights_IHW": new((items, heads, slots)),
                "out_grad_IHC": tall((own, heads, channels)),
                "logit_grad_IHW": new((own, heads, slots)),
                "delta_IH1": new((own, heads, 1)),
                "latent_grad_IWC": new((own, slots, channels)),
                # Rows of queries and gradients, as they come and go.
                "rows": Buffer((items, self.heads, self.channels), self.query_dtype, inside=True),
                # CPU and CUDA sort the indices and the places they stood at; latents lose their padding before.
                "index_add": Buffer((own, slots, 12), torch.int64, inside=True),
                "unpadded": new((own if pads else 0, slots, self.channels), inside=True),
                # One more row of the sum over rows; flags and indices of the whole call.
                "sink": new((channels,), inside=True),
                "scalars": Buffer((4096,), torch.uint8, inside=True),
            }
        )


@dataclass(frozen=True)
class _Call:
    """What both passes of one call know beside the tensors that autograd saves."""

    item: _Item
    layout: PoolLayout
    classes: tuple[SlotClass, ...]
    tail_slots: int
    softmax_scale: float
    attend_bytes: int
    shards: LatentShards

    def chunks(self, group: SlotClass) -> tuple[Tensor, ...]:
        """The items of a class, as many at a time as backward, the greedier pass, can hold."""
        fixed, one = (self.item.workspace(items, group.slots, backward=True).nbytes for items in (0, 1))
        chunks: tuple[Tensor, ...] = group.item_I.split((self.attend_bytes - fixed) // (one - fixed))
        return chunks


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_SBHC: Tensor, kv_LBC: Tensor, selection_BSK: Tensor, bounds: RowBounds, call: _Call, kept: Kept
    ) -> Tensor:
        kv_TBC = call.shards.gather(kv_LBC)
        out_SBHC = q_SBHC.new_zeros(q_SBHC.shape)
        fault_2 = find_faults(selection_BSK, bounds, call.attend_bytes)

        def work(chunk: _Chunk) -> None:
            chunk.attend(q_SBHC, kv_TBC, call.softmax_scale)
            chunk.mix(chunk.weights_IHW)
            chunk.store_mixed(out_SBHC)

        _each_chunk(call, kv_TBC, selection_BSK, bounds, work, backward=False)
        unseen, disordered = fault_2.cpu()
        raise_if_unseen(unseen)
        if bool(disordered):
            raise ValueError("selection_BSK repeats or disorders pool ids; accepted are ascending ids, -1 behind them")
        # Backward looks the tokens up once more. `ctx` could hold bounds and layout as objects; saved, they go by their
        # versions, so that one that is written in place between the passes is an error and not a wrong gradient. The
        # table of pools is saved for that alone: `call.layout` holds it.
        ctx.save_for_backward(
            q_SBHC,
            kv_LBC,
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
    @ranged("attention")
    def backward(ctx: Any, out_grad_SBHC: Tensor) -> tuple[Tensor | None, ...]:
        q_SBHC, kv_LBC, selection_BOK, _, *of_rows = ctx.saved_tensors
        call: _Call = ctx.call
        kv_TBC = call.shards.gather(kv_LBC)
        bounds, selection_BSK = RowBounds(*of_rows), ctx.restore(selection_BOK)
        tokens, batch, channels = kv_TBC.shape
        q_grad_SBHC = q_SBHC.new_zeros(q_SBHC.shape) if ctx.needs_input_grad[0] else None
        # One row more than kv: there goes what items without tokens contribute.
        sum_XC = (
            kv_TBC.new_zeros(tokens * batch + 1, channels, dtype=call.item.dtype) if ctx.needs_input_grad[1] else None
        )

        def work(chunk: _Chunk) -> None:
            chunk.attend(q_SBHC, kv_TBC, call.softmax_scale)
            chunk.differentiate(out_grad_SBHC)
            if q_grad_SBHC is not None:
                chunk.mix(chunk.logit_grad_IHW).mul_(call.softmax_scale)
                chunk.store_mixed(q_grad_SBHC)
            if sum_XC is not None:
                _add_in_row_order(sum_XC, chunk.slots, chunk.latent_grad())

        _each_chunk(call, kv_TBC, selection_BSK, bounds, work, backward=True)
        if sum_XC is None:
            return q_grad_SBHC, None, None, None, None, None
        kv_grad_TBC = sum_XC[:-1].unflatten(0, (tokens, batch)).to(kv_TBC.dtype)
        return q_grad_SBHC, call.shards.reduce(kv_grad_TBC), None, None, None, None


def _each_chunk(
    call: _Call,
    kv_TBC: Tensor,
    selection_BSK: Tensor,
    bounds: RowBounds,
    work: Callable[[_Chunk], None],
    *,
    backward: bool,
) -> None:
    """Call `work` on all items, chunk by chunk. What a class holds is free before the next one takes its own."""
    with full_precision(kv_TBC.device.type):
        for group in call.classes:
            _each_chunk_of_class(call, group, kv_TBC, selection_BSK, bounds, work, backward=backward)


def _each_chunk_of_class(
    call: _Call,
    group: SlotClass,
    kv_TBC: Tensor,
    selection_BSK: Tensor,
    bounds: RowBounds,
    work: Callable[[_Chunk], None],
    *,
    backward: bool,
) -> None:
    chunks = call.chunks(group)
    held = call.item.workspace(len(chunks[0]), group.slots, backward=backward).allocate(kv_TBC.device)
    token_IW, unused_IW = held.pop("token_IW"), held.pop("unused_IW")
    for item_I in chunks:
        count = len(item_I)
        slots = Slots.place(
            token_IW[:count],
            unused_IW[:count],
            selection_BSK,
            call.layout,
            bounds,
            item_I,
            pools=group.pools,
            tail_slots=call.tail_slots,
        )
        work(_Chunk(item_I, slots, **{name: buffer[:count] for name, buffer in held.items()}))


@dataclass(frozen=True)
class _Chunk:
    """Some items of one class, their slots, and their scratch, `_Item.workspace`."""

    item_I: Tensor
    slots: Slots
    gathered_IWC: Tensor
    latent_IWC: Tensor
    query_IHC: Tensor
    mixed_IHC: Tensor
    logits_IHW: Tensor
    weights_IHW: Tensor
    out_grad_IHC: Tensor
    logit_grad_IHW: Tensor
    delta_IH1: Tensor
    latent_grad_IWC: Tensor

    def attend(self, q_SBHC: Tensor, kv_TBC: Tensor, softmax_scale: float) -> None:
        """Fill `latent`, `query` (times the scale) and `weights`: zeros in unused slots, NaN in empty items."""
        gathered_IWC = self.gathered_IWC if len(self.gathered_IWC) else self.latent_IWC
        torch.index_select(kv_TBC.flatten(0, 1), 0, self.slots.token_IW.flatten(), out=gathered_IWC.flatten(0, 1))
        if gathered_IWC is not self.latent_IWC:
            self.latent_IWC[..., : kv_TBC.shape[2]] = gathered_IWC
        self._load(self.query_IHC, q_SBHC)
        self.query_IHC.mul_(softmax_scale)
        torch.bmm(self.query_IHC, self.latent_IWC.mT, out=self.logits_IHW)
        self.logits_IHW.masked_fill_(self.slots.unused_IW.unsqueeze(1), -math.inf)
        torch.softmax(self.logits_IHW, -1, out=self.weights_IHW)

    def differentiate(self, out_grad_SBHC: Tensor) -> None:
        """Fill `logit_grad` with the gradient of the scaled logits: `p * (dp - sum(p * dp))`. Spends `logits`."""
        self._load(self.out_grad_IHC, out_grad_SBHC)
        torch.bmm(self.out_grad_IHC, self.latent_IWC.mT, out=self.logit_grad_IHW)
        torch.mul(self.weights_IHW, self.logit_grad_IHW, out=self.logits_IHW)
        torch.sum(self.logits_IHW, -1, keepdim=True, out=self.delta_IH1)
        self.logit_grad_IHW.sub_(self.delta_IH1).mul_(self.weights_IHW)

    def latent_grad(self) -> Tensor:
        """What every slot contributes to the gradient of its latent, as value and as key, `[i, w, c]`, padded."""
        torch.bmm(self.weights_IHW.mT, self.out_grad_IHC, out=self.latent_grad_IWC)
        return self.latent_grad_IWC.baddbmm_(self.logit_grad_IHW.mT, self.query_IHC)

    def mix(self, weights_IHW: Tensor) -> Tensor:
        """Fill and return `mixed`: the latents of an item, weighted."""
        return torch.bmm(weights_IHW, self.latent_IWC, out=self.mixed_IHC)

    def store_mixed(self, x_SBHC: Tensor) -> None:
        """Write `mixed` into the items' rows, zeros into those of empty items."""
        heads, channels = x_SBHC.shape[2:]
        self.mixed_IHC.masked_fill_(self.slots.empty_I1.unsqueeze(2), 0.0)
        x_SBHC.flatten(0, 1).index_copy_(0, self.item_I, self.mixed_IHC[:, :heads, :channels].to(x_SBHC.dtype))

    def _load(self, buffer_IHC: Tensor, x_SBHC: Tensor) -> None:
        batch, heads, channels = x_SBHC.shape[1:]
        buffer_IHC[:, :heads, :channels] = x_SBHC[self.item_I // batch, self.item_I % batch]


def _add_in_row_order(sum_XC: Tensor, slots: Slots, latent_grad_IWC: Tensor) -> None:
    """Add every slot's gradient to its token's sum, item after item, so that no chunk and no thread moves a bit.

    Unused slots add zeros to their item's last token, which changes no bit of it: leaving them out would take a copy of
    the gradients, and one row for them all would be a single chain of additions on CUDA. Spends the tokens.
    """
    target_X = slots.token_IW.masked_fill_(slots.empty_I1, len(sum_XC) - 1).flatten()
    grad_XC = latent_grad_IWC[..., : sum_XC.shape[1]].flatten(0, 1)
    if sum_XC.device.type == "cpu":
        # The CPU kernel adds equal indices in the order they come in: 12 times faster than row by row at 16 channels.
        sum_XC.index_add_(0, target_X, grad_XC)
    else:
        # There index_add_ is atomic. This sorts the indices, stably, and adds equal ones one after the other (of 32
        # channels or fewer: those of a chunk first); torch itself takes it for a deterministic index_add_.
        sum_XC.index_put_((target_X,), grad_XC, accumulate=True)
