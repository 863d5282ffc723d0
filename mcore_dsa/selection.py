"""Exact k-pool selection: for every row, the `budget` visible pools with the greatest score.

Shapes by suffix: S rows of the call, B batch, H index heads, D index channels, P pools, K budget (pools a row may
select); R rows of a tile, C columns (pools) of a strip.

The result of a row is a function of its query, its head weights, the keys it can see and the budget, bit for bit:
scores come from `scoring.py`, and the order over them is total. Scores are ordered as int32, which makes -0.0 equal
0.0 and puts NaN last; of equal scores the smaller pool wins. Blocks of pools merge exactly under such an order, so
that scores of a strip of any length stay under a byte budget.

A row that sees no more pools than the budget takes them all and is never scored. A strip holds rows of one
segment, and a tile of it only meets pools that one of its rows can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mcore_dsa.kpool import PoolLayout, check_device, check_integer
from mcore_dsa.precision import full_precision
from mcore_dsa.scoring import Tile, TileScorer, tile_fingerprint, tile_for

DEFAULT_SCORE_BYTES = 256 << 20

_INVISIBLE = -(1 << 31)
# Added to an order, it makes +inf the greatest int32, so that a positive NaN wraps round to the bottom.
_NAN_WRAP = 0x7FFFFFFF - 0x7F800000
_NAN = -0x7F800000 + _NAN_WRAP - 1
# Bytes a (row, column) of a strip takes at most: scores 4, signs or a running count 4, three bools, and the copy of
# values and indices, 16, that torch.topk works on.
_STRIP_BYTES = 27
# Bytes a (row, selected pool) takes: topk's values and indices 12; columns, slots and orders, old and new, 40.
_SELECTED_BYTES = 52
_FILL_ELEMENTS = 1 << 18


@dataclass
class SelectionCounters:
    """What `select_pools` did, summed over calls; plain integers on the host.

    `rows` that came in, `scored_rows` of them that see more pools than the budget, `scored_pairs` the visible pools of
    those, `tile_pairs` the (row, pool) products computed, padding of the tiles included.
    """

    calls: int = 0
    rows: int = 0
    scored_rows: int = 0
    scored_pairs: int = 0
    tile_pairs: int = 0


@torch.no_grad()
def select_pools(
    q_SBHD: Tensor,
    weights_SBH: Tensor,
    pool_key_PBD: Tensor,
    layout: PoolLayout,
    position_S: Tensor | None = None,
    *,
    budget: int,
    score_bytes: int = DEFAULT_SCORE_BYTES,
    use_relu: bool = True,
    counters: SelectionCounters | None = None,
) -> Tensor:
    """For every row the `budget` visible complete pools of its own segment with the greatest score.

    `score = sum_h weights_h * relu(q_h . pool_key)` in fp32. Equal scores go to the smaller pool id, -0.0 equals 0.0,
    NaN ranks below everything.

    Args:
        q_SBHD: floating `[s, b, heads, dim]`, index queries of any set of rows.
        weights_SBH: floating `[s, b, heads]`, signed head weights, already times `heads**-0.5 * dim**-0.5`.
        pool_key_PBD: floating `[layout.num_pools, b, dim]`, from `compress_keys`.
        position_S: integer `[s]`, the token each row stands at; None: rows are the tokens 0 ... s-1.
        budget: pools a row may select, `index_topk // index_kpool`.
        score_bytes: bytes of scores and scratch in flight at most.
        counters: where to add up what was done.

    Returns: `selection_BSK` int32 `[b, s, budget]`, ids ascending, -1 in unused slots, every slot written.

    Raises: TypeError, ValueError for what does not fit; ValueError for a `score_bytes` below the smallest that works;
        RuntimeError where the device's matrix product cannot keep the contract.

    Source of the score: transformers' `Glm5NextTextIndexer.forward`.
    """
    position_S = _check_call(q_SBHD, weights_SBH, pool_key_PBD, layout, position_S, budget)
    heads, dim = q_SBHD.shape[2:]
    tile = tile_for(layout.device, heads)
    block = _block_pools(tile, heads, dim, budget, score_bytes)
    first_BS, visible_BS = layout.visible(position_S)
    selection_BSK = torch.empty(layout.batch, position_S.shape[0], budget, dtype=torch.int32, device=layout.device)
    counters = SelectionCounters() if counters is None else counters
    counters.calls += 1
    counters.rows += visible_BS.numel()
    scorer = None
    with full_precision(layout.device.type):
        for sample in range(layout.batch):
            first_S, visible_S = first_BS[sample], visible_BS[sample]
            scored_S = visible_S > budget
            _take_all_visible(selection_BSK[sample], first_S, visible_S, (~scored_S).nonzero().flatten())
            for strip in _row_strips(first_S - layout.first_pool_id, visible_S, scored_S.nonzero().flatten(), tile):
                if scorer is None:
                    tile_fingerprint(layout.device, heads, dim)
                    scorer = TileScorer(tile, heads, dim, layout.device, use_relu=use_relu)
                scorer.load_rows(q_SBHD[strip.row_R, sample], weights_SBH[strip.row_R, sample])
                slot_RK = _select_strip(scorer, pool_key_PBD[:, sample], strip, block, budget)
                selection_BSK[sample, strip.row_R] = slot_RK + layout.first_pool_id
                strip.count(counters, tile)
    return selection_BSK


def smallest_score_bytes(device: torch.device, heads: int, dim: int, budget: int) -> int:
    """The least `score_bytes` that `select_pools` accepts: one tile, and the running top-k over a block of pools."""
    tile = tile_for(device, heads)
    return _bytes_in_flight(tile, heads, dim, budget, _smallest_block(tile, budget))


@dataclass(frozen=True)
class _RowStrip:
    """Rows of one segment: their indices, and how far each sees, in pool slots `first ... end - 1`."""

    row_R: Tensor
    end_R: Tensor
    first: int
    least_end: int
    tile_ends: list[int]
    visible_pairs: int

    def count(self, counters: SelectionCounters, tile: Tile) -> None:
        counters.scored_rows += self.row_R.shape[0]
        counters.scored_pairs += self.visible_pairs
        tiles = sum(-(-(end - self.first) // tile.pools) for end in self.tile_ends)
        counters.tile_pairs += tile.rows * tile.pools * tiles


def _row_strips(slot_S: Tensor, visible_S: Tensor, scored: Tensor, tile: Tile) -> Iterator[_RowStrip]:
    """The scored rows in strips; rows next to each other share a strip if they share a segment."""
    if scored.numel() == 0:
        return
    slot, end = slot_S[scored], (slot_S + visible_S)[scored]
    host_slot, host_end = torch.stack([slot, end]).cpu()
    border = (host_slot[1:] != host_slot[:-1]).nonzero().flatten() + 1
    starts = [0, *border.tolist(), scored.shape[0]]
    for start, stop in pairwise(starts):
        first = int(host_slot[start])
        for begin in range(start, stop, tile.strip_rows):
            part = slice(begin, min(begin + tile.strip_rows, stop))
            ends = host_end[part]
            tile_ends = [int(rows.max()) for rows in ends.split(tile.rows)]
            pairs = int(ends.sum()) - first * ends.shape[0]
            yield _RowStrip(scored[part], end[part], first, int(ends.min()), tile_ends, pairs)


def _select_strip(scorer: TileScorer, key_PD: Tensor, strip: _RowStrip, block: int, budget: int) -> Tensor:
    """int32 pool slots `[rows, budget]`, ascending: the best of what each loaded row sees.

    Blocks of pools are merged one by one: the best so far, in ascending order, stand left of the next block, so the
    order of columns is the order of pools, and dropping what is already beaten drops nothing that could win.
    """
    last = max(strip.tile_ends)
    best_RK = order_RK = None
    for begin in range(strip.first, last, block):
        end = min(begin + block, last)
        kept = 0 if best_RK is None else budget
        shape = (strip.row_R.shape[0], kept + end - begin)
        score_RC = torch.empty(shape, dtype=torch.float32, device=key_PD.device)
        _score_block(scorer, key_PD, strip, begin, score_RC[:, kept:])
        order_RC = _order_(score_RC)
        slot_RC = torch.arange(begin - kept, end, dtype=torch.int32, device=key_PD.device).expand_as(order_RC)
        if (edge := max(begin, strip.least_end)) < end:
            unseen = slot_RC[:, edge - end :] >= strip.end_R.unsqueeze(1)
            order_RC[:, edge - end :].masked_fill_(unseen, _INVISIBLE)
        if best_RK is not None and order_RK is not None:
            order_RC[:, :kept] = order_RK
            slot_RC = torch.cat([best_RK, slot_RC[:, kept:]], dim=1)
        chosen = _leftmost_greatest(order_RC, budget)
        best_RK = slot_RC.masked_select(chosen).view(-1, budget)
        if end < last:
            order_RK = order_RC.masked_select(chosen).view(-1, budget)
    assert best_RK is not None
    return best_RK


def _score_block(scorer: TileScorer, key_PD: Tensor, strip: _RowStrip, begin: int, score_RC: Tensor) -> None:
    """Scores of pool slots `begin ... begin + c - 1`; what no row of a tile sees is left unwritten."""
    rows, pools = scorer.tile.rows, scorer.tile.pools
    for column in range(0, score_RC.shape[1], pools):
        out_RC = score_RC[:, column : column + pools]
        first = begin + column
        scorer.load_keys(key_PD[first : first + out_RC.shape[1]])
        for index, tile_end in enumerate(strip.tile_ends):
            if tile_end > first:
                part = out_RC[index * rows : (index + 1) * rows]
                part.copy_(scorer.score(index)[: part.shape[0], : part.shape[1]])


def _leftmost_greatest(order_RC: Tensor, budget: int) -> Tensor:
    """bool `[r, c]`, True at the `budget` greatest values of each row; of equal values at those on the left."""
    threshold = order_RC.topk(budget, dim=1, sorted=False).values.amin(1, keepdim=True)
    chosen = order_RC >= threshold
    surplus = chosen.sum(1, keepdim=True, dtype=torch.int32) - budget
    if bool(surplus.any()):
        level = order_RC == threshold
        level_so_far = level.cumsum(1, dtype=torch.int32)
        wanted = level_so_far[:, -1:] - surplus
        chosen &= ~(level & (level_so_far > wanted))
    return chosen


def _order_(score: Tensor) -> Tensor:
    """The scores as int32 whose order is the contract's: -0.0 equals 0.0, every NaN lowest. Overwrites `score`."""
    bits = score.view(torch.int32)
    sign = bits >> 31
    magnitude = bits.bitwise_and_(0x7FFFFFFF)
    return magnitude.bitwise_xor_(sign).sub_(sign).add_(_NAN_WRAP).clamp_min_(_NAN)


def _take_all_visible(selection_SK: Tensor, first_S: Tensor, visible_S: Tensor, row: Tensor) -> None:
    """Write the selection of rows that see no more pools than the budget."""
    budget = selection_SK.shape[1]
    rank = torch.arange(budget, device=row.device)
    for part in row.split(max(1, _FILL_ELEMENTS // budget)):
        ids = (first_S[part, None] + rank).to(torch.int32)
        selection_SK[part] = ids.masked_fill_(rank >= visible_S[part, None], -1)


def bytes_in_flight(
    device: torch.device, heads: int, dim: int, budget: int, pools: int, score_bytes: int = DEFAULT_SCORE_BYTES
) -> int:
    """Bytes of scores and scratch that rows seeing up to `pools` pools take, under `score_bytes`."""
    tile = tile_for(device, heads)
    block = min(_block_pools(tile, heads, dim, budget, score_bytes), -(-max(pools, budget) // tile.pools) * tile.pools)
    return _bytes_in_flight(tile, heads, dim, budget, block)


def _smallest_block(tile: Tile, budget: int) -> int:
    return -(-budget // tile.pools) * tile.pools


def _bytes_in_flight(tile: Tile, heads: int, dim: int, budget: int, block: int) -> int:
    strip = tile.strip_rows * ((budget + block) * _STRIP_BYTES + budget * _SELECTED_BYTES)
    return tile.bytes_in_use(heads, dim) + strip


def _block_pools(tile: Tile, heads: int, dim: int, budget: int, score_bytes: int) -> int:
    """Pools scored before they are merged: the most, in whole tiles, that `score_bytes` holds."""
    if isinstance(score_bytes, bool) or not isinstance(score_bytes, int):
        raise TypeError(f"score_bytes is {score_bytes!r}; accepted is an integer")
    smallest = _smallest_block(tile, budget)
    needed = _bytes_in_flight(tile, heads, dim, budget, smallest)
    if score_bytes < needed:
        raise ValueError(f"score_bytes is {score_bytes}; accepted for this geometry is {needed} or more")
    return smallest + (score_bytes - needed) // (tile.strip_rows * _STRIP_BYTES * tile.pools) * tile.pools


def _check_call(
    q: Tensor, weights: Tensor, pool_key: Tensor, layout: PoolLayout, position: Tensor | None, budget: int
) -> Tensor:
    for name, tensor in (("q_SBHD", q), ("weights_SBH", weights), ("pool_key_PBD", pool_key)):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} is {kind}; accepted is a floating-point tensor")
    if q.ndim != 4 or q.shape[1] != layout.batch or 0 in q.shape[2:]:
        raise ValueError(f"q_SBHD has shape {tuple(q.shape)}; accepted is [rows, {layout.batch}, heads, dim]")
    if weights.shape != q.shape[:3]:
        raise ValueError(f"weights_SBH has shape {tuple(weights.shape)}; accepted is {list(q.shape[:3])} as q_SBHD")
    if pool_key.shape != (layout.num_pools, layout.batch, q.shape[3]):
        accepted = [layout.num_pools, layout.batch, q.shape[3]]
        raise ValueError(f"pool_key_PBD has shape {tuple(pool_key.shape)}; accepted is {accepted}")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 1:
        raise ValueError(f"budget is {budget!r}; accepted is an integer >= 1")
    if position is None:
        position = torch.arange(layout.num_tokens, device=layout.device)
    check_integer("position_S", position, ndim=1)
    if position.shape[0] != q.shape[0]:
        raise ValueError(f"q_SBHD has {q.shape[0]} rows and position_S {position.shape[0]}; accepted are equal numbers")
    check_device(layout.device, q_SBHD=q, weights_SBH=weights, pool_key_PBD=pool_key, position_S=position)
    return position
