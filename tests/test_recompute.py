"""A forward's selection is computed once, whatever is recomputed, in whatever order, and is gone with what needs it."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import megatron_ranks
from models import (
    BATCH,
    ON,
    POOL,
    ROWS,
    SIZES,
    TOPK,
    Trainer,
    assert_equal,
    attentions,
    config,
    gpt,
    tokens,
    under_each,
)
from packs import Pack
from train_runs import tiny, trainer_of

from mcore_dsa.megatron import recompute
from mcore_dsa.megatron.recompute import Carrier, held_bytes
from mcore_dsa.settings import PARTITION_VARIABLE, STORE_BYTES_VARIABLE, STORE_VARIABLE
from mcore_dsa.train.config import JobConfig

LAYERS = SIZES["num_layers"]
STORED_AND_SCORED = [{STORE_VARIABLE: word} for word in ("1", "0")]
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# `test_megatron_attention.py` has every way; here are those that differ in what a carrier is wrapped around.
WAYS: dict[str, dict[str, Any]] = {
    "full": FULL,
    "two layers": {**FULL, "recompute_num_layers": 2},
    "core_attn and mla_up_proj": {
        "recompute_granularity": "selective",
        "recompute_modules": ["core_attn", "mla_up_proj"],
    },
}
# How many of the layers' forwards run once more.
AGAIN = {"full": 2, "two layers": 2, "core_attn and mla_up_proj": 2}


@contextmanager
def carriers() -> Iterator[list[weakref.ref[Carrier]]]:
    """Every carrier made while the context is open."""
    made: list[weakref.ref[Carrier]] = []
    original = Carrier.__init__

    def init(self: Carrier, function: Callable[..., Any]) -> None:
        original(self, function)
        made.append(weakref.ref(self))

    Carrier.__init__ = init
    try:
        yield made
    finally:
        Carrier.__init__ = original


def held(made: list[weakref.ref[Carrier]]) -> int:
    """Bytes that carriers hold."""
    return sum(kept.nbytes for ref in made if (one := ref()) is not None for kept in one.held.values())


def loss_of(model: Any, step: int) -> torch.Tensor:
    ids = tokens(step)
    return model(ids[:, :-1], None, None, labels=ids[:, 1:]).mean()


def in_order(model: Any) -> None:
    first, second = loss_of(model, 1), loss_of(model, 2)
    first.backward()
    second.backward()


def in_reverse(model: Any) -> None:
    first, second = loss_of(model, 1), loss_of(model, 2)
    second.backward()
    first.backward()


def as_a_sum(model: Any) -> None:
    (loss_of(model, 1) + loss_of(model, 2)).backward()


def one_without_backward(model: Any) -> None:
    loss_of(model, 3)
    in_order(model)


def evaluated_between(model: Any) -> None:
    first, second = loss_of(model, 1), loss_of(model, 2)
    with torch.no_grad():
        loss_of(model, 3)
    first.backward()
    model.eval()
    with torch.no_grad():
        loss_of(model, 4)
    model.train()
    second.backward()


def the_same_twice(model: Any) -> None:
    first, again = loss_of(model, 1), loss_of(model, 1)
    loss_of(model, 2).backward()
    again.backward()
    del first


def after_an_error_in_a_first_pass(model: Any) -> None:
    layer = attentions(model)[-1]
    hook = layer.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("first pass")))
    with pytest.raises(RuntimeError, match="first pass"):
        loss_of(model, 3)
    hook.remove()
    in_order(model)


def after_an_error_in_a_backward(model: Any) -> None:
    layer = attentions(model)[0]
    loss = loss_of(model, 3)
    hook = layer.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("backward")))
    with pytest.raises(RuntimeError, match="backward"):
        loss.backward()
    hook.remove()
    del loss
    model.zero_grad()
    in_order(model)


# Each with the forwards that run to their end and that a backward pass follows.
SCHEDULES: dict[Callable[[Any], None], int] = {
    in_order: 2,
    in_reverse: 2,
    as_a_sum: 2,
    one_without_backward: 2,
    evaluated_between: 2,
    the_same_twice: 2,
    after_an_error_in_a_first_pass: 2,
    after_an_error_in_a_backward: 2,
}
# What an order or an error does to a carrier does not depend on what it is wrapped around.
OF_EVERY_WAY = (in_reverse, evaluated_between)


def schedules(way: str, every: bool) -> dict[str, Any]:
    torch.manual_seed(7)
    model = gpt(config(**WAYS[way]))
    layers, projected, results = attentions(model), [], {}
    for layer in layers:
        layer.indexer.register_forward_pre_hook(lambda *_: projected.append(True))
    for run, backwards in SCHEDULES.items() if every else ((one, SCHEDULES[one]) for one in OF_EVERY_WAY):
        model.zero_grad()
        projected.clear()
        for layer in layers:
            layer.recomputed = dict.fromkeys(layer.recomputed, 0)
        with carriers() as made:
            run(model)
            gc.collect()
            alive = held(made)
        results[run.__name__] = {
            "gradients": {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad},
            "alive": alive,
            "made": len(made),
            "recomputed": [layer.recomputed for layer in layers],
            "projected": len(projected),
            "backwards": backwards,
        }
    return results


@pytest.mark.parametrize(("way", "flag"), [*((way, "zigzag") for way in WAYS), ("full", "off")])
def test_in_every_schedule_a_forward_selects_once(way: str, flag: str) -> None:
    every = (way, flag) == ("full", "zigzag")
    both = [env | {PARTITION_VARIABLE: flag} for env in STORED_AND_SCORED]
    for rank, (found, again) in enumerate(megatron_ranks(under_each, 2, both, schedules, way, every, tp=2)):
        for name, result in found.items():
            where = f"{name}, rank {rank}"
            assert_equal(result["gradients"], again[name]["gradients"], where)
            assert result["made"] > 0, where
            assert result["alive"] == again[name]["alive"] == 0, where
            assert not any(one["selected again"] for one in result["recomputed"]), where
            recomputed = sum(one["found"] for one in result["recomputed"])
            # A backward that raises in the first layer has recomputed it, and those behind it, before.
            assert recomputed >= result["backwards"] * AGAIN[way], where
            assert again[name]["projected"] - result["projected"] == recomputed, where


def pipelined() -> dict[str, Any]:
    """Four micro-batches, several of them in flight."""
    model = gpt(config(**FULL))
    trainer = Trainer(model)
    with carriers() as made:
        trainer.backward([tokens(step) for step in range(4)])
        gc.collect()
        alive = held(made)
    (layer,) = attentions(model)
    return {"gradients": trainer.gradients(), "alive": alive, "recomputed": layer.recomputed}


def test_a_pipeline_with_micro_batches_in_flight_selects_once_a_forward() -> None:
    for found, again in megatron_ranks(under_each, 2, STORED_AND_SCORED, pipelined, pp=2):
        assert_equal(found["gradients"], again["gradients"])
        assert (found["alive"], found["recomputed"]) == (0, {"found": 4, "selected again": 0})
        assert again["recomputed"] == {"found": 0, "selected again": 0}


def interleaved(config: JobConfig) -> dict[str, Any]:
    """One step of the job on two stages of two chunks each, eight micro-batches."""
    from mcore_dsa.train.model import attentions as of_chunks

    trainer, _ = trainer_of(config)
    with carriers() as made:
        report = trainer.train_step()
        gc.collect()
        alive = held(made)
    layers = of_chunks(trainer.chunks)
    return {
        "losses": [report.loss, report.gradient_norm],
        "alive": alive,
        "recomputed": [layer.recomputed for layer in layers],
        "calls": [layer.counters.calls for layer in layers],
    }


def test_virtual_stages_select_once_a_forward(tmp_path: Path) -> None:
    job = tiny(
        tmp_path / "run",
        "--parallel.tensor 1 --parallel.pipeline 2 --parallel.virtual_pipeline 2 --model.num_layers 4",
        "--training.recompute full --training.micro_batch_size 1 --training.global_batch_size 8",
    )
    for found, again in megatron_ranks(under_each, 2, STORED_AND_SCORED, interleaved, job, pp=2, vp=2):
        assert found["losses"] == again["losses"]
        assert found["alive"] == again["alive"] == 0
        assert found["recomputed"] == [{"found": 8, "selected again": 0}] * 2
        assert (found["calls"], again["calls"]) == ([8, 8], [16, 16])


def one_rank_loses(lost: int | None) -> dict[str, Any]:
    torch.manual_seed(7)
    model = gpt(config(num_layers=1, **FULL))
    with carriers() as made:
        loss = loss_of(model, 1)
        for ref in made if dist.get_rank() == lost else ():
            if (carrier := ref()) is not None:
                carrier.held.clear()
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {"gradients": gradients, "recomputed": attentions(model)[0].recomputed}


def lost_and_kept() -> tuple[dict[str, Any], dict[str, Any]]:
    return one_rank_loses(1), one_rank_loses(None)


def test_where_one_rank_lacks_its_selection_all_select_again() -> None:
    """None is left waiting, and the bits are the same."""
    flags = [{PARTITION_VARIABLE: flag} for flag in ("off", "1")]
    found = megatron_ranks(under_each, 3, flags, lost_and_kept, tp=3, timeout=45.0)
    for one, other in (pair for of_rank in found for pair in of_rank):
        assert one["recomputed"] == {"found": 0, "selected again": 1}
        assert other["recomputed"] == {"found": 1, "selected again": 0}
        assert_equal(one["gradients"], other["gradients"])


def one_that_does_not_fit() -> str:
    model = gpt(config(num_layers=1, **FULL))
    with carriers() as made:
        loss = loss_of(model, 1)
        (carrier,) = (one for ref in made if (one := ref()) is not None and one.held)
        carrier.held = {key: kept[:, 1:] for key, kept in carrier.held.items()}
        with pytest.raises(RuntimeError, match="a recomputation selects for") as raised:
            loss.backward()
    return str(raised.value)


def test_a_selection_that_does_not_fit_raises() -> None:
    (said,) = megatron_ranks(one_that_does_not_fit, 1)
    shape = [BATCH, ROWS, TOPK // POOL]
    assert f"selects for {shape}; accepted is what its first pass selected for, {[BATCH, ROWS - 1, shape[2]]}" in said


def kept_bytes() -> tuple[int, int]:
    """Bytes that carriers hold between forward and backward, and the recomputations that found them."""
    model = gpt(config(**FULL))
    with carriers() as made:
        loss = loss_of(model, 1)
        between = held(made)
        loss.backward()
    return between, sum(one.recomputed["found"] for one in attentions(model))


def test_beyond_the_byte_bound_nothing_is_kept() -> None:
    own = BATCH * ROWS // 2 * (TOPK // POOL) * 4
    most = held_bytes(own, layers=LAYERS, stages=1, chunks=1)
    assert most == LAYERS * own
    envs = [ON | {STORE_BYTES_VARIABLE: str(limit)} for limit in (most, most - 1)]
    assert megatron_ranks(under_each, 2, envs, kept_bytes, tp=2) == [[(most, LAYERS), (0, 0)]] * 2


@pytest.mark.parametrize(("stages", "chunks", "in_flight"), [(1, 1, 1), (4, 1, 4), (2, 2, 5), (4, 3, 15)])
def test_the_bound_counts_what_the_schedules_have_in_flight(stages: int, chunks: int, in_flight: int) -> None:
    """Layers a chunk, rounded up, times the passes through chunks that wait for their backward."""
    layers = stages * chunks * 3
    assert held_bytes(10, layers=layers - (layers > 3), stages=stages, chunks=chunks) == 3 * in_flight * 10
    assert held_bytes(10, layers=layers, stages=stages, chunks=chunks) == 3 * in_flight * 10


def by_torch(reentrant: bool) -> dict[str, Any]:
    """torch's own checkpoint, which carries nothing, around a whole layer."""
    from torch.utils.checkpoint import checkpoint

    results = []
    for wrapped in (False, True):
        torch.manual_seed(7)
        model = gpt(config(num_layers=1))
        layer = model.decoder.layers[0]
        forward = layer.forward
        if wrapped:

            def again(hidden: torch.Tensor, forward: Any = forward, **named: Any) -> Any:
                return checkpoint(lambda x: forward(x, **named), hidden, use_reentrant=reentrant)

            layer.forward = lambda hidden_states, **named: again(hidden_states, **named)
        loss_of(model, 1).backward()
        results.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    return {"results": results, "recomputed": attentions(model)[0].recomputed, "calls": attentions(model)[0].counters}


def by_torch_both_ways() -> list[dict[str, Any]]:
    return [by_torch(reentrant) for reentrant in (True, False)]


def test_where_nothing_carries_a_recompute_selects_again() -> None:
    for found in (one for rank in megatron_ranks(by_torch_both_ways, 2, tp=2, env=ON) for one in rank):
        assert_equal(*found["results"])
        assert found["recomputed"] == {"found": 0, "selected again": 0}
        assert found["calls"].calls == 2


def packed() -> tuple[dict[str, torch.Tensor], list[dict[str, int]]]:
    pack = Pack.of(37, 0, 41, 5, 21, multiple=4)
    model = gpt(config(**FULL))
    ids, labels = pack.tokens_and_labels()
    model(ids, None, None, labels=labels, packed_seq_params=pack.params()).mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return gradients, [one.recomputed for one in attentions(model)]


def test_a_pack_is_selected_for_once() -> None:
    both = [ON | env for env in STORED_AND_SCORED]
    for (found, recomputed), (again, _) in megatron_ranks(under_each, 2, both, packed, tp=2):
        assert_equal(found, again)
        assert recomputed == [{"found": 1, "selected again": 0}] * LAYERS


def test_no_carrier_runs_outside_a_checkpointed_function() -> None:
    assert recompute.current() is None
    inner: list[Carrier | None] = []
    outer = Carrier(lambda: (inner.append(recompute.current()), Carrier(lambda: inner.append(recompute.current()))()))
    outer()
    assert inner[0] is outer
    assert inner[1] is not outer
    assert recompute.current() is None
    with pytest.raises(ZeroDivisionError):
        Carrier(lambda: 1 / 0)()
    assert recompute.current() is None
