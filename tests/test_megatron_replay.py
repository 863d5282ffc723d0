"""Replay of a recorded forward in Megatron models: the same loss and gradients, bit for bit, and no projection run."""

import contextlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import megatron_ranks
from megatron.core import parallel_state
from models import OFF, TOPK, assert_equal, attentions, config, gpt, hybrid, tokens
from packs import Pack, Pass, forward_backward
from records import as_rollout, assert_records_equal, changed, without
from torch.utils.checkpoint import checkpoint

from mcore_dsa import SelectionRecord, from_rollout
from mcore_dsa.megatron import KPoolDSAIndexer, ModelSelections
from mcore_dsa.settings import ATTEND_SHARD_VARIABLE, PARTITION_VARIABLE, STORE_VARIABLE

PARTITIONS = ("off", "1", "zigzag", "balanced")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
RECOMPUTATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "none": ({}, "1"),
    "full, stored": (FULL, "1"),
    "full, asked again": (FULL, "0"),
    "core_attn, asked again": (CORE, "0"),
}
# How attention is cut, how rows are, and how layers are recomputed.
type Call = tuple[str, str, str]
DENSE = Pack.of(96)
PACK = Pack.of(37, 0, 48, 5, 30, multiple=8, behind=1)


@contextlib.contextmanager
def projections() -> Iterator[list[int]]:
    """One entry for each call of an indexer."""
    calls: list[int] = []
    original = KPoolDSAIndexer.forward

    def forward(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        return original(self, *arguments)

    KPoolDSAIndexer.forward = forward
    try:
        yield calls
    finally:
        KPoolDSAIndexer.forward = original


def build(host: Callable[..., Any] = gpt, **options: Any) -> Any:
    cp = parallel_state.get_context_parallel_world_size()
    torch.manual_seed(1)
    return host(config(context_parallel_size=cp, cp_comm_type="allgather" if cp > 1 else None, **options))


def one_pass(model: Any, pack: Pack) -> Pass:
    """Forward and backward of a pack, or of a dense batch where it is one whole document."""
    ids, labels = pack.tokens_and_labels()
    rows_X, params = rows_of(pack), None if pack == DENSE else pack.params()
    return forward_backward(model, ids, labels, pack.real_T, rows_X, params)


def one_forward(model: Any, pack: Pack) -> float:
    """The loss alone."""
    (ids, labels), rows_X = pack.tokens_and_labels(), rows_of(pack)
    params = None if pack == DENSE else pack.params()
    losses = model(ids[:, rows_X], None, None, labels=labels[:, rows_X], packed_seq_params=params)
    loss = (losses * pack.real_T[rows_X]).sum()
    dist.all_reduce(loss, group=parallel_state.get_context_parallel_group())
    return float(loss)


def rows_of(pack: Pack) -> torch.Tensor:
    """This rank's, of context parallelism."""
    return pack.rows(parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size())


def bits(one: Pass) -> dict[str, Any]:
    """What has to be equal; projections are not run, and what is counted differs."""
    kept = ("loss", "gradients", "losses_X", "selections")
    return {name: value for name, value in asdict(one).items() if name in kept}


def replayed(pack: Pack, calls: Sequence[Call]) -> list[SelectionRecord]:
    """The record of each call; replay of it is asserted to be the recorded pass, and that to be a plain one."""
    plain: dict[str, dict[str, Any]] = {}
    records = []
    for number, (shard, partition, name) in enumerate(calls):
        options, store = RECOMPUTATIONS[name]
        os.environ.update(
            {ATTEND_SHARD_VARIABLE: shard, PARTITION_VARIABLE: partition, STORE_VARIABLE: store},
        )
        # Neither partitions nor ways to recompute move a bit, and a model of its own keeps nothing of a recording.
        if shard not in plain:
            plain[shard] = bits(one_pass(build(), pack))
        model = build(**options)
        selections = ModelSelections(model)
        with selections.recording() as recorder:
            assert_equal(bits(one_pass(model, pack)), plain[shard], f"{calls[number]}, recording")
        (record,) = recorder.finish()
        scored = [layer.counters.scored_rows for layer in attentions(model)]
        with projections() as projected, selections.replaying(record), selections.recording() as again:
            assert_equal(bits(one_pass(model, pack)), plain[shard], f"{calls[number]}, replaying")
        assert projected == []
        assert [layer.counters.scored_rows for layer in attentions(model)] == scored
        assert_records_equal(again.finish()[0], record)
        # Another selection, of the least pools, is another loss: it is the record that is attended to.
        with torch.no_grad(), selections.replaying(first_pools(record)):
            assert one_forward(model, pack) != plain[shard]["loss"]
        # Once for each way: what is left behind does not depend on the partition.
        if (shard, name) not in [(left, way) for left, _, way in calls[number + 1 :]]:
            assert_equal(bits(one_pass(model, pack)), plain[shard], f"{calls[number]}, after")
        records.append(record)
    return records


def first_pools(record: SelectionRecord) -> SelectionRecord:
    """Every row selects the first pools of its document."""
    count_TK = torch.arange(record.budget, dtype=torch.int32).expand(len(record.visible_T), -1)
    first_TK = torch.where(count_TK < record.visible_T.unsqueeze(1), count_TK, -1)
    return SelectionRecord(**{**vars_of(record), "selection_xTK": first_TK.expand(record.layers, -1, -1).contiguous()})


def vars_of(record: SelectionRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in ("recorded_T", "lengths", "padded_lengths", "pool_size")}


LAYOUTS: dict[str, tuple[dict[str, int], tuple[str, ...]]] = {
    "one": ({}, ("off",)),
    "tp2": ({"tp": 2}, PARTITIONS),
    "cp2": ({"cp": 2}, ("off",)),
    "tp2cp2": ({"tp": 2, "cp": 2}, ("off", "zigzag")),
}


@pytest.mark.parametrize("pack", [DENSE, PACK], ids=["dense", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replay_is_the_recorded_forward(layout: str, pack: Pack) -> None:
    """Under every way to recompute, with the store on and off; each rank has the whole record."""
    sizes, partitions = LAYOUTS[layout]
    ranks = sizes.get("tp", 1) * sizes.get("cp", 1)
    # How rows are cut, how a layer is recomputed and whether there are documents know nothing of one another.
    ways = tuple(RECOMPUTATIONS)[0 if pack == PACK else 1 :: 2]
    *others, last = partitions
    calls = [("heads", partition, ways[-1]) for partition in (others if pack == PACK else [])]
    calls += [("heads", last, way) for way in ways]
    seen = [record for records in megatron_ranks(replayed, ranks, pack, calls, **sizes) for record in records]
    assert len(seen) == len(calls) * ranks
    for record in seen:
        assert_records_equal(record, seen[0])
    assert seen[0].lengths == pack.lengths
    assert seen[0].padded_lengths == pack.padded
    # As many entries as rows see, up to the budget, whatever shards and recomputes them.
    visible_T = seen[0].visible_T
    assert int((seen[0].selection_xTK >= 0).sum()) == 2 * int(visible_T.clamp(max=seen[0].budget).sum())


@pytest.mark.parametrize(
    ("sizes", "partition", "pack"), [({"tp": 2}, "off", DENSE), ({"tp": 2, "cp": 2}, "zigzag", PACK)]
)
def test_replays_where_attention_is_cut_by_rows(sizes: dict[str, int], partition: str, pack: Pack) -> None:
    """No rank has the whole selection then; the record has it, and is that of attention cut by heads."""
    ranks = sizes["tp"] * sizes.get("cp", 1)
    calls = [
        ("rows", partition, "full, stored"),
        ("rows", partition, "core_attn, asked again"),
        ("heads", partition, "none"),
    ]
    seen = [record for records in megatron_ranks(replayed, ranks, pack, calls, **sizes) for record in records]
    assert len(seen) == 3 * ranks
    for record in seen:
        assert_records_equal(record, seen[0])


def in_flight() -> None:
    """Two micro-batches whose recomputes come in any order give the gradients of the run without records."""
    two_micro_batches(build(gpt, **FULL), ("01", "10", "sum"))
    # What is wrapped differs by host, and the order that a queue would get wrong is one.
    two_micro_batches(build(hybrid, num_layers=4, **FULL), ("10",))


def two_micro_batches(model: Any, orders: Sequence[str]) -> None:
    batches, selections = [tokens(step) for step in range(2)], ModelSelections(model)

    def loss_of(ids: torch.Tensor) -> torch.Tensor:
        return model(ids[:, :-1], None, None, labels=ids[:, 1:]).mean()

    def losses_and_gradients(order: str, ways: Sequence[Any]) -> dict[str, Any]:
        model.zero_grad()
        losses = []
        for ids, way in zip(batches, ways, strict=True):
            with way:
                losses.append(loss_of(ids))
        if order == "sum":
            sum(losses).backward()
        else:
            for number in map(int, order):
                losses[number].backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        return {"losses": [loss.detach() for loss in losses], "gradients": gradients}

    with torch.no_grad(), selections.recording() as recorder:
        for ids in batches:
            loss_of(ids)
    records = recorder.finish()
    for order in orders:
        with projections() as calls:
            found = losses_and_gradients(order, [selections.replaying(record) for record in records])
        assert calls == []
        with projections() as calls:
            wanted = losses_and_gradients(order, [contextlib.nullcontext()] * 2)
        assert calls != []
        assert_equal(found, wanted, order)


@pytest.mark.parametrize("store", ["1", "0"])
def test_each_recompute_replays_the_record_of_its_own_forward(store: str) -> None:
    """The records are closed before backward begins."""
    megatron_ranks(in_flight, 2, tp=2, env={PARTITION_VARIABLE: "zigzag", STORE_VARIABLE: store})


def without_a_carrier(reentrant: bool) -> list[str]:
    """torch's own checkpoint around a layer's core attention: what a recompute says with and without an open record."""
    model = build(num_layers=1)
    (attention,) = attentions(model)
    original = attention.forward

    def checkpointed(query: Any, key: Any, *_: Any, x: Any, qr: Any, **__: Any) -> Any:
        return checkpoint(
            lambda *given: original(*given[:2], x=given[2], qr=given[3]), query, key, x, qr, use_reentrant=reentrant
        )

    attention.forward = checkpointed
    ids, selections = tokens(), ModelSelections(model)

    def loss_of() -> torch.Tensor:
        model.zero_grad()
        return model(ids[:, :-1], None, None, labels=ids[:, 1:]).mean()

    def gradients() -> list[torch.Tensor]:
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    with selections.recording() as recorder:
        loss_of().backward()
    wanted = gradients()
    (record,) = recorder.finish()
    with torch.no_grad(), selections.replaying(record):
        loss_of()
    for _ in range(2):
        with selections.replaying(record):
            loss_of().backward()
        assert_equal(gradients(), wanted)
        # Neither that replay nor the one without gradients is open.
        loss_of().backward()
        assert_equal(gradients(), wanted)
    with selections.replaying(record):
        loss = loss_of()
    with pytest.raises(RuntimeError) as raised:
        loss.backward()
    return [str(raised.value)]


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_that_lost_its_record_raises(reentrant: bool) -> None:
    for (said,) in megatron_ranks(without_a_carrier, 2, reentrant, tp=2, env=OFF):
        assert said.startswith("layer 1 recomputes without a record, and 1 of its forwards replayed one; accepted is")


def on_one_rank() -> dict[str, str]:
    """What this rank is told where rank 1 alone does something else; a forward of all alike is right afterwards."""
    model = build(num_layers=1)
    return {what: told_of(what, model) for what in SAID}


def told_of(what: str, model: Any) -> str:
    ids, selections = tokens()[:, :-1], ModelSelections(model)
    odd = dist.get_rank() == 1
    with torch.no_grad():
        with selections.recording() as recorder:
            wanted = model(ids, None, None)
        (record,) = recorder.finish()
        other = {
            "another record": lambda: selections.replaying(first_pools(record)),
            "a bad record": lambda: selections.replaying(changed(record, 0, 9, [5])),
            "another way with missing rows": lambda: selections.replaying(record, missing="score"),
            "scoring": contextlib.nullcontext,
            "recording": selections.recording,
        }
        way = other[what] if odd else lambda: selections.replaying(record)
        with way(), pytest.raises(ValueError, match=r"within it\): source is ") as raised:
            model(ids, None, None)
        with selections.replaying(record):
            assert torch.equal(model(ids, None, None), wanted)
    return str(raised.value)


SAID = {
    "another record": r"'replayed [0-9a-f]{16}.*' on ranks \[0\], 'replayed [0-9a-f]{16}.*' on ranks \[1\]",
    "a bad record": r"the pool id of layer 0 at row 9, token 9 of document 0, is 5; .*future.* on ranks \[1\]",
    "another way with missing rows": r"rows without a record: score' on ranks \[1\]",
    "scoring": r"'scored' on ranks \[1\]",
    "recording": r"'recorded, scored' on ranks \[1\]",
}


@pytest.mark.parametrize("flag", ["off", "1"])
def test_ranks_that_take_selections_from_elsewhere_are_told_on_every_rank(flag: str) -> None:
    told = megatron_ranks(on_one_rank, 2, tp=2, env={PARTITION_VARIABLE: flag})
    assert told[0] == told[1]
    for what, said in SAID.items():
        assert re.search(said, told[0][what]), told[0][what]


def from_an_engine() -> None:
    """A record through the engine's format, of two samples; a prefix of the second was not recorded."""
    model = build()
    ids, selections = tokens(), ModelSelections(model)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(ids[:, :-1], None, None, labels=ids[:, 1:])

    with selections.recording() as recorder:
        wanted = run()
    (record,) = recorder.finish()
    rows, samples = wanted.shape[1], wanted.shape[0]
    sizes = {"pool_size": record.pool_size, "budget": record.budget, "always_select_tail": True}
    assert record.budget == TOPK // record.pool_size
    last = [rows * sample + rows - 1 for sample in range(samples)]
    for missing in (last, [*last, *range(rows, rows + 40)]):
        found = from_rollout(as_rollout(without(record, missing)), **sizes)
        assert_records_equal(found, without(record, missing))
        with selections.replaying(found, missing="score"):
            assert torch.equal(run(), wanted)
        with projections() as calls, selections.replaying(found, missing="leave_out"):
            losses = run()
        # The last rows have nobody behind them, and are left out; what a prefix feeds is scored.
        assert len(calls) == (0 if missing == last else 2)
        counts = torch.ones(samples * rows, dtype=torch.bool).index_fill(0, torch.tensor(last), False)
        assert torch.equal(losses.flatten()[counts], wanted.flatten()[counts])
        assert not torch.equal(losses, wanted)
        with (
            pytest.raises(ValueError, match=r"missing is 'refuse' and row .* has no record"),
            selections.replaying(found),
        ):
            run()
    drift = record.agreement(first_pools(record))
    assert [layer.layer for layer in drift] == [0, 1]
    assert all(0 < layer.share < 1 and 0 < layer.rows_differing < layer.rows for layer in drift)


@pytest.mark.parametrize("flag", ["off", "zigzag"])
def test_a_rollout_replays_as_the_record_of_its_selections(flag: str) -> None:
    megatron_ranks(from_an_engine, 2, tp=2, env={PARTITION_VARIABLE: flag})
