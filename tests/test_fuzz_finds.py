"""What `make fuzz` has found, each with the answer that it has to get."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hf_checkpoints
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from records import fields_of, random_record
from safetensors import safe_open
from safetensors.torch import save_file
from train_runs import ROOT, write_indexed

from mcore_dsa import (
    DsaGeometry,
    DsaTpPlan,
    IndexerState,
    PoolLayout,
    SelectionRecord,
    from_rollout,
    fused_qk_topk_kpool,
    sparse_attention,
)
from mcore_dsa.checkpoint import absorb_up_projections, merge_attention
from mcore_dsa.cli.run_folder import RunFolder
from mcore_dsa.megatron.batch import plan_of
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.rows import RowPartition, partition_rows
from mcore_dsa.train.config import parse_config
from mcore_dsa.train.data import read_corpus
from mcore_dsa.train.stored import _described
from mcore_dsa.work import best_partition, selection_work

HUGE = 2**62
GEOMETRY = DsaGeometry.from_config(hf_checkpoints.TINY)
EDGES = torch.tensor([0, 0])
SIZES: dict[str, Any] = {"pool_size": 4, "budget": 2, "partition": "off", "tp_rank": 0, "tp_size": 1}
REQUEST = torch.full((3, 1, 4), -1, dtype=torch.int32)
UP_PROJECTIONS = ("linear_q_up_proj.weight", "linear_kv_up_proj.weight", "linear_proj.weight")
ROLLOUT: dict[str, Any] = {"pool_size": 4, "budget": 1, "always_select_tail": False}


def fused(mask: torch.Tensor) -> Any:
    q = torch.zeros(4, 1, 1, 2)
    gates = {"gate_score": q[:, :, 0], "ape": torch.zeros(2, 2), "always_select_tail": True}
    return fused_qk_topk_kpool(q, q[:, :, 0], q[..., 0], 2, mask=mask, pool_size=2, **gates)


def packed(lengths: Any) -> Any:
    packed = PackedSeqParams(qkv_format="thd", max_seqlen_q=4, max_seqlen_kv=4)
    packed.cu_seqlens_q = packed.cu_seqlens_kv = lengths
    return plan_of(torch.zeros(4, 1, 1, 2), packed, **SIZES, cp_rank=0, cp_size=1)


def attend(scale: int, **options: int) -> torch.Tensor:
    q, layout = torch.ones(4, 1, 1, 2), PoolLayout.dense(4, pool_size=4)
    selection = torch.full((1, 4, 1), -1, dtype=torch.int32)
    return sparse_attention(
        q, q[:, :, 0], selection, layout, torch.arange(4), softmax_scale=scale, always_select_tail=True, **options
    )


def state(**sizes: Any) -> IndexerState:
    return IndexerState(torch.zeros(4, 2), dtype=torch.float32, **sizes)


CALLS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a batch beyond memory": (
        lambda: PoolLayout.dense(0, pool_size=1, batch=HUGE),
        ValueError,
        r"^batch is 4611686018427387904; accepted is an integer >= 0, at most 2\*\*31$",
    ),
    "a batch of packs beyond memory": (
        lambda: PoolLayout.from_cu_seqlens(EDGES, pool_size=1, batch=2**31 + 1),
        ValueError,
        "^batch is 2147483649; accepted is",
    ),
    "a number of thousands of digits": (
        lambda: PoolLayout.dense(10**5000, pool_size=1),
        ValueError,
        "^num_tokens is an integer of 16610 bits; accepted is",
    ),
    "context ranks without end": (
        lambda: SelectionPlan.packed(EDGES, **SIZES, cp_rank=0, cp_size=HUGE),
        ValueError,
        "^cp_size is 4611686018427387904; accepted is an integer >= 1, at most 65536$",
    ),
    "ranks without end": (
        lambda: RowPartition.zigzag(8, HUGE),
        ValueError,
        "^group_size is 4611686018427387904; accepted is an integer >= 1, at most 65536$",
    ),
    "a plan for ranks without end": (
        lambda: DsaTpPlan(0, HUGE, GEOMETRY),
        ValueError,
        "^tp_size is 4611686018427387904; accepted is an integer >= 1, at most 65536$",
    ),
    "rows beyond a range": (lambda: RowPartition.contiguous(2**63, 2), ValueError, r"^num_rows is .*; accepted is"),
    "a plan without a budget": (
        lambda: SelectionPlan.packed(EDGES, **SIZES | {"budget": -1}),
        ValueError,
        "^budget is -1; accepted is",
    ),
    "a rank that is a word": (
        lambda: SelectionPlan.packed(EDGES, **SIZES | {"tp_rank": "0"}),
        ValueError,
        "^tp_rank is '0'; accepted is",
    ),
    "work of no geometry": (
        lambda: selection_work([4], None, group_size=1, partition="off"),  # type: ignore[arg-type]
        TypeError,
        "^geometry is None; accepted is a DsaGeometry$",
    ),
    "work of a word": (
        lambda: best_partition("4", GEOMETRY, group_size=1),  # type: ignore[arg-type]
        TypeError,
        "^lengths is str; accepted is a sequence$",
    ),
    "lengths that are none": (
        lambda: partition_rows("balanced", 4, 2, None, pool_size=4, budget=1),  # type: ignore[arg-type]
        TypeError,
        "^lengths is None; accepted is a sequence of integers$",
    ),
    "a scale beyond floats": (
        lambda: attend(10**400),
        ValueError,
        "^softmax_scale is an integer of 1329 bits; accepted is a finite number$",
    ),
    "bytes without end": (
        lambda: attend(1, attend_bytes=10**30),
        ValueError,
        r"^attend_bytes is 1000000000000000000000000000000; accepted is an integer number of bytes below 2\*\*63$",
    ),
    "a mask of 8-bit floats": (
        lambda: fused(torch.zeros(4, 4).to(torch.float8_e4m3fn)),
        ValueError,
        "^mask is torch.float8_e4m3fn; accepted are None",
    ),
    "lengths of 8-bit floats": (
        lambda: packed(torch.tensor([0.0, 4.0]).to(torch.float8_e4m3fn)),
        TypeError,
        "^packed_seq_params.cu_seqlens_q is torch.float8_e4m3fn; accepted is",
    ),
    "lengths as a list": (
        lambda: packed([0, 4]),
        TypeError,
        "^packed_seq_params.cu_seqlens_q is list; accepted is a torch.int32",
    ),
    "a padded length that is not the rows'": (
        lambda: packed(torch.tensor([0, 2**31 - 1], dtype=torch.int32)),
        ValueError,
        "^the last padded cumulative length is 2147483647; accepted is the number of tokens, 4:",
    ),
    "a state beyond int32": (
        lambda: state(batch=2**20, capacity=2**20),
        ValueError,
        "^capacity is 1048576 for a batch of 1048576; accepted are at most 2147483648 tokens in all",
    ),
    "no requests": (lambda: from_rollout(None, **ROLLOUT), TypeError, "^requests is NoneType; accepted"),  # type: ignore[arg-type]
    "places that are words": (
        lambda: from_rollout([REQUEST], padded_lengths=["4"], **ROLLOUT),  # type: ignore[list-item]
        ValueError,
        r"^padded_lengths\[0\] is '4'; accepted is",
    ),
    "a place beyond memory": (
        lambda: from_rollout([REQUEST], padded_lengths=[HUGE], **ROLLOUT),
        ValueError,
        r"^padded_lengths\[0\] is 4611686018427387904; accepted is",
    ),
    "lengths of a record as words": (
        lambda: SelectionRecord(**fields_of(random_record([5]), lengths=("5",))),
        TypeError,
        r"^lengths is \('5',\); accepted is a tuple of integers$",
    ),
    "no record to compare with": (
        lambda: random_record([5]).agreement(None),  # type: ignore[arg-type]
        TypeError,
        "^own is NoneType; accepted is a SelectionRecord$",
    ),
    "a shard that holds no tensor": (
        lambda: list(merge_attention([{"linear_proj.weight": None}], GEOMETRY)),  # type: ignore[dict-item]
        TypeError,
        r"^shards\[0\]\['linear_proj.weight'\] is None; accepted is a tensor$",
    ),
    "weights that are no tensors": (
        lambda: absorb_up_projections({"linear_proj.weight": 3}, GEOMETRY),  # type: ignore[dict-item]
        TypeError,
        r"^tensors\['linear_proj.weight'\] is 3; accepted is a tensor$",
    ),
    "a weight without dimensions": (
        lambda: absorb_up_projections(dict.fromkeys(UP_PROJECTIONS, torch.tensor(1.0)), GEOMETRY),
        ValueError,
        r"^tensors\['linear_q_up_proj.weight'\] has shape \[\]; accepted is \[0, 136\] for 0 heads$",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_refused_with_what_is_accepted(name: str) -> None:
    call, kind, message = CALLS[name]
    with pytest.raises(kind, match=message):
        call()


def test_a_scale_that_is_a_great_integer_is_a_number() -> None:
    assert torch.equal(attend(10**30)[:3], attend(1e30)[:3])  # type: ignore[arg-type]


def test_a_record_goes_to_a_new_file_and_comes_from_a_path_of_any_kind(tmp_path: Path) -> None:
    record = random_record([5, 9])
    record.save(str(tmp_path / "a"))
    assert SelectionRecord.load(str(tmp_path / "a")).digest == record.digest
    with pytest.raises(FileExistsError, match="which is there; accepted is a new file"):
        random_record([5]).save(tmp_path / "a")
    assert SelectionRecord.load(tmp_path / "a").digest == record.digest


@pytest.mark.parametrize(
    ("field", "value"), [("lengths", "[" * 5000), ("pool_size", "[3, 4]"), ("lengths", "9" * 5000)]
)
def test_metadata_of_a_record_that_say_something_else_are_refused(tmp_path: Path, field: str, value: str) -> None:
    random_record([5]).save(tmp_path / "a")
    with safe_open(tmp_path / "a", framework="pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, tmp_path / "b", {**metadata, field: value})
    with pytest.raises(ValueError, match=rf"^{field} is .* in the file's metadata; accepted"):
        SelectionRecord.load(tmp_path / "b")


@pytest.mark.parametrize(
    ("job", "found"),
    [
        ("{", "is no JSON"),
        ("[" * 5000, "is no JSON"),
        ('{"step": 1, "step": 2}', "is no JSON: step stands there twice"),
        ("[]", "has step None"),
        ('{"step": "1", "run": {}, "layout": {}}', "has step '1'"),
        ('{"step": 1, "run": null, "layout": {}}', "has run None"),
        ('{"step": 1, "run": {}}', "has layout None"),
    ],
)
def test_a_checkpoint_that_describes_no_run_is_refused_by_its_file(tmp_path: Path, job: str, found: str) -> None:
    (tmp_path / "job.json").write_text(job)
    with pytest.raises(ValueError, match=rf"job\.json {re.escape(found)}.*; accepted is"):
        _described(tmp_path)


def test_a_log_of_anything_is_shown_as_far_as_it_can_be_read(tmp_path: Path) -> None:
    lines = ["[" * 5000, '{"step": Infinity, "loss": 1.0}', '{"step": 1, "loss": 5.0, "step_ms": 0, "indexer_ms": 1}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    run = RunFolder.read(tmp_path)
    assert len(run.steps) == 1
    assert any(re.search(r"\b2\b.*metrics.jsonl|metrics.jsonl.*\b2\b", line) for line in run.left_out), run.left_out
    assert run.series("indexer_ms", "step_ms") == []


def test_an_index_that_is_longer_than_its_data_is_refused(tmp_path: Path) -> None:
    write_indexed(tmp_path / "set", [[1, 2, 3], [4] * 9])
    (tmp_path / "set.bin").write_bytes(b"1234")
    with pytest.raises(ValueError, match=r"^data has '.*set'; accepted are PREFIX.idx and PREFIX.bin"):
        read_corpus([str(tmp_path / "set")], max_bytes=100)


@pytest.mark.parametrize(
    ("vocabulary", "unknown"),
    [({"some": 0}, None), ({"some": 0}, "?"), ({"some": 2**31 + 1, "text": 1}, "text")],
    ids=["no unknown", "an unknown without an id", "an id that is none"],
)
def test_a_tokenizer_that_cannot_read_every_text_is_refused(
    tmp_path: Path, vocabulary: dict[str, int], unknown: str | None
) -> None:
    """It is a sound file, and the library says so no sooner than at the text."""
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": unknown or ""}
    fields = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None, "decoder": None}
    fields |= {"truncation": None, "padding": None, "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
    (tmp_path / "text").write_text("some text")
    with pytest.raises(ValueError, match=r"^tokenizer is '.*'; accepted is one that knows every text, by ids below 2"):
        read_corpus([str(tmp_path / "text")], max_bytes=100, tokenizer=str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize("odd", [b"data: {x: []}", b"data: [\xff]", b"data: [\0]"])
def test_a_run_that_cannot_be_read_is_refused(tmp_path: Path, odd: bytes) -> None:
    """A mapping in place of a list, and what is no text."""
    text = (ROOT / "configs/tiny_tp2.yaml").read_bytes()
    assert b"data: []" in text
    (tmp_path / "run.yaml").write_bytes(text.replace(b"data: []", odd))
    with pytest.raises(ValueError, match=r"run\.yaml|the configuration cannot be read"):
        parse_config(["--config", str(tmp_path / "run.yaml")])
