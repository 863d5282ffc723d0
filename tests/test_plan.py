"""The plan of a micro-batch: what every layer is told about its rows, against loops over tokens."""

from dataclasses import fields
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_dsa import PoolLayout
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.reference import reference_tail, reference_visible
from mcore_dsa.rows import partition_rows

KINDS = ("off", "contiguous", "zigzag", "balanced")


def chunks(lengths: list[int], rank: int, size: int) -> list[int]:
    """Tokens of a context-parallel rank: chunks r and 2 * size - 1 - r of each document, token by token."""
    starts = [0, *accumulate(lengths)]
    return [
        token
        for start, length in zip(starts, lengths, strict=False)
        for chunk in (rank, 2 * size - 1 - rank)
        for token in range(start, start + length)
        if (token - start) * 2 * size // length == chunk
    ]


def assert_sees(plan: SelectionPlan, segments: list[tuple[int, int]], position: list[int], pool_size: int) -> None:
    bounds = plan.bounds
    assert bounds.position_S.tolist() == position
    for row, token in enumerate(position):
        low, high = reference_visible(segments, token, pool_size)
        for sample in range(plan.layout.batch):
            assert int(bounds.visible_BS[sample, row]) == high - low
            assert int(bounds.tail_BS[sample, row]) == len(reference_tail(segments, token, pool_size))
            if high > low:
                assert int(bounds.first_BS[sample, row]) == low
    assert bounds.max_visible == max((int(count) for count in bounds.visible_BS.flatten()), default=0)


@given(st.integers(0, 60), st.integers(1, 3), st.integers(1, 5), st.sampled_from(KINDS), st.integers(1, 4), st.data())
def test_dense(rows: int, batch: int, pool_size: int, kind: Any, ranks: int, data: Any) -> None:
    rank = data.draw(st.integers(0, ranks - 1))
    sizes = {"batch": batch, "pool_size": pool_size, "budget": 2, "partition": kind}
    plan = SelectionPlan.dense(rows, **sizes, tp_rank=rank, tp_size=ranks)
    assert_sees(plan, [(0, rows)], list(range(rows)), pool_size)
    assert plan.partition == partition_rows(kind, rows, ranks, [rows], pool_size=pool_size, budget=2)
    assert plan.key_order_T is None
    own = [row for part in plan.partition.slices(rank) for row in part]
    assert plan.own.position_S.tolist() == own
    assert plan.own.max_visible == max((int(plan.bounds.visible_BS[0, row]) for row in own), default=0)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 4), st.data())
def test_under_context_parallelism(parts: list[int], cp: int, pool_size: int, data: Any) -> None:
    """Documents of `2 * cp * n` tokens, some of it padding: rows are the rank's, pools and positions the sequence's."""
    padded = [2 * cp * part for part in parts]
    lengths = [data.draw(st.integers(0, length)) for length in padded]
    starts = [0, *accumulate(padded)]
    segments = [(start, start + length) for start, length in zip(starts, lengths, strict=False)]
    cu_seqlens, cu_padded = torch.tensor([0, *accumulate(lengths)]), torch.tensor(starts)
    kind = data.draw(st.sampled_from(KINDS[:3] if cp > 1 else KINDS))
    sizes: dict[str, Any] = {"pool_size": pool_size, "budget": 2, "partition": kind, "tp_rank": 0, "tp_size": 2}
    gathered = []
    for rank in range(cp):
        plan = SelectionPlan.packed(cu_seqlens, cu_padded, **sizes, cp_rank=rank, cp_size=cp)
        assert_sees(plan, segments, chunks(padded, rank, cp), pool_size)
        assert plan.layout.num_tokens == sum(padded)
        gathered += chunks(padded, rank, cp)
    if cp == 1:
        assert plan.key_order_T is None
    else:
        assert [gathered[place] for place in plan.key_order_T.tolist()] == list(range(sum(padded)))
    if lengths == padded:
        plain = SelectionPlan.packed(cu_seqlens, **sizes)
        assert torch.equal(plain.layout.pool_token_BP, plan.layout.pool_token_BP)


def test_a_dense_batch_is_a_pack_of_one() -> None:
    sizes: dict[str, Any] = {"pool_size": 4, "budget": 3, "partition": "zigzag", "tp_rank": 1, "tp_size": 2}
    for cp in (1, 2, 4):
        dense = SelectionPlan.dense(48 // cp, batch=1, **sizes, cp_rank=cp - 1, cp_size=cp)
        packed = SelectionPlan.packed(torch.tensor([0, 48]), **sizes, cp_rank=cp - 1, cp_size=cp)
        for field in fields(dense.own):
            assert torch.equal(getattr(dense.own, field.name), getattr(packed.own, field.name))
        assert dense.partition == packed.partition


def test_two_layouts_compare_by_identity() -> None:
    """As tensors do not: comparing theirs raised."""
    layouts = [PoolLayout.dense(9, pool_size=4) for _ in range(2)]
    assert layouts[0] == layouts[0]
    assert layouts[0] != layouts[1]


def test_bounds_of_some_rows_are_located_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice shares what was brought to the host: no row is located or copied again."""
    bounds = PoolLayout.dense(40, pool_size=4, batch=2).bounds(torch.arange(40))
    assert bounds.max_visible == 10
    monkeypatch.setattr(torch.Tensor, "cpu", lambda _: pytest.fail("brought to the host again"))
    part = bounds.take(slice(8, 20))
    assert part.max_visible == 5
    assert torch.equal(part.on_host[1], bounds.visible_BS[:, 8:20])


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cu_seqlens": torch.tensor([0.0, 8])}, TypeError, "cu_seqlens is torch.float32; accepted is a torch.int32 or"),
    ({"cu_seqlens": torch.tensor([0])}, ValueError, r"cu_seqlens holds \[0\]; accepted are two or more ascending"),
    (
        {"cu_seqlens": torch.tensor([1, 8])},
        ValueError,
        r"cu_seqlens holds \[1, 8\]; accepted are two or more ascending",
    ),
    ({"cu_seqlens": torch.tensor([0, 8, 4])}, ValueError, "accepted are two or more ascending lengths, the first 0"),
    ({"cu_seqlens_padded": torch.tensor([0, 8])}, ValueError, "cu_seqlens_padded holds 2 values; accepted are as many"),
    (
        {"cu_seqlens_padded": torch.tensor([0, 6, 16])},
        ValueError,
        "document 0 of cu_seqlens is 8 tokens; accepted is at most its place in cu_seqlens_padded, 6",
    ),
    ({"cp_size": 4}, ValueError, "document 1 is 4 tokens; accepted under context parallelism of 4 .* of 8, 8 here"),
    ({"cp_size": 0}, ValueError, "cp_size is 0; accepted is an integer >= 1"),
    ({"cp_rank": 1}, ValueError, "cp_rank 1 of 1; accepted are ranks below sizes"),
    ({"tp_rank": 2}, ValueError, "tp_rank is 2 of 2"),
    (
        {"cp_size": 2, "partition": "balanced"},
        ValueError,
        "partition is 'balanced' under context parallelism; accepted",
    ),
]


@pytest.mark.parametrize(("changed", "kind", "message"), BAD)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], kind: type[Exception], message: str) -> None:
    good: dict[str, Any] = {"cu_seqlens": torch.tensor([0, 8, 12]), "pool_size": 4, "budget": 2, "partition": "zigzag"}
    good |= {"tp_rank": 0, "tp_size": 2}
    SelectionPlan.packed(**good)
    with pytest.raises(kind, match=message):
        SelectionPlan.packed(**{**good, **changed})


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_evaluation_asks_first_can_be_saved_for_backward(kind: Any) -> None:
    """Rows are taken when they are first asked for, and kept for the training step that comes after."""
    sizes = {"batch": 1, "pool_size": 4, "budget": 2, "tp_rank": 0, "tp_size": 2}
    plan = SelectionPlan.dense(40, partition=kind, **sizes)
    with torch.inference_mode():
        asked = [plan.own, plan.attended_own, *plan.attended_pieces(7)]
    for bounds in asked:
        assert not any(getattr(bounds, field.name).is_inference() for field in fields(bounds))
