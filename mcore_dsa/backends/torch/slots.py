"""The token slots of a row: as many as it can fill, whatever the budget, and which tokens stand in them.

Letters of shapes: `mcore_dsa/__init__.py`. An item is a row of one sample, numbered `row * batch + sample`.

Items come in classes of equal width. An item's class follows from how many pools it sees itself, so that neither other
rows nor other samples move its bits, and a pack of short documents pays for what they hold and not for the budget.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mcore_dsa.kpool import PoolLayout, RowBounds
from mcore_dsa.workspace import Buffer, Workspace

LANES = 16
# Pool ids checked at a time: what they take stays in a core's cache.
_CHECK_ELEMENTS = 1 << 16
_GREATEST = 0x7FFFFFFF

# Layers and passes of a micro-batch share its bounds, and with them what follows from them.
_classes: WeakKeyDictionary[RowBounds, dict[tuple[int, int, int], tuple[SlotClass, ...]]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class SlotClass:
    """The items that have tokens and see at most `pools` pools, or of `pools`, the budget, any number.

    Attributes:
        pools: leading columns of the selection that these items can fill.
        slots: token slots of an item: the pools', then those of the tail, then padding.
        item_I: int64, ascending.
    """

    pools: int
    slots: int
    item_I: Tensor


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def slot_classes(bounds: RowBounds, *, budget: int, pool_size: int, tail_slots: int) -> tuple[SlotClass, ...]:
    """The classes that items fall in, narrowest first; an item without any token falls in none."""
    known = _classes.setdefault(bounds, {})
    key = (budget, pool_size, tail_slots)
    if key not in known:
        extents = _extents(*key)
        _, visible_BS = bounds.on_host
        filled_BS = visible_BS.clamp(max=budget)
        some_BS = (filled_BS > 0) | (bounds.tail_on_host > 0) if tail_slots else filled_BS > 0
        class_BS = torch.bucketize(filled_BS, torch.tensor([pools for pools, _ in extents], device="cpu"))
        class_X = class_BS.masked_fill(~some_BS, len(extents)).T.flatten()
        counts = class_X.bincount(minlength=len(extents) + 1).tolist()
        item_X = class_X.argsort(stable=True).to(bounds.position_S.device)
        groups = zip(extents, item_X.split(counts)[: len(extents)], strict=True)
        known[key] = tuple(SlotClass(*extent, item_I) for extent, item_I in groups if len(item_I))
    return known[key]


def _extents(budget: int, pool_size: int, tail_slots: int) -> list[tuple[int, int]]:
    """Pools and slots of every class: powers of two below what the whole budget takes, then that."""
    full, slots = round_up(budget * pool_size + tail_slots, LANES), LANES
    extents = []
    while slots < full:
        if slots >= tail_slots:
            extents.append(((slots - tail_slots) // pool_size, slots))
        slots *= 2
    return [*extents, (budget, full)]


@dataclass(frozen=True)
class Slots:
    """The token slots of some items.

    Attributes:
        token_IW: int64, rows of the latents flattened over tokens and samples; an unused slot repeats the item's last
            token, so that what it reads is finite wherever the item's own tokens are.
        unused_IW: bool, slots that hold no token.
        empty_I1: bool, items without any token; they read one that is not theirs.
    """

    token_IW: Tensor
    unused_IW: Tensor
    empty_I1: Tensor

    @staticmethod
    def workspace(items: int, slots: int) -> Workspace:
        return Workspace(
            {
                "token_IW": Buffer((items, slots), torch.int64),
                "unused_IW": Buffer((items, slots), torch.bool),
                # Selected ids, as they come and as places in the table of pools; first tokens of the pools.
                "pools": Buffer((items, slots, 3), torch.int64, inside=True),
                "of an item": Buffer((items, 12), torch.int64, inside=True),
            }
        )

    @classmethod
    def place(
        cls,
        token_IW: Tensor,
        unused_IW: Tensor,
        selection_BSK: Tensor,
        layout: PoolLayout,
        bounds: RowBounds,
        item_I: Tensor,
        *,
        pools: int,
        tail_slots: int,
    ) -> Slots:
        """Fill the two buffers with the slots of `item_I`, of a class of `pools` pools."""
        size, batch = layout.pool_size, layout.batch
        row_I, sample_I = item_I // batch, item_I % batch
        offset_J = torch.arange(size, device=item_I.device)
        filled = pools * size
        if pools and layout.num_pools:
            id_IK = selection_BSK[sample_I, row_I, :pools]
            # An id that is none of the layout's is found by `find_faults`, and read nowhere outside of it before.
            slot_IK = id_IK.long().sub_(layout.first_pool_id).clamp_(0, layout.num_pools - 1)
            first_IK = layout.pool_token_BP[sample_I.unsqueeze(1), slot_IK].masked_fill_(id_IK < 0, -size)
            torch.add(first_IK.unsqueeze(2), offset_J, out=token_IW[:, :filled].unflatten(1, (pools, size)))
        else:
            token_IW[:, :filled] = -1
        if tail_slots:
            tail_I1, position_I1 = bounds.tail_BS[sample_I, row_I].unsqueeze(1), bounds.position_S[row_I].unsqueeze(1)
            tail_IJ = (position_I1 + 1 - tail_I1) + offset_J[:-1]
            token_IW[:, filled : filled + tail_slots] = tail_IJ.masked_fill_(offset_J[:-1] >= tail_I1, -1)
        token_IW[:, filled + tail_slots :] = -1
        torch.lt(token_IW, 0, out=unused_IW)
        last_I1 = token_IW.amax(1, keepdim=True)
        torch.where(unused_IW, last_I1.clamp(min=0), token_IW, out=token_IW)
        token_IW.mul_(batch).add_(sample_I.unsqueeze(1))
        return cls(token_IW, unused_IW, last_I1 < 0)


def find_faults(selection_BSK: Tensor, bounds: RowBounds, scratch_bytes: int) -> Tensor:
    """A bool pair on the device: an id that its row cannot see, and ids that do not ascend with -1 behind them.

    Of ids that ascend, the first and the greatest tell whether all are visible; and no row can then fill more columns
    than it sees pools, so that columns behind are only read.
    """
    batch, rows, budget = selection_BSK.shape
    fault_2 = torch.zeros(2, dtype=torch.bool, device=selection_BSK.device)
    if selection_BSK.numel() == 0:
        return fault_2
    width = max(1, min(budget, bounds.max_visible))
    step = min(_CHECK_ELEMENTS // (batch * width), scratch_bytes // _fault_workspace(batch, 1, width).nbytes)
    for start in range(0, rows, max(1, step)):
        part = slice(start, start + max(1, step))
        id_BRK, first_BR = selection_BSK[:, part], bounds.first_BS[:, part]
        last_BR = id_BRK[..., :width].amax(-1)
        before, after = id_BRK[..., : width - 1], id_BRK[..., 1:width]
        # Without its sign -1 is the greatest id: nothing but another -1 may come behind it.
        fault_2[1] |= ((after >= 0) & (after <= (before & _GREATEST))).any() | (id_BRK.amin() < -1)
        if width < budget:
            spare_BR = id_BRK[..., width:].amax(-1)
            fault_2[1] |= (spare_BR >= 0).any()
            last_BR = torch.maximum(last_BR, spare_BR)
        head_BR = id_BRK[..., 0]
        past_BR = last_BR >= first_BR + bounds.visible_BS[:, part]
        fault_2[0] |= (past_BR | ((head_BR >= 0) & (head_BR < first_BR))).any()
    return fault_2


def _fault_workspace(batch: int, rows: int, width: int) -> Workspace:
    return Workspace(
        {
            "before": Buffer((batch, rows, width), torch.int32, inside=True),
            "verdicts": Buffer((batch, rows, width, 3), torch.bool, inside=True),
            "of a row": Buffer((batch, rows, 8), torch.int64, inside=True),
        }
    )
