"""Checkpoints of DSA layers as Hugging Face folders hold them, made from shapes written down apart from the package."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mcore_dsa.binding import CheckpointBinding, DsaStorage, verify
from mcore_dsa.checkpoint import LayerTensor, load_attention, merge_attention
from mcore_dsa.safetensors_files import FaultKind
from mcore_dsa.tp_plan import DsaTpPlan

PREFIX = "model.language_model."
FP8_WEIGHTS = ("q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "o_proj.weight")
DTYPES = {DsaStorage.F32: torch.float32}
QUANTIZATION: dict[DsaStorage, dict[str, Any]] = {
    DsaStorage.FP8: {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    },
    DsaStorage.NVFP4: {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
    DsaStorage.F32: {"dtype": "float32"},
    DsaStorage.BF16: {"dtype": "bfloat16"},
}

# No two shapes are equal that need not be; with 4 heads, sizes that FP8 blocks of 128 do not divide.
TINY: dict[str, Any] = {
    "model_type": "glm5_next_text",
    "hidden_size": 168,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "q_lora_rank": 136,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 0,
    "v_head_dim": 48,
    "rms_norm_eps": 1e-5,
    "index_n_heads": 3,
    "index_head_dim": 20,
    "index_topk": 32,
    "index_kpool": 4,
    "index_kpool_always_select_tail": True,
    "max_position_embeddings": 4096,
    "layer_types": [
        "linear_attention",
        "deepseek_sparse_attention",
        "linear_attention",
        "deepseek_sparse_attention",
    ],
    "indexer_types": ["full"] * 4,
    "num_nextn_predict_layers": 1,
}
DSA_LAYERS = (1, 3)
MTP_LAYER = 4
LAYERS = (*DSA_LAYERS, MTP_LAYER)
APE = "indexer.index_kpool_compress_ape"


def tiny_config(storage: DsaStorage = DsaStorage.BF16, **changes: Any) -> dict[str, Any]:
    """As published: the text model's fields nested, how weights are stored beside them."""
    return {"text_config": copy.deepcopy(TINY) | changes, **copy.deepcopy(QUANTIZATION[storage])}


def layer_shapes(text: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The 14 tensors under `self_attn.`, in the order of the checkpoint."""
    hidden, heads, q_lora, kv_lora = (
        text[name] for name in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank")
    )
    query, value = text["qk_nope_head_dim"], text["v_head_dim"]
    index_heads, index_dim = text["index_n_heads"], text["index_head_dim"]
    return {
        "q_a_proj.weight": (q_lora, hidden),
        "q_a_layernorm.weight": (q_lora,),
        "q_b_proj.weight": (heads * query, q_lora),
        "kv_a_proj_with_mqa.weight": (kv_lora, hidden),
        "kv_a_layernorm.weight": (kv_lora,),
        "kv_b_proj.weight": (heads * (query + value), kv_lora),
        "o_proj.weight": (hidden, heads * value),
        "indexer.wq_b.weight": (index_heads * index_dim, q_lora),
        "indexer.wk.weight": (index_dim, hidden),
        "indexer.k_norm.weight": (index_dim,),
        "indexer.k_norm.bias": (index_dim,),
        "indexer.weights_proj.weight": (index_heads, hidden),
        "indexer.index_kpool_compress_gate": (index_dim, hidden),
        "indexer.index_kpool_compress_ape": (text["index_kpool"], index_dim),
    }


def layer_tensors(text: Mapping[str, Any], storage: DsaStorage, generator: torch.Generator) -> dict[str, Tensor]:
    """Random tensors of one layer by their names under `self_attn.`, block scales behind FP8 weights."""
    tensors = {}
    for name, shape in layer_shapes(text).items():
        values = torch.randn(shape, generator=generator)
        if storage is DsaStorage.FP8 and name in FP8_WEIGHTS:
            blocks = tuple(-(-size // 128) for size in shape)
            tensors[name] = (values * 60).to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = torch.rand(blocks, generator=generator) * 1e-3 + 1e-5
        else:
            tensors[name] = values.to(DTYPES.get(storage, torch.bfloat16))
    return tensors


def checkpoint_tensors(
    config: Mapping[str, Any],
    storage: DsaStorage = DsaStorage.BF16,
    *,
    prefix: str = PREFIX,
    layers: tuple[int, ...] = (*DSA_LAYERS, MTP_LAYER),
    seed: int = 0,
) -> dict[str, Tensor]:
    """DSA layers, a little of a linear-attention layer, and tensors that are none of the attention's."""
    generator = torch.Generator().manual_seed(seed)
    text = config.get("text_config", config)
    tensors = {f"{prefix}embed_tokens.weight": torch.randn(7, 5, generator=generator).bfloat16()}
    for name in ("o_proj.weight", "q_proj.weight", "A_log"):
        tensors[f"{prefix}layers.0.self_attn.{name}"] = torch.randn(6, 5, generator=generator)
    for layer in layers:
        tensors[f"{prefix}layers.{layer}.input_layernorm.weight"] = torch.ones(3)
        for name, tensor in layer_tensors(text, storage, generator).items():
            tensors[f"{prefix}layers.{layer}.self_attn.{name}"] = tensor
    return tensors


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], files: int = 1) -> Path:
    """One `model.safetensors`, or `files` of them with an index and the tensors dealt out in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if files == 1:
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [f"model-{number + 1:05d}-of-{files:05d}.safetensors" for number in range(files)]
    weight_map = {name: names[position % files] for position, name in enumerate(whole)}
    for file in names:
        part = {name: tensor for name, tensor in whole.items() if weight_map[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Mapping[str, Any]) -> None:
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def read_index(folder: Path) -> dict[str, str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    return index["weight_map"]


def full(name: str, layer: int = 3, prefix: str = PREFIX) -> str:
    return f"{prefix}layers.{layer}.self_attn.{name}"


def faults_of(binding: CheckpointBinding) -> set[tuple[FaultKind, str]]:
    return {(fault.kind, fault.tensor) for fault in binding.faults}


def refused(path: Path, faults: set[tuple[FaultKind, str]]) -> CheckpointBinding:
    """Exactly these faults are reported, in text and in JSON, and what they concern cannot be loaded."""
    binding = verify(path)
    assert faults_of(binding) == faults
    report = json.loads(json.dumps(binding.to_dict()))
    assert report["ok"] is False
    assert {(fault["kind"], fault["tensor"]) for fault in report["faults"]} == {(str(k), name) for k, name in faults}
    with pytest.raises(ValueError, match="fault") as caught:
        binding.raise_faults()
    for kind, name in faults:
        assert kind in str(caught.value)
        assert name in str(caught.value)
    plan = DsaTpPlan(0, 1, binding.geometry)
    for layer in (*binding.layers, *binding.mtp_layers):
        own = binding.faults_of((layer,))
        assert {fault for fault in binding.faults if f".{layer}.self_attn." in fault.tensor} <= set(own)
        if own:
            with pytest.raises(ValueError, match=f"{len(own)} fault"):
                load_attention(binding, layer, plan)
        else:
            assert len(load_attention(binding, layer, plan)) == 14
    return binding


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def saved(
    folder: Path, storage: DsaStorage = DsaStorage.BF16, files: int = 3
) -> tuple[CheckpointBinding, dict[str, Tensor]]:
    config = tiny_config(storage)
    tensors = checkpoint_tensors(config, storage)
    binding = verify(write_checkpoint(folder, config, tensors, files))
    assert not binding.faults
    return binding, tensors


def shards(binding: CheckpointBinding, layer: int, size: int) -> list[dict[str, Tensor]]:
    return [load_attention(binding, layer, DsaTpPlan(rank, size, binding.geometry)) for rank in range(size)]


def merged(
    binding: CheckpointBinding, size: int, layers: tuple[int, ...] = (*DSA_LAYERS, MTP_LAYER)
) -> Iterator[LayerTensor]:
    for layer in layers:
        for name, tensor in merge_attention(shards(binding, layer, size), binding.geometry):
            yield layer, name, tensor


def rounded_once(exact: Tensor) -> Tensor:
    """float64 to BF16 in one rounding to nearest, ties to even, on the bits: 45 of 52 bits of the fraction go.

    For magnitudes from 2**-126 on, where BF16 numbers are normal, and zero.
    """
    assert exact.dtype == torch.float64
    assert bool(((exact == 0) | (exact.abs() >= 2.0**-126)).all())
    bits = exact.contiguous().view(torch.int64)
    bits = bits + (2**44 - 1) + ((bits >> 45) & 1)
    return ((bits >> 45) << 45).view(torch.float64).bfloat16()


def dequantised(weight: Tensor, scale: Tensor) -> Tensor:
    """The whole FP8 weight times its scales, each of which stands for 128 rows and 128 columns."""
    rows = []
    for block_row, scales in zip(weight.split(128), scale, strict=True):
        wide = scales.double().repeat_interleave(128)[: weight.shape[1]]
        rows.append(rounded_once(block_row.double() * wide))
    return torch.cat(rows)
