"""Zigzag and balanced partitions and the overlapped gather: who owns which rows, what moves, and no bit changes."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from draw import numbers
from harness import run_ranks
from hypothesis import given
from hypothesis import strategies as st
from recorder import Recorder

from mcore_dsa import PoolLayout, select_pools, select_pools_sharded, sharded
from mcore_dsa.backends import SelectionCounters
from mcore_dsa.collectives import exchange_rows
from mcore_dsa.rows import PackWork, RowPartition, partition_rows
from mcore_dsa.selection_gather import SelectionGather, gather_selection

KINDS = ("contiguous", "zigzag", "balanced")
ALL = ("off", *KINDS)
POOL_SIZE, BUDGET = 4, 3


def brute_visible(lengths: list[int], pool_size: int) -> list[int]:
    return [row // pool_size for length in lengths for row in range(1, length + 1)]


@given(st.integers(0, 200), st.integers(1, 12), st.lists(st.integers(0, 40), max_size=6))
def test_every_row_has_one_owner(rows: int, ranks: int, lengths: list[int]) -> None:
    for kind in KINDS:
        partition = partition_rows(kind, rows, ranks, lengths, pool_size=POOL_SIZE, budget=BUDGET)
        owned = [row for rank in range(ranks) for part in partition.slices(rank) for row in part]
        assert sorted(owned) == list(range(rows))
        assert partition.group_size == ranks
        assert [partition.rows_of(rank) for rank in range(ranks)] == [
            sum(map(len, partition.slices(rank))) for rank in range(ranks)
        ]
        assert partition.rows_per_rank == max(partition.rows_of(rank) for rank in range(ranks))


def test_zigzag_pairs_an_early_slice_with_a_late_one() -> None:
    assert RowPartition.zigzag(16, 2).shards == ((range(4), range(12, 16)), (range(4, 8), range(8, 12)))
    # 2R slices of ceil(s / 2R): with 9 rows the last slice is short and the one before it whole.
    assert RowPartition.zigzag(9, 2).shards == ((range(3), range(9, 9)), (range(3, 6), range(6, 9)))


@given(st.lists(st.integers(0, 60), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_pack_work_is_the_sum_over_rows(lengths: list[int], pool_size: int, budget: int, ranks: int) -> None:
    work = PackWork(tuple(lengths), pool_size, budget)
    visible = brute_visible(lengths, pool_size)
    scored = [pools if pools > budget else 0 for pools in visible]
    assert (work.rows, work.visible_pairs, work.scored_pairs) == (len(visible), sum(visible), sum(scored))
    for row in range(len(visible) + 3):
        assert work.visible_pairs_before(row) == sum(visible[:row])
        assert work.scored_pairs_before(row) == sum(scored[:row])
    partition = RowPartition.balanced(len(visible), ranks, work)
    if sum(scored):
        cuts = [0, *(partition.slices(rank)[0].stop for rank in range(ranks))]
        for (start, stop), rank in zip(pairwise(cuts), range(ranks), strict=True):
            assert abs(sum(scored[start:stop]) - sum(scored) / ranks) <= 1 + max(scored)
            assert partition.slices(rank) == (range(start, stop),)


@pytest.mark.parametrize("arguments", [((-1,), 4, 3), ((8,), 0, 3), ((8,), 4, 0)])
def test_bad_work_is_refused(arguments: tuple[tuple[int, ...], int, int]) -> None:
    with pytest.raises(ValueError, match=r"accepted are lengths >= 0, pool_size >= 1 and budget >= 1"):
        PackWork(*arguments)


def test_bad_partitions_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"partition is 'striped'; accepted are 'off', 'contiguous', 'zigzag', 'balanced'"
    ):
        partition_rows("striped", 4, 2, [4], pool_size=4, budget=1)  # type: ignore[arg-type]
    for make in (RowPartition.contiguous, RowPartition.zigzag):
        with pytest.raises(ValueError, match=r"(num_rows|group_size) is .*; accepted is an integer >= "):
            make(4, 0)
        with pytest.raises(ValueError, match=r"(num_rows|group_size) is .*; accepted is an integer >= "):
            make(-1, 2)
    for rank in (-1, 2):
        with pytest.raises(ValueError, match=rf"rank is {rank}; accepted is 0 <= rank < 2"):
            RowPartition.zigzag(4, 2).slices(rank)


def exchange(rows: int, device: str = "cpu") -> None:
    """Rows of several dtypes reach the rank that owns them, in its order, by one all-to-all."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    every = [
        torch.arange(rows * 6, dtype=torch.float64).view(rows, 2, 3).to(torch.bfloat16),
        torch.arange(rows, dtype=torch.float32).view(rows, 1) + 0.25,
        torch.arange(rows * 3, dtype=torch.int32).view(rows, 3),
        torch.arange(rows, dtype=torch.int64),
        torch.empty(rows, 0, 2),
    ]
    mine = [tensor[rank * rows // ranks : (rank + 1) * rows // ranks].to(device) for tensor in every]
    kinds = {kind: partition_rows(kind, rows, ranks, [rows], pool_size=POOL_SIZE, budget=BUDGET) for kind in ALL}
    # Empty slices ahead of full ones, slices out of order, and from three ranks on one that owns nothing.
    turned = [
        (range(row, row), range(row, row + 6), range(row + 9, row + 12), range(row + 6, row + 9))
        for row in range(0, rows, 12)
    ]
    kinds["turned"] = RowPartition(rows, tuple(turned[::-1]))
    if ranks > 2:
        kinds["idle"] = RowPartition(rows, ((range(5, rows),), (), (range(5),), *((),) * (ranks - 3)))
    for kind, partition in kinds.items():
        with Recorder() as log:
            owned = exchange_rows(mine, partition, dist.group.WORLD, agreed=True)
        index = torch.cat([torch.arange(part.start, part.stop) for part in (range(0), *partition.slices(rank))])
        for got, tensor in zip(owned, every, strict=True):
            assert got.dtype == tensor.dtype
            assert got.device == mine[0].device
            assert torch.equal(got.cpu(), tensor[index])
        in_place = kind in ("off", "contiguous") or (ranks == 1 and kind != "turned")
        moving = (
            ["all_gather_single"] * len(mine) if kind == "off" and ranks > 1 else ["all_to_all_single"] * (not in_place)
        )
        assert [call.name for call in log.calls] == moving
    partition = RowPartition.zigzag(rows, ranks)
    with pytest.raises(ValueError, match="accepted are equal parts of the rows over"):
        exchange_rows([mine[0][:-1]], partition, dist.group.WORLD)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_are_exchanged(ranks: int) -> None:
    run_ranks(exchange, ranks, 12 * ranks)


def selection_over_ranks(rows: int, cuts: list[int], data: str, piece: int, device: str = "cpu") -> None:
    """Every partition, with and without overlap, gives every rank the bits of the unsharded selection."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    sharded.OVERLAP_ROWS = piece
    cu_seqlens = torch.tensor(cuts, device=device)
    layout = PoolLayout.from_cu_seqlens(cu_seqlens, num_tokens=rows, pool_size=POOL_SIZE, batch=2)
    q, weights, key = (x.to(device) for x in numbers(data, rows, layout.num_pools, 2, 8, 16, seed=rows))
    position = torch.arange(rows, device=device)
    whole = select_pools(q, weights, key, layout, budget=BUDGET)
    lengths = [stop - start for start, stop in pairwise(cuts)]
    kinds = {kind: partition_rows(kind, rows, ranks, lengths, pool_size=POOL_SIZE, budget=BUDGET) for kind in ALL}
    # A rank without any slice, and one whose first slice is empty.
    kinds["odd"] = RowPartition(
        rows,
        ((range(rows, rows), range(2, rows)), *((),) * (ranks - 2), (range(2),))[:ranks]
        if ranks > 1
        else ((range(2, rows), range(2)),),
    )
    for kind, partition in kinds.items():
        index = torch.cat([torch.arange(part.start, part.stop) for part in (range(0), *partition.slices(rank))])
        for overlap in (False, True):
            counters = SelectionCounters()
            got = select_pools_sharded(
                q[index],
                weights[index],
                key,
                layout,
                position,
                budget=BUDGET,
                query_shard_group=dist.group.WORLD,
                partition=partition,
                overlap=overlap,
                counters=counters,
            )
            assert got.dtype == torch.int32
            assert torch.equal(got, whole), (kind, overlap)
            assert counters.rows == 2 * len(index)
            pieces = -(-len(index) // piece) if overlap and not partition.is_replicated else 1
            assert counters.calls == max(1, pieces)


# Rows that straddle slices, strips, segments and ranks; a pack whose last rank would have nothing to score.
PACKS = [(120, [0, 120]), (121, [0, 3, 60, 61, 100, 121]), (7, [0, 7]), (96, [0, 80, 81, 82, 83, 96])]


TIED = ("plateau", "zeros", "equal", "duplicates")


def selections_over_ranks() -> None:
    """Each pack with two kinds of data, each kind with two packs."""
    for number, data in enumerate(TIED):
        for rows, cuts in (PACKS[number], PACKS[number - 1]):
            selection_over_ranks(rows, cuts, data, 7)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_partitions_change_no_bit(ranks: int) -> None:
    run_ranks(selections_over_ranks, ranks)


def partition_that_does_not_fit() -> None:
    layout = PoolLayout.dense(12, pool_size=POOL_SIZE)
    q, weights, key = numbers("normal", 12, layout.num_pools, 1, 8, 16, seed=1)
    common = {"budget": 1, "query_shard_group": dist.group.WORLD}
    position = torch.arange(12)
    for partition in (RowPartition.zigzag(12, 3), RowPartition.zigzag(11, 2)):
        with pytest.raises(ValueError, match="accepted are 12 rows and 2 ranks"):
            select_pools_sharded(q[:6], weights[:6], key, layout, position, partition=partition, **common)
    with pytest.raises(ValueError, match=r"q_OBHD has shape \(7, .*; accepted is \[6, "):
        select_pools_sharded(q[:7], weights[:7], key, layout, position, **common)
    with pytest.raises(ValueError, match="cuts rows for 3 ranks; accepted are the group's 2 ranks"):
        gather_selection(torch.zeros(1, 12, 2, dtype=torch.int32), RowPartition.contiguous(12, 3), dist.group.WORLD)
    gather = SelectionGather(
        RowPartition.zigzag(12, 2), dist.group.WORLD, batch=1, budget=2, device=torch.device("cpu")
    )
    with pytest.raises(TypeError, match=r"torch.int64; accepted is torch.int32"):
        gather.advance(torch.zeros(1, 6, 2, dtype=torch.int64), 6)
    with pytest.raises(ValueError, match=r"accepted is \[1, 6, 2\]"):
        gather.advance(torch.zeros(1, 5, 2, dtype=torch.int32), 5)


def test_a_partition_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    run_ranks(partition_that_does_not_fit, 2)


def gathers_in_flight() -> int:
    """The most gathers that ran at once, over a shard of many pieces."""
    partition = RowPartition.contiguous(40, 2)
    running = most = 0
    original = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    class Tracked:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            nonlocal running
            running -= 1
            self.work.wait()

    def tracked(*arguments: Any, **options: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert options["async_op"]
        assert arguments[0].ndim == 3
        return Tracked(original(*arguments, **options))

    setattr(dist, original.__name__, tracked)
    gather = SelectionGather(
        partition, dist.group.WORLD, batch=1, budget=1, device=torch.device("cpu"), piece_rows=3, in_flight=2
    )
    mine = torch.arange(20, dtype=torch.int32).view(1, 20, 1) + 20 * dist.get_rank()
    own = torch.full_like(mine, -7)
    for done in range(20):
        own[:, done] = mine[:, done]
        gather.advance(own, done + 1)
    assert torch.equal(gather.finish(own).flatten(), torch.arange(40, dtype=torch.int32))
    assert running == 0
    return most


def test_a_bounded_number_of_gathers_is_in_flight() -> None:
    assert run_ranks(gathers_in_flight, 2) == [3, 3]
