"""The oracle against code that this project did not write, transformers' own indexer, and against hand-made cases."""

import math

import pytest
import torch
from transformers_indexer import random_indexer

from mcore_dsa.reference import (
    reference_attention,
    reference_compress,
    reference_expand,
    reference_pools,
    reference_scores,
    reference_select,
    reference_tail,
    reference_topk,
    reference_visible,
)

HEADS, DIM, HIDDEN, Q_LORA = 8, 16, 32, 24


def reference_token_ids(indexer, hidden_BSE, q_resid_BSQ, segments) -> torch.Tensor:
    """The same selection from the oracle's parts, from the weights of transformers' module."""
    pool_size = indexer.index_kpool
    batch, length, _ = hidden_BSE.shape
    with torch.no_grad():
        q = indexer.wq_b(q_resid_BSQ).view(batch, length, HEADS, DIM).transpose(0, 1)
        key = indexer.k_norm(indexer.wk(hidden_BSE)).transpose(0, 1)
        gate = (hidden_BSE @ indexer.index_kpool_compress_gate.T).transpose(0, 1)
        weights = indexer.weights_proj(hidden_BSE).transpose(0, 1) * (HEADS**-0.5 * DIM**-0.5)
        pool_key = reference_compress(key, gate, indexer.index_kpool_compress_ape, segments)
    position = torch.arange(length)
    selection = reference_select(
        reference_scores(q, weights, pool_key),
        segments,
        position,
        pool_size=pool_size,
        budget=indexer.index_topk // pool_size,
    )
    tail = indexer.index_kpool_always_select_tail
    return reference_expand(selection, segments, position, pool_size=pool_size, always_select_tail=tail)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 17, 64, 131])
@pytest.mark.parametrize(("pool_size", "index_topk", "tail"), [(4, 16, True), (3, 12, False)])
def test_equals_transformers_indexer(length: int, pool_size: int, index_topk: int, tail: bool) -> None:
    torch.manual_seed(length)
    indexer = random_indexer(
        HIDDEN, Q_LORA, heads=HEADS, dim=DIM, pool_size=pool_size, index_topk=index_topk, tail=tail
    )
    segments = [[(0, length)], [(length // 3, length)], [(0, (length + 1) // 2)]]
    valid = torch.zeros(len(segments), length, dtype=torch.bool)
    for sample, ((start, end),) in enumerate(segments):
        valid[sample, start:end] = True
    hidden = torch.randn(len(segments), length, HIDDEN)
    q_resid = torch.randn(len(segments), length, Q_LORA)
    theirs = indexer(hidden_states=hidden, q_resid=q_resid, attention_mask=valid, cache=None)
    ours = reference_token_ids(indexer, hidden, q_resid, segments)

    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    contested = 0
    for sample, ((start, end),) in enumerate(segments):
        for row in range(length):
            if start <= row < end:
                contested += (row + 1 - start) // pool_size > index_topk // pool_size
            assert set(ours[sample, row].tolist()) == set(theirs[sample, row].tolist())
    if length == 131:
        assert contested >= 200  # rows that really drop pools


def test_topk_contract() -> None:
    nan, inf = math.nan, math.inf
    scores = torch.tensor([nan, 0.0, -0.0, -inf, 2.0, 0.0, inf, nan, -1.0])
    everything = [6, 4, 1, 2, 5, 8, 3, 0, 7]  # by hand: score descending, ties by id, NaN behind -inf
    for budget in range(1, 10):
        assert reference_topk(scores, 0, 9, budget) == sorted(everything[:budget])
    assert reference_topk(scores, 2, 6, 2) == [2, 4]
    assert reference_topk(scores, 2, 4, 4) == [2, 3, -1, -1]
    assert reference_topk(scores, 5, 5, 2) == [-1, -1]


def test_documents_by_hand() -> None:
    # Documents of 3, 6 and 1 tokens behind 2 tokens of padding, pools of 4.
    sample = [(2, 5), (5, 11), (11, 12)]
    assert reference_pools([sample, [(0, 0)]], 4) == [[5], []]
    assert [reference_visible(sample, row, 4) for row in (0, 4, 7, 8, 10, 11)] == [
        (0, 0), (0, 0), (0, 0), (0, 1), (0, 1), (1, 1)
    ]  # fmt: skip
    assert [reference_tail(sample, row, 4) for row in (1, 4, 7, 8, 10, 11)] == [
        [], [2, 3, 4], [5, 6, 7], [], [9, 10], [11]
    ]  # fmt: skip


def test_attention_by_hand() -> None:
    q = torch.tensor([1.0, 0.0]).view(1, 1, 1, 2).expand(2, 1, 1, 2)
    kv = torch.tensor([[math.log(3.0), 0.0], [9.0, 9.0], [0.0, 4.0]]).view(3, 1, 2)
    tokens = torch.tensor([[[0, -1, 2], [-1, -1, -1]]], dtype=torch.int32)
    out = reference_attention(q, kv, tokens, softmax_scale=1.0)
    expected = 0.75 * kv[0, 0] + 0.25 * kv[2, 0]
    # Two exponentials, a sum, a quotient and the products: a rounding each, of fp32.
    torch.testing.assert_close(out[0, 0, 0], expected, rtol=8 * torch.finfo(torch.float32).eps, atol=0)
    assert not out[1].any()
