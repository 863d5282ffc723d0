"""Recording and replay over pipeline stages, with several micro-batches in flight and a record for each of them."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import megatron_ranks
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from models import BATCH, ROWS, VOCAB, assert_equal, attentions, config, tokens
from records import assert_records_equal
from test_megatron_replay import FULL, projections

from mcore_dsa import SelectionRecord
from mcore_dsa.megatron import ModelSelections, kpool_dsa_gpt_model, kpool_dsa_hybrid_model
from mcore_dsa.settings import PARTITION_VARIABLE, STORE_VARIABLE

MICROBATCHES = 4
VIRTUAL = {
    "virtual_pipeline_model_parallel_size": 2,
    "overlap_p2p_comm": True,
    "batch_p2p_comm": False,
}


def chunks_of(pattern: str | None, options: dict[str, Any]) -> list[Any]:
    """The chunks of this stage, of four DSA layers in all."""
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    cfg = config(num_layers=len((pattern or "DDDD").replace("|", "")), **FULL, **options)
    chunks = []
    for stage in range(stages or 1):
        place = {"vp_stage": stage if stages else None}
        ends = {
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, **place),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, **place),
        }
        sizes = {"vocab_size": VOCAB, "max_sequence_length": ROWS, **ends, **place}
        torch.manual_seed(10 * stage + parallel_state.get_pipeline_model_parallel_rank())
        if pattern is None:
            chunks.append(kpool_dsa_gpt_model(cfg, **sizes))
        else:
            chunks.append(kpool_dsa_hybrid_model(cfg, hybrid_layer_pattern=pattern, **sizes))
    return chunks


def mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = losses.float().mean()
    return mean, {"loss": mean.detach().clone()}


def step(chunks: list[Any], replaying: Callable[[int], Any], *, forward_only: bool = False) -> dict[str, Any]:
    """Losses and gradients of one step; every forward of a chunk runs inside `replaying` of its micro-batch."""

    def forward(batches: Iterator[tuple[int, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        number, ids = next(batches)
        with replaying(number):
            return model(ids[:, :-1], None, None, labels=ids[:, 1:]), mean_loss

    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        parameter.grad = None
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(list(enumerate(map(tokens, range(MICROBATCHES))))) for _ in chunks],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=MICROBATCHES,
        seq_length=ROWS,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    gradients = [{n: p.grad.clone() for n, p in chunk.named_parameters() if p.grad is not None} for chunk in chunks]
    return {"losses": [loss["loss"] for loss in losses], "gradients": gradients}


def over_stages(pattern: str | None, options: dict[str, Any]) -> tuple[list[SelectionRecord], list[int]]:
    chunks = chunks_of(pattern, options)
    plain = step(chunks, lambda _: nullcontext())
    selections = ModelSelections(chunks)
    with selections.recording() as recorder:
        assert_equal(step(chunks, lambda _: nullcontext()), plain, "recording")
    records = recorder.finish()
    with projections() as calls, selections.recording() as again:
        assert_equal(step(chunks, lambda number: selections.replaying(records[number])), plain, "replaying")
    assert calls == []
    for found, wanted in zip(again.finish(), records, strict=True):
        assert_records_equal(found, wanted)
    for record in records:
        record.check()
    # Records of other micro-batches are other selections, and another loss.
    other = step(chunks, lambda number: selections.replaying(records[number - 1]), forward_only=True)
    if plain["losses"]:
        assert other["losses"] != plain["losses"]
    return records, [layer.layer_number for chunk in chunks for layer in attentions(chunk)]


STACKS: dict[str, tuple[str | None, dict[str, Any], dict[str, Any]]] = {
    "gpt": (None, {}, {"pp": 2}),
    "gpt in chunks": (None, VIRTUAL, {"pp": 2, "vp": 2}),
    "gpt with tensor parallelism": (None, {}, {"pp": 2, "tp": 2}),
    "hybrid": ("D-D-|DD", {}, {"pp": 2}),
    "a stage without": ("D-DDD-|--", {}, {"pp": 2}),
}


# Without the store each recompute asks for its record again; with it chunks and letters may confuse what is kept.
@pytest.mark.parametrize(
    ("name", "store"), [*((name, "0") for name in STACKS), ("gpt in chunks", "1"), ("hybrid", "1")]
)
def test_every_micro_batch_replays_its_own_record(name: str, store: str) -> None:
    """Backward recomputes what is long closed; every rank has the records of the whole pipeline."""
    pattern, options, sizes = STACKS[name]
    env = {PARTITION_VARIABLE: "zigzag", STORE_VARIABLE: store}
    ranks = megatron_ranks(over_stages, 2 * sizes.get("tp", 1), pattern, options, env=env, **sizes)
    numbers = sorted({number for _, numbers in ranks for number in numbers})
    assert len(numbers) == 4
    for records, _ in ranks:
        assert len(records) == MICROBATCHES
        for record, same in zip(records, ranks[0][0], strict=True):
            assert record.layers == 4
            assert_records_equal(record, same)
    assert not torch.equal(records[0].selection_xTK, records[1].selection_xTK)
    assert not torch.equal(records[0].selection_xTK[0], records[0].selection_xTK[-1])


def refusals() -> list[str]:
    (chunk,) = chunks_of(None, {})
    said = []
    for chunks in ([torch.nn.Linear(2, 2)], [chunk, chunk]):
        with pytest.raises(ValueError, match="k-pool DSA layers of the pipeline") as raised:
            ModelSelections(chunks)
        said.append(str(raised.value))
    return said


def test_a_model_without_layers_or_with_some_twice_is_refused() -> None:
    for said in megatron_ranks(refusals, 2, pp=2):
        assert said[0] == "the k-pool DSA layers of the pipeline are []; accepted are some, each once"
        assert said[1].startswith("the k-pool DSA layers of the pipeline are [1, 1, 2, 2, 3, 3, 4, 4]; accepted are")
