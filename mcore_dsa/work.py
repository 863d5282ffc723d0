"""What a selection costs before it is run: pairs, FLOPs, bytes exchanged and held, for each rank of the group.

Integers only, from the lengths of the documents alone: the partition is chosen with it, and the plan and the benchmark
print it. The counts of rows and pairs are those that `SelectionCounters` counts in a real run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from mcore_dsa.backends import resolve
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.rows import PackWork, RowPartition, overlap, partition_rows
from mcore_dsa.settings import DEFAULT_SCORE_BYTES, Partition
from mcore_dsa.sharded import GATHERS_HELD, OVERLAP_ROWS

_INT32 = _FP32 = 4
_INT64 = 8
# Position, first pool, visible pools and tail of a row, on the device, and three of them on the host.
_BOUNDS = 7 * _INT64
# Shards this close to the least busy partition count as even; among them the fewest bytes win.
_EVEN_ENOUGH = 1.02


@dataclass(frozen=True)
class RankWork:
    """One rank's part of a selection; bytes are what it receives, and the most it holds beyond the hidden states."""

    rows: int
    visible_pairs: int
    scored_pairs: int
    flops: int
    received_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class SelectionWork:
    """The parts of all ranks, in rank order."""

    partition: Partition
    ranks: tuple[RankWork, ...]

    @property
    def busiest_over_mean(self) -> float:
        """Scored pairs of the busiest rank over the mean of all, 1.0 where nothing is scored."""
        pairs = [rank.scored_pairs for rank in self.ranks]
        return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0


@dataclass(frozen=True)
class _Sizes:
    """Bytes of one row of each kind, and what all ranks hold alike.

    Attributes:
        key_row: keys and gates. query_row: queries and head weights. ids: the selection.
        keys: keys, gates and bounds of every row. compressing, selecting: beyond them, in these steps.
    """

    key_row: int
    query_row: int
    ids: int
    keys: int
    compressing: int
    selecting: int


def selection_work(
    lengths: Sequence[int],
    geometry: DsaGeometry,
    *,
    group_size: int,
    partition: Partition,
    elem_bytes: int = 2,
    score_bytes: int = DEFAULT_SCORE_BYTES,
    device: str = "cuda",
) -> SelectionWork:
    """The work of selecting for one pack of documents of `lengths` tokens, as the attention module runs it.

    `elem_bytes` is an element of the model's dtype. FLOPs are of scored pairs, `2 * heads * dim` each, tile padding not
    among them. Received: keys and gates of other ranks' rows, then their queries and head weights where rows move (all
    of them with "off"), then their selections, padded.

    Raises: ValueError for lengths or sizes that `PackWork` and `RowPartition` refuse.
    """
    heads, dim, budget = geometry.index_n_heads, geometry.index_head_dim, geometry.pool_budget
    work = PackWork(tuple(lengths), geometry.index_kpool, budget)
    owned = partition_rows(
        partition, work.rows, group_size, work.lengths, pool_size=geometry.index_kpool, budget=budget
    )
    longest, pools = max(work.lengths, default=0) // geometry.index_kpool, work.rows // geometry.index_kpool
    backend, key_row = resolve(), 2 * dim * elem_bytes
    scratch = backend.select_bytes(torch.device(device), heads, dim, budget, longest, score_bytes)
    pool_keys = pools * dim * elem_bytes
    sizes = _Sizes(
        key_row=key_row,
        query_row=heads * (dim * elem_bytes + _FP32),
        ids=budget * _INT32,
        keys=work.rows * (key_row + _BOUNDS) + pools * _INT64,
        compressing=backend.compress_bytes(pools, dim, geometry.index_kpool) + pool_keys,
        selecting=pool_keys + (scratch if work.scored_pairs else 0),
    )
    ranks = tuple(_rank_work(rank, work, owned, sizes, 2 * heads * dim) for rank in range(group_size))
    return SelectionWork(partition, ranks)


def _rank_work(rank: int, work: PackWork, owned: RowPartition, sizes: _Sizes, pair_flops: int) -> RankWork:
    ranks, rows, parts = owned.group_size, owned.rows_of(rank), owned.slices(rank)
    (home,) = RowPartition.contiguous(work.rows, ranks).slices(rank)
    stay = sum(len(overlap(part, home)) for part in parts)
    scored = sum(work.scored_pairs_before(part.stop) - work.scored_pairs_before(part.start) for part in parts)
    visible = sum(work.visible_pairs_before(part.stop) - work.visible_pairs_before(part.start) for part in parts)
    received = (work.rows - len(home)) * sizes.key_row + (rows - stay) * sizes.query_row
    # Own rows' selection; with shards also everyone's, and gathers in which a piece is filled, sent and placed.
    selected, moving = rows * sizes.ids, (len(home) + rows) * sizes.query_row
    piece = min(OVERLAP_ROWS, owned.rows_per_rank)
    if owned.is_replicated:
        piece = rows
    else:
        pieces = -(-owned.rows_per_rank // OVERLAP_ROWS)
        received += (ranks - 1) * (owned.rows_per_rank + pieces) * sizes.ids
        selected += work.rows * sizes.ids + (GATHERS_HELD * (ranks + 1) + 1) * (piece + 1) * sizes.ids
        if stay == len(home) == rows:
            moving = rows * sizes.query_row
        else:
            moving += max(len(home), rows) * sizes.query_row
    own = rows * (sizes.query_row + _BOUNDS)
    peak = sizes.keys + max(moving, sizes.compressing + own, sizes.selecting + own + selected)
    return RankWork(rows, visible, scored, pair_flops * scored, received, peak)


def best_partition(lengths: Sequence[int], geometry: DsaGeometry, *, group_size: int) -> Partition:
    """The partition to set for packs like `lengths`: of those even enough, the one that moves least."""
    candidates = [
        selection_work(lengths, geometry, group_size=group_size, partition=partition)
        for partition in get_args(Partition)
        if partition != "off"
    ]
    bound = _EVEN_ENOUGH * min(work.busiest_over_mean for work in candidates)
    even = [work for work in candidates if work.busiest_over_mean <= bound]
    return min(even, key=lambda work: sum(rank.received_bytes for rank in work.ranks)).partition
