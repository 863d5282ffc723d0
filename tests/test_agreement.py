"""What ranks must have in common: the exchange that compares it, the contract that says it, and what misses nothing."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from recorder import Recorder
from test_collectives import SIZES, SPLITS, in_groups, in_world

from mcore_dsa.agreement import SelectionContract, agree, differing_replica, newly_agreed, weights_digest
from mcore_dsa.settings import PARTITION_VARIABLE, read_settings

SAME = {"FLAG": "contiguous", "BYTES": "256"}


def agreement(group: Any) -> None:
    """One exchange a call, also for what was agreed before; which settings are new is known without one."""
    with Recorder() as log:
        agree(SAME, (), group)
        agree(SAME, (), group)
    assert [(call.name, call.group) for call in log.calls] == [("all_gather_object", group)] * 2
    with Recorder() as log:
        first = newly_agreed(SAME, group)
        assert first > 0
        assert newly_agreed(dict(reversed(SAME.items())), group) == 0
        assert newly_agreed({**SAME, "BYTES": "512"}, group) == first + 1
        assert newly_agreed(SAME, group) == 0
    assert log.calls == []


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
            agree(values[rank], faults[rank], dist.group.WORLD)
            told.append("agreed")
        except ValueError as error:
            told.append(str(error))
    return told


def disagreement(values: list[Mapping[str, str]], faults: list[tuple[str, ...]]) -> list[str]:
    rank = dist.get_rank()
    told = values_of(rank, values, faults)
    # The group works on, and agrees once its settings do.
    agree(SAME, (), dist.group.WORLD)
    return told


NO_FAULTS = [(), (), ()]
DISAGREEMENTS = {
    "the flag on some ranks only": (
        [SAME, {**SAME, "FLAG": "off"}, SAME],
        NO_FAULTS,
        ["FLAG is", "'contiguous' on ranks [0, 2]", "'off' on ranks [1]"],
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
        ["FLAG is", "BYTES is", "'1' on ranks [1]", "'256' on ranks [0, 2]"],
        [],
    ),
    "a setting that one rank lacks": (
        [SAME, SAME, {"FLAG": "contiguous"}],
        NO_FAULTS,
        ["BYTES is", "'not set' on ranks [2]"],
        ["FLAG is"],
    ),
    "a rank that cannot read its flag": (
        [SAME, SAME, SAME],
        [(), ("FLAG is 'maybe'; accepted are on and off",), ()],
        ["rank 1: FLAG is 'maybe'; accepted are on and off"],
        ["on every rank"],
    ),
    "faults of two ranks beside a difference": (
        [SAME, {**SAME, "BYTES": "1"}, SAME],
        [("one", "two"), (), ("three",)],
        ["rank 0: one", "rank 0: two", "rank 2: three", "BYTES is"],
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
    agree(SAME, (), dist.group.WORLD)
    changed = {**SAME, "FLAG": "off"} if dist.get_rank() == 1 else SAME
    with pytest.raises(ValueError, match=r"FLAG is .*; accepted is the same on every rank") as error:
        agree(changed, (), dist.group.WORLD)
    return str(error.value)


def test_a_change_on_one_rank_after_an_agreement_is_told() -> None:
    told = run_ranks(change_after_agreement, 3, timeout=30.0)
    assert told == [told[0]] * 3
    assert "'off' on ranks [1]" in told[0]


def fault_after_agreement() -> None:
    """A fault that shows up on one rank later is not hidden by an agreement on the same values."""
    agree(SAME, (), dist.group.WORLD)
    with pytest.raises(ValueError, match="rank 1: broken"):
        agree(SAME, ("broken",) if dist.get_rank() else (), dist.group.WORLD)


def test_a_fault_after_an_agreement_is_told() -> None:
    run_ranks(fault_after_agreement, 2)


def new_group_agrees_anew() -> None:
    """Nothing is carried over to a group made after another was destroyed."""
    for _ in range(3):
        group = dist.new_group([0, 1])
        agree(SAME, (), group)
        assert newly_agreed(SAME, group) > 0
        dist.destroy_process_group(group)
        del group


def test_a_new_group_agrees_anew() -> None:
    run_ranks(new_group_agrees_anew, 2)


def contract(**environ: str) -> SelectionContract:
    """One value for every field, none of them like another's."""
    values: dict[str, Any] = {
        field.name: f"value of {field.name}" for field in fields(SelectionContract) if field.name != "settings"
    }
    return SelectionContract(settings=read_settings(environ), **values)


def test_every_field_of_the_contract_is_compared() -> None:
    base = contract()
    for field in fields(SelectionContract):
        other = contract(**{PARTITION_VARIABLE: "1"}).settings if field.name == "settings" else "another"
        changed = replace(base, **{field.name: other}).describe()
        differing = [name for name, value in base.describe().items() if changed[name] != value]
        assert differing == [PARTITION_VARIABLE if field.name == "settings" else field.name]


def test_the_digest_is_of_every_bit_name_dtype_and_shape() -> None:
    weight = torch.randn(6, 4)
    digests = {weights_digest([("w", weight)])}
    flipped = weight.clone()
    flipped.view(torch.int32)[5, 3] ^= 1
    for named in (
        [("v", weight)],
        [("w", weight.view(4, 6))],
        [("w", weight.view(torch.int32))],
        [("w", flipped)],
        [("w", weight[:3]), ("w", weight[3:])],
        [("w", weight.bfloat16())],
    ):
        digests.add(weights_digest(named))
    assert len(digests) == 7
    assert weights_digest([("w", weight.T.contiguous().T)]) == weights_digest([("w", weight)])
    assert weights_digest([("w", weight[:1, ::2][:, :1])]) == weights_digest([("w", weight[:1, :1].clone())])


def replicas_tell() -> list[str | None]:
    rank = dist.get_rank()
    words = {PARTITION_VARIABLE: "zigzag"} if rank == 2 else {}
    told = []
    for turn in range(3):
        if turn == rank:
            told.append(differing_replica(read_settings(words).describe(), 1))
        dist.barrier()
    # What comes second is compared with what others told second.
    told.append(differing_replica({"FLAG": "off"}, 2))
    # Another version of the package has another number of settings, one of them, none.
    versions: list[dict[str, str]] = [{"FLAG": "a=b\nc", "OLD": "1"}, {"FLAG": "a=b\nc", "NEW": "2", "NEWER": ""}, {}]
    for turn in range(3):
        if turn == rank:
            told.append(differing_replica(versions[rank], 3))
        dist.barrier()
    return told


def test_a_replica_with_other_settings_is_reported_without_waiting() -> None:
    first, second, third = run_ranks(replicas_tell, 3)
    assert first == [None, None, None]
    assert second == [
        None,
        None,
        "NEW is '2' here and not set on rank 0; NEWER is '' here and not set on rank 0; "
        "OLD is not set here and '1' on rank 0",
    ]
    assert third[:2] == [f"{PARTITION_VARIABLE} is 'zigzag' here and 'off' on rank 0", None]
    assert third[2] == "FLAG is not set here and 'a=b\\nc' on rank 0; OLD is not set here and '1' on rank 0"
