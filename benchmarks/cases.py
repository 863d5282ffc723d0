"""What is timed: inputs of GLM-5.3-Flash's indexer, and ratios of two things measured side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks.baseline import select_by_mask
from mcore_dsa import PoolLayout, select_pools
from mcore_dsa.rows import PackWork, RowPartition, partition_rows
from mcore_dsa.settings import Partition

HEADS, DIM, POOL_SIZE, BUDGET = 32, 128, 4, 512
PARTITIONS: tuple[Partition, ...] = ("contiguous", "zigzag", "balanced")


@dataclass(frozen=True)
class Inputs:
    """Random queries, weights and pooled keys of one pack, fp32, batch 1."""

    q: Tensor
    weights: Tensor
    pool_key: Tensor
    layout: PoolLayout
    work: PackWork

    @classmethod
    def of(cls, *lengths: int) -> Inputs:
        generator = torch.Generator().manual_seed(sum(lengths))
        boundaries = torch.tensor([0, *lengths]).cumsum(0)
        layout = PoolLayout.from_cu_seqlens(boundaries, pool_size=POOL_SIZE)
        rows = sum(lengths)
        return cls(
            torch.randn(rows, 1, HEADS, DIM, generator=generator),
            torch.randn(rows, 1, HEADS, generator=generator) * (HEADS * DIM) ** -0.5,
            torch.randn(layout.num_pools, 1, DIM, generator=generator),
            layout,
            PackWork(lengths, POOL_SIZE, BUDGET),
        )

    def select(self) -> Tensor:
        return select_pools(self.q, self.weights, self.pool_key, self.layout, budget=BUDGET)

    def shard(self, rows: Sequence[range]) -> Callable[[], Tensor]:
        """The selection of the slices `rows`, whose queries the rank holds already."""
        index = torch.cat([torch.arange(part.start, part.stop) for part in rows])
        q, weights = self.q[index], self.weights[index]
        return lambda: select_pools(q, weights, self.pool_key, self.layout, index, budget=BUDGET)


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def bare_seconds_per_pair() -> float:
    """Time of a (row, pool) pair in the product 512 x 128 by 128 x 256, 16 rows of 32 heads, operands in cache."""
    rows, keys, out = torch.randn(512, DIM), torch.randn(256, DIM), torch.empty(512, 256)
    times = [seconds(lambda: torch.mm(rows, keys.T, out=out)) for _ in range(60)]
    return median(times) / (16 * 256)


def over_bare_products(repetitions: int, rows: int = 8192) -> list[float]:
    """(a) selection over the bare products of the pairs that must be scored."""
    inputs = Inputs.of(rows)
    inputs.select()
    ratios = []
    for _ in range(repetitions):
        before = bare_seconds_per_pair()
        took = seconds(inputs.select)
        bare = (before + bare_seconds_per_pair()) / 2
        ratios.append(took / (bare * inputs.work.scored_pairs))
    return ratios


def baseline_over_selection(repetitions: int, rows: int = 8192) -> list[float]:
    """(b) the straightforward selection over ours, whole document on one rank."""
    inputs = Inputs.of(rows)

    def baseline() -> Tensor:
        return select_by_mask(inputs.q, inputs.weights, inputs.pool_key, pool_size=POOL_SIZE, budget=BUDGET)

    inputs.select()
    return [seconds(baseline) / seconds(inputs.select) for _ in range(repetitions)]


def slowest_rank_over_unsharded(
    repetitions: int, rows: int = 16384, sizes: Sequence[int] = (2, 4)
) -> Mapping[tuple[int, Partition], list[float]]:
    """(c) the slowest rank's own selection over the unsharded one, ranks one after another."""
    inputs = Inputs.of(rows)
    partitions: dict[tuple[int, Partition], RowPartition] = {
        (size, kind): partition_rows(kind, rows, size, [rows], pool_size=POOL_SIZE, budget=BUDGET)
        for size in sizes
        for kind in PARTITIONS
    }
    ratios: dict[tuple[int, Partition], list[float]] = {key: [] for key in partitions}
    inputs.shard([range(rows // 2, rows // 2 + 512)])()
    for _ in range(repetitions):
        unsharded = seconds(inputs.select)
        for key, partition in partitions.items():
            ranks = [seconds(inputs.shard(parts)) for parts in partition.shards]
            ratios[key].append(max(ranks) / unsharded)
    return ratios


def pack_over_document(repetitions: int, documents: int = 8, length: int = 4096) -> list[float]:
    """(d) a pack of documents over one document of as many tokens."""
    pack, one = Inputs.of(*[length] * documents), Inputs.of(documents * length)
    pack.shard([range(length)])()
    return [seconds(pack.select) / seconds(one.select) for _ in range(repetitions)]


def document_mix(documents: int = 1000) -> list[int]:
    """Lengths as a corpus has them, log-normal from 16 to 60,000 tokens, the same in every run."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.empty(documents).log_normal_(mean=7.5, std=1.5, generator=generator)
    return [int(length) for length in drawn.clamp(16, 60_000)]
