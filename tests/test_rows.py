"""Who owns which rows: plain integers, looked at for all ranks in one process."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from draw import Call, calls
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_dsa.rows import PackWork, RowExchange, RowPartition, partition_rows

KINDS = ("contiguous", "zigzag", "balanced")


def own(partition: RowPartition, rank: int) -> list[int]:
    return [row for part in partition.slices(rank) for row in part]


@given(st.integers(0, 3000), st.integers(1, 130))
def test_contiguous_shards_are_the_formula(rows: int, ranks: int) -> None:
    partition = RowPartition.contiguous(rows, ranks)
    longest = -(-rows // ranks)
    assert (partition.num_rows, partition.group_size, partition.rows_per_rank) == (rows, ranks, longest)
    for rank in range(ranks):
        assert partition.slices(rank) == (range(min(rows, rank * longest), min(rows, (rank + 1) * longest)),)


@given(st.integers(0, 500), st.integers(1, 40))
def test_zigzag_shards_are_the_formula(rows: int, ranks: int) -> None:
    partition = RowPartition.zigzag(rows, ranks)
    length = -(-rows // (2 * ranks))
    for rank in range(ranks):
        assert own(partition, rank) == [
            row
            for part in (rank, 2 * ranks - 1 - rank)
            for row in range(part * length, (part + 1) * length)
            if row < rows
        ]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_thousand_and_one_rows(ranks: int) -> None:
    partition = RowPartition.contiguous(1001, ranks)
    sizes = [partition.rows_of(rank) for rank in range(ranks)]
    assert sizes == {2: [501, 500], 3: [334, 334, 333], 8: [126] * 7 + [119]}[ranks]


def test_fewer_rows_than_ranks() -> None:
    partition = RowPartition.contiguous(5, 8)
    assert [own(partition, rank) for rank in range(8)] == [[0], [1], [2], [3], [4], [], [], []]
    assert [own(RowPartition.contiguous(9, 4), rank) for rank in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], []]
    assert RowPartition.contiguous(0, 3).rows_per_rank == 0


@settings(max_examples=40)
@given(calls(max_batch=2), st.sampled_from([1, 2, 3, 5, 8, 100]), st.sampled_from(KINDS), st.lists(st.integers(0, 40)))
def test_shards_put_together_are_the_whole(call: Call, ranks: int, kind: Any, lengths: list[int]) -> None:
    """Every rank of a group in turn, empty shards too: its rows' selections, laid side by side, are the unsharded."""
    rows = len(call.position_S)
    partition = partition_rows(kind, rows, ranks, lengths, pool_size=call.layout.pool_size, budget=call.budget)
    together = torch.full((call.layout.batch, rows, call.budget), -7, dtype=torch.int32)
    for rank in range(ranks):
        row = torch.tensor(own(partition, rank), dtype=torch.int64)
        selection = call.rows(row).select()
        assert selection.shape[1] == partition.rows_of(rank) <= partition.rows_per_rank
        together[:, row] = selection
    assert torch.equal(together, call.select())


@pytest.mark.parametrize("bad", [-1, 5.0, True, None, "5"])
def test_bad_row_counts_are_refused(bad: Any) -> None:
    work = PackWork((40,), 4, 1)
    for make in (RowPartition.contiguous, RowPartition.zigzag, lambda *sizes: RowPartition.balanced(*sizes, work)):
        with pytest.raises((TypeError, ValueError), match=r"num_rows is .*accepted is an integer >= 0"):
            make(bad, 2)


@pytest.mark.parametrize("bad", [0, -2, 2.0, True, None])
def test_bad_group_sizes_are_refused(bad: Any) -> None:
    work = PackWork((40,), 4, 1)
    for make in (RowPartition.contiguous, RowPartition.zigzag, lambda *sizes: RowPartition.balanced(*sizes, work)):
        with pytest.raises((TypeError, ValueError), match=r"group_size is .*accepted is an integer >= 1"):
            make(40, bad)


@pytest.mark.parametrize("rank", [-1, 4, 400])
def test_a_rank_outside_the_group_is_refused(rank: int) -> None:
    for kind in KINDS:
        partition = partition_rows(kind, 10, 4, [10], pool_size=4, budget=1)
        for ask in (partition.slices, partition.rows_of):
            with pytest.raises(ValueError, match=rf"rank is {rank}; accepted is 0 <= rank < 4"):
                ask(rank)


@pytest.mark.parametrize(
    "shards",
    [
        (),
        ((range(3),), (range(4, 6),)),
        ((range(5),), ()),
        ((range(1, 6),),),
        ((range(7),),),
        ((range(-1, 6),),),
        ((range(0, 6, 2),), (range(1, 6, 2),)),
        ((range(2),), (range(4, 6), range(2, 3))),
        ((range(4),), (range(3, 6),)),
        ((range(6),), (range(6),), ()),
        ((range(6), range(6)),),
    ],
)
def test_shards_that_do_not_hold_each_row_once_are_refused(shards: Any) -> None:
    """A row nobody owns would keep what its slot held before; one of two owners would be work done twice."""
    with pytest.raises(ValueError, match=r"(shards|group_size).*accepted (is|are)"):
        RowPartition(6, shards)


@given(st.integers(0, 400), st.integers(1, 40))
def test_off_gives_every_rank_every_row(rows: int, ranks: int) -> None:
    partition = partition_rows("off", rows, ranks, [rows], pool_size=4, budget=1)
    assert partition == RowPartition.replicated(rows, ranks)
    assert partition.is_replicated
    assert [own(partition, rank) for rank in range(ranks)] == [list(range(rows))] * ranks
    if rows > 1 and ranks > 1:
        assert not RowPartition.contiguous(rows, ranks).is_replicated


@given(st.integers(0, 9), st.integers(1, 6), st.sampled_from(("off", *KINDS)), st.randoms(use_true_random=False))
def test_exchanged_rows_arrive_where_they_belong(part: int, ranks: int, kind: Any, random: Any) -> None:
    """All ranks played in one process: what each sends, laid into what each receives."""
    rows = part * ranks
    partition = partition_rows(kind, rows, ranks, [rows], pool_size=2, budget=1)
    if kind == "zigzag":
        shuffled = [piece for shard in partition.shards for piece in (*shard, range(rows, rows))]
        random.shuffle(shuffled)
        partition = RowPartition(rows, tuple(tuple(shuffled[rank::ranks]) for rank in range(ranks)))
    exchanges = [RowExchange.of(partition, rank) for rank in range(ranks)]
    sent: list[list[list[int]]] = []
    for rank, exchange in enumerate(exchanges):
        outgoing = [rank * part + row for run in exchange.send for row in run]
        cuts = [0, *accumulate(exchange.send_counts)]
        sent.append([outgoing[start:stop] for start, stop in pairwise(cuts)])
    for rank, exchange in enumerate(exchanges):
        incoming = [row for sender in sent for row in sender[rank]]
        assert exchange.receive_counts == tuple(len(sender[rank]) for sender in sent)
        owned: list[int | None] = [None] * partition.rows_of(rank)
        for place, arrived in zip(exchange.place, exchange.incoming, strict=True):
            owned[place.start : place.stop] = incoming[arrived.start : arrived.stop]
        assert owned == own(partition, rank)
        stays = all(own(partition, each) == list(range(each * part, (each + 1) * part)) for each in range(ranks))
        assert exchange.moves != stays


def test_rows_that_no_ranks_hold_equally_are_not_exchanged() -> None:
    with pytest.raises(ValueError, match="num_rows is 10; accepted are multiples of the group's 4 ranks"):
        RowExchange.of(RowPartition.contiguous(10, 4), 0)


def test_shards_in_any_order_and_with_empty_slices_are_fine() -> None:
    partition = RowPartition(6, ((range(4, 6), range(1)), (), (range(2, 2), range(1, 4))))
    assert [partition.rows_of(rank) for rank in range(3)] == [3, 0, 3]


@pytest.mark.parametrize("field", ["lengths", "pool_size", "budget"])
@pytest.mark.parametrize("bad", [-1, 2.0, True, None])
def test_bad_packs_are_refused(field: str, bad: Any) -> None:
    good: dict[str, Any] = {"lengths": (8, 3), "pool_size": 4, "budget": 2}
    with pytest.raises((TypeError, ValueError), match=rf"{field}.*accepted are"):
        PackWork(**{**good, field: (8, bad) if field == "lengths" else bad})
