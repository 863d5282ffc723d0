"""Pools against the loops of `reference.py`: where they lie, what they compress to, what they expand to."""

import math
from dataclasses import fields
from itertools import pairwise

import pytest
import torch
from draw import Segments, layout_of, poisoned, threads
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from layouts import random_selection, segmentations
from torch import Tensor
from transformers.models.glm5_next import modeling_glm5_next
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from mcore_dsa.backends.torch import compress
from mcore_dsa.functions import compress_keys
from mcore_dsa.kpool import PoolLayout, expand_selection
from mcore_dsa.reference import (
    reference_compress,
    reference_expand,
    reference_pools,
    reference_tail,
    reference_visible,
)

EPS = torch.finfo(torch.float32).eps
POOL_SIZES = st.integers(1, 6)


def assert_same_layout(layout: PoolLayout, expected: PoolLayout) -> None:
    for field in fields(PoolLayout):
        got, want = getattr(layout, field.name), getattr(expected, field.name)
        assert torch.equal(got, want) if isinstance(want, Tensor) else got == want


@given(segmentations(), POOL_SIZES, st.integers(0, 1000), st.sampled_from([torch.int32, torch.int64]))
def test_layout_equals_reference(segmentation: tuple[Segments, int], pool_size: int, first_id: int, dtype) -> None:
    segments, num_tokens = segmentation
    layout = layout_of(segments, num_tokens=num_tokens, pool_size=pool_size, first_pool_id=first_id)
    assert layout.batch == len(segments)
    assert layout.num_pools == num_tokens // pool_size
    for pools, row in zip(reference_pools(segments, pool_size), layout.pool_token_BP.tolist(), strict=True):
        assert row == pools + [-1] * (layout.num_pools - len(pools))

    position = torch.arange(-2, num_tokens + 3, dtype=dtype)[torch.randperm(num_tokens + 5)]
    bounds = layout.bounds(position)
    first_pool, visible, tail = bounds.first_BS, bounds.visible_BS, bounds.tail_BS
    first_token = bounds.position_S + 1 - tail
    assert {x.dtype for x in (first_pool, visible, first_token, tail)} == {torch.int64}
    for b, sample in enumerate(segments):
        for s, row in enumerate(position.tolist()):
            lo, hi = reference_visible(sample, row, pool_size)
            assert visible[b, s] == hi - lo
            if hi > lo:
                assert first_pool[b, s] == lo + first_id
            start, count = int(first_token[b, s]), int(tail[b, s])
            assert list(range(start, start + count)) == reference_tail(sample, row, pool_size)


@given(
    st.integers(0, 30), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=3), POOL_SIZES
)
def test_padding_masks_are_segments(num_tokens: int, ends: list[tuple[int, int]], pool_size: int) -> None:
    segments = [[(min(*pair, num_tokens), min(max(pair), num_tokens))] for pair in ends]
    valid = torch.zeros(len(segments), num_tokens, dtype=torch.bool)
    for row, ((start, end),) in zip(valid, segments, strict=True):
        row[start:end] = True
    layout = PoolLayout.from_padding_mask(valid, pool_size=pool_size)
    # A sample without a token may call its empty segment what it likes.
    segments = [[(start, end)] if end > start else [(num_tokens, num_tokens)] for ((start, end),) in segments]
    assert_same_layout(layout, layout_of(segments, num_tokens=num_tokens, pool_size=pool_size))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 5), st.integers(1, 3), POOL_SIZES)
def test_packs_are_segments(lengths: list[int], padding: int, batch: int, pool_size: int) -> None:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    bounds = cu_seqlens.tolist()
    num_tokens = bounds[-1] + padding
    layout = PoolLayout.from_cu_seqlens(cu_seqlens.int(), pool_size=pool_size, num_tokens=num_tokens, batch=batch)
    segments = [list(pairwise(bounds))] * batch
    assert_same_layout(layout, layout_of(segments, num_tokens=num_tokens, pool_size=pool_size))
    if not padding:
        assert_same_layout(layout, PoolLayout.from_cu_seqlens(cu_seqlens, pool_size=pool_size, batch=batch))
    if len(lengths) == 1 and not padding:
        assert_same_layout(layout, PoolLayout.dense(num_tokens, pool_size=pool_size, batch=batch))


@given(segmentations(), POOL_SIZES, st.integers(0, 6), st.booleans(), st.integers(0, 99))
def test_expansion_equals_reference(segmentation, pool_size: int, budget: int, tail: bool, seed: int) -> None:
    segments, num_tokens = segmentation
    layout = layout_of(segments, num_tokens=num_tokens, pool_size=pool_size)
    torch.manual_seed(seed)
    position = torch.randint(-2, num_tokens + 2, (12,))
    selection = random_selection(layout, position, budget)
    expected = reference_expand(selection, segments, position, pool_size=pool_size, always_select_tail=tail)
    with poisoned():
        token = expand_selection(selection, layout, position, always_select_tail=tail)
        assert token.dtype == torch.int32
        assert torch.equal(token, expected)
        # The same pools under a numbering that goes on from elsewhere.
        later = layout_of(segments, num_tokens=num_tokens, pool_size=pool_size, first_pool_id=50)
        moved = torch.where(selection < 0, selection, selection + 50)
        assert torch.equal(expand_selection(moved, later, position.int(), always_select_tail=tail), expected)
    strided = torch.stack([selection, selection], -1)[..., 0]
    assert torch.equal(expand_selection(strided, layout, position, always_select_tail=tail), expected)


def test_shorter_than_a_pool_leaves_tails_only() -> None:
    layout = PoolLayout.from_cu_seqlens(torch.tensor([0, 1, 2, 3]), pool_size=4)
    assert layout.num_pools == 0
    nothing = torch.full((1, 3, 2), -1, dtype=torch.int32)
    with poisoned():
        token = expand_selection(nothing, layout, torch.arange(3), always_select_tail=True)
    assert token.tolist() == [[[-1] * 8 + [row, -1, -1] for row in range(3)]]
    key = torch.randn(3, 1, 5)
    assert compress_keys(key, key, torch.zeros(4, 5), layout).shape == (0, 1, 5)
    layout = PoolLayout.dense(3, pool_size=4)
    token = expand_selection(nothing, layout, torch.arange(3), always_select_tail=True)
    assert token[0, 2].tolist() == [-1] * 8 + [0, 1, 2]


@pytest.mark.parametrize(
    ("lengths", "pools"), [([3, 6], [3, -1]), ([5, 9, 3], [0, 5, 9, -1]), ([4, 4], [0, 4]), ([7], [0])]
)
def test_pools_restart_at_every_document_and_never_straddle(lengths: list[int], pools: list[int]) -> None:
    layout = PoolLayout.from_cu_seqlens(torch.tensor([0, *lengths]).cumsum(0), pool_size=4)
    assert layout.pool_token_BP.tolist() == [pools]


def test_no_tail_where_the_last_pool_is_complete() -> None:
    layout = PoolLayout.dense(9, pool_size=4)
    assert layout.bounds(torch.arange(9)).tail_BS.tolist() == [[1, 2, 3, 0, 1, 2, 3, 0, 1]]
    assert layout.bounds(torch.arange(9)).visible_BS.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2, 2]]
    nothing = torch.full((1, 1, 2), -1, dtype=torch.int32)
    # The row's own token is in the pool that ends at it: unselected, it is not seen.
    assert expand_selection(nothing, layout, torch.tensor([7]), always_select_tail=True).tolist() == [[[-1] * 11]]


def test_no_loop_over_documents() -> None:
    """A hundred thousand documents cost a few tensor operations, not one each."""
    cu_seqlens = torch.arange(0, 3 * 100_001, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        layout = PoolLayout.from_cu_seqlens(cu_seqlens, pool_size=2)
    assert layout.pool_token_BP[0, :100_000].tolist() == list(range(0, 300_000, 3))
    assert sum(event.count for event in profiler.key_averages()) < 150


def random_pools(segments: Segments, num_tokens: int, pool_size: int, channels: int, seed: int, dtype=torch.float32):
    torch.manual_seed(seed)
    key, gate = (torch.randn(num_tokens, len(segments), channels).to(dtype) for _ in range(2))
    ape = torch.randn(pool_size, channels)
    return key, gate * 3, ape, layout_of(segments, num_tokens=num_tokens, pool_size=pool_size)


@given(
    segmentations(),
    POOL_SIZES,
    st.integers(1, 20),
    st.integers(0, 99),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_compression_equals_reference(segmentation, pool_size: int, channels: int, seed: int, dtype) -> None:
    segments, num_tokens = segmentation
    key, gate, ape, layout = random_pools(segments, num_tokens, pool_size, channels, seed, dtype)
    with poisoned(math.nan):
        pooled = compress_keys(key, gate, ape, layout)
    assert pooled.dtype == dtype
    exact = reference_compress(key, gate, ape, segments, dtype=torch.float64)
    assert pooled.shape == exact.shape
    # A weight carries 2 ulp of exp, its rounded argument (|x| < 30, so 30 ulp) and the sum's ulp; keys are below 5.
    tolerance = 5 * 40 * EPS + (0 if dtype == torch.float32 else 5 * torch.finfo(dtype).eps)
    assert bool(((pooled.double() - exact).abs() <= tolerance).all())
    missing = layout.pool_token_BP.T < 0
    assert not pooled[missing].any()
    if dtype == torch.bfloat16:
        assert torch.equal(compress_keys(key.float(), gate.float(), ape, layout).bfloat16(), pooled)


@given(segmentations(), POOL_SIZES, st.integers(1, 20), st.integers(0, 99))
@hypothesis_settings(max_examples=50)
def test_a_pools_key_depends_on_its_own_tokens_alone(segmentation, pool_size: int, channels: int, seed: int) -> None:
    """Bit for bit: each pool compressed by itself, in chunks of any size, from strided tensors, beside NaN."""
    segments, num_tokens = segmentation
    key, gate, ape, layout = random_pools(segments, num_tokens, pool_size, channels, seed)
    pooled = compress_keys(key, gate, ape, layout)
    single = PoolLayout.dense(pool_size, pool_size=pool_size)
    for b, sample in enumerate(reference_pools(segments, pool_size)):
        for pool, token in enumerate(sample):
            own = slice(token, token + pool_size)
            alone = compress_keys(key[own, b : b + 1], gate[own, b : b + 1], ape, single)
            assert torch.equal(alone[0, 0], pooled[pool, b])

    for elements in (1, 100, 1000):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compress, "_SCRATCH_ELEMENTS", elements)
            assert torch.equal(compress_keys(key, gate, ape, layout), pooled)

    both = torch.stack([key, gate], -1).transpose(0, 1).contiguous().transpose(0, 1)
    strided = compress_keys(both[..., 0], both[..., 1], ape.T.contiguous().T, layout)
    assert torch.equal(strided, pooled)

    outside = torch.ones(num_tokens, len(segments), dtype=torch.bool)
    for b, sample in enumerate(reference_pools(segments, pool_size)):
        for token in sample:
            outside[token : token + pool_size, b] = False
    lost = [x.masked_fill(outside.unsqueeze(-1), math.nan) for x in (key, gate)]
    assert torch.equal(compress_keys(*lost, ape, layout), pooled)


def test_no_thread_count_moves_a_bit() -> None:
    key, gate, ape, layout = random_pools([[(0, 4099)], [(3, 4000)]], 4099, 4, 37, 0)
    pooled = compress_keys(key, gate, ape, layout)
    for count in (2, 3):
        with threads(count):
            assert torch.equal(compress_keys(key, gate, ape, layout), pooled)
    # A run of scalar remainders at the end of one big elementwise pass is where vectorised kernels differ.
    short = PoolLayout.dense(4096, pool_size=4, batch=2)
    assert torch.equal(compress_keys(key[:4096], gate[:4096], ape, short)[:, 0], pooled[:, 0])


@given(st.integers(1, 40), st.integers(0, 12), POOL_SIZES, st.integers(0, 99))
@hypothesis_settings(max_examples=40)
def test_equals_transformers_pooled_states(length: int, left: int, pool_size: int, seed: int) -> None:
    channels = 16
    config = Glm5NextTextConfig(
        hidden_size=8, q_lora_rank=8, num_attention_heads=4, num_key_value_heads=4, qk_rope_head_dim=0,
        index_n_heads=8, index_head_dim=channels, index_topk=4 * pool_size, index_kpool=pool_size,
    )  # fmt: skip
    indexer = modeling_glm5_next.Glm5NextTextIndexer(config, layer_idx=0)
    segments = [[(min(left, length), length)], [(0, length)]]
    key, gate, ape, layout = random_pools(segments, length, pool_size, channels, seed)
    with torch.no_grad():
        indexer.index_kpool_compress_ape.copy_(ape)
    valid = torch.arange(length)[:, None] >= torch.tensor([left, 0])
    packed = torch.cat([key, gate, valid.unsqueeze(-1)], dim=-1).transpose(0, 1)
    with torch.no_grad():
        their_keys, their_tokens, exists = indexer.get_pooled_states(packed)
    pooled = compress_keys(key, gate, ape, layout).transpose(0, 1)
    for b in range(2):
        count = int(exists[b].sum())
        assert layout.pool_token_BP[b].tolist()[:count] == their_tokens[b, :count, 0].tolist()
        assert layout.pool_token_BP[b, count:].eq(-1).all()
        torch.testing.assert_close(pooled[b, :count], their_keys[b, :count], rtol=0, atol=5 * 40 * EPS)


def test_nearly_equal_tokens_keep_their_precision() -> None:
    """Keys of small variance around a large mean, gates that hardly differ, and gates that differ beyond fp32."""
    torch.manual_seed(0)
    key = 1000 + 1e-3 * torch.randn(400, 1, 16)
    for scale in (1e-6, 100.0, 1e30):
        gate, ape = scale * torch.randn(400, 1, 16), torch.zeros(4, 16)
        exact = reference_compress(key, gate, ape, [[(0, 400)]], dtype=torch.float64)
        pooled = compress_keys(key, gate, ape, PoolLayout.dense(400, pool_size=4))
        # A weighted mean of 4 values: 1 ulp for each product, quotient and sum.
        assert float(((pooled - exact) / exact).abs().max()) <= 8 * EPS


def test_exp_is_within_two_ulp() -> None:
    x = -torch.cat([torch.logspace(-30, 1, 100_000), torch.linspace(0, 87, 500_001), torch.zeros(1)])
    x.clamp_(min=-87.0)  # linspace rounds past it
    got, exact = compress._exp_of_nonpositive(x.clone()), x.double().exp()
    ulp = torch.nextafter(exact.float(), torch.tensor(math.inf)).double() - exact.float().double()
    assert float(((got.double() - exact).abs() / ulp).max()) <= 2.0
    assert got[-1] == 1.0
    edges = compress._exp_of_nonpositive(torch.tensor([-88.0, -1e30, -math.inf, math.nan]))
    assert edges[:3].tolist() == [float(compress._exp_of_nonpositive(torch.tensor([-87.0])))] * 3
    assert edges[3].isnan()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_layout_keeps_its_segments_when_the_caller_reuses_the_buffer(dtype: torch.dtype) -> None:
    cu_seqlens, position = torch.tensor([0, 5, 14, 17], dtype=dtype), torch.arange(17)
    bounds = torch.tensor([[0, 5, 14]], dtype=dtype), torch.tensor([[5, 14, 17]], dtype=dtype)
    layouts = [
        PoolLayout.from_cu_seqlens(cu_seqlens, pool_size=4),
        PoolLayout.from_segments(*bounds, num_tokens=17, pool_size=4),
    ]
    before = [layout.bounds(position) for layout in layouts]
    for buffer in (cu_seqlens, *bounds):
        buffer.zero_()
    for layout, were in zip(layouts, before, strict=True):
        now = layout.bounds(position)
        assert torch.equal(now.first_BS, were.first_BS)
        assert torch.equal(now.visible_BS, were.visible_BS)
