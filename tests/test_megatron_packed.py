"""Packs through the whole Megatron path against each document alone, and what of a pack is refused."""

import re
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import megatron_ranks
from megatron.core.packed_seq_params import PackedSeqParams
from models import POOL, VOCAB, assert_equal, config, gpt, hybrid
from packs import Pack, Pass, assert_close, assert_same_or_near_tie, run_pack, sum_of
from torch import Tensor

from mcore_dsa import PoolLayout
from mcore_dsa.megatron.batch import Batch, plan_of
from mcore_dsa.settings import PARTITION_VARIABLE

PARTITIONS = ("off", "1", "zigzag", "balanced")
# Documents shorter than a pool, and of whole pools; of more pools than the budget; empty ones; padding inside, behind.
PACKS = [
    Pack.of(1, multiple=2),
    Pack.of(1, 1, 1, behind=1),
    Pack.of(3, 6, behind=3),
    Pack.of(5, 9, 3, multiple=2),
    Pack.of(24, 0, 40, 32),
    Pack.of(37, 0, 41, 5, 21, multiple=4, behind=3),
]
HOSTS: dict[str, tuple[Any, dict[str, Any]]] = {"gpt": (gpt, {}), "hybrid": (hybrid, {"num_layers": 4})}


def names_of(pack: Pack) -> str:
    return ",".join(map(str, pack.lengths))


def relative(selection_BSK: Tensor, pack: Pack) -> Tensor:
    """The selections of all documents one after the other, with ids as if each stood alone."""
    firsts = accumulate((stop - start) // POOL for start, stop in pack.bounds())
    parts = zip(pack.bounds(), [0, *firsts], strict=False)
    own = [(selection_BSK[:, start:stop], first) for (start, stop), first in parts]
    return torch.cat([torch.where(part < 0, part, part - first) for part, first in own], dim=1)


def of_host(pack: Pack, host: str) -> tuple[Pass, Pass, list[Pass]]:
    """The pack, the same with weights that differ in the last place, and each document alone."""
    build, options = HOSTS[host]
    results = []
    for way in ({}, {"moved": True}, {"alone": True}):
        torch.manual_seed(1)
        results.append(run_pack(pack, build, **way, **options))
    return tuple(results)


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("pack", PACKS, ids=names_of)
def test_a_pack_is_its_documents_one_by_one(pack: Pack, host: str) -> None:
    """Losses, selections and gradients; projections over another number of rows round otherwise."""
    ((packed, moved, alone),) = megatron_ranks(of_host, 1, pack, host)
    assert len(packed.selections) == 2
    for number, selection in enumerate(packed.selections):
        assert bool((selection[:, ~pack.real_T] == -1).all()), "padding selects"
        own = relative(selection, pack)[0]
        theirs = torch.cat([one.selections[number] for one in alone], dim=1)[0]
        start = 0
        for one in alone:
            rows = slice(start, start := start + len(one.rows_X))
            layout = PoolLayout.dense(len(one.rows_X), pool_size=POOL)
            where = f"layer {number}, document at {rows.start}"
            assert_same_or_near_tie(own[rows], theirs[rows], one.projections[number], layout, where)
    losses, apart = torch.cat([one.losses_X for one in alone]), packed.losses_X[pack.real_T]
    bound = 8 * float((moved.losses_X - packed.losses_X)[pack.real_T].norm())
    assert 0 < float((apart - losses).norm()) <= bound or torch.equal(apart, losses)
    assert_close(packed.gradients, sum_of(alone), moved.gradients, "alone")


@pytest.mark.parametrize("pack", PACKS[3:], ids=names_of)
def test_every_partition_of_two_ranks_gives_the_same_bits(pack: Pack) -> None:
    pack = Pack(pack.lengths, (*pack.padded[:-1], pack.padded[-1] + pack.tokens % 2))
    (one,), (moved,) = (megatron_ranks(run_pack, 1, pack, gpt, moved) for moved in (False, True))
    off, *others = (megatron_ranks(run_pack, 2, pack, tp=2, env={PARTITION_VARIABLE: word}) for word in PARTITIONS)
    for on in others:
        for left, right in zip(off, on, strict=True):
            for part in ("loss", "losses_X", "selections", "gradients"):
                assert_equal(getattr(left, part), getattr(right, part), part)
    assert_close(off[0].gradients, one.gradients, moved.gradients, "against one rank")


# What a pack's parameters hold, and how the refusal begins.
EIGHT, OWN = Pack.of(5, 3), torch.tensor([0, 5, 8], dtype=torch.int32)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"qkv_format": "sbhd"}, "packed_seq_params.qkv_format is 'sbhd'; accepted is 'thd'"),
    ({"local_cp_size": 2}, "packed_seq_params.local_cp_size is 2; accepted is None"),
    ({"max_seqlen_q": None}, "packed_seq_params.max_seqlen_q is None; accepted"),
    ({"max_seqlen_kv": None}, "packed_seq_params.max_seqlen_kv is None; accepted"),
    ({"cu_seqlens_kv": OWN + 1}, "packed_seq_params.cu_seqlens_q and cu_seqlens_kv differ"),
    ({"cu_seqlens_kv": None}, "packed_seq_params.cu_seqlens_q and cu_seqlens_kv differ"),
    ({"cu_seqlens_q": None, "cu_seqlens_kv": None}, "packed_seq_params.cu_seqlens_q is None"),
    ({"cu_seqlens_q_padded": OWN}, "packed_seq_params.cu_seqlens_q_padded and cu_seqlens_kv_padded differ"),
    (dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), OWN[:2]), "the last padded cumulative length is 5; accepted"),
    ({name: OWN.view(1, 3) for name in ("cu_seqlens_q", "cu_seqlens_kv")}, "cu_seqlens_q has shape (1, 3)"),
    ({name: torch.tensor([-1, 5, 8]) for name in ("cu_seqlens_q", "cu_seqlens_kv")}, "cu_seqlens holds [-1, 5, 8]"),
    ({name: torch.tensor([0, -1, 8]) for name in ("cu_seqlens_q", "cu_seqlens_kv")}, "cu_seqlens holds [0, -1, 8]"),
    ({name: OWN.float() for name in ("cu_seqlens_q", "cu_seqlens_kv")}, "cu_seqlens_q is torch.float32"),
    (
        {name: torch.tensor([0, 4, 8]) for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")},
        "document 0 of cu_seqlens is 5 tokens; accepted is at most its place in cu_seqlens_padded, 4",
    ),
    (
        {name: torch.tensor([0, 5, 9]) for name in ("cu_seqlens_q_padded", "cu_seqlens_kv_padded")},
        "the last padded cumulative length is 9; accepted is the number of tokens, 8",
    ),
]
SIZES = {"pool_size": 4, "budget": 2, "partition": "off", "tp_rank": 0, "tp_size": 1, "cp_rank": 0, "cp_size": 1}


@pytest.mark.parametrize(("changed", "message"), BAD)
def test_a_pack_that_does_not_fit_is_refused_by_name(changed: dict[str, Any], message: str) -> None:
    query = torch.zeros(8, 1, 2, 4)
    plan_of(query, EIGHT.params(), **SIZES)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        plan_of(query, EIGHT.params(**changed), **SIZES)


def test_what_a_loader_fills_up_with_is_left_out() -> None:
    """Sentinels of -1 behind the lengths; a last length that repeats is a document without tokens."""
    query = torch.zeros(8, 1, 2, 4)
    plain = plan_of(query, EIGHT.params(), **SIZES)
    for filled in (torch.tensor([0, 5, 8, -1, -1]), torch.tensor([0, 5, 8, 8, 8])):
        other = plan_of(query, EIGHT.params(cu_seqlens_q=filled, cu_seqlens_kv=filled.clone()), **SIZES)
        assert torch.equal(other.bounds.visible_BS, plain.bounds.visible_BS)
        assert torch.equal(other.layout.pool_token_BP, plain.layout.pool_token_BP)


def test_a_plan_is_built_once_a_micro_batch() -> None:
    """For all layers and recomputes, and anew where lengths, sizes or rows are others."""
    query, params = torch.zeros(8, 1, 2, 4), EIGHT.params()
    plan = plan_of(query, params, **SIZES)
    assert plan_of(query.clone(), params, **SIZES) is plan
    assert plan_of(query, params, **{**SIZES, "budget": 1}) is not plan
    plan = plan_of(query, params, **SIZES)
    params.cu_seqlens_q[1] = params.cu_seqlens_kv[1] = 4
    moved = plan_of(query, params, **SIZES)
    assert moved.layout.segment_end_BN.tolist() == [[4, 8]]
    params.cu_seqlens_q, params.cu_seqlens_kv = OWN, OWN.clone()
    assert plan_of(query, params, **SIZES).layout.segment_end_BN.tolist() == [[5, 8]]
    with torch.inference_mode():
        params = EIGHT.params()
        params.cu_seqlens_q.numpy()[1] = params.cu_seqlens_kv.numpy()[1] = 3
        inside = plan_of(query, params, **SIZES)
        assert plan_of(query, params, **SIZES) is inside
    assert not inside.bounds.position_S.is_inference()
    assert inside.layout.segment_end_BN.tolist() == [[3, 8]]
    params.cu_seqlens_q.numpy()[1] = params.cu_seqlens_kv.numpy()[1] = 6
    assert plan_of(query, params, **SIZES).layout.segment_end_BN.tolist() == [[6, 8]]


def shapes(tokens: int = 8) -> dict[str, Tensor]:
    return {
        "query": torch.zeros(tokens, 2, 4),
        "key": torch.zeros(tokens, 1, 4),
        "x": torch.zeros(tokens, 1, 6),
        "qr": torch.zeros(tokens, 3),
    }


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("query", (8, 1, 2, 4), "query has shape (8, 1, 2, 4); accepted is [t, heads, kv_lora_rank]"),
        ("key", (8, 4), "key has shape (8, 4); accepted is [8, 1, 4]"),
        ("key", (9, 1, 4), "key has shape (9, 1, 4); accepted is [8, 1, 4]"),
        ("x", (5, 1, 6), "x has 5 rows of 1 samples; accepted are this rank's of 8 rows over 1 tensor-parallel ranks"),
        ("x", (8, 2, 6), "x has 8 rows of 2 samples"),
        ("qr", (7, 3), "qr has 7 rows of 1 samples"),
    ],
)
def test_tensors_of_another_shape_are_refused_by_name(name: str, shape: tuple[int, ...], message: str) -> None:
    Batch.of(**shapes(), packed=True, tp_size=1)
    with pytest.raises(ValueError, match=re.escape(message)):
        Batch.of(**{**shapes(), name: torch.zeros(shape)}, packed=True, tp_size=1)


def without_length() -> list[str]:
    """Megatron itself reads it before any core attention is called."""
    model, said = gpt(config(num_layers=1)), []
    ids = torch.zeros(1, 8, dtype=torch.int64)
    assert int(ids.max()) < VOCAB
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        with pytest.raises(ValueError, match="accepted is the longest document") as raised:
            model(ids, None, None, packed_seq_params=EIGHT.params(**{name: None}))
        said.append(str(raised.value))
    return said


def test_a_pack_without_its_longest_length_is_refused_by_name() -> None:
    ((of_query, of_key),) = megatron_ranks(without_length, 1)
    assert of_query.startswith("packed_seq_params.max_seqlen_q is None")
    assert of_key.startswith("packed_seq_params.max_seqlen_kv is None")


def test_any_other_object_with_the_fields_serves() -> None:
    """Trainers subclass and copy the parameters."""
    fields = vars(EIGHT.params())
    plan = plan_of(torch.zeros(8, 1, 2, 4), SimpleNamespace(**fields), **SIZES)
    same = plan_of(torch.zeros(8, 1, 2, 4), PackedSeqParams(**fields), **SIZES)
    assert torch.equal(plan.bounds.visible_BS, same.bounds.visible_BS)
