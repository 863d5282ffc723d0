"""The verifier over sound checkpoints, and over many broken ones: each fault is found and the tensor named."""

from collections.abc import Callable
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
    layer_shapes,
    refused,
    tiny_config,
    write_checkpoint,
)
from torch import Tensor

from mcore_dsa.binding import MEGATRON_NAMES, PREFIXES, DsaStorage, expected_tensors, verify
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.safetensors_files import FaultKind
from mcore_dsa.tp_plan import DsaTpPlan

GLM = DsaGeometry.from_config(Path(__file__).parents[1] / "configs" / "glm-5.3-flash.json")
BF16, FP8 = DsaStorage.BF16, DsaStorage.FP8


def test_the_names_are_those_of_the_plan_in_its_order() -> None:
    assert list(MEGATRON_NAMES) == [tensor.name for tensor in DsaTpPlan(0, 1, GLM).tensors]
    assert list(MEGATRON_NAMES) == list(layer_shapes(TINY))
    assert len(set(MEGATRON_NAMES.values())) == 14


@pytest.mark.parametrize("storage", [BF16, DsaStorage.F32, DsaStorage.NVFP4])
def test_what_an_unquantised_layer_holds(storage: DsaStorage) -> None:
    dtype = "F32" if storage is DsaStorage.F32 else "BF16"
    expected = expected_tensors(DsaGeometry.from_config(TINY), storage)
    assert expected == {name: (dtype, shape) for name, shape in layer_shapes(TINY).items()}


def test_what_a_layer_of_the_published_fp8_checkpoint_holds() -> None:
    expected = expected_tensors(GLM, FP8)
    assert len(expected) == 18
    assert {name: want for name, want in expected.items() if want.dtype != "BF16"} == {
        "q_a_proj.weight": ("F8_E4M3", (1536, 4096)),
        "q_a_proj.weight_scale_inv": ("F32", (12, 32)),
        "q_b_proj.weight": ("F8_E4M3", (16384, 1536)),
        "q_b_proj.weight_scale_inv": ("F32", (128, 12)),
        "kv_a_proj_with_mqa.weight": ("F8_E4M3", (512, 4096)),
        "kv_a_proj_with_mqa.weight_scale_inv": ("F32", (4, 32)),
        "o_proj.weight": ("F8_E4M3", (4096, 16384)),
        "o_proj.weight_scale_inv": ("F32", (32, 128)),
    }


@pytest.mark.parametrize("storage", list(DsaStorage))
@pytest.mark.parametrize(("files", "prefix"), [(1, ""), (3, PREFIX), (3, "model."), (1, "language_model.")])
def test_a_sound_checkpoint_has_no_fault(tmp_path: Path, storage: DsaStorage, files: int, prefix: str) -> None:
    config = tiny_config(storage)
    write_checkpoint(tmp_path, config, checkpoint_tensors(config, storage, prefix=prefix), files)
    index = tmp_path / "model.safetensors.index.json"
    for path in (tmp_path, str(tmp_path), index if files > 1 else tmp_path / "model.safetensors"):
        binding = verify(path)
        assert binding.faults == ()
        assert (binding.storage, binding.prefix) == (storage, prefix)
        assert (binding.layers, binding.mtp_layers) == (DSA_LAYERS, (MTP_LAYER,))
        assert len(binding.files) == files
        assert len(binding.tensors) == 3 * (18 if storage is FP8 else 14)
        assert "no fault" in str(binding)
        assert "1 of 1 multi-token-prediction" in str(binding)
        assert binding.to_dict()["ok"] is True


def test_a_checkpoint_without_its_multi_token_prediction_block_is_sound(tmp_path: Path) -> None:
    config = tiny_config()
    write_checkpoint(tmp_path, config, checkpoint_tensors(config, layers=DSA_LAYERS))
    binding = verify(tmp_path)
    assert (binding.faults, binding.layers, binding.mtp_layers) == ((), DSA_LAYERS, ())
    assert "0 of 1 multi-token-prediction" in str(binding)


def test_a_path_that_holds_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "nothing", TINY)
    with pytest.raises(FileNotFoundError):
        verify(tmp_path / "model.safetensors", TINY)
    with pytest.raises(ValueError, match=r"accepted is a folder with a \.safetensors file or a"):
        verify(tmp_path, TINY)
    other = tmp_path / "weights.bin"
    other.write_bytes(b"")
    with pytest.raises(ValueError, match=r"weights\.bin"):
        verify(other, TINY)
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"with a\.safe.*b\.safe.*; accepted is a folder with one index"):
        verify(tmp_path, TINY)


Change = Callable[[dict[str, Tensor]], Any]


def moved(old: str, new: str) -> Change:
    return lambda tensors: tensors.__setitem__(new, tensors.pop(old))


def swapped(left: str, right: str) -> Change:
    return lambda tensors: tensors.update({left: tensors[right], right: tensors[left]})


def replaced(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors: tensors.__setitem__(name, change(tensors[name]))


def renamed(tensors: dict[str, Tensor], old: str, new: str) -> None:
    for name in [name for name in tensors if name.startswith(old)]:
        tensors[new + name.removeprefix(old)] = tensors.pop(name)


WHOLE_LAYER = f"{PREFIX}layers.3."
O_SCALE = "o_proj.weight_scale_inv"
# What is done to a sound checkpoint's tensors, and the faults that must come of it, all of them and no other.
CORRUPTIONS: dict[str, tuple[DsaStorage, Change, set[tuple[FaultKind, str]]]] = {
    "a tensor is missing": (
        BF16,
        lambda tensors: tensors.pop(full("kv_a_layernorm.weight")),
        {(FaultKind.MISSING, full("kv_a_layernorm.weight"))},
    ),
    "a layer is missing": (
        BF16,
        lambda tensors: renamed(tensors, WHOLE_LAYER, "elsewhere."),
        {(FaultKind.MISSING, full("*"))},
    ),
    "a bias that the model does not have": (
        BF16,
        lambda tensors: tensors.update({full("q_a_proj.bias"): torch.ones(136)}),
        {(FaultKind.UNEXPECTED, full("q_a_proj.bias"))},
    ),
    "a wrong shape": (
        BF16,
        replaced(full("indexer.wk.weight"), lambda tensor: tensor[:-1]),
        {(FaultKind.SHAPE, full("indexer.wk.weight"))},
    ),
    "a vector as a matrix": (
        BF16,
        replaced(full("q_a_layernorm.weight"), lambda tensor: tensor[None]),
        {(FaultKind.SHAPE, full("q_a_layernorm.weight"))},
    ),
    "a wrong dtype": (
        BF16,
        replaced(full("indexer.wq_b.weight"), Tensor.half),
        {(FaultKind.DTYPE, full("indexer.wq_b.weight"))},
    ),
    "ape in fp32": (
        BF16,
        replaced(full("indexer.index_kpool_compress_ape"), Tensor.float),
        {(FaultKind.DTYPE, full("indexer.index_kpool_compress_ape"))},
    ),
    "a weight left in BF16 among FP8": (
        FP8,
        replaced(full("q_b_proj.weight"), Tensor.bfloat16),
        {(FaultKind.DTYPE, full("q_b_proj.weight"))},
    ),
    "a missing scale": (
        FP8,
        lambda tensors: tensors.pop(full("kv_a_proj_with_mqa.weight_scale_inv")),
        {(FaultKind.SCALE_MISSING, full("kv_a_proj_with_mqa.weight_scale_inv"))},
    ),
    "a scale without the ragged block": (
        FP8,
        replaced(full(O_SCALE), lambda tensor: tensor[:1, :1]),
        {(FaultKind.SCALE_SHAPE, full(O_SCALE))},
    ),
    "a scale in BF16": (
        FP8,
        replaced(full(O_SCALE), Tensor.bfloat16),
        {(FaultKind.DTYPE, full(O_SCALE))},
    ),
    "a scale of a weight that is not quantised": (
        FP8,
        lambda tensors: tensors.update({full("kv_b_proj.weight_scale_inv"): torch.ones(3, 1)}),
        {(FaultKind.UNEXPECTED, full("kv_b_proj.weight_scale_inv"))},
    ),
    "attention packed as NVFP4": (
        DsaStorage.NVFP4,
        replaced(full("q_a_proj.weight"), lambda tensor: tensor[:, ::2].to(torch.uint8)),
        {(FaultKind.DTYPE, full("q_a_proj.weight")), (FaultKind.SHAPE, full("q_a_proj.weight"))},
    ),
    "DSA tensors in a linear-attention layer": (
        BF16,
        lambda tensors: tensors.update(
            {full("q_b_proj.weight", 2): torch.ones(2), full("o_proj.weight", 2): torch.ones(2)}
        ),
        {(FaultKind.NOT_DSA, full("q_b_proj.weight", 2))},
    ),
    "DSA tensors in a layer beyond the last": (
        BF16,
        lambda tensors: tensors.update({full("indexer.wk.weight", 5): torch.ones(2)}),
        {(FaultKind.NOT_DSA, full("indexer.wk.weight", 5))},
    ),
    "a multi-token-prediction block in part": (
        BF16,
        lambda tensors: tensors.pop(full("o_proj.weight", MTP_LAYER)),
        {(FaultKind.MISSING, full("o_proj.weight", MTP_LAYER))},
    ),
    "a key norm without bias": (
        BF16,
        lambda tensors: tensors.pop(full("indexer.k_norm.bias")),
        {(FaultKind.MISSING, full("indexer.k_norm.bias"))},
    ),
    "q_b and kv_b exchanged": (
        BF16,
        swapped(full("q_b_proj.weight"), full("kv_b_proj.weight")),
        {(FaultKind.SHAPE, full("q_b_proj.weight")), (FaultKind.SHAPE, full("kv_b_proj.weight"))},
    ),
    "o_proj transposed": (
        BF16,
        replaced(full("o_proj.weight"), lambda tensor: tensor.T),
        {(FaultKind.SHAPE, full("o_proj.weight"))},
    ),
    "a tensor under another prefix": (
        BF16,
        moved(full("indexer.wk.weight"), full("indexer.wk.weight", prefix="model.")),
        {
            (FaultKind.MISSING, full("indexer.wk.weight")),
            (FaultKind.PREFIX, full("indexer.wk.weight", prefix="model.")),
        },
    ),
    "a tensor named as a parameter of a module": (
        BF16,
        moved(full("indexer.index_kpool_compress_gate"), full("indexer.index_kpool_compress_gate.weight")),
        {
            (FaultKind.MISSING, full("indexer.index_kpool_compress_gate")),
            (FaultKind.UNEXPECTED, full("indexer.index_kpool_compress_gate.weight")),
        },
    ),
}


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_corrupted_checkpoint_is_refused_with_the_tensor_named(tmp_path: Path, corruption: str, files: int) -> None:
    storage, change, faults = CORRUPTIONS[corruption]
    config = tiny_config(storage)
    tensors = checkpoint_tensors(config, storage)
    change(tensors)
    refused(write_checkpoint(tmp_path, config, tensors, files), faults)


def test_all_faults_are_reported_at_once(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(tiny_config())
    expected: set[tuple[FaultKind, str]] = set()
    for name in (
        "a tensor is missing",
        "a wrong shape",
        "a wrong dtype",
        "o_proj transposed",
        "a key norm without bias",
    ):
        _, change, faults = CORRUPTIONS[name]
        change(tensors)
        expected |= faults
    report = str(refused(write_checkpoint(tmp_path, tiny_config(), tensors, 3), expected))
    assert report.splitlines()[0].startswith(f"{tmp_path}: 5 faults; BF16 attention")
    assert len(report.splitlines()) == 2 + 5
    # The likely cause stands beside the fault.
    assert "the transpose" in report
    assert "as of an RMSNorm" in report


def test_tensors_of_each_other_are_told_by_their_shape(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(tiny_config())
    CORRUPTIONS["q_b and kv_b exchanged"][1](tensors)
    report = str(verify(write_checkpoint(tmp_path, tiny_config(), tensors)))
    assert "the shape of kv_b_proj.weight" in report
    assert "the shape of q_b_proj.weight" in report


def test_what_headers_cannot_show(tmp_path: Path) -> None:
    """The limits that binding.py's docstring states: names, shapes and dtypes stay as they are."""
    tensors = checkpoint_tensors(tiny_config())
    query, value = TINY["qk_nope_head_dim"], TINY["v_head_dim"]
    heads = tensors[full("kv_b_proj.weight")].unflatten(0, (-1, query + value))
    tensors[full("kv_b_proj.weight")] = torch.cat([heads[:, query:], heads[:, :query]], dim=1).flatten(0, 1)
    swapped(full("indexer.wk.weight"), full("indexer.index_kpool_compress_gate"))(tensors)
    swapped(full("indexer.k_norm.weight"), full("indexer.k_norm.bias"))(tensors)
    assert verify(write_checkpoint(tmp_path, tiny_config(), tensors)).faults == ()
    shapes = layer_shapes(TINY)
    assert [name for name in shapes if list(shapes.values()).count(shapes[name]) > 1] == [
        "indexer.wk.weight",
        "indexer.k_norm.weight",
        "indexer.k_norm.bias",
        "indexer.index_kpool_compress_gate",
    ]


def test_an_unknown_prefix_is_named_and_not_guessed(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(tiny_config(), prefix="model.draft.")
    binding = verify(write_checkpoint(tmp_path, tiny_config(), tensors))
    assert binding.prefix is None
    assert binding.tensors == {}
    assert (FaultKind.PREFIX, full("q_a_proj.weight", prefix="model.draft.")) in faults_of(binding)
    assert all(f"{prefix!r}" in str(binding) for prefix in PREFIXES)
    tensors = {name: tensor for name, tensor in tensors.items() if "self_attn" not in name}
    assert faults_of(verify(write_checkpoint(tmp_path, tiny_config(), tensors))) == {(FaultKind.PREFIX, "")}
