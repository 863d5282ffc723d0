"""The module with attention cut by rows against attention cut by heads, in the same layout."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from harness import RanksFailed, megatron_ranks
from models import BATCH, POOL, ROWS, TOPK, Run, assert_equal, attentions, config, gpt, tokens, train, under_each
from packs import ROUNDINGS, Pack, Pass, assert_close, move, run_dense, run_pack
from recorder import Recorder
from test_recompute import WAYS

from mcore_dsa.rows import partition_rows
from mcore_dsa.settings import (
    ATTEND_BYTES_VARIABLE,
    ATTEND_SHARD_VARIABLE,
    PARTITION_VARIABLE,
    STORE_BYTES_VARIABLE,
)

# Lengths that need tails, padding within documents and behind the last.
PACK = Pack.of(37, 0, 73, 5, 24, multiple=24, behind=1)
KINDS: dict[str, tuple[Any, Any]] = {"dense": (run_dense, ROWS), "packed": (run_pack, PACK)}
RECOMPUTE: dict[str, dict[str, Any]] = {"none": {}, **{way: WAYS[way] for way in ("full", "core_attn and mla_up_proj")}}


def env(shard: str, word: str, attend_bytes: str = "") -> dict[str, str]:
    return {PARTITION_VARIABLE: word, ATTEND_SHARD_VARIABLE: shard, ATTEND_BYTES_VARIABLE: attend_bytes}


def moved_gpt(cfg: Any) -> Any:
    model = gpt(cfg)
    move(model)
    return model


def one_after_the_other(words: Mapping[str, Sequence[str]], options: dict[str, Any]) -> dict[str, list[Pass]]:
    """Of each kind a pass by heads, one of weights that rounding has moved, and one by rows for each partition."""
    heads = [env("heads", "contiguous")]
    # Every other partition without recomputation.
    ways = [options, {}]
    found = {}
    for kind, (run, what) in KINDS.items():
        passes = partial(run, what, **options)
        found[kind] = [*under_each(heads, passes, gpt), *under_each(heads, passes, moved_gpt)]
        for number, word in enumerate(words[kind]):
            # The least that holds an item of all heads leaves the exchange a few rows a piece.
            rows = [env("rows", word, "128KiB")]
            found[kind] += under_each(rows, partial(run, what, **ways[number % 2]), gpt)
    return found


def compare(rank: int, tp: int, found: list[Pass], words: Sequence[str], where: str) -> None:
    heads, moved, *of_words = found
    for word, rows in zip(words, of_words, strict=True):
        for part in ("loss", "losses_X"):
            assert_equal(getattr(heads, part), getattr(rows, part), f"{where}, {word}: {part}")
        assert_close(rows.gradients, heads.gradients, moved.gradients, f"{where}, {word}")
        # Nothing but the latents' gradients, and what comes before them, is a sum in another order.
        for name, gradient in heads.gradients.items():
            if "layers.1" in name and ("linear_proj" in name or "mlp" in name or "linear_q_up" in name):
                assert torch.equal(rows.gradients[name], gradient), f"{where}, {word}: {name}"
        kind: Any = "contiguous" if word == "off" else word
        for whole, own in zip(heads.selections, rows.selections, strict=True):
            num_rows = whole.shape[1]
            # Of a pack the work that balances it is not this: there the losses tell.
            if kind != "balanced" or num_rows == ROWS:
                partition = partition_rows(kind, num_rows, tp, [ROWS], pool_size=POOL, budget=TOPK // POOL)
                assert torch.equal(own, whole[:, [row for part in partition.slices(rank % tp) for row in part]])
        assert all(of["selected again"] == 0 for of in rows.recomputed)
    # The first of the partitions recomputes as heads do.
    assert of_words[0].recomputed == heads.recomputed


@pytest.mark.parametrize(
    ("tp", "cp", "way", "words"),
    [
        (2, 1, "full", dict.fromkeys(KINDS, ("off", "contiguous", "zigzag", "balanced"))),
        (3, 1, "full", dict.fromkeys(KINDS, ("off", "contiguous", "zigzag", "balanced"))),
        (4, 1, "core_attn and mla_up_proj", {"dense": ("off", "contiguous"), "packed": ("zigzag", "balanced")}),
        (2, 2, "full", {"dense": ("off", "contiguous"), "packed": ("contiguous", "zigzag")}),
    ],
)
def test_rows_and_heads_give_equal_losses(tp: int, cp: int, way: str, words: dict[str, tuple[str, ...]]) -> None:
    """Every partition; each layout without and with a way to recompute."""
    found = megatron_ranks(one_after_the_other, tp * cp, words, RECOMPUTE[way], tp=tp, cp=cp, timeout=120)
    for rank, of_rank in enumerate(found):
        for kind, passes in of_rank.items():
            compare(rank, tp, passes, words[kind], f"TP {tp}, CP {cp}, {kind}, {way}, rank {rank}")


def trained(word: str, steps: int) -> list[Run]:
    """By heads, by heads of weights that rounding has moved, and by rows."""
    return [
        *under_each([env("heads", word)], partial(train, gpt, steps=steps)),
        *under_each([env("heads", word)], partial(train, moved_gpt, steps=steps)),
        *under_each([env("rows", word)], partial(train, gpt, steps=steps)),
    ]


def assert_replicas_equal(runs: list[Run]) -> None:
    """Whole parameters, those that every rank of the group has, are the same on all."""
    shared = [name for name, value in runs[0].parameters.items() if "norm" in name or "linear_kv_down" in name]
    assert len(shared) > 4
    for run in runs[1:]:
        for name in shared:
            assert torch.equal(run.parameters[name], runs[0].parameters[name]), name


@pytest.mark.parametrize(("tp", "word", "steps"), [(2, "zigzag", 10), (3, "off", 4), (4, "contiguous", 4)])
def test_steps_of_training(tp: int, word: str, steps: int) -> None:
    """The first loss is equal to the last bit; the others are as far apart as rounding takes them."""
    found = megatron_ranks(trained, tp, word, steps, tp=tp)
    for heads, moved, rows in found:
        assert heads.losses[0] == rows.losses[0]
        assert_equal(heads.logits[0], rows.logits[0])
        assert rows.losses[-1] < 0.9 * rows.losses[0]
        # Both are what rounding does: of every weight once, and of sums in another order in every step.
        bound = ROUNDINGS * max(abs(one - other) for one, other in zip(moved.losses, heads.losses, strict=True))
        assert 0 < bound < 1e-2
        assert max(abs(one - other) for one, other in zip(rows.losses, heads.losses, strict=True)) <= bound
    assert_replicas_equal([rows for *_, rows in found])


def what_travels() -> set[torch.dtype]:
    """Dtypes that travel in a training step, sums apart."""
    model, ids = gpt(config()), tokens()
    with Recorder() as log:
        model(ids[:, :-1], None, None, labels=ids[:, 1:]).mean().backward()
    return {call.output[0] for call in log.calls if call.name != "all_reduce" and call.output}


def test_no_collective_carries_selections() -> None:
    for shard, word in (("heads", "zigzag"), ("rows", "zigzag"), ("rows", "off")):
        for dtypes in megatron_ranks(what_travels, 2, tp=2, env=env(shard, word)):
            # Rows of the indexer travel as bytes, queries and outputs as they are.
            assert (torch.int32 in dtypes) == (shard == "heads")
            assert torch.float32 in dtypes


def recomputed_within(store_bytes: int) -> int:
    """How many recomputes found the selection of their first pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STORE_BYTES_VARIABLE, str(store_bytes))
        model, ids = gpt(config(**WAYS["full"])), tokens()
    model(ids[:, :-1], None, None, labels=ids[:, 1:]).mean().backward()
    return sum(layer.recomputed["found"] for layer in attentions(model))


def test_the_store_is_sized_for_own_rows() -> None:
    """With the flag off every rank selects for all rows, and keeps those that it attends."""
    own = 2 * BATCH * (ROWS // 2) * (TOPK // POOL) * 4
    for store_bytes, found in ((own, 2), (own - 1, 0)):
        assert megatron_ranks(recomputed_within, 2, store_bytes, tp=2, env=env("rows", "off")) == [found] * 2


def disagree() -> None:
    model, ids = gpt(config()), tokens()
    model(ids[:, :-1], None, None)


def test_ranks_that_cut_otherwise_are_named_on_every_rank() -> None:
    envs = [env("rows" if rank == 1 else "heads", "contiguous") for rank in range(3)]
    with pytest.raises(RanksFailed) as failure:
        megatron_ranks(disagree, 3, tp=3, env=envs)
    text = str(failure.value)
    assert text.count("MCORE_DSA_ATTEND_SHARD") >= 3
    assert "still ran" not in text


def test_an_unknown_cut_is_refused_on_every_rank() -> None:
    with pytest.raises(RanksFailed) as failure:
        megatron_ranks(disagree, 2, tp=2, env=env("columns", "contiguous"))
    assert str(failure.value).count("MCORE_DSA_ATTEND_SHARD is 'columns'; accepted are heads and rows") >= 2


def test_the_budget_is_for_all_heads() -> None:
    """One that holds a row of this rank's heads and none of all is refused before anything is exchanged."""
    with pytest.raises(RanksFailed) as failure:
        megatron_ranks(disagree, 2, tp=2, env=env("rows", "contiguous", "32KiB"))
    assert str(failure.value).count("MCORE_DSA_ATTEND_BYTES is 32768; accepted for this geometry is ") >= 2
    megatron_ranks(disagree, 2, tp=2, env=env("heads", "contiguous", "32KiB"))
