"""How a checkpoint says that attention is stored, and how little of it a fault blocks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import (
    DSA_LAYERS,
    MTP_LAYER,
    PREFIX,
    TINY,
    checkpoint_tensors,
    faults_of,
    full,
    refused,
    tiny_config,
    write_checkpoint,
)

from mcore_dsa.binding import MEGATRON_NAMES, DsaStorage, verify
from mcore_dsa.checkpoint import load_attention
from mcore_dsa.safetensors_files import FaultKind
from mcore_dsa.tp_plan import DsaTpPlan

BF16, FP8 = DsaStorage.BF16, DsaStorage.FP8


def test_the_configuration_says_how_attention_is_stored_unless_the_caller_does(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), checkpoint_tensors(tiny_config(FP8), FP8))
    assert not verify(tmp_path, storage=FP8).faults
    assert verify(tmp_path, storage="FP8").storage is FP8  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="storage is 'fp8'; accepted are BF16, F32, FP8, NVFP4"):
        verify(tmp_path, storage="fp8")  # type: ignore[arg-type]
    assert not verify(tmp_path, tiny_config(FP8)).faults
    wrong = faults_of(verify(tmp_path))
    assert (FaultKind.DTYPE, full("o_proj.weight")) in wrong
    assert (FaultKind.UNEXPECTED, full("o_proj.weight_scale_inv")) in wrong


SAID: list[tuple[dict[str, Any], DsaStorage]] = [
    ({}, BF16),
    ({"torch_dtype": torch.float32}, DsaStorage.F32),
    ({"dtype": None, "torch_dtype": "float32"}, DsaStorage.F32),
    ({"dtype": "float32", "torch_dtype": "bfloat16", "quantization_config": None}, DsaStorage.F32),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "producer": "nvfp4-tools"}}, FP8),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": (128, 128)}, "dtype": "float32"}, FP8),
    *(
        ({"quantization_config": said}, DsaStorage.NVFP4)
        for said in (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"},
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}},
            {"quant_method": "modelopt", "quant_algo": "MIXED", "quantized_layers": {"a": {"quant_algo": "NVFP4"}}},
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        )
    ),
]


@pytest.mark.parametrize(("said", "storage"), SAID)
def test_how_attention_is_stored_is_read_from_any_level(
    tmp_path: Path, said: dict[str, Any], storage: DsaStorage
) -> None:
    write_checkpoint(tmp_path, tiny_config(storage), checkpoint_tensors(tiny_config(storage), storage))
    nulls = dict.fromkeys(("quantization_config", "dtype"))
    for config in ({**TINY, **said}, {"text_config": {**TINY, **said}}, {"text_config": {**TINY, **nulls}, **said}):
        binding = verify(tmp_path, config)
        assert (binding.storage, binding.faults) == (storage, ())


@pytest.mark.parametrize(
    "quantization",
    [
        {},
        8,
        "nvfp4",
        {"quant_method": "gptq"},
        {"quant_method": "gptq", "dataset": "nvfp4", "quant_algo": "NVFP4"},
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["nvfp4"]},
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4", "exclude_modules": ["nvfp4"]}},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": 128},
        {"quant_method": "fp8", "weight_block_size": [64, 64]},
        {"quant_method": "fp8", "weight_block_size": "128"},
        {"quant_method": ["fp8"], "weight_block_size": [128, 128]},
    ],
)
def test_another_quantisation_is_refused(tmp_path: Path, quantization: Any) -> None:
    write_checkpoint(tmp_path, tiny_config(), checkpoint_tensors(tiny_config()))
    with pytest.raises(ValueError, match=r"quantization_config is .*; accepted are quant_method 'fp8' with"):
        verify(tmp_path, {**TINY, "quantization_config": quantization})


def test_the_text_part_s_word_counts_before_the_whole_s(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), checkpoint_tensors(tiny_config()))
    for word in ("dtype", "torch_dtype"):
        config = {"text_config": {**TINY, word: "float32"}, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
        assert verify(tmp_path, config).storage is DsaStorage.F32


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), checkpoint_tensors(tiny_config()))
    with pytest.raises(ValueError, match=r"config\.dtype is 'float16'; accepted are 'bfloat16'"):
        verify(tmp_path, {**TINY, "dtype": "float16"})


def test_blocks_that_only_the_outer_level_counts_are_bound(tmp_path: Path) -> None:
    config = tiny_config()
    config["num_nextn_predict_layers"] = config["text_config"].pop("num_nextn_predict_layers")
    binding = verify(write_checkpoint(tmp_path, config, checkpoint_tensors(config)))
    assert (binding.faults, binding.mtp_layers) == ((), (MTP_LAYER,))


def test_one_unusual_block_blocks_no_other_layer(tmp_path: Path) -> None:
    """FP8 in an NVFP4 checkpoint; what is loaded elsewhere is what a sound checkpoint holds."""
    config = tiny_config(DsaStorage.NVFP4)
    tensors = checkpoint_tensors(config, DsaStorage.NVFP4)
    fp8 = checkpoint_tensors(config, FP8)
    tensors |= {name: tensor for name, tensor in fp8.items() if f"layers.{MTP_LAYER}.self_attn." in name}
    binding = verify(write_checkpoint(tmp_path, config, tensors, files=2))
    assert {name.split(".")[3] for _, name in faults_of(binding)} == {str(MTP_LAYER)}
    assert binding.faults_of(DSA_LAYERS) == ()
    assert binding.faults_of((1, MTP_LAYER)) == binding.faults
    plan = DsaTpPlan(1, 2, binding.geometry)
    for layer in DSA_LAYERS:
        loaded = load_attention(binding, layer, plan)
        for name in MEGATRON_NAMES:
            part = tensors[full(name, layer)][plan.src_slice(name)]
            assert torch.equal(loaded[MEGATRON_NAMES[name]].bfloat16(), part)
    with pytest.raises(ValueError, match=f"{len(binding.faults)} faults"):
        load_attention(binding, MTP_LAYER, plan)


@pytest.mark.parametrize("layers", [(*DSA_LAYERS, MTP_LAYER), (3,)])
def test_scales_under_another_name_are_one_hint(tmp_path: Path, layers: tuple[int, ...]) -> None:
    config = tiny_config(FP8)
    tensors = checkpoint_tensors(config, FP8)
    for name in [name for name in tensors if name.endswith("_scale_inv") and int(name.split(".")[3]) in layers]:
        tensors[name.removesuffix("_inv")] = tensors.pop(name)
    where = "*" if len(layers) == 3 else "3"
    hint = (FaultKind.SCALE_MISSING, f"{PREFIX}layers.{where}.self_attn.*_scale_inv")
    binding = refused(write_checkpoint(tmp_path, config, tensors), {hint})
    assert f"_scale in the names of {4 * len(layers)}, as other quantisers have it; rename them" in str(binding)
    assert [layer for layer in (*DSA_LAYERS, MTP_LAYER) if binding.faults_of((layer,))] == list(layers)
