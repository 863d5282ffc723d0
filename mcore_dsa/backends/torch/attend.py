"""Attention restricted to the selected tokens: absorbed multi-latent form, both passes; backward recomputes forward.

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

import torch
from torch import Tensor

from mcore_dsa.backends.protocol import AttentionCall
from mcore_dsa.backends.torch.products import multiply, weigh
from mcore_dsa.backends.torch.scoring import operands_of
from mcore_dsa.backends.torch.slots import LANES, SlotClass, Slots, find_faults, round_up, slot_classes
from mcore_dsa.precision import product_precision
from mcore_dsa.workspace import Buffer, Workspace

_HEADS = 4


def selection_faults(selection_BSK: Tensor, call: AttentionCall) -> Tensor:
    return find_faults(selection_BSK, call.bounds, call.attend_bytes)


def attend(q_SBHC: Tensor, kv_TBC: Tensor, selection_BSK: Tensor, call: AttentionCall, out_SBHC: Tensor) -> tuple[()]:
    items = _Items.of(q_SBHC, kv_TBC, selection_BSK, call)
    out_SBHC.zero_()

    def work(chunk: _Chunk) -> None:
        chunk.attend(q_SBHC, kv_TBC, call.softmax_scale)
        chunk.mix(chunk.weights_IHW)
        chunk.store_mixed(out_SBHC)

    items.each_chunk(work, backward=False)
    return ()


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
    items = _Items.of(q_SBHC, kv_TBC, selection_BSK, call)
    if q_grad_SBHC is not None:
        q_grad_SBHC.zero_()

    def work(chunk: _Chunk) -> None:
        chunk.attend(q_SBHC, kv_TBC, call.softmax_scale)
        chunk.differentiate(out_grad_SBHC, call.softmax_scale)
        if q_grad_SBHC is not None:
            chunk.mix(chunk.logit_grad_IHW)
            chunk.store_mixed(q_grad_SBHC)
        if sum_XC is not None:
            _add_in_row_order(sum_XC, chunk.slots, chunk.latent_grad())

    items.each_chunk(work, backward=True)


def smallest_attend_bytes(*, batch: int, heads: int, channels: int, dtype: torch.dtype, slots: int) -> int:
    """The least `attend_bytes` that works: backward of one row of every sample, queries and latents of `dtype`."""
    operands = {torch.promote_types(dtype, torch.float32), torch.promote_types(dtype, torch.bfloat16)}
    items = (_Item(heads, channels, dtype, dtype, of_products) for of_products in operands)
    return max(item.workspace(batch, round_up(slots, LANES), backward=True).nbytes for item in items)


@dataclass(frozen=True)
class _Item:
    """What the scratch of an item follows from beside its slots."""

    heads: int
    channels: int
    query_dtype: torch.dtype
    latent_dtype: torch.dtype
    operands: torch.dtype

    @classmethod
    def of(cls, q_SBHC: Tensor, kv_TBC: Tensor) -> _Item:
        dtypes = q_SBHC.dtype, kv_TBC.dtype
        wide = torch.promote_types(torch.promote_types(*dtypes), torch.float32)
        narrow = operands_of(q_SBHC.device, *dtypes) == torch.bfloat16
        return cls(q_SBHC.shape[2], kv_TBC.shape[2], *dtypes, torch.bfloat16 if narrow else wide)

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
        converted = items if pads or self.latent_dtype != self.operands else 0
        new = partial(Buffer, dtype=self.dtype)
        operand = partial(Buffer, dtype=self.operands)
        tall = partial(operand, zeroed=pads or heads != self.heads)
        return Workspace(
            {
                **Slots.workspace(items, slots).buffers,
                "gathered_IWC": Buffer((converted, slots, self.channels), self.latent_dtype),
                "latent_IWC": operand((items, slots, channels), zeroed=pads),
                "query_IHC": tall((items, heads, channels)),
                "mixed_IHC": new((items, heads, channels)),
                "logits_IHW": new((items, heads, slots)),
                "weights_IHW": new((items, heads, slots)),
                "out_grad_IHC": tall((own, heads, channels)),
                "logit_grad_IHW": new((own, heads, slots)),
                "halves": operand((items if self.operands != self.dtype else 0, 2 * heads, slots)),
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


@dataclass(frozen=True, eq=False)
class _Items:
    """The items of a call in their classes."""

    item: _Item
    classes: tuple[SlotClass, ...]
    tail_slots: int
    kv_TBC: Tensor
    selection_BSK: Tensor
    call: AttentionCall

    @classmethod
    def of(cls, q_SBHC: Tensor, kv_TBC: Tensor, selection_BSK: Tensor, call: AttentionCall) -> _Items:
        budget, pool_size = selection_BSK.shape[2], call.layout.pool_size
        tail_slots = pool_size - 1 if call.always_select_tail else 0
        item = _Item.of(q_SBHC, kv_TBC)
        slots = round_up(budget * pool_size + tail_slots, LANES)
        smallest = item.workspace(call.layout.batch, slots, backward=True).nbytes
        if call.attend_bytes < smallest:
            raise ValueError(
                f"attend_bytes is {call.attend_bytes}; accepted are at least {smallest}, which hold one row of "
                f"{call.layout.batch} samples with {slots} token slots (padded)"
            )
        classes = slot_classes(call.bounds, budget=budget, pool_size=pool_size, tail_slots=tail_slots)
        return cls(item, classes, tail_slots, kv_TBC, selection_BSK, call)

    def each_chunk(self, work: Callable[[_Chunk], None], *, backward: bool) -> None:
        """Call `work` on all items, chunk by chunk. What a class holds is free before the next one takes its own."""
        with product_precision(self.kv_TBC.device.type, self.item.operands):
            for group in self.classes:
                self._each_chunk_of_class(group, work, backward=backward)

    def _each_chunk_of_class(self, group: SlotClass, work: Callable[[_Chunk], None], *, backward: bool) -> None:
        chunks = self._chunks(group)
        held = self.item.workspace(len(chunks[0]), group.slots, backward=backward).allocate(self.kv_TBC.device)
        token_IW, unused_IW = held.pop("token_IW"), held.pop("unused_IW")
        for item_I in chunks:
            count = len(item_I)
            slots = Slots.place(
                token_IW[:count],
                unused_IW[:count],
                self.selection_BSK,
                self.call.layout,
                self.call.bounds,
                item_I,
                pools=group.pools,
                tail_slots=self.tail_slots,
            )
            work(_Chunk(item_I, slots, **{name: buffer[:count] for name, buffer in held.items()}))

    def _chunks(self, group: SlotClass) -> tuple[Tensor, ...]:
        """The items of a class, as many at a time as backward, the greedier pass, can hold."""
        fixed, one = (self.item.workspace(items, group.slots, backward=True).nbytes for items in (0, 1))
        chunks: tuple[Tensor, ...] = group.item_I.split((self.call.attend_bytes - fixed) // (one - fixed))
        return chunks


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
    halves: Tensor
    delta_IH1: Tensor
    latent_grad_IWC: Tensor

    def attend(self, q_SBHC: Tensor, kv_TBC: Tensor, softmax_scale: float) -> None:
        """Fill `latent`, `query` and `weights`: zeros in unused slots, NaN in empty items."""
        gathered_IWC = self.gathered_IWC if len(self.gathered_IWC) else self.latent_IWC
        torch.index_select(kv_TBC.flatten(0, 1), 0, self.slots.token_IW.flatten(), out=gathered_IWC.flatten(0, 1))
        if gathered_IWC is not self.latent_IWC:
            self.latent_IWC[..., : kv_TBC.shape[2]] = gathered_IWC
        self._load(self.query_IHC, q_SBHC)
        multiply(self.query_IHC, self.latent_IWC.mT, out=self.logits_IHW).mul_(softmax_scale)
        self.logits_IHW.masked_fill_(self.slots.unused_IW.unsqueeze(1), -math.inf)
        torch.softmax(self.logits_IHW, -1, out=self.weights_IHW)

    def differentiate(self, out_grad_SBHC: Tensor, softmax_scale: float) -> None:
        """Fill `logit_grad` with the gradient of the bare logits: `scale * p * (dp - sum(p * dp))`. Spends `logits`."""
        self._load(self.out_grad_IHC, out_grad_SBHC)
        multiply(self.out_grad_IHC, self.latent_IWC.mT, out=self.logit_grad_IHW)
        torch.mul(self.weights_IHW, self.logit_grad_IHW, out=self.logits_IHW)
        torch.sum(self.logits_IHW, -1, keepdim=True, out=self.delta_IH1)
        self.logit_grad_IHW.sub_(self.delta_IH1).mul_(self.weights_IHW).mul_(softmax_scale)

    def latent_grad(self) -> Tensor:
        """What every slot contributes to the gradient of its latent, as value and as key, `[i, w, c]`, padded."""
        weigh(self.weights_IHW.mT, self.out_grad_IHC, self.halves, self.latent_grad_IWC)
        return weigh(self.logit_grad_IHW.mT, self.query_IHC, self.halves, self.latent_grad_IWC, add=True)

    def mix(self, weights_IHW: Tensor) -> Tensor:
        """Fill and return `mixed`: the latents of an item, weighted."""
        return weigh(weights_IHW, self.latent_IWC, self.halves, self.mixed_IHC)

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
