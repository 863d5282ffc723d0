"""Pools and selection on one CUDA device: exact against the oracle and the CPU, and independent of everything else."""

import functools
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from draw import EXACT, Call, calls, layout_of, numbers, poisoned
from harness import run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from on_device import DEVICE, moved, requested_at_peak
from test_partitions import PACKS, exchange, selection_over_ranks

from mcore_dsa import PoolLayout, compress_keys, expand_selection, fused_qk_topk_kpool, select_pools
from mcore_dsa.backends import SelectionCounters
from mcore_dsa.backends.torch import TorchBackend, scoring
from mcore_dsa.backends.torch.select import smallest_score_bytes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# GLM-5.3-Flash's indexer, on enough pools for five blocks of a tile at the smallest byte budget.
HEADS, DIM, BUDGET = 32, 128, 512
TOKENS, POOL_SIZE = 9000, 2
SEGMENTS = [[(0, 4000), (4000, 4003), (4003, TOKENS)], [(5, TOKENS - 10)]]
REAL = pytest.mark.parametrize("kind", ["normal", "duplicates"])


def smallest(call: Call) -> int:
    heads, dim = call.q_SBHD.shape[2:]
    return smallest_score_bytes(DEVICE, heads, dim, call.budget)


@functools.cache
def glm_call(kind: str, every: int = 3) -> Call:
    """Every so many rows of two samples of `SEGMENTS`, on the CPU."""
    position = torch.arange(0, TOKENS, every)
    layout = layout_of(SEGMENTS, num_tokens=TOKENS, pool_size=POOL_SIZE)
    data = numbers(kind, len(position), layout.num_pools, 2, HEADS, DIM, seed=every)
    return Call(*data, SEGMENTS, layout, position, BUDGET)


@settings(max_examples=60)
@given(calls(EXACT))
def test_selection_equals_the_float64_oracle(call: Call) -> None:
    assert torch.equal(moved(call).select().cpu(), call.oracle())


@pytest.mark.parametrize("kind", EXACT)
def test_selection_equals_the_float64_oracle_over_many_blocks(kind: str) -> None:
    call = glm_call(kind, every=700)
    assert torch.equal(moved(call).select(score_bytes=smallest(call)).cpu(), call.oracle())


def test_a_place_in_the_tile_does_not_matter() -> None:
    for heads, dim in ((1, 1), (1, 128), (3, 33), (8, 16), (12, 64), (32, 128), (64, 128)):
        digest = scoring.tile_fingerprint(DEVICE, heads, dim)
        scoring._probe.cache_clear()
        assert scoring.tile_fingerprint(DEVICE, heads, dim) == digest


@REAL
def test_no_byte_budget_and_no_repetition_moves_a_bit(kind: str) -> None:
    call = moved(glm_call(kind))
    expected, least = call.select(), smallest(call)
    for score_bytes in (least, least, least + least // 3, 2 * least, 1 << 33):
        assert torch.equal(call.select(score_bytes=score_bytes), expected)


@REAL
def test_rows_are_independent_of_the_rows_beside_them(kind: str) -> None:
    call = moved(glm_call(kind))
    expected, rows = call.select(), len(call.position_S)
    generator = torch.Generator().manual_seed(1)
    shuffled = torch.randperm(rows, generator=generator)
    picks = [torch.arange(*ends) for ends in ((0, 1), (1499, 1500), (rows - 1, rows), (700, 1001), (1200, rows))]
    for row in (*picks, shuffled, shuffled[: rows // 3].repeat(2)):
        assert torch.equal(call.rows(row.to(DEVICE)).select(), expected[:, row.to(DEVICE)])


@REAL
def test_samples_are_independent_of_each_other(kind: str) -> None:
    call = moved(glm_call(kind))
    expected = call.select()
    for sample in range(2):
        one = slice(sample, sample + 1)
        layout = layout_of([SEGMENTS[sample]], num_tokens=TOKENS, pool_size=POOL_SIZE)
        q, weights, key = (x[:, one] for x in (call.q_SBHD, call.weights_SBH, call.pool_key_PBD))
        alone = replace(call, q_SBHD=q, weights_SBH=weights, pool_key_PBD=key, layout=moved(layout))
        assert torch.equal(alone.select(), expected[one])
        other = torch.arange(2, device=DEVICE) != sample
        ruined = replace(
            call,
            q_SBHD=call.q_SBHD.masked_fill(other[:, None, None], torch.nan),
            pool_key_PBD=call.pool_key_PBD.masked_fill(other[:, None], torch.nan),
        )
        assert torch.equal(ruined.select()[one], expected[one])


@REAL
def test_a_document_is_independent_of_the_pack(kind: str) -> None:
    """The third document alone, its pools counted from its own first, and with NaN in all other pools."""
    call = moved(glm_call(kind))
    start, end = SEGMENTS[0][2]
    row = ((call.position_S >= start) & (call.position_S < end)).nonzero().flatten()
    before, pools = sum((b - a) // POOL_SIZE for a, b in SEGMENTS[0][:2]), (end - start) // POOL_SIZE
    packed = call.select()[:1, row]
    alone = replace(
        call.rows(row),
        q_SBHD=call.q_SBHD[row, :1],
        weights_SBH=call.weights_SBH[row, :1],
        pool_key_PBD=call.pool_key_PBD[before : before + pools, :1],
        layout=PoolLayout.dense(end - start, pool_size=POOL_SIZE, device=DEVICE),
        position_S=call.position_S[row] - start,
    )
    assert torch.equal(alone.select(), torch.where(packed >= 0, packed - before, -1))
    ruined = torch.full_like(call.pool_key_PBD, torch.nan)
    ruined[before : before + pools] = call.pool_key_PBD[before : before + pools]
    assert torch.equal(replace(call, pool_key_PBD=ruined).select()[:1, row], packed)


@REAL
def test_modes_streams_and_fresh_memory_move_no_bit(kind: str) -> None:
    call = moved(glm_call(kind))
    expected = call.select()
    for mode in (torch.enable_grad, torch.inference_mode, poisoned, functools.partial(poisoned, torch.nan)):
        with mode():
            assert torch.equal(call.select(), expected)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert torch.equal(call.select(), expected)
    # Another stream has its own workspace for matrix products.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        elsewhere = call.select()
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(elsewhere, expected)


LOWER = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "fp32_precision": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "all backends": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
}


@pytest.fixture
def _restored_precision():
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.fp32_precision = "none"
    torch.backends.cuda.matmul.fp32_precision = "none"


@pytest.mark.usefixtures("_restored_precision")
@pytest.mark.parametrize("lower", LOWER.values(), ids=LOWER)
def test_tf32_that_a_user_asked_for_moves_no_bit(lower: Callable[[], None]) -> None:
    call = moved(glm_call("normal"))
    expected = call.select()
    a, b = torch.randn(2, 512, 512, device=DEVICE)
    exact = a @ b
    lower()
    # The request is real: TF32 exists from Ampere on, and it stands again after the call.
    has_tf32 = torch.cuda.get_device_capability() >= (8, 0)
    assert torch.equal(a @ b, exact) != has_tf32
    scoring._probe.cache_clear()
    assert torch.equal(call.select(), expected)
    assert torch.equal(a @ b, exact) != has_tf32


def select_in_bf16(call: Call, score_bytes: int = 1 << 28) -> torch.Tensor:
    """By the torch path, where the public function may take others' kernels."""
    return TorchBackend().select(
        call.q_SBHD.bfloat16(),
        call.weights_SBH,
        call.pool_key_PBD.bfloat16(),
        call.layout,
        call.layout.bounds(call.position_S),
        budget=call.budget,
        score_bytes=score_bytes,
        use_relu=call.use_relu,
        counters=SelectionCounters(),
    )


@settings(max_examples=60)
@given(calls(EXACT))
def test_bf16_products_select_what_the_float64_oracle_does(call: Call) -> None:
    assert torch.equal(select_in_bf16(moved(call)).cpu(), call.oracle())


@pytest.mark.usefixtures("_restored_precision")
@REAL
def test_bf16_products_follow_nothing_beside_a_row(kind: str) -> None:
    """Byte budgets, other rows, TF32 that a user asked for, sums of bf16 products in bf16."""
    call = moved(glm_call(kind))
    expected, least = select_in_bf16(call), smallest(call)
    for score_bytes in (least, least + least // 3, 1 << 33):
        assert torch.equal(select_in_bf16(call, score_bytes), expected)
    row = torch.randperm(len(call.position_S), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for some in (row, row[:1], row[:700]):
        assert torch.equal(select_in_bf16(call.rows(some)), expected[:, some])
    torch.set_float32_matmul_precision("medium")
    for reduced in (False, True):
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
        scoring._probe.cache_clear()
        assert torch.equal(select_in_bf16(call), expected)


def test_selection_stays_under_its_byte_budget() -> None:
    call = moved(glm_call("normal"))
    call.select()
    # Int64 positions, pools and segments of every row, on top of the selection itself.
    of_rows = 128 * call.layout.batch * len(call.position_S)
    for score_bytes in (smallest(call), 2 * smallest(call)):
        peak, selection = requested_at_peak(functools.partial(call.select, score_bytes=score_bytes))
        assert peak - selection.nbytes - of_rows <= score_bytes
        assert peak > score_bytes // 4  # else the measurement missed it


@settings(max_examples=30)
@given(calls(), st.booleans())
def test_layouts_and_expansions_are_those_of_the_cpu(call: Call, tail: bool) -> None:
    layout, position = call.layout, call.position_S
    bounds = moved(layout.segment_start_BN), moved(layout.segment_end_BN)
    there = PoolLayout.from_segments(*bounds, num_tokens=layout.num_tokens, pool_size=layout.pool_size)
    for field in fields(layout):
        here, made = getattr(layout, field.name), getattr(there, field.name)
        assert torch.equal(made.cpu(), here) if isinstance(here, torch.Tensor) else made == here
    for made, here in zip(
        vars(there.bounds(moved(position))).values(), vars(layout.bounds(position)).values(), strict=True
    ):
        assert torch.equal(made.cpu(), here)
    selection = call.select()
    expanded = expand_selection(moved(selection), there, moved(position), always_select_tail=tail)
    assert torch.equal(expanded.cpu(), expand_selection(selection, layout, position, always_select_tail=tail))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_compressed_keys_have_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layout = layout_of([[(0, 3001)], [(2, 1500), (1500, 2999)]], num_tokens=3001, pool_size=4)
    key, gate = torch.randn(2, 3001, 2, DIM)
    # From near equal weights to one that takes all, and logits below where the exponential is cut off.
    gate *= torch.logspace(-2, 2, DIM)
    inputs = key.to(dtype), gate.to(dtype), torch.randn(4, DIM)
    there = compress_keys(*map(moved, inputs), moved(layout))
    assert there.isfinite().all()
    assert torch.equal(there.cpu(), compress_keys(*inputs, layout))


def test_the_drop_in_function_is_the_same_as_its_parts() -> None:
    torch.manual_seed(0)
    cuts = torch.tensor([0, 3, 700, 700, 701, 1500], device=DEVICE)
    q, weights, k, gate, ape = (
        torch.randn(shape, device=DEVICE)
        for shape in ((1500, 2, 8, 16), (1500, 2, 8), (1500, 2, 16), (1500, 2, 16), (4, 16))
    )
    layout = PoolLayout.from_cu_seqlens(cuts, pool_size=4, batch=2)
    position = torch.arange(1500, device=DEVICE)
    selection = select_pools(q, weights, compress_keys(k, gate, ape, layout), layout, budget=16)
    expected = expand_selection(selection, layout, position, always_select_tail=True)
    starts = cuts[torch.searchsorted(cuts, position, right=True) - 1]
    for bounds in ({"cu_seqlens_kv": cuts}, {"varlen_starts": starts, "varlen_ends": position + 1}):
        _, tokens = fused_qk_topk_kpool(q, k, weights, 64, 4, gate, ape, **bounds)
        assert torch.equal(tokens, expected)


def over_ranks(device: str) -> None:
    """Rows dealt out in every way and gathered again, with and without overlap, then exchanged."""
    for data in ("plateau", "duplicates"):
        for rows, cuts in PACKS:
            selection_over_ranks(rows, cuts, data, 7, device)
    exchange(12 * torch.distributed.get_world_size(), device)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_that_share_the_device_select_as_one_does(ranks: int) -> None:
    """Over gloo, which takes CUDA tensors and brings them to the host itself."""
    run_ranks(over_ranks, ranks, "cuda", backend="gloo", device="cuda", timeout=180)
