"""Scored pairs of a tensor-parallel group under context parallelism, where it has some of the rows and all the pools.

Megatron cuts a document into 2 * CP equal chunks; context-parallel rank c has chunks c and 2 * CP - 1 - c of each
document, one document after the other. Its tensor-parallel group shares these rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.rows import PackWork, partition_rows
from mcore_dsa.settings import Partition

# The balanced cuts go by the rows of whole documents, and are not defined here.
CONTEXT_PARTITIONS: tuple[Partition, ...] = ("off", "contiguous", "zigzag")


def busiest_group(
    lengths: Sequence[int], geometry: DsaGeometry, *, tp: int, cp: int
) -> dict[Partition, list[tuple[int, int, int]]]:
    """Rows, visible pairs and scored pairs of each rank of the group with the most scored pairs, by partition.

    Raises: ValueError for a document whose length is no multiple of 2 * cp.
    """
    uneven = [length for length in lengths if length % (2 * cp)]
    if uneven:
        raise ValueError(f"a document is {uneven[0]} tokens; accepted is, with --cp {cp}, a multiple of {2 * cp}")
    work = PackWork(tuple(lengths), geometry.index_kpool, geometry.pool_budget)
    starts = [0, *accumulate(lengths)][:-1]

    def chunks(rank: int) -> list[range]:
        cuts = [(start, length // (2 * cp)) for start, length in zip(starts, lengths, strict=True)]
        return [
            range(start + chunk * size, start + (chunk + 1) * size)
            for start, size in cuts
            for chunk in (rank, 2 * cp - 1 - rank)
        ]

    rows = sum(lengths) // cp
    busiest = max(map(chunks, range(cp)), key=lambda parts: _before(parts, work.scored_pairs_before)(rows))
    visible, scored = (_before(busiest, count) for count in (work.visible_pairs_before, work.scored_pairs_before))
    owned = {
        kind: partition_rows(kind, rows, tp, (), pool_size=geometry.index_kpool, budget=geometry.pool_budget)
        for kind in CONTEXT_PARTITIONS
    }
    return {
        kind: [
            (
                partition.rows_of(rank),
                sum(visible(part.stop) - visible(part.start) for part in partition.slices(rank)),
                sum(scored(part.stop) - scored(part.start) for part in partition.slices(rank)),
            )
            for rank in range(tp)
        ]
        for kind, partition in owned.items()
    }


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
