"""What a selection costs before it is run: pairs, FLOPs, bytes exchanged and held, for each rank of the group.

Integers only, from the lengths of the documents alone: the partition is chosen with it, and the plan and the benchmark
print it. The counts of rows and pairs are those that `SelectionCounters` counts in a real run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import get_args

import torch

from mcore_dsa.backends import Backend, resolve
from mcore_dsa.checks import check_bytes, check_positive, check_sequence
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.hf_config import shown
from mcore_dsa.rows import PackWork, RowPartition, check_ranks, overlap, partition_rows
from mcore_dsa.settings import DEFAULT_BYTES, Kernels, Partition
from mcore_dsa.sharded import GATHERS_HELD, OVERLAP_ROWS

_INT32 = _FP32 = 4
_INT64 = 8
# Position, first pool, visible pools and tail of a row, on the device, and three of them on the host.
_BOUNDS = 7 * _INT64
# Under context parallelism; the balanced cuts go by the rows of whole documents, and are not defined there.
CONTEXT_PARTITIONS: tuple[Partition, ...] = ("off", "contiguous", "zigzag")
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
        keys: keys and gates of every row, bounds of the held ones. ordering, compressing, selecting: beyond them, in
            these steps.
    """

    key_row: int
    query_row: int
    ids: int
    keys: int
    ordering: int
    compressing: int
    selecting: int


@dataclass(frozen=True)
class Held:
    """The rows of a tensor-parallel group, and of the first n of them the pairs and the tokens that they attend."""

    rows: int
    visible_before: Callable[[int], int]
    scored_before: Callable[[int], int]
    attended_before: Callable[[int], int]

    @classmethod
    def of(cls, work: PackWork, context_size: int, attended_before: Callable[[int], int] = lambda row: 0) -> Held:
        """Those of the context-parallel rank with the most scored pairs; `attended_before` is of the whole pack.

        Raises: ValueError for a document whose length is no multiple of `2 * context_size`.
        """
        if context_size == 1:
            return cls(work.rows, work.visible_pairs_before, work.scored_pairs_before, attended_before)
        multiple = 2 * context_size
        uneven = [length for length in work.lengths if length % multiple]
        if uneven:
            raise ValueError(
                f"a document is {uneven[0]} tokens; accepted is, with {context_size} context-parallel ranks, a "
                f"multiple of {multiple}"
            )
        starts = list(accumulate(work.lengths, initial=0))[:-1]
        groups = [
            [
                range(start + chunk * (length // multiple), start + (chunk + 1) * (length // multiple))
                for start, length in zip(starts, work.lengths, strict=True)
                for chunk in (rank, multiple - 1 - rank)
            ]
            for rank in range(context_size)
        ]
        rows = work.rows // context_size
        busiest = max(groups, key=lambda parts: _before(parts, work.scored_pairs_before)(rows))
        counts = (work.visible_pairs_before, work.scored_pairs_before, attended_before)
        return cls(rows, *(_before(busiest, count) for count in counts))


def _before(parts: Sequence[range], count: Callable[[int], int]) -> Callable[[int], int]:
    """Pairs of the first n rows of `parts`, from `count`, the pairs before a row of the whole pack."""
    ends = [0, *accumulate(map(len, parts))]
    sums = [0, *accumulate(count(part.stop) - count(part.start) for part in parts)]

    def before(row: int) -> int:
        part = bisect_right(ends, row) - 1
        if part == len(parts):
            return sums[part]
        start = parts[part].start
        return sums[part] + count(start + row - ends[part]) - count(start)

    return before


def selection_work(
    lengths: Sequence[int],
    geometry: DsaGeometry,
    *,
    group_size: int,
    partition: Partition,
    context_size: int = 1,
    elem_bytes: int = 2,
    kernels: Kernels = "torch",
    score_bytes: int = DEFAULT_BYTES,
    device: str = "cuda",
) -> SelectionWork:
    """The work of selecting for one pack of documents of `lengths` tokens, as the attention module runs it.

    `elem_bytes` is an element of the model's dtype; `kernels` and `score_bytes` tell the scratch. FLOPs are of scored
    pairs, `2 * heads * dim` each, tile padding not among them. Received: keys and gates of other ranks' rows, then
    their queries and head weights where rows move (all of them with "off"), then their selections, padded.

    Under context parallelism a rank has chunks c and `2 * CP - 1 - c` of each document, and the keys of all: the ranks
    are those of the tensor-parallel group with the most scored pairs.

    Raises: TypeError for arguments of another kind; ValueError for lengths or sizes that `PackWork` and `RowPartition`
    refuse, for `kernels` other than "torch" and "triton", for a document whose length is no multiple of
    `2 * context_size`, and for a partition that is none of `CONTEXT_PARTITIONS` with more than one.
    """
    check_request(lengths, geometry, context_size)
    check_positive("elem_bytes", elem_bytes)
    check_bytes("score_bytes", score_bytes)
    heads, dim, budget = geometry.index_n_heads, geometry.index_head_dim, geometry.pool_budget
    work = PackWork(tuple(lengths), geometry.index_kpool, budget)
    if context_size > 1 and partition not in CONTEXT_PARTITIONS:
        accepted = " and ".join(CONTEXT_PARTITIONS)
        raise ValueError(
            f"partition is {partition}; accepted are, with {context_size} context-parallel ranks, {accepted}"
        )
    held = Held.of(work, context_size)
    owned = partition_rows(
        partition, held.rows, group_size, work.lengths, pool_size=geometry.index_kpool, budget=budget
    )
    longest, pools = max(work.lengths, default=0) // geometry.index_kpool, work.rows // geometry.index_kpool
    backend, key_row = backend_named(kernels), 2 * dim * elem_bytes
    scratch = backend.select_bytes(torch.device(device), heads, dim, budget, longest, score_bytes)
    pool_keys = pools * dim * elem_bytes
    sizes = _Sizes(
        key_row=key_row,
        query_row=heads * (dim * elem_bytes + _FP32),
        ids=budget * _INT32,
        keys=work.rows * key_row + held.rows * _BOUNDS + pools * _INT64,
        # Gathered in the order of ranks, and once more in that of tokens, with the order and its inverse.
        ordering=work.rows * (key_row + 2 * _INT64) if context_size > 1 else 0,
        compressing=backend.compress_bytes(pools, dim, geometry.index_kpool) + pool_keys,
        selecting=pool_keys + (scratch if work.scored_pairs else 0),
    )
    ranks = tuple(_rank_work(rank, work.rows, held, owned, sizes, 2 * heads * dim) for rank in range(group_size))
    return SelectionWork(partition, ranks)


def _rank_work(rank: int, all_rows: int, held: Held, owned: RowPartition, sizes: _Sizes, pair_flops: int) -> RankWork:
    ranks, rows, parts = owned.group_size, owned.rows_of(rank), owned.slices(rank)
    (home,) = RowPartition.contiguous(held.rows, ranks).slices(rank)
    stay = sum(len(overlap(part, home)) for part in parts)
    scored = sum(held.scored_before(part.stop) - held.scored_before(part.start) for part in parts)
    visible = sum(held.visible_before(part.stop) - held.visible_before(part.start) for part in parts)
    received = (all_rows - len(home)) * sizes.key_row + (rows - stay) * sizes.query_row
    # Own rows' selection; with shards also everyone's, and gathers in which a piece is filled, sent and placed.
    selected, moving = rows * sizes.ids, (len(home) + rows) * sizes.query_row
    piece = min(OVERLAP_ROWS, owned.rows_per_rank)
    if owned.is_replicated:
        piece = rows
    else:
        pieces = -(-owned.rows_per_rank // OVERLAP_ROWS)
        received += (ranks - 1) * (owned.rows_per_rank + pieces) * sizes.ids
        selected += held.rows * sizes.ids + (GATHERS_HELD * (ranks + 1) + 1) * (piece + 1) * sizes.ids
        if stay == len(home) == rows:
            moving = rows * sizes.query_row
        else:
            moving += max(len(home), rows) * sizes.query_row
    own = rows * (sizes.query_row + _BOUNDS)
    ordering = sizes.ordering + len(home) * sizes.query_row
    peak = sizes.keys + max(moving, ordering, sizes.compressing + own, sizes.selecting + own + selected)
    return RankWork(rows, visible, scored, pair_flops * scored, received, peak)


def best_partition(
    lengths: Sequence[int], geometry: DsaGeometry, *, group_size: int, context_size: int = 1
) -> Partition:
    """The partition to set for packs like `lengths`: of those even enough, the one that moves least.

    Raises: as `selection_work`.
    """
    check_request(lengths, geometry, context_size)
    candidates = [
        selection_work(lengths, geometry, group_size=group_size, partition=partition, context_size=context_size)
        for partition in (get_args(Partition) if context_size == 1 else CONTEXT_PARTITIONS)
        if partition != "off"
    ]
    bound = _EVEN_ENOUGH * min(work.busiest_over_mean for work in candidates)
    even = [work for work in candidates if work.busiest_over_mean <= bound]
    return min(even, key=lambda work: sum(rank.received_bytes for rank in work.ranks)).partition


def backend_named(kernels: Kernels) -> Backend:
    """The backend of that name, wherever it can run."""
    if kernels not in ("torch", "triton"):
        raise ValueError(f"kernels is {shown(kernels)}; accepted are 'torch' and 'triton'")
    return resolve(kernels)


def check_request(lengths: Sequence[int], geometry: DsaGeometry, context_size: int) -> None:
    """Refuse what no work can be counted of, before anything is read from it."""
    check_sequence("lengths", lengths)
    if not isinstance(geometry, DsaGeometry):
        raise TypeError(f"geometry is {shown(geometry)}; accepted is a DsaGeometry")
    check_ranks("context_size", context_size)
