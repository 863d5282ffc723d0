"""Exact k-pool selection: for every row, the `budget` visible pools with the greatest score.

Shapes by suffix: S rows of the call, B batch, H index heads, D index channels, P pools, K budget (pools a row may
select); R rows of a strip, C columns (pools) of a block.

The result of a row is a function of its query, its head weights, the keys it can see and the budget, bit for bit:
scores come from `scoring.py`, the best of them from `topk.py`, block by block of pools, so that whatever the number of
pools a strip's scores stay under a byte budget.

A row that sees no more pools than the budget takes them all and is never scored. A strip holds rows of one
segment, and a tile of it only meets pools that one of its rows can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from mcore_dsa.checks import check_device, check_integer, check_positive
from mcore_dsa.kpool import PoolLayout, check_layout
from mcore_dsa.precision import full_precision
from mcore_dsa.scoring import Tile, TileScorer, tile_fingerprint, tile_for
from mcore_dsa.topk import COLUMN_BYTES, KEPT_BYTES, RunningTopK

DEFAULT_SCORE_BYTES = 256 << 20

# Pool ids written at a time for rows that take all they see.
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
    host_first_BS, host_visible_BS = torch.stack([first_BS, visible_BS]).cpu()
    _take_all_visible(selection_BSK, first_BS, visible_BS, host_visible_BS <= budget)
    if not bool((host_visible_BS > budget).any()):
        return selection_BSK
    with full_precision(layout.device.type):
        tile_fingerprint(layout.device, heads, dim)
        scorer = TileScorer(tile, heads, dim, layout.device, use_relu=use_relu)
        columns = min(block, int(host_visible_BS.max()))
        top = RunningTopK(rows=tile.strip_rows, columns=columns, budget=budget, device=layout.device)
        for sample in range(layout.batch):
            end_S = first_BS[sample] + visible_BS[sample] - layout.first_pool_id
            slot_S = host_first_BS[sample] - layout.first_pool_id
            for strip in _row_strips(slot_S, host_visible_BS[sample], budget, tile):
                scorer.load_rows(q_SBHD[strip.rows, sample], weights_SBH[strip.rows, sample])
                slot_RK = _select_strip(scorer, top, pool_key_PBD[:, sample], strip, end_S[strip.rows], block)
                selection_BSK[sample, strip.rows] = slot_RK.add_(layout.first_pool_id)
                strip.count(counters, tile)
    return selection_BSK


def smallest_score_bytes(device: torch.device, heads: int, dim: int, budget: int) -> int:
    """The least `score_bytes` that `select_pools` accepts: one tile, and the running top-k over a block of pools."""
    check_positive("dim", dim)
    check_positive("budget", budget)
    tile = tile_for(device, heads)
    return _bytes_in_flight(tile, heads, dim, budget, _smallest_block(tile, budget))


@dataclass(frozen=True)
class _RowStrip:
    """Rows of one segment next to each other, and how far they see: pool slots `first ... end - 1`."""

    rows: slice
    first: int
    least_end: int
    tile_ends: list[int]
    visible_pairs: int

    def count(self, counters: SelectionCounters, tile: Tile) -> None:
        counters.scored_rows += self.rows.stop - self.rows.start
        counters.scored_pairs += self.visible_pairs
        tiles = sum(-(-(end - self.first) // tile.pools) for end in self.tile_ends)
        counters.tile_pairs += tile.rows * tile.pools * tiles


def _row_strips(slot_S: Tensor, visible_S: Tensor, budget: int, tile: Tile) -> Iterator[_RowStrip]:
    """The rows that see more pools than the budget, in strips; `slot_S` is each row's first pool slot. Host tensors."""
    scored = (visible_S > budget).nonzero().flatten()
    if scored.numel() == 0:
        return
    apart = (scored[1:] != scored[:-1] + 1) | (slot_S[scored[1:]] != slot_S[scored[:-1]])
    starts = [0, *(apart.nonzero().flatten() + 1).tolist(), scored.shape[0]]
    for start, stop in pairwise(starts):
        first, row = int(slot_S[scored[start]]), int(scored[start])
        visible = visible_S[row : row + stop - start]
        for begin in range(0, stop - start, tile.strip_rows):
            part = visible[begin : begin + tile.strip_rows]
            tile_ends = [first + int(rows.max()) for rows in part.split(tile.rows)]
            rows = slice(row + begin, row + begin + part.shape[0])
            yield _RowStrip(rows, first, first + int(part.min()), tile_ends, int(part.sum()))


def _select_strip(
    scorer: TileScorer, top: RunningTopK, key_PD: Tensor, strip: _RowStrip, end_R: Tensor, block: int
) -> Tensor:
    """int64 `[rows, budget]`, the best pool slots of the loaded rows, ascending; `top`'s own buffer."""
    last = max(strip.tile_ends)
    top.reset(strip.rows.stop - strip.rows.start)
    for begin in range(strip.first, last, block):
        columns = min(block, last - begin)
        _score_block(scorer, key_PD, strip, begin, top.block(columns))
        top.merge(begin, columns, end_R, strip.least_end, last=begin + columns == last)
    assert top.slots is not None
    return top.slots


def _score_block(scorer: TileScorer, key_PD: Tensor, strip: _RowStrip, begin: int, score_RC: Tensor) -> None:
    """Scores of pool slots `begin ... begin + c - 1`; what no row of a tile sees is left unwritten."""
    rows, pools = scorer.tile.rows, scorer.tile.pools
    for column in range(0, score_RC.shape[1], pools):
        first = begin + column
        outs = score_RC[:, column : column + pools].split(rows)
        scorer.load_keys(key_PD[first : first + outs[0].shape[1]])
        for index, (out, tile_end) in enumerate(zip(outs, strip.tile_ends, strict=True)):
            if tile_end > first:
                score = scorer.score(index)
                out.copy_(score if out.shape == score.shape else score[: out.shape[0], : out.shape[1]])


def _take_all_visible(selection_BSK: Tensor, first_BS: Tensor, visible_BS: Tensor, fits_BS: Tensor) -> None:
    """Write the selection of rows that see no more pools than the budget, and something in rows near them."""
    batch, rows, budget = selection_BSK.shape
    rank = torch.arange(budget, dtype=torch.int32, device=first_BS.device)
    first_BS1, visible_BS1 = first_BS.to(torch.int32).unsqueeze(-1), visible_BS.unsqueeze(-1)
    step = max(1, _FILL_ELEMENTS // budget)
    for sample in range(batch):
        for start in range(0, rows, step):
            part = slice(start, start + step)
            if bool(fits_BS[sample, part].any()):
                ids = torch.add(first_BS1[sample, part], rank, out=selection_BSK[sample, part])
                ids.masked_fill_(rank >= visible_BS1[sample, part], -1)


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
    strip = tile.strip_rows * ((budget + block) * COLUMN_BYTES + budget * KEPT_BYTES)
    return tile.bytes_in_use(heads, dim) + strip


def _block_pools(tile: Tile, heads: int, dim: int, budget: int, score_bytes: int) -> int:
    """Pools scored before they are merged: the most, in whole tiles, that `score_bytes` holds."""
    if isinstance(score_bytes, bool) or not isinstance(score_bytes, int):
        raise TypeError(f"score_bytes is {score_bytes!r}; accepted is an integer")
    smallest = _smallest_block(tile, budget)
    needed = _bytes_in_flight(tile, heads, dim, budget, smallest)
    if score_bytes < needed:
        raise ValueError(f"score_bytes is {score_bytes}; accepted for this geometry is {needed} or more")
    return smallest + (score_bytes - needed) // (tile.strip_rows * COLUMN_BYTES * tile.pools) * tile.pools


def _check_call(
    q: Tensor, weights: Tensor, pool_key: Tensor, layout: PoolLayout, position: Tensor | None, budget: int
) -> Tensor:
    check_layout(layout)
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
    check_positive("budget", budget)
    if position is None:
        position = torch.arange(layout.num_tokens, device=layout.device)
    check_integer("position_S", position, ndim=1)
    if position.shape[0] != q.shape[0]:
        raise ValueError(f"q_SBHD has {q.shape[0]} rows and position_S {position.shape[0]}; accepted are equal numbers")
    check_device(layout.device, q_SBHD=q, weights_SBH=weights, pool_key_PBD=pool_key, position_S=position)
    return position
