"""The training job's ``load_hf``: which weights come from a Hugging Face checkpoint, where they go, what is refused."""

import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import megatron_ranks, run_ranks
from hf_checkpoints import checkpoint_tensors, dequantised, full, tiny_config, write_checkpoint
from torch import Tensor
from train_runs import losses, refusals, start, tiny

from mcore_dsa.binding import MEGATRON_NAMES, DsaStorage
from mcore_dsa.files import digest_of, names_in, write_digests
from mcore_dsa.train.config import JobConfig
from mcore_dsa.train.pretrained import find_pretrained

# The attention of train_runs.TINY, of which a rank may get four layers: neither the first, nor evenly spaced.
DSA_LAYERS = (1, 2, 5, 7)
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 8,
    "index_head_dim": 8,
    "index_topk": 8,
    "num_hidden_layers": 8,
    "indexer_types": ["full"] * 8,
    "layer_types": ["deepseek_sparse_attention" if layer in DSA_LAYERS else "linear_attention" for layer in range(8)],
    "num_nextn_predict_layers": 0,
}


def written(folder: Path, storage: DsaStorage = DsaStorage.BF16, **changes: Any) -> tuple[Path, dict[str, Tensor]]:
    config = tiny_config(storage, **(SHAPE | changes))
    tensors = checkpoint_tensors(config, storage, layers=DSA_LAYERS)
    return write_checkpoint(folder / "hf", config, tensors, files=2), tensors


@dataclass
class Loaded:
    """What building a trainer with a checkpoint gave on a rank.

    Attributes:
        attention: for each layer the parameters of its attention, of the master weights those that lie apart.
        unchanged: parameters that are those of a trainer without the checkpoint.
        messages: what the load logged.
    """

    tp_rank: int
    attention: list[dict[str, Tensor]]
    masters: list[dict[str, Tensor]]
    unchanged: set[str]
    others: set[str]
    messages: list[str]


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.taken.append(record.getMessage())


def build(config: JobConfig) -> Loaded:
    from megatron.core import parallel_state

    from mcore_dsa.train.job import prepare
    from mcore_dsa.train.loop import Trainer

    job = prepare(config, torch.distributed.get_world_size())
    handler, logger = _Messages(), logging.getLogger("mcore_dsa.train.pretrained")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    without = Trainer(config, job.samples, torch.device("cpu"))
    trainer = Trainer(config, job.samples, torch.device("cpu"), pretrained=job.pretrained)
    result = Loaded(parallel_state.get_tensor_model_parallel_rank(), [], [], set(), set(), handler.taken)
    for number, (chunk, other) in enumerate(zip(trainer.chunks, without.chunks, strict=True)):
        layers: dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]] = {}
        for name, parameter in chunk.named_parameters():
            layer, is_attention, own = name.partition(".self_attention.")
            if torch.equal(parameter, other.get_parameter(name)):
                result.unchanged.add(f"{number}.{name}")
            if not is_attention:
                result.others.add(f"{number}.{name}")
                continue
            parameters, masters = layers.setdefault(layer, ({}, {}))
            parameters[own] = parameter.detach().clone()
            if getattr(parameter, "main_param", None) is not None:
                masters[own] = parameter.main_param.detach().clone()
        for parameters, masters in layers.values():
            result.attention.append(parameters)
            result.masters.append(masters)
    return result


def part_of(name: str, tensors: dict[str, Tensor], layer: int, rank: int, size: int) -> Tensor:
    """A rank's heads, cut here without the plan."""
    whole = tensors[full(name, layer)]
    if whole.dtype is torch.float8_e4m3fn:
        whole = dequantised(whole, tensors[full(name, layer) + "_scale_inv"])
    if name in ("q_b_proj.weight", "kv_b_proj.weight"):
        return whole.chunk(size, dim=0)[rank]
    return whole.chunk(size, dim=1)[rank] if name == "o_proj.weight" else whole


# Options of a run, Megatron's sizes, and for each rank the model's DSA layers that it has, in order.
SPREADS: dict[str, tuple[str, dict[str, int], list[list[int]]]] = {
    "one": ("--parallel.tensor 1 --model.num_layers 3", {}, [[0, 1, 2]]),
    "tp2": ("--model.num_layers 4", {"tp": 2}, [[0, 1, 2, 3]] * 2),
    "tp4": ("--parallel.tensor 4", {"tp": 4}, [[0, 1]] * 4),
    "dp2": ("--parallel.tensor 1", {}, [[0, 1]] * 2),
    "tp2_pp2": ("--parallel.pipeline 2", {"tp": 2, "pp": 2}, [[0], [0], [1], [1]]),
    "pp2_vp2": (
        "--parallel.tensor 1 --parallel.pipeline 2 --parallel.virtual_pipeline 2 --model.num_layers 4",
        {"pp": 2, "vp": 2},
        [[0, 2], [1, 3]],
    ),
    "hybrid_tp2": (
        "--model.host hybrid --model.hybrid_layer_pattern=-D-DD --model.num_layers 5",
        {"tp": 2},
        [[0, 1, 2]] * 2,
    ),
    "hybrid_pp2": (
        "--parallel.tensor 1 --parallel.pipeline 2 --model.host hybrid --model.hybrid_layer_pattern 'D-D|-D' "
        "--model.num_layers 5",
        {"pp": 2},
        [[0, 1], [2]],
    ),
}


@pytest.mark.parametrize("spread", SPREADS)
def test_every_layer_gets_its_heads_of_the_layer_in_its_place(spread: str, tmp_path: Path) -> None:
    options, sizes, layers = SPREADS[spread]
    folder, tensors = written(tmp_path)
    config = tiny(tmp_path / "run", options, f"--load_hf {folder}")
    ranks = megatron_ranks(build, len(layers), config, **sizes)
    for rank, ordinals in zip(ranks, layers, strict=True):
        assert len(rank.attention) == len(ordinals)
        for ordinal, parameters in zip(ordinals, rank.attention, strict=True):
            assert parameters.keys() == set(MEGATRON_NAMES.values())
            for name, ours in MEGATRON_NAMES.items():
                want = part_of(name, tensors, DSA_LAYERS[ordinal], rank.tp_rank, sizes.get("tp", 1))
                assert torch.equal(parameters[ours], want.float()), (ordinal, name)
        # Nothing else is touched, and of the attention nothing is left.
        assert rank.others
        assert rank.unchanged == rank.others
    loaded = max(max(ordinals) for ordinals in layers) + 1
    (message,) = ranks[0].messages
    assert f"{loaded} layers from layers {', '.join(map(str, DSA_LAYERS[:loaded]))} of {folder}, BF16" in message
    assert all(not rank.messages for rank in ranks[1:])


@pytest.mark.parametrize("storage", list(DsaStorage))
def test_master_weights_of_a_bf16_model_are_the_checkpoint_s(storage: DsaStorage, tmp_path: Path) -> None:
    folder, tensors = written(tmp_path, storage)
    config = tiny(tmp_path / "run", f"--load_hf {folder} --training.dtype bf16")
    for rank in megatron_ranks(build, 2, config, tp=2):
        for ordinal, (parameters, masters) in enumerate(zip(rank.attention, rank.masters, strict=True)):
            trained = [name for name in parameters if "indexer" not in name]
            assert list(masters) == trained
            for name, ours in MEGATRON_NAMES.items():
                want = part_of(name, tensors, DSA_LAYERS[ordinal], rank.tp_rank, 2)
                dtype = torch.float32 if name.endswith("ape") else torch.bfloat16
                assert torch.equal(parameters[ours], want.to(dtype)), name
                if ours in masters:
                    assert torch.equal(masters[ours], want.to(dtype).float().flatten()), name


def test_a_run_starts_from_it_sharded_or_not_and_resumes_without_it(tmp_path: Path) -> None:
    folder, _ = written(tmp_path)
    options = "--training.micro_batch_size 1 --training.global_batch_size 2"
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    summary = start(tiny(straight, options, f"--load-hf {folder} --compare-unsharded"))
    assert summary["unsharded_losses_bit_identical"] is True
    start(tiny(resumed, options, f"--load-hf {folder} --training.steps 2"))
    start(tiny(resumed, options, "--resume"))
    assert losses(resumed) == losses(straight)


def test_files_that_have_changed_and_weights_that_are_no_numbers_are_refused_on_every_rank(tmp_path: Path) -> None:
    folder, tensors = written(tmp_path)
    write_digests(folder, {name: digest_of(folder / name) for name in names_in(folder)})
    changed = max(folder.glob("*.safetensors"))
    changed.write_bytes(changed.read_bytes()[:-1] + b"\x7f")
    tensors[full("indexer.wk.weight", 2)][0, 0] = torch.nan
    poisoned = write_checkpoint(tmp_path / "poisoned", tiny_config(**SHAPE), tensors)
    configs = [tiny(tmp_path / "run", f"--model.num_layers 4 --load-hf {path}") for path in (folder, poisoned)]
    all_told = run_ranks(refusals, 2, configs)
    assert all_told[0] == all_told[1]
    told_of_bytes, told_of_weights = all_told[0]
    assert told_of_bytes.startswith(f"{changed} has SHA-256 {digest_of(changed)[:16]}… over ")
    name = "model.decoder.layers.1.self_attention.core_attention.indexer.linear_wk.weight"
    assert told_of_weights.startswith(f"weights of {poisoned}: {name} is not finite on ranks [0, 1]; accepted are")
    assert not (tmp_path / "run").exists()


def refused(config: JobConfig) -> list[str]:
    from mcore_dsa.train.job import prepare

    with pytest.raises(ValueError, match="load_hf") as caught:
        prepare(config, 2)
    return str(caught.value).splitlines()


def test_it_needs_safetensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = written(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    (line,) = refused(tiny(tmp_path / "run", f"--load_hf {folder}"))
    assert line.endswith("accepted without safetensors is null: pip install 'mcore-dsa[hf]'")


def test_it_is_refused_together_with_resume(tmp_path: Path) -> None:
    folder, _ = written(tmp_path)
    (line,) = refused(tiny(tmp_path / "run", f"--load_hf {folder} --resume"))
    assert line.startswith(f"load_hf is {str(folder)!r}; accepted with resume true is null")


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    (line,) = refused(tiny(tmp_path / "run", f"--load_hf {tmp_path / 'absent'}"))
    assert line.startswith("load_hf is '")
    assert "absent" in line
    (tmp_path / "empty").mkdir()
    (line,) = refused(tiny(tmp_path / "run", f"--load_hf {tmp_path / 'empty'}"))
    assert "accepted is a folder with a .safetensors file" in line


def test_a_faulty_checkpoint_is_refused_with_its_tensors_named(tmp_path: Path) -> None:
    _, tensors = written(tmp_path)
    gone = [full("indexer.k_norm.bias", 5), full("o_proj.weight", 7)]
    for name in gone:
        del tensors[name]
    folder = write_checkpoint(tmp_path / "faulty", tiny_config(**SHAPE), tensors)
    lines = refused(tiny(tmp_path / "run", f"--load_hf {folder} --model.num_layers 4"))
    assert all(any(name in line for line in lines) for name in gone)
    # The first two layers, of which nothing is missing, are all that a model of two takes.
    assert find_pretrained(tiny(tmp_path / "run", f"--load_hf {folder}")).layers[:2] == (1, 2)


def test_every_size_that_differs_is_named(tmp_path: Path) -> None:
    changes: dict[str, tuple[str, Any, Any]] = {
        "hidden_size": ("hidden_size", 32, 48),
        "num_attention_heads": ("num_attention_heads", 4, 8),
        "q_lora_rank": ("q_lora_rank", 16, 24),
        "kv_lora_rank": ("kv_lora_rank", 16, 24),
        "qk_head_dim": ("qk_nope_head_dim", 8, 12),
        "v_head_dim": ("v_head_dim", 8, 12),
        "dsa_indexer_n_heads": ("index_n_heads", 8, 4),
        "dsa_indexer_head_dim": ("index_head_dim", 8, 12),
        "dsa_indexer_topk": ("index_topk", 8, 16),
        "dsa_indexer_kpool": ("index_kpool", 4, 2),
        "dsa_indexer_kpool_always_select_tail": ("index_kpool_always_select_tail", True, False),
        "layernorm_epsilon": ("rms_norm_eps", 1e-5, 1e-6),
    }
    folder, _ = written(tmp_path, **{theirs: value for theirs, _, value in changes.values()})
    lines = refused(tiny(tmp_path / "run", f"--load_hf {folder} --model.num_layers 6"))
    assert lines[:-1] == [
        f"model.{ours} is {own!r}; accepted with load_hf {str(folder)!r} is {value!r}"
        for ours, (_, own, value) in changes.items()
    ]
    assert lines[-1] == f"the number of DSA layers is 6; accepted with load_hf {str(folder)!r} is at most its 4"
