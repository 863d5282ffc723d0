"""What the pool functions refuse: the argument, its value and what is accepted."""

import pytest
import torch
from torch import Tensor

from mcore_dsa.functions import compress_keys, select_pools
from mcore_dsa.kpool import PoolLayout, expand_selection


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("start", "end", "options", "kind", "match"),
    [
        (ids([4, 0]), ids([8, 4]), {}, ValueError, "are not ascending, disjoint and inside"),
        (ids([0, 3]), ids([4, 8]), {}, ValueError, "are not ascending, disjoint and inside"),
        (ids([5]), ids([4]), {}, ValueError, "are not ascending"),
        (ids([-1]), ids([8]), {}, ValueError, "are not ascending"),
        (ids([0]), ids([9]), {}, ValueError, r"inside \[0, 8\)"),
        (ids([0], [5]), ids([8], [4]), {}, ValueError, "are not ascending"),
        (ids([0]), ids([4, 8]), {}, ValueError, r"segment_start_BN has shape \(1, 1\) and segment_end_BN \(1, 2\)"),
        (torch.zeros(1, 0).long(), torch.zeros(1, 0).long(), {}, ValueError, "accepted are equal shapes"),
        (ids([0])[0], ids([8])[0], {}, ValueError, r"segment_start_BN has shape \(1,\); accepted are 2 dimensions"),
        (ids([0]).float(), ids([8]), {}, TypeError, "segment_start_BN is torch.float32; accepted is a torch.int32 or"),
        (ids([0]), ids([8]).bool(), {}, TypeError, "segment_end_BN is torch.bool"),
        (ids([0]), [[8]], {}, TypeError, "segment_end_BN is list"),
        (ids([0]), ids([0]), {"num_tokens": -1}, ValueError, "num_tokens is -1"),
        (ids([0]), ids([8]), {"pool_size": 0}, ValueError, "pool_size is 0; accepted is an integer >= 1"),
        (ids([0]), ids([8]), {"pool_size": 2.0}, ValueError, "pool_size is 2.0"),
        (ids([0]), ids([8]), {"first_pool_id": -1}, ValueError, "first_pool_id is -1"),
        (ids([0]), ids([8]), {"first_pool_id": 1.5}, ValueError, "first_pool_id is 1.5"),
        (ids([0]), ids([8]), {"num_tokens": 8.0}, ValueError, "num_tokens is 8.0; accepted is an integer >= 0"),
        (ids([0]), ids([8]), {"num_tokens": True}, ValueError, "num_tokens is True"),
        (ids([0]), ids([8]).to("meta"), {}, ValueError, "segment_end_BN is on meta; accepted is"),
        (ids([0]), ids([8]), {"first_pool_id": 2**31 - 1}, ValueError, "whose token ids and pool ids fit int32"),
    ],
)
def test_from_segments(start, end, options: dict, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        PoolLayout.from_segments(start, end, **({"num_tokens": 8, "pool_size": 4} | options))


@pytest.mark.parametrize(
    ("valid", "kind", "match"),
    [
        (ids([1, 1]), TypeError, "valid_BT is torch.int64; accepted is a torch.bool tensor"),
        ([[True]], TypeError, "valid_BT is list; accepted is a torch.bool tensor"),
        (ids([1, 1])[0].bool(), ValueError, r"valid_BT has shape \(2,\); accepted is \[batch, tokens\]"),
        (ids([1, 1, 1], [1, 0, 1], [0, 1, 0]).bool(), ValueError, r"hole between valid tokens in samples \[1\]"),
    ],
)
def test_from_padding_mask(valid: Tensor, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        PoolLayout.from_padding_mask(valid, pool_size=4)


@pytest.mark.parametrize(
    ("cu_seqlens", "options", "kind", "match"),
    [
        (ids([0])[0], {}, ValueError, r"holds 1 values, \[0\] at its head; accepted are at least two"),
        (ids([1, 4])[0], {}, ValueError, r"\[1, 4\] at its head; accepted are at least two, the first 0"),
        (ids([0, 4])[0], {"batch": -1}, ValueError, "batch is -1; accepted is an integer >= 0"),
        # Many documents: the message names the bad one and does not list them all.
        (torch.arange(10_000).flip(0).roll(1), {}, ValueError, r"^.{,250}$"),
        (ids([0, 5, 4])[0], {}, ValueError, "are not ascending"),
        (ids([0, 5])[0], {"num_tokens": 4}, ValueError, r"inside \[0, 4\)"),
        (ids([0, 5]), {}, ValueError, r"cu_seqlens has shape \(1, 2\); accepted are 1 dimensions"),
        (ids([0, 5])[0].float(), {}, TypeError, "cu_seqlens is torch.float32"),
        ([0, 5], {}, TypeError, "cu_seqlens is list"),
    ],
)
def test_from_cu_seqlens(cu_seqlens, options: dict, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        PoolLayout.from_cu_seqlens(cu_seqlens, pool_size=4, **options)


def test_dense_and_what_is_no_layout() -> None:
    for options in ({"batch": -1}, {"batch": 1.0}, {"pool_size": True}, {"pool_size": 0}):
        with pytest.raises(ValueError, match=r"(batch|pool_size) is .*; accepted is an integer >= [01]"):
            PoolLayout.dense(8, **({"pool_size": 4} | options))
    key = torch.zeros(8, 1, 2)
    with pytest.raises(TypeError, match="layout is NoneType; accepted is a PoolLayout"):
        compress_keys(key, key, torch.zeros(4, 2), None)
    with pytest.raises(TypeError, match="layout is list; accepted is a PoolLayout"):
        expand_selection(torch.zeros(1, 1, 1, dtype=torch.int32), [], torch.zeros(1).long(), always_select_tail=True)
    layout = PoolLayout.dense(8, pool_size=4)
    with pytest.raises(TypeError, match=r"selection_BSK is list; accepted is torch.int32"):
        expand_selection([[[0]]], layout, torch.zeros(1).long(), always_select_tail=True)
    with pytest.raises(TypeError, match=r"key_TBD is torch.float8_e4m3fn; accepted is a floating-point tensor of 16"):
        compress_keys(key.to(torch.float8_e4m3fn), key, torch.zeros(4, 2), layout)
    with pytest.raises(ValueError, match="position_S is on meta; accepted is the layout's device, cpu"):
        layout.bounds(torch.zeros(2, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("position", [torch.zeros(2), torch.zeros(1, 2).long(), [0, 1]])
def test_positions(position) -> None:
    with pytest.raises((TypeError, ValueError), match=r"position_S (is|has shape) .*; accepted (is|are) "):
        PoolLayout.dense(8, pool_size=4).bounds(position)


@pytest.mark.parametrize(
    ("place", "spoil", "kind", "match"),
    [
        (0, lambda key: key[:7], ValueError, r"key_TBD has shape \(7, 2, 3\); accepted is \[8, 2, None\]"),
        (0, lambda key: key[:, :1], ValueError, r"key_TBD has shape \(8, 1, 3\)"),
        (0, lambda key: key[0], ValueError, r"key_TBD has shape \(2, 3\)"),
        (0, lambda key: key.int(), TypeError, "key_TBD is torch.int32; accepted is a floating-point tensor"),
        (0, lambda key: key.tolist(), TypeError, "key_TBD is list"),
        (0, lambda key: key.to("meta"), ValueError, "key_TBD is on meta; accepted is the layout's device, cpu"),
        (1, lambda gate: gate[..., :2], ValueError, r"gate_TBD has shape \(8, 2, 2\); accepted is \[8, 2, 3\]"),
        (1, lambda gate: gate.bool(), TypeError, "gate_TBD is torch.bool"),
        (1, lambda gate: gate.to("meta"), ValueError, "gate_TBD is on meta"),
        (2, lambda ape: ape[:3], ValueError, r"ape_JD has shape \(3, 3\); accepted is \[4, 3\]"),
        (2, lambda ape: ape.flatten(), ValueError, r"ape_JD has shape \(12,\)"),
        (2, lambda ape: None, TypeError, "ape_JD is NoneType"),
        (2, lambda ape: ape.to("meta"), ValueError, "ape_JD is on meta"),
    ],
)
def test_compress_keys(place: int, spoil, kind: type[Exception], match: str) -> None:
    arguments = [torch.randn(8, 2, 3), torch.randn(8, 2, 3), torch.randn(4, 3)]
    arguments[place] = spoil(arguments[place])
    with pytest.raises(kind, match=match):
        compress_keys(*arguments, PoolLayout.dense(8, pool_size=4, batch=2))


SELECTION = torch.tensor([[[0, -1], [2, -1]]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("selection", "position", "kind", "match"),
    [
        (SELECTION.long(), [4, 20], TypeError, "selection_BSK is torch.int64; accepted is torch.int32"),
        (SELECTION.float(), [4, 20], TypeError, "selection_BSK is torch.float32; accepted is torch.int32"),
        (SELECTION[0], [4, 20], ValueError, r"selection_BSK has shape \(2, 2\); accepted is \[1, 2, budget\]"),
        (SELECTION.expand(2, -1, -1), [4, 20], ValueError, r"selection_BSK has shape \(2, 2, 2\)"),
        (SELECTION, [4, 20, 20], ValueError, r"accepted is \[1, 3, budget\]"),
        (SELECTION, [4.0, 20.0], TypeError, "position_S is torch.float32"),
        (SELECTION.to("meta"), [4, 20], ValueError, "selection_BSK is on meta; accepted is the layout's device, cpu"),
        # Ids that are no pool are refused, never clamped into a wrong token.
        (SELECTION + 3, [4, 20], ValueError, r"selection_BSK holds pool ids from 2 to 5; accepted are -1 and \[0, 5\)"),
        (SELECTION - 1, [4, 20], ValueError, "selection_BSK holds pool ids from -2 to 1"),
        # Documents of 9 and 12 tokens: pools 0 and 1, then 2 to 4; 13 is the fifth token of the second.
        (SELECTION, [2, 20], ValueError, "cannot see .*an incomplete or a future pool"),
        (SELECTION, [4, 11], ValueError, "cannot see"),
        (SELECTION, [4, 8], ValueError, "cannot see"),
        (SELECTION, [9, 20], ValueError, "cannot see"),
        (SELECTION, [4, -1], ValueError, "cannot see"),
        (SELECTION, [4, 21], ValueError, "cannot see"),
    ],
)
@pytest.mark.parametrize("tail", [True, False])
def test_expand_selection(selection: Tensor, position: list, kind: type[Exception], match: str, tail: bool) -> None:
    layout = PoolLayout.from_cu_seqlens(torch.tensor([0, 9, 21]), pool_size=4)
    expand_selection(SELECTION, layout, torch.tensor([4, 20]), always_select_tail=tail)
    with pytest.raises(kind, match=match):
        expand_selection(selection, layout, torch.tensor(position), always_select_tail=tail)


@pytest.mark.parametrize("pool", [0, 4])
def test_expand_selection_refuses_ids_before_and_after_a_numbering_that_starts_later(pool: int) -> None:
    start = torch.zeros(1, 1, dtype=torch.int64)
    layout = PoolLayout.from_segments(start, start + 8, num_tokens=8, pool_size=4, first_pool_id=2)
    selection = torch.tensor([[[pool]]], dtype=torch.int32)
    with pytest.raises(ValueError, match=rf"pool ids from {pool} to {pool}; accepted are -1 and \[2, 4\)"):
        expand_selection(selection, layout, torch.tensor([7]), always_select_tail=False)


def test_selecting_without_a_layout() -> None:
    with pytest.raises(TypeError, match="layout is NoneType; accepted is a PoolLayout"):
        select_pools(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1), None, budget=1)


def test_token_ids_fit_int32_too() -> None:
    """2**32 tokens in pools of 2**20 have few pools, and token ids that int32 cannot hold."""
    with pytest.raises(ValueError, match=r"num_tokens is 4294967296; accepted is an integer >= 0, at most 2\*\*31"):
        PoolLayout.dense(2**32, pool_size=2**20)
    assert PoolLayout.dense(2**31, pool_size=2**20).num_pools == 2**11
