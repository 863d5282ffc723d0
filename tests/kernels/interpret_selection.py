"""Selection by Triton's kernels under its interpreter, against the torch backend and float64."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from draw import EXACT, ROUNDED, Call, calls, layout_of, numbers, poisoned
from hypothesis import given, settings
from hypothesis import strategies as st
from strict_interpreter import backwards

from mcore_dsa.backends import Backend, SelectionCounters
from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.backends.torch.compress import compress_keys as torch_compress
from mcore_dsa.backends.triton import TritonBackend
from mcore_dsa.backends.triton import probe as probing
from mcore_dsa.backends.triton.probe import orders, probe
from mcore_dsa.backends.triton.scratch import smallest_score_bytes, strip_for
from mcore_dsa.kernels import scoring
from mcore_dsa.kernels.compress import compress_keys
from mcore_dsa.kernels.tiles import POOLS, rows_of_tile
from mcore_dsa.kpool import PoolLayout
from mcore_dsa.settings import DEFAULT_BYTES

CPU = torch.device("cpu")
TRITON, TORCH = TritonBackend(), TorchBackend()
# Rows of a call: a program of the top-k takes 30 ms in the interpreter.
MOST_ROWS = 4


@st.composite
def few_rows(draw: st.DrawFn, kinds: tuple[str, ...], *, long: bool = False) -> Call:
    """A call in bf16 of some of the rows; layouts, budgets and data as the contract's properties draw them."""
    call = draw(calls(kinds, long=long, max_batch=2))
    rows = len(call.position_S)
    row = torch.randperm(rows, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))[:MOST_ROWS]
    call = call.rows(row if draw(st.booleans()) else row.sort().values)
    return replace(call, q_SBHD=call.q_SBHD.bfloat16(), pool_key_PBD=call.pool_key_PBD.bfloat16())


@st.composite
def many_rows(draw: st.DrawFn) -> Call:
    """9 to 20 rows, which are more than one tile, in any order and with any heads; documents of more pools than one."""
    heads, rows, tokens = draw(st.integers(17, 64)), draw(st.integers(9, 20)), draw(st.integers(70, 150))
    cut, budget = draw(st.integers(20, tokens - 20)), draw(st.integers(1, 30))
    segments, generator = [[(0, cut), (cut, tokens)]], torch.Generator().manual_seed(draw(st.integers(0, 99)))
    layout = layout_of(segments, num_tokens=tokens, pool_size=1)
    q, weights, key = numbers("plateau", rows, tokens, 1, heads, draw(st.sampled_from([3, 16])), seed=rows)
    position = torch.randint(0, tokens, (rows,), generator=generator)
    return Call(q.bfloat16(), weights, key.bfloat16(), segments, layout, position, budget)


def select(backend: Backend, call: Call, score_bytes: int = DEFAULT_BYTES) -> tuple[torch.Tensor, SelectionCounters]:
    counters = SelectionCounters()
    with poisoned():
        selection = backend.select(
            call.q_SBHD,
            call.weights_SBH,
            call.pool_key_PBD,
            call.layout,
            call.layout.bounds(call.position_S),
            budget=call.budget,
            score_bytes=score_bytes,
            use_relu=call.use_relu,
            counters=counters,
        )
    return selection, counters


def smallest(call: Call) -> int:
    return smallest_score_bytes(call.q_SBHD.shape[2], call.budget)


@settings(max_examples=15)
@given(few_rows(EXACT))
def test_equals_the_torch_backend(call: Call) -> None:
    """Also what both counted, but for the padding of tiles."""
    selection, counters = select(TRITON, call)
    expected, counted = select(TORCH, call)
    assert torch.equal(selection, expected)
    assert torch.equal(selection, call.oracle())
    assert replace(counters, tile_pairs=0) == replace(counted, tile_pairs=0)
    assert counters.tile_pairs >= counters.scored_pairs


@settings(max_examples=3)
@given(few_rows(EXACT, long=True), st.floats(0, 1))
def test_equals_the_torch_backend_in_blocks_and_strips(call: Call, more: float) -> None:
    expected, _ = select(TORCH, call)
    for score_bytes in (smallest(call), int((1 + 3 * more) * smallest(call)), DEFAULT_BYTES):
        assert torch.equal(select(TRITON, call, score_bytes)[0], expected)


@settings(max_examples=4)
@given(few_rows(EXACT), st.booleans())
def test_the_order_of_programs_moves_no_bit(call: Call, blocks: bool) -> None:
    """None writes where another does."""
    expected, _ = select(TORCH, call)
    with backwards():
        assert torch.equal(select(TRITON, call, smallest(call) if blocks else DEFAULT_BYTES)[0], expected)


@settings(max_examples=2)
@given(many_rows())
def test_equals_the_torch_backend_in_many_strips(call: Call) -> None:
    """Of two to five tiles of rows each, in one strip and in as many as there are."""
    expected, _ = select(TORCH, call)
    for score_bytes in (smallest(call), DEFAULT_BYTES):
        assert torch.equal(select(TRITON, call, score_bytes)[0], expected)


@settings(max_examples=4)
@given(few_rows(ROUNDED, long=True))
def test_selects_by_its_own_scores_whatever_stands_beside_a_row(call: Call) -> None:
    """The exact top-k of what the kernel scores for one row alone, against that row's own document alone."""
    selection, _ = select(TRITON, call, smallest(call))
    bounds = call.layout.bounds(call.position_S)
    for sample in range(call.layout.batch):
        for row in range(len(call.position_S)):
            first, visible = int(bounds.first_BS[sample, row]), int(bounds.visible_BS[sample, row])
            seen = slice(first, first + visible)
            if visible and call.use_relu:
                one = slice(row, row + 1)
                data = call.q_SBHD[one, sample], call.weights_SBH[one, sample], call.pool_key_PBD[seen, sample]
                order = orders(*data)[0].long() & 0xFFFFFFFF
                place = order.argsort(descending=True, stable=True)[: call.budget].sort().values
                assert torch.equal(selection[sample, row, : len(place)].long(), place + first)


@settings(max_examples=20)
@given(st.integers(1, 64), st.sampled_from([1, 3, 16, 33, 128]), st.integers(0, 1 << 20))
def test_scores_are_the_formula(heads: int, dim: int, seed: int) -> None:
    """Against float64, within fp32's roundings of `dim + heads` sums; the order is turned back into its score."""
    generator = torch.Generator().manual_seed(seed)
    rows, pools = 2, 65
    q, weights, key = (
        torch.randn(shape, generator=generator) for shape in ((rows, heads, dim), (rows, heads), (pools, dim))
    )
    q, key = q.bfloat16(), key.bfloat16()
    order = orders(q, weights, key).long() & 0xFFFFFFFF
    signed = order - 2**31
    bits = torch.where(signed < 0, -signed | 0x80000000, signed)
    score = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32).double()
    dots = torch.einsum("rhd,pd->rhp", q.double(), key.double())
    terms = torch.einsum("rhd,pd,rh->rp", q.double().abs(), key.double().abs(), weights.double().abs())
    expected = torch.einsum("rhp,rh->rp", dots.relu(), weights.double())
    assert ((score - expected).abs() <= terms * (dim + heads + 2) * 2.0**-24).all()


@triton.jit
def order_kernel(score_ptr, order_ptr, ORDERED: tl.constexpr):
    lane = tl.arange(0, 16)
    tl.store(order_ptr + lane, ORDERED(tl.load(score_ptr + lane)))


def check_orders(function: Any) -> None:
    """NaN of either sign below everything, -0.0 as 0.0, infinities at the ends, all above what is not seen."""
    nan, inf, small = float("nan"), float("inf"), 1e-45
    score = torch.tensor([nan, -nan, -inf, -3e38, -1.0, -small, -0.0, 0.0, small, 2e-38, 1.0, 1.5, 3e38, inf, inf, 7.0])
    order = torch.zeros(16, dtype=torch.int32).view(torch.uint32)
    order_kernel[(1,)](score, order, function)
    found = order.view(torch.int32).long() & 0xFFFFFFFF
    rank = [0, 0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9, 11, 12, 12, 10]
    assert found.unique(return_inverse=True)[1].tolist() == rank
    assert int(found.min()) == 1


def test_orders_are_those_of_the_contract() -> None:
    check_orders(scoring.ordered)


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=5),
    st.integers(1, 5),
    st.sampled_from([1, 5, 16]),
    st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    st.integers(0, 1 << 20),
)
def test_compresses_to_the_bits_of_torch(
    lengths: list[int], pool_size: int, dim: int, dtype: torch.dtype, seed: int
) -> None:
    boundary = torch.tensor([0, *lengths]).cumsum(0)
    layout = PoolLayout.from_cu_seqlens(boundary, pool_size=pool_size, num_tokens=int(boundary[-1]) + 3, batch=2)
    generator = torch.Generator().manual_seed(seed)
    key, gate = (torch.randn(layout.num_tokens, 2, dim, generator=generator) for _ in range(2))
    # Nothing below the normal range: the interpreter reads it as zero in bf16.
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, 2e-38, -80.0, 300.0])
    for x in (key, gate):
        hit = torch.rand(x.shape, generator=generator) < 0.05
        x[hit] = special[torch.randint(0, len(special), (int(hit.sum()),), generator=generator)]
    ape = torch.randn(pool_size, dim, generator=generator)
    with poisoned(6e4):
        found = compress_keys(key.to(dtype), (4 * gate).to(dtype), ape, layout)
    expected = torch_compress(key.to(dtype), (4 * gate).to(dtype), ape, layout)
    assert found.dtype == dtype
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_fingerprint_is_a_function_of_the_shape() -> None:
    found = [TRITON.fingerprint(CPU, heads, 16) for heads in (3, 8)]
    assert found[0] != found[1] == TRITON.fingerprint(CPU, 8, 16)
    assert "Triton 3." in found[0]


@pytest.mark.parametrize("use_relu", [True, False])
@pytest.mark.parametrize("place", [(0, 0), (-1, -1), (7, 63)])
def test_a_place_that_matters_is_refused(
    place: tuple[int, int], use_relu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the binary that is asked for."""
    original = probing.orders

    def by_place(q: torch.Tensor, *rest: torch.Tensor, **options: Any) -> torch.Tensor:
        order = original(q, *rest, **options)
        if order.shape[0] > 7 and options["use_relu"] is use_relu:
            order[place] += 1
        return order

    monkeypatch.setattr(probing, "orders", by_place)
    with pytest.raises(RuntimeError, match=r"place in it.*accepted is"):
        probe.__wrapped__(CPU, 8, 16, use_relu)


def test_a_selection_proves_the_binary_that_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    proved = []
    monkeypatch.setattr(probing, "probe", lambda *shape: proved.append(shape))
    layout = layout_of([[(0, 9)]], num_tokens=9, pool_size=1)
    q, weights, key = numbers("plateau", 9, 9, 1, 8, 16, seed=0)
    call = Call(q.bfloat16(), weights, key.bfloat16(), [[(0, 9)]], layout, torch.arange(9), 2)
    for use_relu in (True, False):
        select(TRITON, replace(call, use_relu=use_relu))
    assert proved == [(CPU, 8, 16, True), (CPU, 8, 16, False)]


def test_more_heads_than_a_tile_has_are_refused() -> None:
    layout = layout_of([[(0, 9)]], num_tokens=9, pool_size=1)
    q, weights, key = numbers("plateau", 9, 9, 1, 257, 16, seed=0)
    call = Call(q.bfloat16(), weights, key.bfloat16(), [[(0, 9)]], layout, torch.arange(9), 2)
    with pytest.raises(ValueError, match=r"^heads is 257; accepted are 1 to 64$"):
        select(TRITON, call)


def test_kernels_take_bf16() -> None:
    layout = layout_of([[(0, 9)]], num_tokens=9, pool_size=1)
    q, weights, key = numbers("normal", 9, 9, 1, 8, 16, seed=0)
    with pytest.raises(TypeError, match=r"q_SBHD is torch.float32; accepted .* torch.bfloat16"):
        select(TRITON, Call(q, weights, key, [[(0, 9)]], layout, torch.arange(9), 2))


@settings(max_examples=300)
@given(st.integers(1, 64), st.integers(1, 5000), st.integers(0, 2**20), st.floats(1, 1e5))
def test_a_strip_fits_its_budget(heads: int, budget: int, pools: int, factor: float) -> None:
    least = smallest_score_bytes(heads, budget)
    score_bytes = int(least * factor)
    strip = strip_for(heads, budget, score_bytes, pools=pools)
    assert strip.workspace.nbytes <= score_bytes
    assert strip.workspace.nbytes == TRITON.select_bytes(CPU, heads, 128, budget, pools, score_bytes)
    assert strip.rows % rows_of_tile(heads) == 0
    assert strip.head == 0 or (strip.tiles - 1) * POOLS >= budget
    assert strip.head > 0 or strip.tiles * POOLS >= pools + POOLS - 1 or pools == 0
    with pytest.raises(ValueError, match=f"score_bytes is {least - 1}; accepted for this geometry is {least} or more"):
        strip_for(heads, budget, least - 1, pools=pools)
