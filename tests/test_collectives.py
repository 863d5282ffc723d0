"""Gathers and the agreement over gloo, on one to four ranks and in groups inside a bigger world."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from draw import poisoned
from harness import RanksFailed, run_ranks
from recorder import Recorder

from mcore_dsa.collectives import agree, gather_rows, gather_selection, group_rank, group_size
from mcore_dsa.rows import PackWork, RowPartition

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
                joined = gather_rows(strided, group)
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
        ):
            for batch, budget in ((1, 1), (2, 7), (3, 2)):
                every = mixed(seed + rows, batch, rows, budget).to(torch.int32)
                row = [row for part in partition.slices(me) for row in part]
                strided = every[:, row].transpose(0, 2).contiguous().transpose(0, 2)
                with poisoned(), Recorder() as log:
                    joined = gather_selection(strided, partition, group)
                assert joined.dtype == torch.int32
                assert torch.equal(joined, every)
                (call,) = log.calls
                assert call.group is group
                assert call.output == (torch.int32, (ranks * batch, partition.rows_per_rank, budget))
                assert call.input == (torch.int32, (batch, partition.rows_per_rank, budget))


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


def test_a_partition_for_another_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"partition 2 ranks; accepted .* 1 ranks"):
        gather_selection(torch.zeros(2, 3, 3, dtype=torch.int32), RowPartition.contiguous(6, 2), None)
    with pytest.raises(ValueError, match=r"x has no dimensions; accepted"):
        gather_rows(torch.tensor(1.0), None)


SAME = {"FLAG": "contiguous", "BYTES": "256"}


def agreement(group: Any) -> None:
    """One exchange a call, which says whether these values are new to the group; their order is nothing new."""
    with Recorder() as log:
        assert agree(SAME, (), group)
        assert not agree(dict(reversed(SAME.items())), (), group)
        assert agree({**SAME, "BYTES": "512"}, (), group)
        assert not agree(SAME, (), group)
    assert [(call.name, call.group) for call in log.calls] == [("all_gather_object", group)] * 4


@pytest.mark.parametrize("size", SIZES)
def test_equal_settings_agree(size: int) -> None:
    run_ranks(in_world, size, agreement)


@pytest.mark.parametrize("split", SPLITS)
def test_groups_agree_by_themselves(split: tuple[tuple[int, ...], ...]) -> None:
    run_ranks(in_groups, 4, split, agreement)


def values_of(rank: int, values: list[Mapping[str, str]], faults: list[tuple[str, ...]]) -> list[str]:
    """What this rank is told: twice the same, for a failed agreement is no agreement."""
    told = []
    for _ in range(2):
        try:
            told.append(f"agreed {agree(values[rank], faults[rank], dist.group.WORLD)}")
        except ValueError as error:
            told.append(str(error))
    return told


def disagreement(values: list[Mapping[str, str]], faults: list[tuple[str, ...]]) -> list[str]:
    rank = dist.get_rank()
    told = values_of(rank, values, faults)
    # The group works on, and agrees once its settings do.
    assert agree(SAME, (), dist.group.WORLD)
    return told


NO_FAULTS = [(), (), ()]
DISAGREEMENTS = {
    "the flag on some ranks only": (
        [SAME, {**SAME, "FLAG": "off"}, SAME],
        NO_FAULTS,
        ["FLAG differs", "'contiguous' on ranks [0, 2]", "'off' on ranks [1]"],
        ["BYTES"],
    ),
    "three values": (
        [{"FLAG": "a"}, {"FLAG": "b"}, {"FLAG": "c"}],
        NO_FAULTS,
        ["'a' on ranks [0]", "'b' on ranks [1]", "'c' on ranks [2]"],
        [],
    ),
    "two settings": (
        [SAME, {"FLAG": "off", "BYTES": "1"}, SAME],
        NO_FAULTS,
        ["FLAG differs", "BYTES differs", "'1' on ranks [1]", "'256' on ranks [0, 2]"],
        [],
    ),
    "a setting that one rank lacks": (
        [SAME, SAME, {"FLAG": "contiguous"}],
        NO_FAULTS,
        ["BYTES differs", "'not set' on ranks [2]"],
        ["FLAG differs"],
    ),
    "a rank that cannot read its flag": (
        [SAME, SAME, SAME],
        [(), ("FLAG is 'maybe'; accepted are on and off",), ()],
        ["rank 1: FLAG is 'maybe'; accepted are on and off"],
        ["differs"],
    ),
    "faults of two ranks beside a difference": (
        [SAME, {**SAME, "BYTES": "1"}, SAME],
        [("one", "two"), (), ("three",)],
        ["rank 0: one", "rank 0: two", "rank 2: three", "BYTES differs"],
        ["FLAG"],
    ),
}


@pytest.mark.parametrize("case", DISAGREEMENTS)
def test_a_difference_is_told_on_every_rank(case: str) -> None:
    values, faults, named, unnamed = DISAGREEMENTS[case]
    told = run_ranks(disagreement, 3, values, faults, timeout=30.0)
    assert told == [[told[0][0]] * 2] * 3
    for part in named:
        assert part in told[0][0]
    for part in unnamed:
        assert part not in told[0][0]


def change_after_agreement() -> str:
    """Settings that change on one rank alone, a module built later say: nobody waits for nobody."""
    assert agree(SAME, (), dist.group.WORLD)
    changed = {**SAME, "FLAG": "off"} if dist.get_rank() == 1 else SAME
    with pytest.raises(ValueError, match="FLAG differs") as error:
        agree(changed, (), dist.group.WORLD)
    return str(error.value)


def test_a_change_on_one_rank_after_an_agreement_is_told() -> None:
    told = run_ranks(change_after_agreement, 3, timeout=30.0)
    assert told == [told[0]] * 3
    assert "'off' on ranks [1]" in told[0]


def fault_after_agreement() -> None:
    """A fault that shows up on one rank later is not hidden by an agreement on the same values."""
    assert agree(SAME, (), dist.group.WORLD)
    with pytest.raises(ValueError, match="rank 1: broken"):
        agree(SAME, ("broken",) if dist.get_rank() else (), dist.group.WORLD)


def test_a_fault_after_an_agreement_is_told() -> None:
    run_ranks(fault_after_agreement, 2)


def new_group_agrees_anew() -> None:
    """Nothing is carried over to a group made after another was destroyed."""
    for _ in range(3):
        group = dist.new_group([0, 1])
        assert agree(SAME, (), group)
        dist.destroy_process_group(group)
        del group


def test_a_new_group_agrees_anew() -> None:
    run_ranks(new_group_agrees_anew, 2)


def one_rank_skips() -> None:
    if dist.get_rank():
        gather_rows(torch.zeros(1), dist.group.WORLD)


def test_the_harness_would_notice_a_rank_that_does_not_enter() -> None:
    """What the tests above rest on: a collective that one rank leaves out hangs, and a hang is a failure."""
    with pytest.raises(RanksFailed):
        run_ranks(one_rank_skips, 2, timeout=3.0)
