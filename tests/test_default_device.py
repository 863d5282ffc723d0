"""Whatever torch's default device is, tensors of the host stay on the host, and the rest follows the arguments."""

from typing import Any

import pytest
import torch
from attend_cases import Case, assert_equal
from draw import Call, calls
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_fused import inputs
from test_plan import KINDS

from mcore_dsa.fused import fused_qk_topk_kpool
from mcore_dsa.plan import SelectionPlan

SEGMENTS = [[(0, 9), (9, 21)], [(4, 21), (21, 21)]]


@pytest.mark.parametrize("budget", [1, 3, 40])
def test_attention_and_its_gradients(budget: int) -> None:
    # Bounds remember what was computed of them: another layout for each device.
    expected = Case.random(SEGMENTS, 21, budget=budget).run()
    case = Case.random(SEGMENTS, 21, budget=budget)
    with torch.device("meta"):
        got = case.run()
    assert_equal(got, expected)


@given(calls(max_batch=2))
@hypothesis_settings(max_examples=30)
def test_selection(call: Call) -> None:
    expected = call.select()
    with torch.device("meta"):
        got = call.select()
    assert torch.equal(got, expected)


@pytest.mark.parametrize("bounded", [False, True])
def test_the_drop_in_signature(bounded: bool) -> None:
    bounds = (
        {"varlen_starts": torch.zeros(20, dtype=torch.int32), "varlen_ends": torch.arange(1, 21)} if bounded else {}
    )
    call = {**inputs(20, 4), **bounds, "key_positions": torch.arange(20)}
    _, expected = fused_qk_topk_kpool(**call, index_topk=8, pool_size=4)
    with torch.device("meta"):
        _, got = fused_qk_topk_kpool(**call, index_topk=8, pool_size=4)
    assert torch.equal(got, expected)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.integers(1, 2),
    st.sampled_from(KINDS),
    st.integers(1, 3),
    st.data(),
)
@hypothesis_settings(max_examples=30)
def test_plans(parts: list[int], cp: int, kind: Any, ranks: int, data: Any) -> None:
    kind = "zigzag" if cp > 1 and kind == "balanced" else kind
    sizes = {"pool_size": 2, "budget": 2, "partition": kind, "tp_size": ranks, "cp_size": cp}
    sizes |= {"tp_rank": data.draw(st.integers(0, ranks - 1)), "cp_rank": data.draw(st.integers(0, cp - 1))}
    cuts = torch.tensor([0, *(2 * cp * part for part in parts)]).cumsum(0)

    def plans() -> list[SelectionPlan]:
        dense = SelectionPlan.dense(2 * parts[0], batch=2, device="cpu", **sizes)
        return [dense, SelectionPlan.packed(cuts, **sizes)]

    expected = plans()
    with torch.device("meta"):
        got = plans()
        owned = [plan.own.position_S for plan in got]
    for ours, theirs, own_O in zip(got, expected, owned, strict=True):
        assert torch.equal(ours.bounds.position_S, theirs.bounds.position_S)
        assert torch.equal(ours.bounds.visible_BS, theirs.bounds.visible_BS)
        assert torch.equal(own_O, theirs.own.position_S)
        assert (ours.key_order_T is None) == (theirs.key_order_T is None)
        assert ours.key_order_T is None or torch.equal(ours.key_order_T, theirs.key_order_T)
