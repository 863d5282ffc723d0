"""Gathers over gloo, on one to four ranks and in groups inside a bigger world."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from draw import poisoned
from harness import RanksFailed, run_ranks
from recorder import Recorder

from mcore_dsa.collectives import (
    exchange_rows,
    gather_rows,
    greatest,
    group_rank,
    group_size,
)
from mcore_dsa.rows import PackWork, RowExchange, RowPartition
from mcore_dsa.selection_gather import SelectionGather, gather_selection

SIZES = [1, 2, 3, 4]
# Groups of a world of four: neighbours, and ranks that are none.
SPLITS = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0,), (1, 2, 3)), ((0, 3, 1), (2,))]


def in_groups(split: tuple[tuple[int, ...], ...], check: Callable[[Any], None]) -> None:
    """`check` in every group of a split at once, each with its own data."""
    groups = [dist.new_group(list(ranks)) for ranks in split]
    for ranks, group in zip(split, groups, strict=True):
        if dist.get_rank() in ranks:
            assert group_size(group) == len(ranks)
            assert group_rank(group) == sorted(ranks).index(dist.get_rank())
            check(group)


def in_world(check: Callable[[Any], None]) -> None:
    check(dist.group.WORLD)


def mixed(seed: int, *shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int64)


def rows_are_joined(group: Any) -> None:
    """In rank order, bit for bit, whatever the dtype, the strides or the number of rows, none too."""
    ranks, me, seed = group_size(group), group_rank(group), dist.get_process_group_ranks(group)[0]
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8):
        for rows in (0, 1, 5):
            every = mixed(seed, ranks * rows, 2, 3).to(dtype)
            mine = every[me * rows : (me + 1) * rows]
            strided = torch.stack([mine, mine * 0], dim=-1)[..., 0]
            with poisoned(), Recorder() as log:
                joined = gather_rows(strided, group, agreed=True)
            assert joined.dtype == dtype
            assert torch.equal(joined, every)
            assert [call.group for call in log.calls] == [group]
    learned = torch.ones(2, 3, requires_grad=True)
    assert not gather_rows(learned, group).requires_grad


def selections_are_joined(group: Any) -> None:
    """Every partition of every row count, by one collective into three dimensions; no slot keeps what it held."""
    ranks, me, seed = group_size(group), group_rank(group), dist.get_process_group_ranks(group)[0]
    for rows in (0, 1, 2, 5, 17, 64):
        work = PackWork((rows // 3, rows - rows // 3), 1, 1)
        for partition in (
            RowPartition.contiguous(rows, ranks),
            RowPartition.zigzag(rows, ranks),
            RowPartition.balanced(rows, ranks, work),
            RowPartition.replicated(rows, ranks),
        ):
            for batch, budget in ((1, 1), (2, 7), (3, 2)):
                every = mixed(seed + rows, batch, rows, budget).to(torch.int32)
                row = [row for part in partition.slices(me) for row in part]
                strided = every[:, row].transpose(0, 2).contiguous().transpose(0, 2)
                with poisoned(), Recorder() as log:
                    joined = gather_selection(strided, partition, group, agreed=True)
                assert joined.dtype == torch.int32
                assert torch.equal(joined, every)
                # A row more, for the numbers of call and piece; and nothing to gather where every rank owns every row.
                one = (torch.int32, (batch, partition.rows_per_rank + 1, budget))
                all_of_them = (torch.int32, (ranks * batch, partition.rows_per_rank + 1, budget))
                assert [(call.group, call.input, call.output) for call in log.calls] == [(group, one, all_of_them)] * (
                    rows > 0 and not partition.is_replicated
                )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", [rows_are_joined, selections_are_joined])
def test_gathers_over_the_world(size: int, check: Callable[[Any], None]) -> None:
    run_ranks(in_world, size, check)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("check", [rows_are_joined, selections_are_joined])
def test_gathers_inside_a_bigger_world(split: tuple[tuple[int, ...], ...], check: Callable[[Any], None]) -> None:
    run_ranks(in_groups, 4, split, check)


def test_no_group_is_a_group_of_one_without_communication() -> None:
    """Also where no process group was ever made."""
    assert not dist.is_initialized()
    assert (group_size(None), group_rank(None)) == (1, 0)
    x = torch.randn(5, 2)
    with poisoned():
        joined = gather_rows(x, None)
        selection = torch.arange(20, dtype=torch.int32).view(2, 5, 2)
        together = gather_selection(selection, RowPartition.contiguous(5, 1), None)
    assert torch.equal(joined, x)
    assert joined.data_ptr() != x.data_ptr()
    assert torch.equal(together, selection)


@pytest.mark.parametrize(
    ("selection", "error"),
    [
        (torch.zeros(2, 5, 3, dtype=torch.int64), TypeError),
        (torch.zeros(2, 5, 3), TypeError),
        (torch.zeros(2, 4, 3, dtype=torch.int32), ValueError),
        (torch.zeros(2, 6, 3, dtype=torch.int32), ValueError),
        (torch.zeros(5, 3, dtype=torch.int32), ValueError),
    ],
)
def test_a_bad_selection_is_refused(selection: torch.Tensor, error: type[Exception]) -> None:
    with pytest.raises(error, match=r"selection_BOK .*accepted"):
        gather_selection(selection, RowPartition.contiguous(5, 1), None)


def nothing_is_exchanged(group: Any) -> None:
    ranks = group_size(group)
    with Recorder() as log:
        for partition in (RowPartition.zigzag(8 * ranks, ranks), RowPartition.replicated(8 * ranks, ranks)):
            assert exchange_rows([], partition, group, agreed=True) == []
        nothing = torch.zeros(0, 3)
        for partition in (RowPartition.zigzag(0, ranks), RowPartition.replicated(0, ranks)):
            assert exchange_rows([nothing], partition, group, agreed=True)[0].shape == (0, 3)
    assert log.calls == []


@pytest.mark.parametrize("size", [1, 3])
def test_no_tensors_and_no_rows_are_exchanged_without_a_collective(size: int) -> None:
    run_ranks(in_world, size, nothing_is_exchanged)


def test_rows_that_every_rank_owns_are_cut_into_no_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowExchange, "of", lambda *_: pytest.fail("runs that nobody sends"))
    x = torch.randn(6, 2)
    assert torch.equal(exchange_rows([x], RowPartition.replicated(6, 1), None)[0], x)


def test_a_tensor_that_is_no_equal_part_is_named() -> None:
    partition = RowPartition.contiguous(6, 1)
    said = r"tensors\[1\] has shape \(5,\) and partition cuts 6 rows for 1 ranks; accepted are equal parts"
    with pytest.raises(ValueError, match=said):
        exchange_rows([torch.zeros(6), torch.zeros(5)], partition, None)


def test_a_partition_for_another_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"partition cuts rows for 2 ranks; accepted .* 1 ranks"):
        gather_selection(torch.zeros(2, 3, 3, dtype=torch.int32), RowPartition.contiguous(6, 2), None)
    with pytest.raises(ValueError, match=r"x has no dimensions; accepted"):
        gather_rows(torch.tensor(1.0), None)


def one_rank_skips() -> None:
    if dist.get_rank():
        gather_rows(torch.zeros(1), dist.group.WORLD)


def test_the_harness_would_notice_a_rank_that_does_not_enter() -> None:
    """What the tests above rest on: a collective that one rank leaves out hangs, and a hang is a failure."""
    with pytest.raises(RanksFailed):
        run_ranks(one_rank_skips, 2, timeout=3.0)


def a_rank_begins_anew(batch: int, budget: int) -> list[str]:
    """Rank 1 raises behind the first piece of a call and calls again; what each rank is told in that call."""
    partition, rank = RowPartition.contiguous(64, 2), dist.get_rank()
    own = torch.arange(batch * 32 * budget, dtype=torch.int32).view(batch, 32, budget)

    def gather() -> SelectionGather:
        options = {"batch": batch, "budget": budget, "device": own.device, "piece_rows": 8, "in_flight": 1}
        return SelectionGather(partition, dist.group.WORLD, **options)

    def told(call: SelectionGather) -> str:
        try:
            call.finish(own)
        except ValueError as error:
            return str(error)
        return "nothing"

    said = [told(gather())]
    if rank == 1:
        gather().advance(own, 8)
    said.append(told(gather()))
    said.append(told(gather()))
    return said


@pytest.mark.parametrize(("batch", "budget"), [(1, 1), (2, 5)])
def test_a_rank_that_raised_in_a_call_and_calls_again_is_told_on_every_rank(batch: int, budget: int) -> None:
    """Every piece of it would lie one beside the others', of the right shape, and select wrong tokens."""
    for said in run_ranks(a_rank_begins_anew, 2, batch, budget):
        # Told once: all have seen the same numbers, and go on in step.
        assert said[0] == said[2] == "nothing"
        assert re.search(r"are in calls and pieces 2\.\d, [23]\.\d; accepted is the same on every rank", said[1])


def a_stranger() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        for ask in (group_size, group_rank, lambda group: gather_rows(torch.zeros(2), group)):
            with pytest.raises(ValueError, match="query_shard_group is a group without this rank; accepted are groups"):
                ask(group)


def test_a_rank_outside_the_group_is_told_so() -> None:
    run_ranks(a_stranger, 2)


@pytest.mark.parametrize("group", [5, "tp", [0, 1], torch.zeros(2)])
def test_what_is_no_group_is_refused(group: Any) -> None:
    with pytest.raises(TypeError, match=r"query_shard_group is .*; accepted are a torch.distributed.ProcessGroup and"):
        group_size(group)


def one_rank_says() -> list[bool]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    cpu = torch.device("cpu")
    said = [rank == speaker for speaker in (0, ranks - 1, ranks)]
    return greatest([*said, rank, -rank, 7 << 50, -(7 << 50)], [dist.group.WORLD], cpu)


@pytest.mark.parametrize("size", SIZES)
def test_what_one_rank_says_all_hear(size: int) -> None:
    assert run_ranks(one_rank_says, size) == [[1, 1, 0, size - 1, 0, 7 << 50, -(7 << 50)]] * size
    assert greatest([True, False, -3], [], torch.device("cpu")) == [1, 0, -3]
