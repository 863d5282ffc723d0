"""Exact k-pool selection: for every row, the `budget` visible pools with the greatest score.

Letters of shapes: `mcore_dsa/__init__.py`.

Scores come from `scoring.py`, the best of them from `topk.py`, block by block of pools, so that whatever the number of
pools a strip's scores stay under a byte budget. A row that sees no more pools than the budget takes them all and is
never scored. A strip holds rows of one segment, and a tile of it only meets pools that one of its rows can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_dsa.backends.protocol import SelectionCounters
from mcore_dsa.backends.torch.scoring import (
    Tile,
    TileScorer,
    operands_of,
    probe_tile,
    tile_for,
    tile_for_rows,
)
from mcore_dsa.backends.torch.topk import RunningTopK, topk_workspace
from mcore_dsa.checks import check_positive
from mcore_dsa.kpool import PoolLayout, RowBounds
from mcore_dsa.precision import product_precision
from mcore_dsa.ranges import ranged

# Pool ids written at a time for rows that take all they see.
_FILL_ELEMENTS = 1 << 18


def select_pools(
    q_SBHD: Tensor,
    weights_SBH: Tensor,
    pool_key_PBD: Tensor,
    layout: PoolLayout,
    bounds: RowBounds,
    *,
    budget: int,
    score_bytes: int,
    use_relu: bool,
    counters: SelectionCounters,
) -> Tensor:
    """`mcore_dsa.select_pools` for arguments that fit, of rows that are located."""
    heads, dim = q_SBHD.shape[2:]
    tile = tile_for(layout.device, heads)
    block = _block_pools(tile, heads, dim, budget, score_bytes)
    selection_BSK = torch.empty(layout.batch, bounds.rows, budget, dtype=torch.int32, device=layout.device)
    host_first_BS, host_visible_BS = bounds.on_host
    counters.calls += 1
    counters.rows += host_visible_BS.numel()
    _take_all_visible(selection_BSK, bounds, host_visible_BS)
    if bounds.max_visible <= budget:
        return selection_BSK
    operands = operands_of(layout.device, q_SBHD.dtype, pool_key_PBD.dtype)
    with product_precision(layout.device.type, operands):
        probe_tile(layout.device, heads, dim, operands)
        slot_BS = host_first_BS - layout.first_pool_id
        runs = [_scored_runs(*sample, budget) for sample in zip(slot_BS, host_visible_BS, strict=True)]
        tile = tile_for_rows(layout.device, heads, dim, max(stop - start for some in runs for start, stop in some))
        scorer = TileScorer(tile, heads, dim, layout.device, use_relu=use_relu, operands=operands)
        columns = min(block, bounds.max_visible)
        top = RunningTopK(rows=tile.strip_rows, columns=columns, budget=budget, device=layout.device)
        for sample in range(layout.batch):
            end_S = bounds.first_BS[sample] + bounds.visible_BS[sample] - layout.first_pool_id
            for strip in _row_strips(runs[sample], slot_BS[sample], host_visible_BS[sample], tile):
                scorer.load_rows(q_SBHD[strip.rows, sample], weights_SBH[strip.rows, sample])
                slot_RK = _select_strip(scorer, top, pool_key_PBD[:, sample], strip, end_S[strip.rows], block)
                selection_BSK[sample, strip.rows] = slot_RK.add_(layout.first_pool_id)
                strip.count(counters, tile)
    return selection_BSK


def smallest_score_bytes(device: torch.device, heads: int, dim: int, budget: int) -> int:
    """The least `score_bytes` that works: one tile, and the running top-k over a block of pools."""
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


def _scored_runs(slot_S: Tensor, visible_S: Tensor, budget: int) -> list[tuple[int, int]]:
    """Ranges of rows of one segment that see more pools than the budget; `slot_S` is each row's first pool slot."""
    scored = (visible_S > budget).nonzero().flatten()
    if scored.numel() == 0:
        return []
    apart = (scored[1:] != scored[:-1] + 1) | (slot_S[scored[1:]] != slot_S[scored[:-1]])
    breaks = (apart.nonzero().flatten() + 1).tolist()
    firsts, lasts = scored[[0, *breaks]].tolist(), scored[[*(at - 1 for at in breaks), -1]].tolist()
    return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def _row_strips(runs: list[tuple[int, int]], slot_S: Tensor, visible_S: Tensor, tile: Tile) -> Iterator[_RowStrip]:
    """The rows of the runs in strips. Host tensors."""
    for start, stop in runs:
        first = int(slot_S[start])
        for begin in range(start, stop, tile.strip_rows):
            part = visible_S[begin : min(begin + tile.strip_rows, stop)]
            tile_ends = [first + int(rows.max()) for rows in part.split(tile.rows)]
            rows = slice(begin, begin + part.shape[0])
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


@ranged("scoring")
def _score_block(scorer: TileScorer, key_PD: Tensor, strip: _RowStrip, begin: int, score_RM: Tensor) -> None:
    """Scores of pool slots `begin ... begin + c - 1`; what no row of a tile sees is left unwritten."""
    rows, pools = scorer.tile.rows, scorer.tile.pools
    for column in range(0, score_RM.shape[1], pools):
        first = begin + column
        outs = score_RM[:, column : column + pools].split(rows)
        scorer.load_keys(key_PD[first : first + outs[0].shape[1]])
        for index, (out, tile_end) in enumerate(zip(outs, strip.tile_ends, strict=True)):
            if tile_end > first:
                score = scorer.score(index)
                out.copy_(score if out.shape == score.shape else score[: out.shape[0], : out.shape[1]])


def _take_all_visible(selection_BSK: Tensor, bounds: RowBounds, visible_BS: Tensor) -> None:
    """Write the selection of rows that see no more pools than the budget, and something in rows near them.

    `visible_BS` is on the host. Columns that none of these rows fills are filled with -1 and nothing else.
    """
    batch, rows, budget = selection_BSK.shape
    fits_BS = visible_BS <= budget
    rank = torch.arange(budget, dtype=torch.int32, device=selection_BSK.device)
    first_BS1, visible_BS1 = bounds.first_BS.to(torch.int32).unsqueeze(-1), bounds.visible_BS.unsqueeze(-1)
    step = max(1, _FILL_ELEMENTS // budget)
    for sample in range(batch):
        for start in range(0, rows, step):
            part = slice(start, start + step)
            fits = fits_BS[sample, part]
            if bool(fits.any()):
                most = int(visible_BS[sample, part][fits].max())
                taken, spare = selection_BSK[sample, part, :most], selection_BSK[sample, part, most:]
                torch.add(first_BS1[sample, part], rank[:most], out=taken)
                taken.masked_fill_(rank[:most] >= visible_BS1[sample, part], -1)
                spare.fill_(-1)


def bytes_in_flight(device: torch.device, heads: int, dim: int, budget: int, pools: int, score_bytes: int) -> int:
    """Bytes of scores and scratch that rows seeing up to `pools` pools take, under `score_bytes`."""
    tile = tile_for(device, heads)
    block = min(_block_pools(tile, heads, dim, budget, score_bytes), -(-max(pools, budget) // tile.pools) * tile.pools)
    return _bytes_in_flight(tile, heads, dim, budget, block)


def _smallest_block(tile: Tile, budget: int) -> int:
    return -(-budget // tile.pools) * tile.pools


def _bytes_in_flight(tile: Tile, heads: int, dim: int, budget: int, block: int) -> int:
    return tile.workspace(heads, dim).nbytes + topk_workspace(tile.strip_rows, block, budget).nbytes


def _block_pools(tile: Tile, heads: int, dim: int, budget: int, score_bytes: int) -> int:
    """Pools scored before they are merged: the most, in whole tiles, that `score_bytes` holds."""
    smallest = _smallest_block(tile, budget)
    needed = _bytes_in_flight(tile, heads, dim, budget, smallest)
    if score_bytes < needed:
        raise ValueError(f"score_bytes is {score_bytes}; accepted for this geometry is {needed} or more")
    more = _bytes_in_flight(tile, heads, dim, budget, smallest + tile.pools) - needed
    return smallest + (score_bytes - needed) // more * tile.pools
