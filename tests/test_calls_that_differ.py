"""What two calls, two ranks or two passes of one module may not mix up: records, documents, a call that one refuses."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import megatron_ranks
from megatron.core import tensor_parallel
from models import OFF, POOL, TOPK, config, gpt, tokens
from packs import Pack
from torch.utils.checkpoint import checkpoint

from mcore_dsa.megatron import ModelSelections
from mcore_dsa.record import SelectionRecord

CORE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


def recorded(selections: ModelSelections, model: Any, step: int) -> SelectionRecord:
    with selections.recording() as recorder, torch.no_grad():
        model(tokens(step)[:, :-1], None, None)
    (record,) = recorder.finish()
    return record


def lost_in_two_checkpoints(reentrant: bool) -> str:
    """The outer checkpoint's recompute makes a new inner one, which knows of no record."""
    model, ids = gpt(config(**CORE)), tokens(0)
    selections = ModelSelections(model)
    record = recorded(selections, model, 1)

    def loss_of(moved: torch.Tensor) -> torch.Tensor:
        return model(ids[:, :-1], None, None, labels=ids[:, 1:]).mean() + 0 * moved

    with selections.replaying(record):
        loss = checkpoint(loss_of, torch.zeros((), requires_grad=True), use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="recomputes without a record") as raised:
        loss.backward()
    return str(raised.value)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_record_lost_between_two_checkpoints_is_missed(reentrant: bool) -> None:
    (said,) = megatron_ranks(lost_in_two_checkpoints, 1, reentrant, env=OFF)
    assert said.startswith("layer 1 recomputes without a record, and 1 of its forwards replayed one; accepted is")


def two_records_in_one_checkpoint() -> tuple[list[float], list[float], bool]:
    """Two forwards in one checkpointed function, each with its own record, and the gradients of their sum."""
    model, ids = gpt(config()), tokens(0)
    selections = ModelSelections(model)
    records = [recorded(selections, model, step) for step in (1, 2)]
    losses: list[float] = []

    def both(moved: torch.Tensor) -> torch.Tensor:
        total = 0 * moved
        for record in records:
            with selections.replaying(record):
                loss = model(ids[:, :-1], None, None, labels=ids[:, 1:]).mean()
            losses.append(float(loss))
            total = total + loss
        return total

    gradients = []
    for way in (both, lambda moved: tensor_parallel.checkpoint(both, False, moved)):
        model.zero_grad()
        way(torch.zeros((), requires_grad=True)).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    same = all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    return losses[:2], losses[2:], same


def test_two_forwards_in_one_checkpoint_keep_their_records() -> None:
    ((plain, carried, same),) = megatron_ranks(two_records_in_one_checkpoint, 1, env=OFF)
    assert plain[0] != plain[1]
    assert carried == plain * 2
    assert same


def more_layers() -> str:
    model = gpt(config(num_layers=1))
    selections = ModelSelections(model)
    record = recorded(selections, model, 1)
    two = SelectionRecord(
        selection_xTK=record.selection_xTK.repeat(2, 1, 1),
        recorded_T=record.recorded_T,
        lengths=record.lengths,
        padded_lengths=record.padded_lengths,
        pool_size=POOL,
    )
    with selections.replaying(two), pytest.raises(ValueError, match="accepted are the model's") as raised:
        model(tokens(1)[:, :-1], None, None)
    return str(raised.value)


def test_a_record_of_more_layers_is_refused() -> None:
    assert megatron_ranks(more_layers, 1, env=OFF) == ["the record has 2 layers; accepted are the model's, 1"]


def two_handles() -> str:
    """The second would take the first one's replay away without a word."""
    model = gpt(config(num_layers=1))
    first = ModelSelections(model)
    record = recorded(first, model, 1)
    second = ModelSelections(model)
    with pytest.raises(RuntimeError, match="another's by now") as raised, first.replaying(record):
        model(tokens(1)[:, :-1], None, None)
    with second.replaying(record):
        model(tokens(1)[:, :-1], None, None)
    return str(raised.value)


def test_of_two_handles_on_a_model_the_older_is_refused() -> None:
    (said,) = megatron_ranks(two_handles, 1, env=OFF)
    assert said.startswith("the source of a layer is another's by now; accepted is one ModelSelections for a model")


# Documents that rank 0 and rank 1 are called with; they have as many tokens.
DIFFERENT = [(48, 48), (16, 80)]


def other_documents(cp: int) -> str:
    over = {"context_parallel_size": cp, "cp_comm_type": "allgather"} if cp > 1 else {}
    model = gpt(config(num_layers=1, **over))
    pack = Pack.of(*DIFFERENT[dist.get_rank()])
    ids = pack.tokens_and_labels()[0][:, : pack.tokens // cp]
    with pytest.raises(ValueError, match="documents is") as raised:
        model(ids, None, None, packed_seq_params=pack.params())
    return str(raised.value)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}])
def test_ranks_with_other_documents_are_named_on_every_rank(sizes: dict[str, int]) -> None:
    """Their plans differ, and with them who sees what; nothing else would."""
    one, other = megatron_ranks(other_documents, 2, sizes.get("cp", 1), **sizes, env=OFF, timeout=45.0)
    assert one == other
    assert "on ranks [0]" in one
    assert "on ranks [1]" in one


def a_call_that_one_refuses() -> str:
    model, pack = gpt(config(num_layers=1)), Pack.of(48, 48)
    if dist.get_rank() == 1:
        params = pack.params(cu_seqlens_q=torch.tensor([0, 48, 88]), cu_seqlens_kv=torch.tensor([0, 48, 88]))
    else:
        params = pack.params()
    with pytest.raises(ValueError, match="rank 1: the last padded cumulative length is 88; accepted") as raised:
        model(pack.tokens_and_labels()[0], None, None, packed_seq_params=params)
    assert TOPK // POOL > 1
    return str(raised.value)


def test_a_call_that_one_rank_refuses_ends_on_every_rank() -> None:
    one, other = megatron_ranks(a_call_that_one_refuses, 2, tp=2, env=OFF, timeout=45.0)
    assert one == other
