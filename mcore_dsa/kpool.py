"""k-pool layout: documents cut into pools, what each row sees of them, pool ids expanded back to tokens.

Letters of shapes: `mcore_dsa/__init__.py`.

Left padding, right padding and packed documents are one mechanism: a sample is a list of segments, every segment is
cut into pools from its own first token, and an incomplete pool at its end is no pool. Pools are numbered through the
whole sample in token order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mcore_dsa.checks import check_bool, check_device, check_integer, check_natural, check_positive, kind_of
from mcore_dsa.eager import uncompiled

# Token ids that `expand_selection` works on at a time.
_EXPAND_ELEMENTS = 1 << 20
# Pool ids and token ids are int32.
_IDS = 2**31


@dataclass(frozen=True, eq=False)
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
        if num_tokens > _IDS or first_pool_id + num_tokens // pool_size > _IDS:
            raise ValueError(
                f"num_tokens is {num_tokens} and first_pool_id {first_pool_id}; accepted are sizes whose token ids and "
                "pool ids fit int32"
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

    def bounds(self, position_S: Tensor) -> RowBounds:
        """What rows standing at tokens `position_S`, integer `[s]`, see; nothing on padding or below 0."""
        check_integer("position_S", position_S, ndim=1)
        check_device(self.device, position_S=position_S)
        position_S = position_S.long()
        position_BS = position_S.expand(self.batch, -1).contiguous()
        segment = torch.searchsorted(self.segment_start_BN, position_BS, right=True) - 1
        inside = segment >= 0
        segment = segment.clamp(min=0)
        inside &= position_BS < self.segment_end_BN.gather(1, segment)
        seen_BS = (position_BS + 1 - self.segment_start_BN.gather(1, segment)) * inside
        return RowBounds(
            position_S,
            self.segment_first_pool_BN.gather(1, segment),
            seen_BS // self.pool_size,
            seen_BS % self.pool_size,
        )


@dataclass(frozen=True, eq=False)
class RowBounds:
    """What each row of a call sees of its own segment, on the layout's device: located once, read by every layer.

    Attributes:
        position_S: int64, the token a row stands at.
        first_BS: int64, id of the first pool of the row's segment.
        visible_BS: int64, complete pools the row sees, from `first_BS` on: those whose last token is at or before it.
        tail_BS: int64, tokens of the row's own incomplete pool, of which the row's is the last.
    """

    position_S: Tensor
    first_BS: Tensor
    visible_BS: Tensor
    tail_BS: Tensor

    @classmethod
    def from_host(cls, position_S: Tensor, bounds_XBS: Tensor, device: torch.device) -> RowBounds:
        """Bounds known on the host, of which no read waits for the device.

        Args:
            position_S, bounds_XBS: int64 on the CPU, the latter `first_BS`, `visible_BS` and `tail_BS`, stacked.
        """
        bounds = cls(position_S.to(device, non_blocking=True), *bounds_XBS.to(device, non_blocking=True))
        vars(bounds)["_host_XBS"] = bounds_XBS
        return bounds

    @property
    def rows(self) -> int:
        return self.position_S.shape[0]

    @cached_property
    def _host_XBS(self) -> Tensor:
        if "_taken_from" in vars(self):
            whole, rows = vars(self)["_taken_from"]
            host_XBS: Tensor = whole._host_XBS[:, :, rows if isinstance(rows, slice) else rows.cpu()]
            return host_XBS
        return torch.stack([self.first_BS, self.visible_BS, self.tail_BS]).cpu()

    @property
    def on_host(self) -> tuple[Tensor, Tensor]:
        """`first_BS` and `visible_BS` on the CPU; the first call waits for the device, no later one does."""
        return self._host_XBS[0], self._host_XBS[1]

    @property
    def tail_on_host(self) -> Tensor:
        """`tail_BS` on the CPU, which comes with `on_host`."""
        return self._host_XBS[2]

    @cached_property
    def max_visible(self) -> int:
        """The greatest of `visible_BS`, 0 where there are no rows; waits for the device once."""
        _, visible_BS = self.on_host
        return int(visible_BS.max()) if visible_BS.numel() else 0

    def take(self, rows: slice | Tensor) -> RowBounds:
        """The bounds of some of the rows, by a slice or by int64 indices; to the host come those of all, once."""
        # Whatever mode asks first, a later step of training may save them for its backward.
        with torch.inference_mode(False):
            taken = RowBounds(
                self.position_S[rows], self.first_BS[:, rows], self.visible_BS[:, rows], self.tail_BS[:, rows]
            )
        vars(taken)["_taken_from"] = self, rows
        return taken


def check_layout(layout: PoolLayout) -> None:
    """Refuse anything but a `PoolLayout`."""
    if not isinstance(layout, PoolLayout):
        raise TypeError(f"layout is {kind_of(layout)}; accepted is a PoolLayout")


@uncompiled
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
    check_bool(always_select_tail=always_select_tail)
    check_selection(selection_BSK, layout, position_S)
    bounds = layout.bounds(position_S)
    batch, rows, budget = selection_BSK.shape
    width = budget * layout.pool_size + (layout.pool_size - 1 if always_select_tail else 0)
    token_BSW = selection_BSK.new_empty(batch, rows, width)
    unseen = torch.zeros((), dtype=torch.bool, device=layout.device)
    step = max(1, _EXPAND_ELEMENTS // max(1, batch * width))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        token_BSW[:, part], unseen_here = expand_unchecked(
            selection_BSK[:, part], layout, bounds.take(part), always_select_tail=always_select_tail
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
    selection_BSK: Tensor, layout: PoolLayout, bounds: RowBounds, *, always_select_tail: bool
) -> tuple[Tensor, Tensor]:
    """`expand_selection` for ids already inside the layout; chunks of rows may call it one after another.

    Returns: the token ids and a bool scalar on the device, True if some id was not visible to its row. It is the
    caller's to pass to `raise_if_unseen`, once, so that a chunked loop costs one host synchronisation.
    """
    pool_size = layout.pool_size
    used = selection_BSK >= 0
    rank = selection_BSK - bounds.first_BS.unsqueeze(-1)
    unseen = (used & ((rank < 0) | (rank >= bounds.visible_BS.unsqueeze(-1)))).any()
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
        tail_count_BS1 = bounds.tail_BS.unsqueeze(-1)
        tail = bounds.position_S.unsqueeze(-1) + 1 - tail_count_BS1 + offset[:-1]
        token_BSW[..., budget * pool_size :] = tail.masked_fill_(offset[:-1] >= tail_count_BS1, -1)
    return token_BSW, unseen


def raise_if_unseen(unseen: Tensor) -> None:
    if bool(unseen):
        raise ValueError(
            "selection_BSK holds a pool id that its row cannot see (another segment's, an incomplete or a future "
            "pool); accepted are the visible complete pools of the row's own segment"
        )
