"""Selection by Triton's kernels on one device: what neither an interpreter nor a compiler can show."""

import functools
from dataclasses import replace

import pytest
import torch
from draw import EXACT, Call, calls, layout_of, numbers, poisoned
from hypothesis import given, settings
from on_device import DEVICE, moved, requested_at_peak

from mcore_dsa import PoolLayout, select_pools
from mcore_dsa.backends import SelectionCounters, Target, choose
from mcore_dsa.backends.torch.compress import compress_keys as torch_compress
from mcore_dsa.backends.triton import TritonBackend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TRITON = TritonBackend()
HEADS, DIM, BUDGET = 32, 128, 512
SHAPES = [(32, 128), (64, 128), (24, 112), (8, 16), (1, 16), (3, 48)]
TOKENS, POOL_SIZE = 9000, 2
SEGMENTS = [[(0, 4000), (4000, 4003), (4003, TOKENS)], [(5, TOKENS - 10)]]
REAL = pytest.mark.parametrize("kind", ["normal", "duplicates", "near"])


@pytest.fixture(autouse=True)
def _can_run() -> None:
    refused = choose("triton", Target.of(DEVICE, torch.bfloat16, heads=HEADS, dim=DIM)).fault
    if refused:
        pytest.skip(refused)


def in_bf16(call: Call) -> Call:
    return moved(replace(call, q_SBHD=call.q_SBHD.bfloat16(), pool_key_PBD=call.pool_key_PBD.bfloat16()))


@functools.cache
def glm_call(kind: str, every: int = 3) -> Call:
    position = torch.arange(0, TOKENS, every)
    layout = layout_of(SEGMENTS, num_tokens=TOKENS, pool_size=POOL_SIZE)
    data = numbers(kind, len(position), layout.num_pools, 2, HEADS, DIM, seed=every)
    return in_bf16(Call(*data, SEGMENTS, layout, position, BUDGET))


def select(call: Call, score_bytes: int = 1 << 28) -> torch.Tensor:
    return TRITON.select(
        call.q_SBHD,
        call.weights_SBH,
        call.pool_key_PBD,
        call.layout,
        call.layout.bounds(call.position_S),
        budget=call.budget,
        score_bytes=score_bytes,
        use_relu=call.use_relu,
        counters=SelectionCounters(),
    )


def smallest(call: Call) -> int:
    return TRITON.smallest_score_bytes(DEVICE, call.q_SBHD.shape[2], DIM, call.budget)


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_no_place_of_a_tile_matters(heads: int, dim: int) -> None:
    """Every row and pool of random ones in every place, ends ragged, alone, in blocks of any length."""
    from mcore_dsa.backends.triton.probe import orders

    TRITON.fingerprint(DEVICE, heads, dim)
    generator = torch.Generator(DEVICE).manual_seed(1)
    rows, pools = 23, 64 * 5 - 3
    draw = functools.partial(torch.randn, generator=generator, device=DEVICE)
    q, weights, key = draw(rows, heads, dim), draw(rows, heads), draw(pools, dim)
    order = orders(q, weights, key)
    for turn in range(64):
        turned = orders(q.roll(turn, 0), weights.roll(turn, 0), key.roll(turn, 0))
        assert torch.equal(turned, order.roll((turn, turn), (0, 1)))
        assert torch.equal(orders(q[: turn + 1], weights[: turn + 1], key[turn:]), order[: turn + 1, turn:])
    for tiles in range(1, 6):
        assert torch.equal(orders(q, weights, key, tiles=tiles), order)
    for row in range(rows):
        assert torch.equal(orders(q[row : row + 1], weights[row : row + 1], key), order[row : row + 1])
    # Neighbours of any size: nothing of them reaches a row's or a pool's score.
    q[1:], key[1:] = torch.nan, torch.inf
    assert torch.equal(orders(q, weights, key)[0, 0], order[0, 0])


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_scores_are_the_formula(heads: int, dim: int) -> None:
    """Within the roundings of fp32 sums of `dim + heads` terms, were each of them cut off instead of rounded."""
    from mcore_dsa.backends.triton.probe import orders

    generator = torch.Generator().manual_seed(2)
    q, weights, key = (torch.randn(s, generator=generator) for s in ((9, heads, dim), (9, heads), (300, dim)))
    q, key = q.bfloat16(), key.bfloat16()
    order = orders(moved(q), moved(weights), moved(key)).cpu().long() & 0xFFFFFFFF
    signed = order - 2**31
    bits = torch.where(signed < 0, -signed | 0x80000000, signed)
    score = torch.where(bits >= 2**31, bits - 2**32, bits).int().view(torch.float32).double()
    dots = torch.einsum("rhd,pd->rhp", q.double(), key.double())
    terms = torch.einsum("rhd,pd,rh->rp", q.double().abs(), key.double().abs(), weights.double().abs())
    error = (score - torch.einsum("rhp,rh->rp", dots.relu(), weights.double())).abs()
    assert (error <= terms * (dim + heads + 2) * 2.0**-23).all()


@pytest.mark.parametrize("levels", [1, 3, 40_000, 2**32 - 1])
@pytest.mark.parametrize(("pools", "budget", "tiles"), [(262_144, 512, None), (262_144, 512, 700), (131_071, 3000, 90)])
def test_the_best_of_random_bits(pools: int, budget: int, tiles: int | None, levels: int) -> None:
    from interpret_topk import ranking
    from scores import select as best

    rows = [ranking(pools - 999 * row, 37 * row, levels, row) for row in range(40)]
    found = best(rows, budget, tiles=tiles, device="cuda").cpu()
    assert torch.equal(found, torch.stack([row.best(budget, 0) for row in rows]))


@settings(max_examples=100)
@given(calls(EXACT))
def test_equals_the_float64_oracle(call: Call) -> None:
    assert torch.equal(select(in_bf16(call)).cpu(), call.oracle())


@pytest.mark.parametrize("kind", EXACT)
def test_equals_the_float64_oracle_in_many_blocks(kind: str) -> None:
    call = glm_call(kind, every=700)
    expected = moved(call, "cpu").oracle()
    for score_bytes in (smallest(call), 3 * smallest(call), 1 << 28):
        assert torch.equal(select(call, score_bytes).cpu(), expected)


@REAL
def test_nothing_beside_a_row_moves_a_bit(kind: str) -> None:
    """Byte budgets, rows, documents, samples, streams, fresh memory."""
    call = glm_call(kind)
    expected, least, rows = select(call), smallest(call), len(call.position_S)
    for score_bytes in (least, least + least // 3, 5 * least, 50 * least, 1 << 32):
        assert torch.equal(select(call, score_bytes), expected)
    shuffled = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    for row in (shuffled, shuffled[:1], shuffled[:7], torch.arange(1499, rows), shuffled[: rows // 3].repeat(2)):
        assert torch.equal(select(call.rows(row.to(DEVICE))), expected[:, row.to(DEVICE)])
    start, end = SEGMENTS[0][2]
    row = ((call.position_S >= start) & (call.position_S < end)).nonzero().flatten()
    before, pools = sum((b - a) // POOL_SIZE for a, b in SEGMENTS[0][:2]), (end - start) // POOL_SIZE
    alone = replace(
        call.rows(row),
        q_SBHD=call.q_SBHD[row, :1],
        weights_SBH=call.weights_SBH[row, :1],
        pool_key_PBD=call.pool_key_PBD[before : before + pools, :1],
        layout=PoolLayout.dense(end - start, pool_size=POOL_SIZE, device=DEVICE),
        position_S=call.position_S[row] - start,
    )
    packed = expected[:1, row]
    assert torch.equal(select(alone), torch.where(packed >= 0, packed - before, -1))
    with poisoned(), torch.cuda.stream(torch.cuda.Stream()):
        elsewhere = select(call)
        torch.cuda.current_stream().synchronize()
    assert torch.equal(elsewhere, expected)


def test_a_hundred_repetitions_are_equal() -> None:
    call = glm_call("near")
    expected = select(call)
    assert all(torch.equal(select(call), expected) for _ in range(100))


def test_nothing_waits_for_the_device() -> None:
    call = glm_call("normal")
    bounds = call.layout.bounds(call.position_S)
    assert bounds.max_visible > BUDGET
    select(call)
    torch.cuda.set_sync_debug_mode("error")
    try:
        data = call.q_SBHD, call.weights_SBH, call.pool_key_PBD, call.layout, bounds
        TRITON.select(*data, budget=BUDGET, score_bytes=1 << 28, use_relu=True, counters=SelectionCounters())
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_public_functions_take_the_kernels() -> None:
    call = glm_call("normal")
    data = call.q_SBHD, call.weights_SBH, call.pool_key_PBD, call.layout, call.position_S
    peak, selection = requested_at_peak(lambda: select_pools(*data, budget=BUDGET, score_bytes=smallest(call)))
    assert torch.equal(selection, select(call))
    assert peak - selection.nbytes - 128 * call.layout.batch * len(call.position_S) <= smallest(call)


def test_compressed_keys_have_the_bits_of_the_cpu() -> None:
    torch.manual_seed(0)
    layout = layout_of([[(0, 3001)], [(2, 1500), (1500, 2999)]], num_tokens=3001, pool_size=4)
    key, gate = torch.randn(2, 3001, 2, DIM)
    gate *= torch.logspace(-2, 2, DIM)
    for value in (torch.nan, torch.inf, -torch.inf):
        gate[torch.rand(gate.shape) < 0.01] = value
    inputs = key.bfloat16(), gate.bfloat16(), torch.randn(4, DIM)
    there, here = TRITON.compress(*map(moved, inputs), moved(layout)).cpu(), torch_compress(*inputs, layout)
    assert 0.01 < here.isnan().float().mean() < 0.2
    assert torch.equal(there.isnan(), here.isnan())
    assert torch.equal(there.nan_to_num(7.0), here.nan_to_num(7.0))
