"""What a selection costs before it is run: pairs, FLOPs, bytes exchanged and held, for each rank of the group.

Integers only, from the lengths of the documents alone: the partition is chosen with it, and the plan and the benchmark
print it. The counts of rows and pairs are those that `SelectionCounters` counts in a real run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from mcore_dsa.backends.torch.compress import compress_bytes
from mcore_dsa.backends.torch.select import bytes_in_flight
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.rows import PackWork, RowPartition, partition_rows
from mcore_dsa.settings import DEFAULT_SCORE_BYTES, Partition
from mcore_dsa.sharded import GATHERS_HELD, OVERLAP_ROWS

_INT32 = _FP32 = 4
_INT64 = 8
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
    """The parts of all ranks, in rank order. `partition` None: every rank selects for every row."""

    partition: Partition | None
    ranks: tuple[RankWork, ...]

    @property
    def busiest_over_mean(self) -> float:
        """Scored pairs of the busiest rank over the mean of all, 1.0 where nothing is scored."""
        pairs = [rank.scored_pairs for rank in self.ranks]
        return max(pairs) * len(pairs) / sum(pairs) if sum(pairs) else 1.0


def selection_work(
    lengths: Sequence[int],
    geometry: DsaGeometry,
    *,
    group_size: int,
    partition: Partition | None,
    elem_bytes: int = 2,
    score_bytes: int = DEFAULT_SCORE_BYTES,
    device: str = "cuda",
) -> SelectionWork:
    """The work of selecting for one pack of documents of `lengths` tokens, as the attention module runs it.

    `elem_bytes` is an element of the model's dtype. FLOPs are of scored pairs, `2 * heads * dim` each, tile padding not
    among them. Received: keys and gates of other ranks' rows, then their queries and head weights where rows move (all
    of them with `partition` None), then their selections, padded.

    Raises: ValueError for lengths or sizes that `PackWork` and `RowPartition` refuse.
    """
    heads, dim, budget = geometry.index_n_heads, geometry.index_head_dim, geometry.pool_budget
    work = PackWork(tuple(lengths), geometry.index_kpool, budget)
    held = RowPartition.contiguous(work.rows, group_size)
    owned = RowPartition(work.rows, ((range(work.rows),),) * group_size)
    if partition is not None:
        owned = partition_rows(
            partition, work.rows, group_size, work.lengths, pool_size=geometry.index_kpool, budget=budget
        )
    key_row, query_row = 2 * dim * elem_bytes, heads * (dim * elem_bytes + _FP32)
    longest = max(work.lengths, default=0) // geometry.index_kpool
    scratch = (
        bytes_in_flight(torch.device(device), heads, dim, budget, longest, score_bytes) if work.scored_pairs else 0
    )
    # Keys and gates of every row, its position, and its selection; pool keys, and what compressing takes.
    pools = work.rows // geometry.index_kpool
    keys = work.rows * (key_row + _INT64) + pools * _INT64
    selecting = keys + pools * dim * elem_bytes + work.rows * budget * _INT32 + scratch
    compressing = keys + compress_bytes(pools, dim, geometry.index_kpool) + pools * dim * elem_bytes
    ranks = []
    for rank in range(group_size):
        parts, (home,) = owned.slices(rank), held.slices(rank)
        stay = sum(max(0, min(part.stop, home.stop) - max(part.start, home.start)) for part in parts)
        received = (work.rows - len(home)) * key_row + (owned.rows_of(rank) - stay) * query_row
        moving = (len(home) + owned.rows_of(rank)) * query_row
        shards = 1 if partition is None else group_size
        # What is gathered and sent, and the piece that is being selected: positions and pools of its rows in int64.
        piece = min(OVERLAP_ROWS, owned.rows_per_rank)
        gathering = (GATHERS_HELD * (shards + 1) + 1) * piece * budget * _INT32 + piece * 32 * _INT64
        if partition is not None:
            received += (group_size - 1) * owned.rows_per_rank * budget * _INT32
            moving = owned.rows_of(rank) * query_row
            if stay < len(home) or stay < owned.rows_of(rank):
                moving = query_row * (len(home) + owned.rows_of(rank) + max(len(home), owned.rows_of(rank)))
        scored = sum(work.scored_pairs_before(part.stop) - work.scored_pairs_before(part.start) for part in parts)
        visible = sum(work.visible_pairs_before(part.stop) - work.visible_pairs_before(part.start) for part in parts)
        own_queries = owned.rows_of(rank) * (query_row + _INT64)
        peak = max(keys + moving, compressing + own_queries, selecting + gathering + own_queries)
        flops = 2 * heads * dim * scored
        ranks.append(RankWork(owned.rows_of(rank), visible, scored, flops, received, peak))
    return SelectionWork(partition, tuple(ranks))


def best_partition(lengths: Sequence[int], geometry: DsaGeometry, *, group_size: int) -> Partition:
    """The partition to set for packs like `lengths`: of those even enough, the one that moves least."""
    candidates = [
        selection_work(lengths, geometry, group_size=group_size, partition=partition)
        for partition in get_args(Partition)
    ]
    bound = _EVEN_ENOUGH * min(work.busiest_over_mean for work in candidates)
    even = [work for work in candidates if work.busiest_over_mean <= bound]
    best = min(even, key=lambda work: sum(rank.received_bytes for rank in work.ranks))
    assert best.partition is not None
    return best.partition
