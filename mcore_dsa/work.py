"""What a selection costs before it is run: pairs, FLOPs, bytes exchanged and held, for each rank of the group.

Integers only, from the lengths of the documents alone: the partition is chosen with it, and the plan and the benchmark
print it. The counts of rows and pairs are those that `SelectionCounters` counts in a real run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.rows import PackWork, RowPartition, partition_rows
from mcore_dsa.selection import DEFAULT_SCORE_BYTES, bytes_in_flight
from mcore_dsa.settings import Partition
from mcore_dsa.sharded import GATHERS_HELD, OVERLAP_ROWS

_INT32 = _FP32 = 4
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
    fixed = work.rows * (key_row + budget * _INT32) + work.rows // geometry.index_kpool * dim * elem_bytes + scratch
    ranks = []
    for rank in range(group_size):
        parts, (home,) = owned.slices(rank), held.slices(rank)
        stay = sum(max(0, min(part.stop, home.stop) - max(part.start, home.start)) for part in parts)
        received = (work.rows - len(home)) * key_row + (owned.rows_of(rank) - stay) * query_row
        gathering = 0
        if partition is not None:
            received += (group_size - 1) * owned.rows_per_rank * budget * _INT32
            piece = min(OVERLAP_ROWS, owned.rows_per_rank)
            gathering = GATHERS_HELD * (group_size + 1) * piece * budget * _INT32
        scored = sum(work.scored_pairs_before(part.stop) - work.scored_pairs_before(part.start) for part in parts)
        visible = sum(work.visible_pairs_before(part.stop) - work.visible_pairs_before(part.start) for part in parts)
        peak = fixed + gathering + (len(home) + owned.rows_of(rank)) * query_row
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
