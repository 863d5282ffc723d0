"""Sparse attention against its dense oracle, its determinism, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from attend_cases import (
    Case,
    add_row_by_row,
    assert_as_exact_as_the_oracle,
    assert_equal,
    assert_sums_rows_in_order,
    random_slots,
    smallest_budget,
)
from draw import layout_of, poisoned, threads
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from layouts import segmentations
from torch import Tensor

from mcore_dsa.backends.torch.attend import _add_in_row_order
from mcore_dsa.functions import masked_attention, sparse_attention
from mcore_dsa.kpool import PoolLayout
from mcore_dsa.reference import reference_attention

POISON = float("nan")

GEOMETRIES = st.fixed_dictionaries(
    {
        "pool_size": st.integers(1, 5),
        "budget": st.integers(0, 5),
        "heads": st.sampled_from([1, 2, 3, 4, 5, 8]),
        "channels": st.sampled_from([1, 16, 17, 32]),
        "tail": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


@given(segmentations(), GEOMETRIES)
@hypothesis_settings(max_examples=60)
def test_equals_masked_attention(segmentation, geometry) -> None:
    case = Case.random(*segmentation, **geometry)
    exact = case.to(torch.float64).run_oracle()
    assert_as_exact_as_the_oracle(case.run(), case.run_oracle(), exact)
    # fp64 inputs run in fp64: sums of at most some hundred terms of order one.
    torch.testing.assert_close(case.to(torch.float64).run(), exact, rtol=1e-12, atol=1e-12)


@given(segmentations(max_tokens=20), GEOMETRIES)
@hypothesis_settings(max_examples=25)
def test_oracle_equals_reference(segmentation, geometry) -> None:
    case = Case.random(*segmentation, **geometry).to(torch.float64)
    by_loops = reference_attention(case.q, case.kv, case.tokens(), softmax_scale=case.scale, dtype=torch.float64)
    dense = masked_attention(case.q, case.kv, case.tokens(), softmax_scale=case.scale)
    torch.testing.assert_close(dense, by_loops, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tail", [True, False])
def test_gradcheck(tail: bool) -> None:
    segments = [[(0, 3), (3, 12)], [(2, 9), (9, 9)]]
    case = Case.random(segments, 12, pool_size=3, budget=2, heads=2, channels=3, tail=tail).to(torch.float64)

    def attended(q: Tensor, kv: Tensor) -> Tensor:
        return replace(case, q=q, kv=kv).out()

    assert torch.autograd.gradcheck(attended, (case.q.requires_grad_(), case.kv.requires_grad_()))


@given(segmentations(), GEOMETRIES, st.sampled_from([1.0, 1.9, 3.0, 7.5]))
@hypothesis_settings(max_examples=60)
def test_no_budget_moves_a_bit(segmentation, geometry, factor) -> None:
    case = Case.random(*segmentation, **geometry)
    assert_equal(case.run(attend_bytes=int(factor * smallest_budget(case))), case.run())


@pytest.mark.parametrize(
    ("heads", "channels", "budget"), [(2, 17, 8), (1, 17, 16), (3, 24, 8), (5, 20, 6), (6, 128, 5), (8, 32, 16)]
)
def test_no_thread_count_moves_a_bit(heads: int, channels: int, budget: int) -> None:
    case = Case.random([[(0, 75)]], 75, heads=heads, channels=channels, budget=budget)
    expected = case.run()
    for count in (2, 3):
        with threads(count):
            assert_equal(case.run(), expected)
            assert_equal(
                case.rows(slice(60, 75)).run(attend_bytes=smallest_budget(case))[:2], [x[60:] for x in expected[:2]]
            )


@given(segmentations(), GEOMETRIES)
@hypothesis_settings(max_examples=30)
def test_gradient_of_kv_adds_rows_in_row_order(segmentation, geometry) -> None:
    """The whole gradient is, bit for bit, the rows' own gradients added first row first; a row alone is the row."""
    case = Case.random(*segmentation, **geometry)
    assert_sums_rows_in_order(case, case.run())


@given(segmentations(), GEOMETRIES)
@hypothesis_settings(max_examples=30)
def test_samples_do_not_touch_each_other(segmentation, geometry) -> None:
    segments, num_tokens = segmentation
    case = Case.random(segments, num_tokens, **geometry)
    whole = case.run()
    for b, sample in enumerate(segments):
        alone = replace(
            case,
            q=case.q[:, b : b + 1],
            kv=case.kv[:, b : b + 1],
            out_grad=case.out_grad[:, b : b + 1],
            selection=case.selection[b : b + 1],
            layout=layout_of([sample], num_tokens=num_tokens, pool_size=geometry["pool_size"]),
        )
        assert_equal(alone.run(), tuple(x[:, b : b + 1] for x in whole))


@pytest.mark.parametrize(("items", "width", "channels"), [(6, 5, 3), (64, 80, 32), (500, 67, 16)])
def test_sum_on_the_cpu_is_the_sum_row_by_row(items: int, width: int, channels: int) -> None:
    """What other devices do, run here: both ways add equal tokens in row order."""
    torch.manual_seed(0)
    batch, spare = 2, 2 * 100
    slots, grad = random_slots(items, width, channels, tokens=100, batch=batch)
    expected = torch.zeros(spare + 1, channels)
    add_row_by_row(expected, slots.token_IW.masked_fill(slots.empty_I1, spare), grad, batch)
    for count in (1, 2, 3):
        total = torch.zeros(spare + 1, channels)
        with threads(count):
            _add_in_row_order(total, slots, grad)
        assert torch.equal(total[:spare], expected[:spare])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_tokens_are_zeros_and_padding_is_never_read(dtype: torch.dtype) -> None:
    # Sample 0 is padded on both sides, sample 1 is padding throughout; rows stand on padding and before the start too.
    segments = [[(5, 21)], [(0, 0)]]
    case = Case.random(segments, 24, rows=200).to(dtype)
    padding = torch.ones(24, 2, dtype=torch.bool)
    padding[5:21, 0] = False
    case.kv[padding] = POISON
    clean = replace(case, kv=case.kv.masked_fill(padding.unsqueeze(-1), 0.0))
    out, q_grad, kv_grad = case.run()
    assert_equal((out, q_grad, kv_grad), clean.run())
    empty = (case.tokens() < 0).all(-1).T
    assert 0 < int(empty[:, 0].sum()) < 200
    assert bool(empty[:, 1].all())
    assert not out[empty].any()
    assert not q_grad[empty].any()
    assert not kv_grad[padding].any()
    assert bool(out[~empty].any(-1).all())
    assert all(bool(x.isfinite().all()) for x in (out, q_grad, kv_grad))


def test_nothing_selected_anywhere() -> None:
    case = replace(Case.random([[(0, 9)]], 9), tail=False)
    case.selection.fill_(-1)
    case.kv.fill_(POISON)
    for tensor in case.run():
        assert not tensor.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channels", [16, 20])
def test_low_precision_inputs_are_computed_in_fp32(dtype: torch.dtype, channels: int) -> None:
    low = Case.random([[(0, 30)], [(2, 29)]], 30, channels=channels).to(dtype)
    expected = tuple(x.to(dtype) for x in low.to(torch.float32).run())
    assert_equal(low.run(), expected)
    assert_equal(low.run(attend_bytes=smallest_budget(low)), expected)
    mixed = replace(low, q=low.q.float(), out_grad=low.out_grad.float()).run()
    assert [x.dtype for x in mixed] == [torch.float32, torch.float32, dtype]


def test_nothing_around_the_call_moves_a_bit() -> None:
    case = Case.random([[(0, 40)], [(7, 40)]], 40, heads=8, channels=60)
    expected, low = case.run(), case.to(torch.bfloat16).run()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(case.run(), expected)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert_equal(case.run(), expected)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    with poisoned(POISON):
        assert_equal(case.run(), expected)
        assert_equal(case.to(torch.bfloat16).run(), low)
    torch.set_default_dtype(torch.float64)
    try:
        assert_equal(case.run(), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        assert torch.equal(case.out(), expected[0])
    with torch.inference_mode():
        assert torch.equal(case.out(), expected[0])


def test_one_gradient_only() -> None:
    case = Case.random([[(0, 21)]], 21)
    out, q_grad, kv_grad = case.run()
    q, kv = case.q.clone().requires_grad_(), case.kv.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(replace(case, q=q).out(), q, case.out_grad)[0], q_grad)
    assert torch.equal(torch.autograd.grad(replace(case, kv=kv).out(), kv, case.out_grad)[0], kv_grad)
    assert torch.equal(case.out(), out)
    assert not case.out().requires_grad


def test_non_contiguous_inputs() -> None:
    case = Case.random([[(0, 21)], [(3, 20)]], 21)

    def strided(x: Tensor) -> Tensor:
        wide = torch.stack([x, torch.full_like(x, 7)], dim=-1).transpose(0, 1).contiguous().transpose(0, 1)
        assert not wide[..., 0].is_contiguous()
        return wide[..., 0]

    names = ("q", "kv", "selection", "position", "out_grad")
    columns = {name: strided(getattr(case, name)) for name in names if name != "position"}
    columns["position"] = torch.stack([case.position, case.position], 1)[:, 0]
    assert_equal(replace(case, **columns).run(), case.run())


@pytest.mark.parametrize(
    ("segments", "num_tokens", "options"),
    [
        ([[(0, 9)]], 9, {"rows": 0}),
        ([[(0, 0)]], 0, {"rows": 3}),
        ([[(0, 9)]], 9, {"budget": 0, "tail": False}),
        ([[(0, 9)]], 9, {"budget": 0}),
        ([[(0, 3)]], 3, {}),
        ([[(0, 1), (1, 2), (2, 3)]], 3, {}),
    ],
)
def test_degenerate_shapes(segments, num_tokens, options) -> None:
    case = Case.random(segments, num_tokens, **options)
    out, q_grad, kv_grad = case.run()
    assert out.shape == q_grad.shape == case.q.shape
    exact = case.to(torch.float64).run_oracle()
    assert_as_exact_as_the_oracle((out, q_grad, kv_grad), case.run_oracle(), exact)


def test_empty_batch() -> None:
    layout = PoolLayout.dense(8, pool_size=4, batch=0)
    q, kv = torch.zeros(3, 0, 4, 16, requires_grad=True), torch.zeros(8, 0, 16, requires_grad=True)
    selection = torch.zeros(0, 3, 2, dtype=torch.int32)
    out = sparse_attention(q, kv, selection, layout, torch.arange(3), softmax_scale=1.0, always_select_tail=True)
    assert out.shape == q.shape
    out.sum().backward()
    assert kv.grad.shape == kv.shape


def test_differentiates_once() -> None:
    case = Case.random([[(0, 21)]], 21)
    out = replace(case, q=case.q.requires_grad_()).out()
    (grad,) = torch.autograd.grad(out.square().sum(), case.q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
