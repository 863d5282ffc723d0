"""k-pool layout: documents cut into pools, pools compressed to keys, pool ids expanded back to tokens.

Shapes by suffix: S rows (queries), T tokens (keys), B batch, N segments, P pools, K selected pools a row, W selected
tokens a row, D index channels, J tokens of one pool (`pool_size`).

Left padding, right padding and packed documents are one mechanism: a sample is a list of segments, every segment is
cut into pools from its own first token, and an incomplete pool at its end is no pool. Pools are numbered through the
whole sample in token order.
"""

from __future__ import annotations

import functools
import math
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_dsa.checks import check_device, check_floating, check_integer, check_natural, check_positive, kind_of

# fp32 elements of scratch in `compress_keys`, which is elementwise: the size moves no bit of the result.
_COMPRESS_ELEMENTS = 1 << 20
# Token ids that `expand_selection` works on at a time.
_EXPAND_ELEMENTS = 1 << 20

_LOG2_E = 1.4426950408889634
# ln 2 in two parts: the first has 10 significant bits, so that n * _LN2_HIGH is exact for every |n| < 2**14.
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2.0) - _LN2_HIGH


@dataclass(frozen=True)
class PoolLayout:
    """Where the pools of a batch lie. Build one with the class methods, which check what they are given.

    Attributes:
        pool_size: tokens a pool compresses, `index_kpool`.
        num_tokens: tokens of the key tensor, padding included.
        segment_start_BN, segment_end_BN: int64, half-open token ranges of the segments, ascending and disjoint.
        segment_first_pool_BN: int64, id of each segment's first pool.
        pool_token_BP: int64 `[b, num_tokens // pool_size]`, first token of each pool; -1 where the sample has fewer.
        first_pool_id: id of the pool in slot 0 (0 unless the pools continue an earlier numbering).
    """

    pool_size: int
    num_tokens: int
    segment_start_BN: Tensor
    segment_end_BN: Tensor
    segment_first_pool_BN: Tensor
    pool_token_BP: Tensor
    first_pool_id: int = 0

    @classmethod
    def from_segments(
        cls,
        segment_start_BN: Tensor,
        segment_end_BN: Tensor,
        *,
        num_tokens: int,
        pool_size: int,
        first_pool_id: int = 0,
    ) -> PoolLayout:
        """Layout of explicit half-open segments, integer `[b, n]`, one row of segments a sample.

        Segments must be ascending and disjoint inside `[0, num_tokens)`; empty ones are allowed, tokens outside every
        segment are padding. Checking costs one host synchronisation, whatever the number of segments.

        Raises: TypeError for a non-integer tensor, ValueError for a bad shape, order, overlap or range.
        """
        check_integer("segment_start_BN", segment_start_BN, ndim=2)
        check_integer("segment_end_BN", segment_end_BN, ndim=2)
        if segment_start_BN.shape != segment_end_BN.shape or segment_start_BN.shape[1] == 0:
            raise ValueError(
                f"segment_start_BN has shape {tuple(segment_start_BN.shape)} and segment_end_BN "
                f"{tuple(segment_end_BN.shape)}; accepted are equal shapes [batch, segments >= 1]"
            )
        check_device(segment_start_BN.device, segment_end_BN=segment_end_BN)
        check_positive("pool_size", pool_size)
        check_natural("num_tokens", num_tokens)
        check_natural("first_pool_id", first_pool_id)
        if first_pool_id + num_tokens // pool_size > 2**31:
            raise ValueError(
                f"num_tokens is {num_tokens} and first_pool_id {first_pool_id}; accepted are sizes whose pool ids fit "
                "int32"
            )
        # Copies: a data loader that reuses its buffer must not move the segments of a layout made from it.
        start = segment_start_BN.to(torch.int64, copy=True).contiguous()
        end = segment_end_BN.to(torch.int64, copy=True).contiguous()
        previous_end = torch.cat([torch.zeros_like(end[:, :1]), end[:, :-1]], dim=1)
        bad = (start < previous_end) | (end < start) | (end > num_tokens)
        if bool(bad.any()):
            sample, index = (int(i) for i in bad.nonzero()[0])
            raise ValueError(
                f"segment {index} of sample {sample} is [{int(start[sample, index])}, {int(end[sample, index])}) "
                f"after {int(previous_end[sample, index])}: segments are not ascending, disjoint and inside "
                f"[0, {num_tokens}); accepted are 0 <= start[i] <= end[i] <= start[i + 1] and end <= num_tokens"
            )
        pools = (end - start) // pool_size
        pools_through = pools.cumsum(1)
        first_pool = pools_through - pools
        slot = torch.arange(num_tokens // pool_size, device=start.device).expand(start.shape[0], -1).contiguous()
        segment = torch.searchsorted(pools_through, slot, right=True)
        exists = segment < start.shape[1]
        segment = segment.clamp(max=start.shape[1] - 1)
        token = start.gather(1, segment) + (slot - first_pool.gather(1, segment)) * pool_size
        token = token.masked_fill(~exists, -1)
        return cls(pool_size, num_tokens, start, end, first_pool + first_pool_id, token, first_pool_id)

    @classmethod
    def dense(
        cls, num_tokens: int, *, pool_size: int, batch: int = 1, device: torch.device | str | None = None
    ) -> PoolLayout:
        """One unpadded document of `num_tokens` tokens in each of `batch` samples."""
        check_natural("num_tokens", num_tokens)
        check_natural("batch", batch)
        start = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return cls.from_segments(start, start + num_tokens, num_tokens=num_tokens, pool_size=pool_size)

    @classmethod
    def from_padding_mask(cls, valid_BT: Tensor, *, pool_size: int) -> PoolLayout:
        """One document a sample, bool `[b, t]` True at its tokens: left, right or both-sided padding.

        Raises: TypeError unless bool, ValueError for a mask with a hole (the tail would have no meaning).
        """
        if not isinstance(valid_BT, Tensor) or valid_BT.dtype != torch.bool:
            raise TypeError(f"valid_BT is {kind_of(valid_BT)}; accepted is a torch.bool tensor")
        if valid_BT.ndim != 2:
            raise ValueError(f"valid_BT has shape {tuple(valid_BT.shape)}; accepted is [batch, tokens]")
        num_tokens = valid_BT.shape[1]
        count = valid_BT.sum(1, keepdim=True)
        position = torch.arange(num_tokens, device=valid_BT.device)
        start = torch.where(valid_BT, position, num_tokens).amin(1, keepdim=True) if num_tokens else count
        holes = ((position >= start) & (position < start + count)) != valid_BT
        if bool(holes.any()):
            raise ValueError(
                f"valid_BT has a hole between valid tokens in samples {holes.any(1).nonzero().flatten().tolist()}; "
                "accepted is one unbroken run of True a sample"
            )
        start = start.clamp(max=num_tokens)
        return cls.from_segments(start, start + count, num_tokens=num_tokens, pool_size=pool_size)

    @classmethod
    def from_cu_seqlens(
        cls, cu_seqlens: Tensor, *, pool_size: int, num_tokens: int | None = None, batch: int = 1
    ) -> PoolLayout:
        """Packed documents, integer `[documents + 1]` cumulative lengths from 0, the same in every sample.

        `num_tokens` is the pack's length where padding follows the last document.
        """
        check_integer("cu_seqlens", cu_seqlens, ndim=1)
        check_natural("batch", batch)
        if cu_seqlens.numel() < 2 or int(cu_seqlens[0]) != 0:
            begin = cu_seqlens[:2].tolist()
            raise ValueError(
                f"cu_seqlens holds {cu_seqlens.numel()} values, {begin} at its head; accepted are at least two, the "
                "first 0"
            )
        total = int(cu_seqlens[-1]) if num_tokens is None else num_tokens
        boundary = cu_seqlens.long().expand(batch, -1)
        return cls.from_segments(boundary[:, :-1], boundary[:, 1:], num_tokens=total, pool_size=pool_size)

    @property
    def batch(self) -> int:
        return self.segment_start_BN.shape[0]

    @property
    def num_pools(self) -> int:
        """Pool slots of a sample: `num_tokens // pool_size`, as many as any segmentation can fill."""
        return self.pool_token_BP.shape[1]

    @property
    def device(self) -> torch.device:
        return self.segment_start_BN.device

    def visible(self, position_S: Tensor) -> tuple[Tensor, Tensor]:
        """Visible complete pools of each row's own segment: int64 `(first_pool_BS, count_BS)`.

        `position_S` is the token a row stands at; a row on padding or at a negative position sees nothing. A pool is
        visible when its last token is at or before the row.
        """
        first_pool, seen = self._locate(position_S)
        return first_pool, seen // self.pool_size

    def tail(self, position_S: Tensor) -> tuple[Tensor, Tensor]:
        """The row's own incomplete pool: int64 `(first_token_BS, count_BS)`, `count = seen tokens % pool_size`."""
        _, seen = self._locate(position_S)
        count = seen % self.pool_size
        return position_S.long() + 1 - count, count

    def _locate(self, position_S: Tensor) -> tuple[Tensor, Tensor]:
        check_integer("position_S", position_S, ndim=1)
        check_device(self.device, position_S=position_S)
        position = position_S.long().expand(self.batch, -1).contiguous()
        segment = torch.searchsorted(self.segment_start_BN, position, right=True) - 1
        inside = segment >= 0
        segment = segment.clamp(min=0)
        inside &= position < self.segment_end_BN.gather(1, segment)
        seen = (position + 1 - self.segment_start_BN.gather(1, segment)) * inside
        return self.segment_first_pool_BN.gather(1, segment), seen


def check_layout(layout: PoolLayout) -> None:
    """Refuse anything but a `PoolLayout`."""
    if not isinstance(layout, PoolLayout):
        raise TypeError(f"layout is {kind_of(layout)}; accepted is a PoolLayout")


@torch.no_grad()
def compress_keys(key_TBD: Tensor, gate_TBD: Tensor, ape_JD: Tensor, layout: PoolLayout) -> Tensor:
    """Compressed key of every pool: softmax over the pool's tokens, per channel, of `gate + ape`, times the keys.

    Args:
        key_TBD, gate_TBD: floating `[t, b, d]`, the normalised index keys and their compression gates.
        ape_JD: floating `[pool_size, d]`, learned offset of each place in a pool.

    Returns: `pool_key_PBD` `[num_pools, b, d]` in the dtype of the keys, accumulated in fp32; zeros in slots that hold
    no pool. Each value depends on its pool's own keys and gates and on `ape` alone, bit for bit on every device:
    only operations that IEEE 754 rounds exactly are used, `exp` included, in one written order.

    Source: transformers' `Glm5NextTextIndexer.get_pooled_states`.
    """
    check_layout(layout)
    check_floating("key_TBD", key_TBD, (layout.num_tokens, layout.batch, None))
    check_floating("gate_TBD", gate_TBD, tuple(key_TBD.shape))
    check_floating("ape_JD", ape_JD, (layout.pool_size, key_TBD.shape[-1]))
    check_device(layout.device, key_TBD=key_TBD, gate_TBD=gate_TBD, ape_JD=ape_JD)
    num_pools, batch, channels = layout.num_pools, layout.batch, key_TBD.shape[-1]
    pool_key_PBD = key_TBD.new_empty(num_pools, batch, channels)
    ape = ape_JD.float()
    sample = torch.arange(batch, device=layout.device)
    step = max(1, _COMPRESS_ELEMENTS // max(1, batch * channels * layout.pool_size))
    for begin in range(0, num_pools, step):
        token = layout.pool_token_BP[:, begin : begin + step].T
        exists = (token >= 0).unsqueeze(-1)
        token = token.clamp(min=0)
        logits = [gate_TBD[token + j, sample].float() + ape[j] for j in range(layout.pool_size)]
        highest = logits[0]
        for logit in logits[1:]:
            highest = torch.maximum(highest, logit)
        weights = [_exp_of_nonpositive(logit - highest) for logit in logits]
        total = weights[0]
        for weight in weights[1:]:
            total = total + weight
        pooled = torch.zeros_like(total)
        for j, weight in enumerate(weights):
            pooled = pooled + (weight / total) * key_TBD[token + j, sample].float()
        pool_key_PBD[begin : begin + step] = torch.where(exists, pooled, 0.0)
    return pool_key_PBD


def compress_bytes(pools: int, dim: int, pool_size: int) -> int:
    """Bytes that `compress_keys` takes beside its result: logits, weights, and a few values a pool and channel."""
    elements = min(_COMPRESS_ELEMENTS, pools * dim * pool_size)
    return elements * (8 + 28 // pool_size)


@functools.cache
def key_fingerprint(device: torch.device, dim: int) -> int:
    """Digest of the bits to which this device compresses fixed keys; equal on two ranks whose pool keys agree."""
    generator = torch.Generator("cpu").manual_seed(21)
    layout = PoolLayout.dense(256, pool_size=4, device=device)
    key, gate = (torch.randn(256, 1, dim, generator=generator, dtype=torch.float32, device="cpu") for _ in range(2))
    ape = torch.zeros(4, dim, dtype=torch.float32, device=device)
    pool_key = compress_keys(key.to(device), (4 * gate).to(device), ape, layout)
    return zlib.crc32(pool_key.cpu().numpy().tobytes())


def expand_selection(
    selection_BSK: Tensor, layout: PoolLayout, position_S: Tensor, *, always_select_tail: bool
) -> Tensor:
    """Token ids of selected pools, with the row's tail behind them.

    Args:
        selection_BSK: int32 `[b, s, budget]`, pool ids, -1 in unused slots.
        position_S: integer `[s]`, the token each row stands at.

    Returns: `token_BSW` int32 `[b, s, budget * pool_size + pool_size - 1]` (without the tail `budget * pool_size`):
    pool by pool from column 0, the tail from column `budget * pool_size`, -1 elsewhere.

    Raises: TypeError unless int32, ValueError for an id that is not a complete pool visible to its row.
    """
    check_selection(selection_BSK, layout, position_S)
    batch, rows, budget = selection_BSK.shape
    width = budget * layout.pool_size + (layout.pool_size - 1 if always_select_tail else 0)
    token_BSW = selection_BSK.new_empty(batch, rows, width)
    unseen = torch.zeros((), dtype=torch.bool, device=layout.device)
    step = max(1, _EXPAND_ELEMENTS // max(1, batch * width))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        token_BSW[:, part], unseen_here = expand_unchecked(
            selection_BSK[:, part], layout, position_S[part], always_select_tail=always_select_tail
        )
        unseen |= unseen_here
    raise_if_unseen(unseen)
    return token_BSW


def check_selection(selection_BSK: Tensor, layout: PoolLayout, position_S: Tensor) -> None:
    """Refuse what cannot be a selection of this layout, before anything is indexed with it."""
    check_layout(layout)
    if not isinstance(selection_BSK, Tensor) or selection_BSK.dtype != torch.int32:
        raise TypeError(f"selection_BSK is {kind_of(selection_BSK)}; accepted is torch.int32")
    check_integer("position_S", position_S, ndim=1)
    if selection_BSK.ndim != 3 or selection_BSK.shape[:2] != (layout.batch, position_S.shape[0]):
        raise ValueError(
            f"selection_BSK has shape {tuple(selection_BSK.shape)}; accepted is "
            f"[{layout.batch}, {position_S.shape[0]}, budget]"
        )
    check_device(layout.device, selection_BSK=selection_BSK, position_S=position_S)
    if selection_BSK.numel():
        low, high = (int(v) for v in torch.stack(selection_BSK.aminmax()).tolist())
        end = layout.first_pool_id + layout.num_pools
        if low < -1 or high >= end or (0 <= low < layout.first_pool_id):
            raise ValueError(
                f"selection_BSK holds pool ids from {low} to {high}; accepted are -1 and "
                f"[{layout.first_pool_id}, {end})"
            )


def expand_unchecked(
    selection_BSK: Tensor, layout: PoolLayout, position_S: Tensor, *, always_select_tail: bool
) -> tuple[Tensor, Tensor]:
    """`expand_selection` for ids already inside the layout; chunks of rows may call it one after another.

    Returns: the token ids and a bool scalar on the device, True if some id was not visible to its row. It is the
    caller's to pass to `raise_if_unseen`, once, so that a chunked loop costs one host synchronisation.
    """
    pool_size = layout.pool_size
    first_pool_BS, visible_BS = layout.visible(position_S)
    used = selection_BSK >= 0
    rank = selection_BSK - first_pool_BS.unsqueeze(-1)
    unseen = (used & ((rank < 0) | (rank >= visible_BS.unsqueeze(-1)))).any()
    slot = (selection_BSK.long() - layout.first_pool_id).clamp_(0, max(0, layout.num_pools - 1))
    batch, rows, budget = selection_BSK.shape
    tail_width = pool_size - 1 if always_select_tail else 0
    token_BSW = selection_BSK.new_empty(batch, rows, budget * pool_size + tail_width)
    offset = torch.arange(pool_size, device=layout.device, dtype=torch.int32)
    if layout.num_pools:
        first_token = layout.pool_token_BP.gather(1, slot.flatten(1)).view_as(slot).to(torch.int32)
        tokens = (first_token.unsqueeze(-1) + offset).masked_fill_(~used.unsqueeze(-1), -1)
        token_BSW[..., : budget * pool_size] = tokens.flatten(2)
    else:
        token_BSW[..., : budget * pool_size] = -1
    if tail_width:
        tail_start, tail_count = layout.tail(position_S)
        tail = tail_start.unsqueeze(-1) + offset[:-1]
        token_BSW[..., budget * pool_size :] = tail.masked_fill_(offset[:-1] >= tail_count.unsqueeze(-1), -1)
    return token_BSW, unseen


def raise_if_unseen(unseen: Tensor) -> None:
    if bool(unseen):
        raise ValueError(
            "selection_BSK holds a pool id that its row cannot see (another segment's, an incomplete or a future "
            "pool); accepted are the visible complete pools of the row's own segment"
        )


def _exp_of_nonpositive(x: Tensor) -> Tensor:
    """fp32 `exp(x)` for `x <= 0`, within 2 ulp; below -87 the value at -87 (2e-38).

    torch's own `exp` gives its vectorised body and its scalar remainder other last bits on some builds, so the bits
    of a pool's key could depend on where the pool lies in a buffer. Here every step is a single IEEE operation:
    x = n ln 2 + r, |r| <= ln(2) / 2, the Taylor series of exp(r) to r**7 / 7! (truncation 5e-9), times 2**n.
    """
    x = x.clamp(min=-87.0)
    n = (x * _LOG2_E).round_()
    r = (x - n * _LN2_HIGH).sub_(n * _LN2_LOW)
    series = torch.full_like(r, 1.0 / math.factorial(7))
    for k in range(6, -1, -1):
        series.mul_(r).add_(1.0 / math.factorial(k))
    # A NaN has no integer exponent; any will do, since the series is NaN as well.
    exponent = n.nan_to_num_(0.0).to(torch.int32)
    return series.mul_(((exponent + 127) << 23).view(torch.float32))
