"""`fused_qk_topk_kpool`: its signature, every way to say who sees what, and what it refuses."""

import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from draw import Segments
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_dsa import fused_qk_topk_kpool
from mcore_dsa.reference import reference_expand, reference_scores, reference_select

SIGNATURE = (
    "(q, k, weights, index_topk, pool_size, gate_score, ape, mask=None, varlen_starts=None, varlen_ends=None, "
    "key_positions=None, cu_seqlens_kv=None, use_relu=True, always_select_tail=True, fp8_indexer=False, "
    "query_shard_group=None, agreed=False)"
)


def inputs(tokens: int, pool_size: int, *, batch: int = 1, heads: int = 2, dim: int = 3, rows: int | None = None,
           seed: int = 0) -> dict[str, Any]:  # fmt: skip
    """Small integers, and gates that weigh the tokens of a pool alike: exact in fp32 where a pool has 1, 2 or 4."""
    generator = torch.Generator().manual_seed(seed)
    rows = tokens if rows is None else rows
    q, k, weights = (
        torch.randint(-2, 3, shape, generator=generator).float()
        for shape in ((rows, batch, heads, dim), (tokens, batch, dim), (rows, batch, heads))
    )
    gate = torch.full((tokens, batch, dim), 0.5)
    return {"q": q, "k": 4 * k, "weights": weights, "gate_score": gate, "ape": torch.zeros(pool_size, dim)}


def mean_keys(k: Tensor, segments: Segments, pool_size: int) -> Tensor:
    """float64 pool keys where all gates are equal."""
    pool_key = torch.zeros(k.shape[0] // pool_size, *k.shape[1:], dtype=torch.float64)
    for sample, documents in enumerate(segments):
        pool = 0
        for start, end in documents:
            for token in range(start, end - pool_size + 1, pool_size):
                pool_key[pool, sample] = k[token : token + pool_size, sample].double().mean(0)
                pool += 1
    return pool_key


def oracle(
    call: dict[str, Any], segments: Segments, position: Tensor, *, index_topk: int, pool_size: int,
    always_select_tail: bool = True,
) -> Tensor:  # fmt: skip
    score = reference_scores(call["q"], call["weights"], mean_keys(call["k"], segments, pool_size), dtype=torch.float64)
    budget = index_topk // pool_size
    selection = reference_select(score, segments, position, pool_size=pool_size, budget=budget)
    return reference_expand(selection, segments, position, pool_size=pool_size, always_select_tail=always_select_tail)


def documents_of(cuts: list[int]) -> list[tuple[int, int]]:
    return list(pairwise(cuts))


def bounds_of(documents: list[tuple[int, int]], rows: int) -> dict[str, Tensor]:
    """Causal bounds inside every document, empty ones for padding."""
    starts, ends = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)
    for start, end in documents:
        starts[start:end], ends[start:end] = start, torch.arange(start + 1, end + 1)
    return {"varlen_starts": starts, "varlen_ends": ends}


def test_signature() -> None:
    signature = inspect.signature(fused_qk_topk_kpool)
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty)) == SIGNATURE


@settings(max_examples=80)
@given(st.data())
def test_every_way_to_say_the_documents(data: st.DataObject) -> None:
    """cu_seqlens, bounds, and both, with padding behind the last document: the same token ids, and the oracle's."""
    pool_size = data.draw(st.sampled_from([1, 2, 4]))
    tokens, batch = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 2))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, tokens), min_size=1, max_size=6)))]
    index_topk = pool_size * data.draw(st.integers(1, 6))
    tail = data.draw(st.booleans())
    call = inputs(tokens, pool_size, batch=batch, seed=data.draw(st.integers(0, 999)))
    settings_ = {"index_topk": index_topk, "pool_size": pool_size, "always_select_tail": tail}
    documents = documents_of(cuts)
    expected = oracle(call, [documents] * batch, torch.arange(tokens), **settings_)
    assert expected.shape[2] == index_topk + (pool_size - 1 if tail else 0)
    dtype = data.draw(st.sampled_from([torch.int32, torch.int64]))
    cu_seqlens = {"cu_seqlens_kv": torch.tensor(cuts, dtype=dtype)}
    bounds = {name: bound.to(dtype) for name, bound in bounds_of(documents, tokens).items()}
    ways: list[dict[str, Tensor]] = [cu_seqlens, bounds, {**cu_seqlens, **bounds}]
    if documents == [(0, tokens)]:
        ways.append({})
    for way in ways:
        scores, token_ids = fused_qk_topk_kpool(**call, **settings_, **way)
        assert scores is None
        assert token_ids.dtype == torch.int32
        assert torch.equal(token_ids, expected)


@settings(max_examples=40)
@given(st.data())
def test_some_rows_of_a_pack(data: st.DataObject) -> None:
    """Bounds for rows of any number and order: a context-parallel rank's, a decoding step's."""
    pool_size, tokens = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.integers(1, 60))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, tokens), min_size=1, max_size=4)))]
    documents = documents_of(cuts)
    row = torch.tensor(data.draw(st.lists(st.integers(0, tokens - 1), max_size=30)), dtype=torch.int64)
    call = inputs(tokens, pool_size, rows=len(row), seed=tokens)
    bounds = {name: bound[row] for name, bound in bounds_of(documents, tokens).items()}
    sizes = {"index_topk": 3 * pool_size, "pool_size": pool_size}
    expected = oracle(call, [documents], torch.where(bounds["varlen_ends"] > 0, row, -1), **sizes)
    for way in (bounds, {**bounds, "cu_seqlens_kv": torch.tensor(cuts)}):
        assert torch.equal(fused_qk_topk_kpool(**call, **sizes, **way)[1], expected)


@pytest.mark.parametrize(
    ("lengths", "pools"),
    [([1, 1, 1], []), ([3, 6], [3]), ([5, 9, 3], [0, 5, 9]), ([4, 4], [0, 4]), ([2], []), ([3, 3, 3, 4], [9])],
)
def test_small_documents(lengths: list[int], pools: list[int]) -> None:
    """Pools of 4 restart at every document and straddle none; what they leave is the rows' tails."""
    cuts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    tokens = cuts[-1]
    call = inputs(tokens, 4, batch=2)
    _, token_ids = fused_qk_topk_kpool(**call, index_topk=64, pool_size=4, cu_seqlens_kv=torch.tensor(cuts))
    for start, end in documents_of(cuts):
        for row in range(start, end):
            seen = [pool for pool in pools if start <= pool and pool + 4 <= row + 1]
            tail = list(range(start + (row + 1 - start) // 4 * 4, row + 1))
            whole = [pool + j for pool in seen for j in range(4)]
            expected = [*whole, *[-1] * (64 - len(whole)), *tail, *[-1] * (3 - len(tail))]
            assert token_ids[:, row].tolist() == [expected, expected]


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 31, 32])
def test_no_more_tokens_than_index_topk_selects_every_visible_one(tokens: int) -> None:
    call = inputs(tokens, 4, batch=2)
    _, token_ids = fused_qk_topk_kpool(**call, index_topk=32, pool_size=4)
    for row in range(tokens):
        for sample in range(2):
            assert sorted(set(token_ids[sample, row].tolist()) - {-1}) == list(range(row + 1))
    _, without = fused_qk_topk_kpool(**call, index_topk=32, pool_size=4, always_select_tail=False)
    assert torch.equal(without, token_ids[..., :32])


def test_a_complete_last_pool_competes_and_leaves_no_tail() -> None:
    """Row 7 ends pool 1, whose score is the lower: the row does not see its own token."""
    key = torch.tensor([1.0] * 4 + [-1.0] * 4).view(8, 1, 1)
    call = {"q": torch.ones(8, 1, 1, 1), "weights": torch.ones(8, 1, 1), "k": key, "gate_score": 0 * key}
    sizes = {"index_topk": 4, "pool_size": 4, "ape": torch.zeros(4, 1)}
    assert fused_qk_topk_kpool(**call, **sizes)[1][0, 7].tolist() == [0, 1, 2, 3, -1, -1, -1]
    assert fused_qk_topk_kpool(**call, **sizes)[1][0, 6].tolist() == [0, 1, 2, 3, 4, 5, 6]


@settings(max_examples=30)
@given(st.data())
def test_a_document_selects_alike_wherever_it_stands(data: st.DataObject) -> None:
    """From its keys and gates on, between documents of NaN and beside another sample, down to near ties."""
    pool_size, length = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 200))
    before, after = data.draw(st.integers(0, 300)), data.draw(st.integers(0, 9))
    generator = torch.Generator().manual_seed(before)
    q, weights, gate, base = (
        torch.randn(shape, generator=generator)
        for shape in ((length, 1, 8, 16), (length, 1, 8), (length, 1, 16), (1, 1, 16))
    )
    step = torch.randint(0, 6, (length, 1, 1), generator=generator) * 2.0**-22
    call = {"q": q, "weights": weights, "k": base * (1 + step), "gate_score": gate}
    sizes = {
        "index_topk": pool_size * data.draw(st.integers(1, 9)),
        "pool_size": pool_size,
        "ape": torch.linspace(-1, 1, pool_size).unsqueeze(1).expand(-1, 16),
    }
    alone = fused_qk_topk_kpool(**call, **sizes)[1][0]
    packed = {}
    for name, x in call.items():
        whole = x.new_full((before + length + after, 2, *x.shape[2:]), torch.nan)
        whole[before : before + length, 1:] = x
        packed[name] = whole.to(torch.float64) if name == "q" else whole
    cuts = torch.tensor([0, before, before + length, before + length + after])
    found = fused_qk_topk_kpool(**packed, **sizes, cu_seqlens_kv=cuts)[1][1, before : before + length]
    assert torch.equal(torch.where(found >= 0, found - before, -1), alone)


def test_relu_can_be_left_out() -> None:
    """Pool 0 agrees with one head alone, pool 1 with none but disagrees less."""
    key = torch.tensor([[4.0, -9.0], [-1.0, -1.0]]).view(2, 1, 2)
    call = {
        "q": torch.eye(2).view(1, 1, 2, 2).expand(2, -1, -1, -1),
        "weights": torch.ones(2, 1, 2),
        "k": key,
        "gate_score": 0 * key,
        "ape": torch.zeros(1, 2),
    }
    assert fused_qk_topk_kpool(**call, index_topk=1, pool_size=1)[1][0, 1].tolist() == [0]
    assert fused_qk_topk_kpool(**call, index_topk=1, pool_size=1, use_relu=False)[1][0, 1].tolist() == [1]


def test_gates_and_ape_weigh_the_tokens_of_a_pool() -> None:
    """A gate, and an offset of a place, that take one token of each pool: its key decides."""
    key = torch.tensor([0.0, 5, 0, 0, 9, 0, 0, 0, 0, 0]).view(10, 1, 1)
    call = {"q": torch.ones(10, 1, 1, 1), "weights": torch.ones(10, 1, 1), "k": key}
    sizes = {"index_topk": 2, "pool_size": 2, "always_select_tail": False}
    second = torch.tensor([[-50.0], [50.0]])
    by_ape = fused_qk_topk_kpool(**call, **sizes, gate_score=0 * key, ape=second)[1]
    by_gate = fused_qk_topk_kpool(**call, **sizes, gate_score=second.repeat(5, 1).view(10, 1, 1), ape=0 * second)[1]
    evenly = fused_qk_topk_kpool(**call, **sizes, gate_score=0 * key, ape=0 * second)[1]
    assert (by_ape[0, 9].tolist(), by_gate[0, 9].tolist(), evenly[0, 9].tolist()) == ([0, 1], [0, 1], [4, 5])


def test_rows_that_see_nothing() -> None:
    call = inputs(12, 4, batch=2)
    none = torch.zeros(12, dtype=torch.int64)
    for starts in (none, torch.full((12,), 12), torch.arange(12)):
        _, token_ids = fused_qk_topk_kpool(
            **call, index_topk=8, pool_size=4, varlen_starts=starts, varlen_ends=starts.clone()
        )
        assert torch.equal(token_ids, torch.full((2, 12, 11), -1, dtype=torch.int32))
    every = fused_qk_topk_kpool(**call, index_topk=8, pool_size=4)[1]
    blind = torch.arange(12) % 3 == 1
    for place in range(13):
        bounds = {
            "varlen_starts": torch.where(blind, place, 0),
            "varlen_ends": torch.where(blind, place, torch.arange(1, 13)),
        }
        expected = every.masked_fill(blind.unsqueeze(1), -1)
        for way in (bounds, {**bounds, "cu_seqlens_kv": torch.tensor([0, 12])}):
            assert torch.equal(fused_qk_topk_kpool(**call, index_topk=8, pool_size=4, **way)[1], expected)
    empty = inputs(0, 4, batch=2)
    assert fused_qk_topk_kpool(**empty, index_topk=8, pool_size=4)[1].shape == (2, 0, 11)


@given(st.integers(0, 20), st.integers(1, 3), st.booleans())
@settings(deadline=None)
def test_rows_behind_the_last_document_select_nothing(behind: int, pool_size: int, bounds: bool) -> None:
    """With the bounds that Megatron gives them: from the end of the documents to the row itself."""
    tokens = 9 + behind
    call, boundary = inputs(tokens, pool_size), torch.tensor([0, 4, 9])
    row = torch.arange(tokens)
    starts = boundary[torch.searchsorted(boundary[1:], row, right=True)]
    way = {"varlen_starts": starts, "varlen_ends": row + 1} if bounds else {}
    found = fused_qk_topk_kpool(**call, index_topk=pool_size, pool_size=pool_size, cu_seqlens_kv=boundary, **way)[1]
    alone = {name: x[:9] if name != "ape" else x for name, x in call.items()}
    expected = fused_qk_topk_kpool(**alone, index_topk=pool_size, pool_size=pool_size, cu_seqlens_kv=boundary)[1]
    assert torch.equal(found[:, :9], expected)
    assert bool((found[:, 9:] == -1).all())


def causal_masks(tokens: int, batch: int) -> list[Tensor]:
    hidden = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    added = torch.zeros(tokens, tokens).masked_fill_(hidden, -torch.inf)
    masks = [hidden, added, added.bfloat16()]
    return masks + [mask.expand(batch, *mask.shape) for mask in masks] + [mask.expand(1, 1, -1, -1) for mask in masks]


@pytest.mark.parametrize("tokens", [1, 20, 600])
def test_the_causal_mask_is_taken_and_every_other_is_refused(tokens: int) -> None:
    call = {**inputs(tokens, 4, batch=2), "index_topk": 8, "pool_size": 4}
    expected = fused_qk_topk_kpool(**call)[1]
    for mask in causal_masks(tokens, 2):
        assert torch.equal(fused_qk_topk_kpool(**call, mask=mask)[1], expected)
        for row, key in {(0, tokens - 1), (tokens - 1, 0), (tokens - 1, tokens - 1)}:
            other = mask.clone()
            seen = key <= row
            other[..., row, key] = seen if mask.dtype == torch.bool else (-torch.inf if seen else 0)
            with pytest.raises(ValueError, match="mask is not causal in rows"):
                fused_qk_topk_kpool(**call, mask=other)


def test_key_positions_that_say_nothing_new_are_taken() -> None:
    call = inputs(12, 4)
    expected = fused_qk_topk_kpool(**call, index_topk=4, pool_size=4)[1]
    for dtype in (torch.int32, torch.int64):
        positions = torch.arange(12, dtype=dtype)
        assert torch.equal(fused_qk_topk_kpool(**call, index_topk=4, pool_size=4, key_positions=positions)[1], expected)


def test_strided_input_just_works() -> None:
    call = inputs(40, 4, batch=2)
    expected = fused_qk_topk_kpool(**call, index_topk=8, pool_size=4)[1]
    strided = {name: torch.stack([x, x * torch.nan], dim=-1)[..., 0] for name, x in call.items()}
    assert not any(x.is_contiguous() for x in strided.values())
    assert torch.equal(fused_qk_topk_kpool(**strided, index_topk=8, pool_size=4)[1], expected)


ROWS = torch.arange(20)
BOUNDS = {"varlen_starts": torch.zeros(20, dtype=torch.int64), "varlen_ends": ROWS + 1}
BAD: list[tuple[str, dict[str, Any]]] = [
    ("use_relu", {"use_relu": "no"}),
    ("always_select_tail", {"always_select_tail": 1}),
    ("always_select_tail", {"always_select_tail": "no"}),
    ("fp8_indexer", {"fp8_indexer": 0}),
    ("query_shard_group", {"query_shard_group": 5}),
    ("q", {"q": None}),
    ("q", {"q": torch.zeros(20, 2, 2, 3, dtype=torch.int64)}),
    ("q", {"q": torch.zeros(20, 2, 6)}),
    ("q", {"q": torch.zeros(19, 2, 2, 3), "weights": torch.zeros(19, 2, 2)}),
    ("q", {"q": torch.zeros(20, 2, 2, 3, device="meta")}),
    ("k", {"k": None}),
    ("k", {"k": torch.zeros(20, 2, 1, 3)}),
    ("k", {"k": torch.zeros(20, 1, 3), "gate_score": torch.zeros(20, 1, 3)}),
    ("k", {"k": torch.zeros(20, 2, 4), "gate_score": torch.zeros(20, 2, 4), "ape": torch.zeros(4, 4)}),
    ("k", {"k": torch.zeros(20, 2, 3, dtype=torch.bool)}),
    ("weights", {"weights": None}),
    ("weights", {"weights": torch.zeros(20, 2, 3)}),
    ("weights", {"weights": torch.zeros(21, 2, 2)}),
    ("weights", {"weights": torch.zeros(20, 2, 2, dtype=torch.int32)}),
    ("weights", {"weights": torch.zeros(20, 2, 2, device="meta")}),
    ("gate_score", {"gate_score": None}),
    ("gate_score", {"gate_score": torch.zeros(19, 2, 3)}),
    ("gate_score", {"gate_score": torch.zeros(20, 2, 3, device="meta")}),
    ("ape", {"ape": None}),
    ("ape", {"ape": torch.zeros(3, 3)}),
    ("ape", {"ape": torch.zeros(4, 3, dtype=torch.int64)}),
    ("index_topk", {"index_topk": 6}),
    ("index_topk", {"index_topk": 0}),
    ("index_topk", {"index_topk": -4}),
    ("index_topk", {"index_topk": 8.0}),
    ("index_topk", {"index_topk": True, "pool_size": 1, "ape": torch.zeros(1, 3)}),
    ("pool_size", {"pool_size": 0}),
    ("pool_size", {"pool_size": 4.0}),
    ("pool_size", {"pool_size": True, "ape": torch.zeros(1, 3)}),
    ("mask", {"mask": torch.zeros(20, 20, dtype=torch.bool)}),
    ("mask", {"mask": "causal"}),
    ("mask", {"mask": torch.zeros(20, 20, dtype=torch.int64).triu(1)}),
    ("mask", {"mask": causal_masks(20, 2)[0][:19]}),
    ("mask", {"mask": causal_masks(20, 3)[3]}),
    ("mask", {"mask": causal_masks(20, 2)[0].to("meta")}),
    ("mask", {"mask": causal_masks(20, 2)[0], **BOUNDS}),
    ("mask", {"mask": causal_masks(20, 2)[0], "cu_seqlens_kv": torch.tensor([0, 20])}),
    ("fp8_indexer", {"fp8_indexer": True}),
    ("key_positions", {"key_positions": ROWS.flip(0)}),
    ("key_positions", {"key_positions": ROWS[:19]}),
    ("key_positions", {"key_positions": ROWS + 1}),
    ("key_positions", {"key_positions": ROWS.float()}),
    ("key_positions", {"key_positions": list(range(20))}),
    ("cu_seqlens_kv", {"cu_seqlens_kv": torch.tensor([0.0, 20.0])}),
    ("cu_seqlens_kv", {"cu_seqlens_kv": torch.tensor([[0, 20]])}),
    ("cu_seqlens_kv", {"cu_seqlens_kv": torch.tensor([0])}),
    ("cu_seqlens_kv", {"cu_seqlens_kv": torch.tensor([1, 20])}),
    ("cu_seqlens_kv", {"cu_seqlens_kv": torch.tensor([0, 12, 9])}),
    ("cu_seqlens_kv", {"cu_seqlens_kv": torch.tensor([0, 21])}),
    ("cu_seqlens_kv", {"cu_seqlens_kv": torch.tensor([0, -2, 20])}),
    ("cu_seqlens_kv", {"cu_seqlens_kv": torch.tensor([0, 20], device="meta")}),
    ("cu_seqlens_kv", {"cu_seqlens_kv": [0, 20]}),
    ("varlen_ends is None beside", {"varlen_starts": BOUNDS["varlen_starts"]}),
    ("varlen_starts is None beside", {"varlen_ends": BOUNDS["varlen_ends"]}),
    ("varlen_starts", {**BOUNDS, "varlen_starts": ROWS[:19]}),
    ("varlen_ends", {**BOUNDS, "varlen_ends": ROWS[1:]}),
    ("varlen_starts", {**BOUNDS, "varlen_starts": BOUNDS["varlen_starts"].float()}),
    ("varlen_ends", {**BOUNDS, "varlen_ends": BOUNDS["varlen_ends"].view(1, 20)}),
    ("varlen_ends", {**BOUNDS, "varlen_ends": BOUNDS["varlen_ends"].to("meta")}),
    ("varlen_starts is -1 and varlen_ends 1 in row 0;", {**BOUNDS, "varlen_starts": BOUNDS["varlen_starts"] - 1}),
    ("varlen_starts is 0 and varlen_ends 21 in row 19;", {**BOUNDS, "varlen_ends": ROWS + 2}),
    ("varlen_starts is 0 and varlen_ends -1 in row 0;", {"varlen_starts": ROWS, "varlen_ends": ROWS - 1}),
    ("varlen_starts is 0 and varlen_ends 11 in row 10;", {**BOUNDS, "cu_seqlens_kv": torch.tensor([0, 10, 20])}),
    (
        "varlen_starts is 5 and varlen_ends 6 in row 5;",
        {"varlen_starts": ROWS // 5 * 5, "varlen_ends": ROWS + 1, "cu_seqlens_kv": torch.tensor([0, 20])},
    ),
]


@pytest.mark.parametrize(("name", "changed"), BAD)
def test_bad_input_is_refused_by_name(name: str, changed: dict[str, Any]) -> None:
    good = {**inputs(20, 4, batch=2), "index_topk": 8, "pool_size": 4}
    fused_qk_topk_kpool(**good)
    fused_qk_topk_kpool(**good, **BOUNDS)
    with pytest.raises((TypeError, ValueError), match=rf"(?s)\b{name}(\b|_| ).*accepted"):
        fused_qk_topk_kpool(**{**good, **changed})


@pytest.mark.parametrize(
    "starts",
    [
        (ROWS - 3).clamp(min=0),
        torch.where(ROWS < 10, 0, 5),
        ROWS // 8 * 4,
        torch.where(ROWS == 19, 3, 0),
        torch.where(ROWS < 10, 0, 9),
    ],
    ids=["window of 4", "cut back into a document", "chunks that overlap", "last row", "by one token"],
)
def test_starts_that_move_inside_a_document_are_refused(starts: Tensor) -> None:
    with pytest.raises(ValueError, match=r"varlen_starts is \d+ inside a document .*; accepted is one start"):
        fused_qk_topk_kpool(**inputs(20, 4), index_topk=8, pool_size=4, varlen_starts=starts, varlen_ends=ROWS + 1)
