"""Loading a rank's tensors, and putting ranks together again."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hf_checkpoints import (
    APE,
    DSA_LAYERS,
    FP8_WEIGHTS,
    LAYERS,
    TINY,
    bits,
    checkpoint_tensors,
    dequantised,
    full,
    layer_shapes,
    merged,
    rounded_once,
    saved,
    shards,
    tiny_config,
    write_checkpoint,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mcore_dsa import safetensors_files
from mcore_dsa.binding import MEGATRON_NAMES, CheckpointBinding, DsaStorage, verify
from mcore_dsa.checkpoint import load_attention, merge_attention
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.tp_plan import DsaTpPlan

BF16, F32, FP8, NVFP4 = DsaStorage.BF16, DsaStorage.F32, DsaStorage.FP8, DsaStorage.NVFP4


def expected_part(name: str, tensor: Tensor, rank: int, size: int) -> Tensor:
    """A rank's heads, cut here without the plan."""
    if name in ("q_b_proj.weight", "kv_b_proj.weight"):
        return tensor.chunk(size, dim=0)[rank]
    return tensor.chunk(size, dim=1)[rank] if name == "o_proj.weight" else tensor


@pytest.mark.parametrize("storage", list(DsaStorage))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_rank_gets_its_heads_and_nothing_else(tmp_path: Path, storage: DsaStorage, size: int) -> None:
    binding, tensors = saved(tmp_path, storage)
    for layer in LAYERS:
        for rank, shard in enumerate(shards(binding, layer, size)):
            assert list(shard) == list(MEGATRON_NAMES.values())
            for name in layer_shapes(TINY):
                whole = tensors[full(name, layer)]
                if storage is FP8 and name in FP8_WEIGHTS:
                    whole = dequantised(whole, tensors[full(name, layer) + "_scale_inv"])
                got = shard[MEGATRON_NAMES[name]]
                want = expected_part(name, whole, rank, size)
                assert got.dtype == (torch.float32 if name == APE else want.dtype)
                assert torch.equal(bits(got), bits(want.to(got.dtype)))
                # Nothing of the mapped file, nor of a larger tensor, hangs on to what is kept.
                assert got.is_contiguous()
                assert got.untyped_storage().nbytes() == got.nbytes


class Copies(TorchDispatchMode):
    """The files that are mapped and the bytes that are copied out of them, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int | str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        if name in ("from_file", "clone"):
            self.steps.append("mapped" if name == "from_file" else result.nbytes)
        else:
            # Nothing else makes a tensor, but the widening of ape.
            assert function.is_view or (name == "_to_copy" and result.shape == (4, 20)), name
        return result


def test_only_the_planned_slices_are_read_and_one_tensor_at_a_time(tmp_path: Path) -> None:
    binding, _ = saved(tmp_path)
    plan = DsaTpPlan(1, 4, binding.geometry)
    with Copies() as copies:
        load_attention(binding, 3, plan)
    assert copies.steps == [step for tensor in plan.tensors for step in ("mapped", tensor.local_bytes)]


def test_headers_are_read_once_however_much_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header of 200,000 names takes 0.4 s to parse: with every tensor that is read, a conversion takes minutes."""
    binding, _ = saved(tmp_path)

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a header is read again")

    for module, name in ((safetensors, "safe_open"), (json, "loads"), (safetensors_files, "parse_json")):
        monkeypatch.setattr(module, name, refuse)
    assert len(shards(binding, 3, 2)) == 2


def test_tensors_may_begin_at_any_byte(tmp_path: Path) -> None:
    """Other writers do not pad the header, so that numbers lie across the places where a machine wants them."""
    _, tensors = saved(tmp_path, files=1)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = whole[8 : 8 + length].rstrip() + b" "
    for padding in (b"", b" "):
        file.write_bytes(struct.pack("<Q", len(header + padding)) + header + padding + whole[8 + length :])
        binding = verify(tmp_path)
        loaded = shards(binding, 3, 1)[0]
        for name in layer_shapes(TINY):
            assert torch.equal(bits(loaded[MEGATRON_NAMES[name]].bfloat16()), bits(tensors[full(name)]))


def test_fp8_products_that_fall_beside_a_tie_are_rounded_once(tmp_path: Path) -> None:
    """In each block a product beside the middle of two BF16 numbers, nearer to it than fp32 resolves."""
    rows, cols = 8, 16
    config = tiny_config(FP8, hidden_size=128 * cols, q_lora_rank=128 * rows)
    tensors = checkpoint_tensors(config, FP8, layers=DSA_LAYERS)
    values = torch.arange(1, 126, dtype=torch.uint8).view(torch.float8_e4m3fn).double()[torch.arange(rows * cols) % 125]
    middle = 1 + (2 * torch.arange(rows * cols) + 1) * 2.0**-8
    scale = (middle / values).float()
    exact = values * scale.double()
    assert int((exact.bfloat16() != rounded_once(exact)).sum()) >= 10
    tensors[full("q_a_proj.weight_scale_inv")] = scale.view(rows, cols)
    weight = values.view(rows, cols).repeat_interleave(128, 0).repeat_interleave(128, 1)
    tensors[full("q_a_proj.weight")] = weight.to(torch.float8_e4m3fn)
    binding = verify(write_checkpoint(tmp_path, config, tensors))
    loaded = load_attention(binding, 3, DsaTpPlan(0, 1, binding.geometry))["linear_q_down_proj.weight"]
    assert torch.equal(loaded[::128, ::128], rounded_once(exact).view(rows, cols))
    assert torch.equal(loaded, loaded[::128, ::128].repeat_interleave(128, 0).repeat_interleave(128, 1))


def test_a_call_that_does_not_fit_the_checkpoint_is_refused(tmp_path: Path) -> None:
    binding, _ = saved(tmp_path)
    plan = DsaTpPlan(0, 1, binding.geometry)
    for layer in (0, 2, 5, "3"):
        with pytest.raises(ValueError, match=r"layer is .*; accepted are \(1, 3, 4\)"):
            load_attention(binding, layer, plan)
    other = DsaTpPlan(0, 1, DsaGeometry.from_config(tiny_config(hidden_size=176, index_n_heads=5)))
    with pytest.raises(ValueError, match="hidden_size=176, not 168, index_n_heads=5, not 3"):
        load_attention(binding, 3, other)


def test_a_file_that_changes_after_verification_is_named(tmp_path: Path) -> None:
    binding, _ = saved(tmp_path, files=1)
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(
        ValueError, match=r"model\.safetensors has 2 bytes; accepted are the \d+ it had when it was verified"
    ):
        load_attention(binding, 3, DsaTpPlan(0, 1, binding.geometry))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_put_together_are_the_checkpoint(tmp_path: Path, size: int) -> None:
    binding, tensors = saved(tmp_path)
    names = []
    for layer, name, tensor in merged(binding, size):
        names.append((layer, name))
        assert torch.equal(bits(tensor.bfloat16()), bits(tensors[full(name, layer)]))
    assert names == [(layer, name) for layer in LAYERS for name in layer_shapes(TINY)]


def test_ranks_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    binding, _ = saved(tmp_path)

    def refused(match: str, **changes: Tensor | None) -> None:
        ranks = shards(binding, 3, 2)
        for name, tensor in changes.items():
            ranks[1].pop(name) if tensor is None else ranks[1].update({name: tensor})
        with pytest.raises(ValueError, match=match):
            list(merge_attention(ranks, binding.geometry))

    norm = shards(binding, 3, 1)[0]["q_layernorm.weight"]
    drifted = norm.clone()
    drifted[3] = drifted[3].nextafter(torch.tensor(9.0, dtype=torch.bfloat16))
    refused(
        r"shards\[1\]\['q_layernorm.weight'\] is not as on rank 0; accepted are equal bits",
        **{"q_layernorm.weight": drifted},
    )
    refused(
        r"shards\[1\]\['q_layernorm.weight'\] is .*\[135\]; accepted is .*\[136\]", **{"q_layernorm.weight": norm[1:]}
    )
    refused(r"is torch.float32 .*; accepted is torch.bfloat16", **{"q_layernorm.weight": norm.float()})
    refused(r"shards\[1\] lacks or adds \['q_layernorm.weight'\]; accepted are the 14", **{"q_layernorm.weight": None})
    refused(r"shards\[1\] lacks or adds \['bias'\]", bias=norm)
    with pytest.raises(ValueError, match="tp_size is 3; accepted is a divisor of num_attention_heads=4"):
        list(merge_attention(shards(binding, 3, 1) * 3, binding.geometry))
    with pytest.raises(ValueError, match="shards is empty"):
        list(merge_attention([], binding.geometry))


def negative_zero_in_the_norm(folder: Path) -> CheckpointBinding:
    config = tiny_config()
    tensors = checkpoint_tensors(config)
    tensors[full("q_a_layernorm.weight")][0] = -0.0
    return verify(write_checkpoint(folder, config, tensors))


def test_replicas_are_compared_by_their_bits(tmp_path: Path) -> None:
    binding = negative_zero_in_the_norm(tmp_path)
    ranks = shards(binding, 3, 2)
    ranks[1]["q_layernorm.weight"][0] = 0.0
    with pytest.raises(ValueError, match="not as on rank 0"):
        list(merge_attention(ranks, binding.geometry))
