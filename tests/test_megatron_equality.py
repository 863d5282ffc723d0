"""Flag off against flag on, in the same layout: equal to the last bit in everything that training produces."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from harness import megatron_ranks
from models import (
    BATCH,
    POOL,
    ROWS,
    TOPK,
    VOCAB,
    Run,
    assert_equal,
    config,
    gpt,
    taken_selections,
    train,
    under_each,
)

from mcore_dsa.settings import PARTITION_VARIABLE

LAYERS = 2
STEPS = 10
PARTITIONS = ("contiguous", "zigzag", "balanced")


def train_ten(options: dict[str, Any]) -> Run:
    return train(steps=STEPS, **options)


def trained(partitions: tuple[str, ...], steps: int, options: dict[str, Any]) -> list[Run]:
    envs = [{PARTITION_VARIABLE: word} for word in ("off", *partitions)]
    return under_each(envs, partial(train, steps=steps, **options))


def assert_same_training(off: Sequence[Run], on: Sequence[Run], partition: str) -> None:
    for rank, (left, right) in enumerate(zip(off, on, strict=True)):
        assert (left.partition, right.partition) == ("off", partition)
        for part in ("selections", "logits", "losses", "gradients", "parameters"):
            assert_equal(getattr(left, part), getattr(right, part), f"{partition}, rank {rank}, {part}")


# Rows that are no multiple of the pool, one row a rank, several tiles of rows (64) and of pools (128): 600.
SHAPES = [(3, 1), (6, 3), (15, 2), (33, 1), (90, 2), (129, 3), (600, 1)]


def shapes(index_heads: int) -> list[list[Any]]:
    """For each shape the selection, the loss and every gradient. Few index heads tie scores at exactly 0."""
    model = gpt(config(num_layers=1, dsa_indexer_n_heads=index_heads))
    results: list[list[Any]] = []
    for rows, batch in SHAPES:
        ids = torch.randint(0, VOCAB, (batch, rows + 1), generator=torch.Generator().manual_seed(rows))
        ids = ids.to(torch.cuda.current_device())
        model.zero_grad()
        with taken_selections() as taken:
            loss = model(ids[:, :-1], None, None, labels=ids[:, 1:]).mean()
        loss.backward()
        gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.requires_grad}
        results.append([*taken, loss.detach(), gradients])
    return results


@pytest.mark.parametrize("index_heads", [1, 8])
def test_any_rows_and_batch_are_bit_identical_in_every_partition(index_heads: int) -> None:
    envs = [{PARTITION_VARIABLE: word} for word in ("off", *PARTITIONS)]
    for rank, (off, *others) in enumerate(megatron_ranks(under_each, 3, envs, shapes, index_heads, tp=3)):
        for partition, on in zip(PARTITIONS, others, strict=True):
            for shape, left, right in zip(SHAPES, off, on, strict=True):
                assert_equal(left, right, f"{partition}, rank {rank}, rows and batch {shape}")


def assert_worth_comparing(runs: Sequence[Run], tp: int, steps: int = STEPS) -> None:
    """Rows drop pools, and others as weights move; ranks of a group select the same, other data otherwise."""
    for run in runs:
        assert run.losses[-1] < 0.9 * run.losses[0]
        assert len(run.selections) == LAYERS * (steps + 2)
        assert len(run.gradients) == steps
        assert run.selections[0].shape == (BATCH, ROWS, TOPK // POOL)
        assert bool((run.selections[0][:, -1] != torch.arange(TOPK // POOL)).any())
        assert not torch.equal(run.selections[0], run.selections[-LAYERS])
    for rank, run in enumerate(runs):
        assert_equal(run.selections, runs[rank - rank % tp].selections)
    if len(runs) > tp:
        assert not torch.equal(runs[0].selections[0], runs[tp].selections[0])


@pytest.mark.parametrize(
    ("world", "tp", "steps", "partitions"),
    [(2, 2, STEPS, PARTITIONS), (3, 3, 5, ("balanced",)), (4, 4, 5, ("zigzag",)), (4, 2, 5, ("contiguous",))],
    ids=["tp2", "tp3", "tp4", "tp2dp2"],
)
def test_flag_on_trains_bit_identically_to_flag_off(
    world: int, tp: int, steps: int, partitions: tuple[str, ...]
) -> None:
    off, *others = zip(*megatron_ranks(trained, world, partitions, steps, {}, tp=tp), strict=True)
    assert_worth_comparing(off, tp, steps)
    assert {run.rows for run in off} == {LAYERS * (steps + 2) * BATCH * ROWS}
    for partition, on in zip(partitions, others, strict=True):
        assert_same_training(off, on, partition)
        # Every rank did its part only.
        assert sum(run.rows for run in on[:tp]) == off[0].rows
        assert sum(run.scored_rows for run in on[:tp]) == off[0].scored_rows
        assert max(run.scored_rows for run in on) < off[0].scored_rows


def test_flag_on_trains_bit_identically_in_bf16() -> None:
    dtype = torch.bfloat16
    options = {"bf16": True, "params_dtype": dtype, "pipeline_dtype": dtype}
    off, on = zip(*megatron_ranks(trained, 2, ("contiguous",), 5, options, tp=2), strict=True)
    assert_worth_comparing(off, 2, 5)
    assert_same_training(off, on, "contiguous")
    attention = "decoder.layers.0.self_attention."
    assert off[0].parameters[attention + "linear_proj.weight"].dtype is dtype
    assert off[0].parameters[attention + "core_attention.indexer.linear_wk.weight"].dtype is dtype
