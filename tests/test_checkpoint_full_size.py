"""One layer of the published size, BF16 and FP8: verified, loaded at TP = 1, 2 and 8, exported; peak memory."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import FP8_WEIGHTS, QUANTIZATION, dequantised, full, layer_shapes, write_checkpoint
from safetensors import safe_open
from torch import Tensor

from mcore_dsa.binding import MEGATRON_NAMES, DsaStorage, verify
from mcore_dsa.checkpoint import LayerTensor, export_attention, load_attention, merge_attention, write_attention
from mcore_dsa.tp_plan import DsaTpPlan

BF16, FP8 = DsaStorage.BF16, DsaStorage.FP8
CONFIG = json.loads((Path(__file__).parents[1] / "configs" / "glm-5.3-flash.json").read_text(encoding="utf-8"))
LARGEST_TENSOR = 4096 * 16384 * 2


def one_layer_config(storage: DsaStorage) -> dict[str, Any]:
    one = {"num_hidden_layers": 1, "layer_types": ["deepseek_sparse_attention"], "indexer_types": ["full"]}
    return {"text_config": {**CONFIG["text_config"], **one, "num_nextn_predict_layers": 0}, **QUANTIZATION[storage]}


def random_bits(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """BF16 of every magnitude below 2, subnormal ones and -0.0 too; no NaN, which need not keep its bits."""
    drawn = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=generator)
    return drawn.bitwise_and_(~0x4000).view(torch.bfloat16)


def layer_of(storage: DsaStorage) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name, shape in layer_shapes(CONFIG["text_config"]).items():
        if storage is FP8 and name in FP8_WEIGHTS:
            drawn = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            drawn[drawn & 0x7F == 0x7F] = 0x3A  # NaN
            tensors[full(name, 0)] = drawn.view(torch.float8_e4m3fn)
            blocks = (shape[0] // 128, shape[1] // 128)
            tensors[full(name, 0) + "_scale_inv"] = torch.rand(blocks, generator=generator) * 1e-3 + 1e-5
        else:
            tensors[full(name, 0)] = random_bits(shape, generator)
    return tensors


@pytest.fixture(scope="module", params=[BF16, FP8])
def layer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, DsaStorage]]:
    folder = tmp_path_factory.mktemp("layer")
    write_checkpoint(folder / "source", one_layer_config(request.param), layer_of(request.param), files=2)
    yield folder, request.param
    shutil.rmtree(folder)


def right_tensor(folder: Path, name: str) -> Tensor:
    """A whole tensor in BF16, read without the package."""
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))["weight_map"]

    def read(key: str) -> Tensor:
        with safe_open(folder / index[key], framework="pt") as file:
            return file.get_tensor(key)

    key = full(name, 0)
    return dequantised(read(key), read(key + "_scale_inv")) if key + "_scale_inv" in index else read(key)


def test_a_layer_of_the_published_size_round_trips(layer: tuple[Path, DsaStorage]) -> None:
    folder, storage = layer
    binding = verify(folder / "source")
    assert (binding.faults, binding.storage, len(binding.tensors)) == ((), storage, 18 if storage is FP8 else 14)
    right = {name: right_tensor(folder / "source", name).view(torch.int16) for name in MEGATRON_NAMES}
    for size in (1, 2, 8):
        shards = [load_attention(binding, 0, DsaTpPlan(rank, size, binding.geometry)) for rank in range(size)]
        for name, tensor in merge_attention(shards, binding.geometry):
            assert torch.equal(tensor.bfloat16().view(torch.int16), right[name])
    if storage is FP8:
        write_attention(layer_tensors(shards, binding.geometry), folder / "target", config=folder / "source")
    else:
        export_attention(layer_tensors(shards, binding.geometry), folder / "target", template=binding)
        assert [path.name for path in verify(folder / "target").files] == [path.name for path in binding.files]
    exported = verify(folder / "target")
    assert (exported.faults, exported.storage) == ((), BF16)
    for name in MEGATRON_NAMES:
        assert torch.equal(right_tensor(folder / "target", name).view(torch.int16), right[name])


def layer_tensors(shards: list[dict[str, Tensor]], geometry: Any) -> Iterator[LayerTensor]:
    return ((0, name, tensor) for name, tensor in merge_attention(shards, geometry))


# Linux: 5 resets the peak of the resident set, VmHWM; pages of mapped files count in it as long as they are mapped.
MEASURE = """
import sys

import torch

from mcore_dsa.binding import verify
from mcore_dsa.checkpoint import load_attention
from mcore_dsa.tp_plan import DsaTpPlan

def status(name):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

torch.set_num_threads(1)
binding = verify(sys.argv[1])
for size in (8, 1):
    plan = DsaTpPlan(0, size, binding.geometry)
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    tensors = load_attention(binding, 0, plan)
    print(plan.local_bytes, status("VmHWM") - before)
    del tensors
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak is measured as Linux keeps it")
def test_peak_memory_is_the_rank_s_tensors_and_one_full_tensor(layer: tuple[Path, DsaStorage]) -> None:
    """Measured beyond the rank's own 58,988,032 and 249,828,864 bytes: 122 MB for BF16, 67 MB for FP8."""
    folder, _ = layer
    command = [sys.executable, "-c", MEASURE, str(folder / "source")]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    measured = [tuple(map(int, line.split())) for line in result.stdout.splitlines()]
    assert [local for local, _ in measured] == [58_988_032, 249_828_864]
    for local, peak in measured:
        assert local < peak <= local + LARGEST_TENSOR
