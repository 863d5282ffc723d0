"""Loading a rank's tensors, putting ranks together again, and folders that appear whole or not at all."""

import errno
import filecmp
import json
import os
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hf_checkpoints import (
    DSA_LAYERS,
    FP8_WEIGHTS,
    MTP_LAYER,
    PREFIX,
    TINY,
    checkpoint_tensors,
    dequantised,
    full,
    layer_shapes,
    rounded_once,
    tiny_config,
    write_checkpoint,
)
from torch import Tensor

from mcore_dsa.binding import MEGATRON_NAMES, CheckpointBinding, DsaStorage, verify
from mcore_dsa.checkpoint import LayerTensor, export_attention, load_attention, merge_attention, write_attention
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.tp_plan import DsaTpPlan

BF16, F32, FP8, NVFP4 = DsaStorage.BF16, DsaStorage.F32, DsaStorage.FP8, DsaStorage.NVFP4
APE = "indexer.index_kpool_compress_ape"
LAYERS = (*DSA_LAYERS, MTP_LAYER)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def saved(folder: Path, storage: DsaStorage = BF16, files: int = 3) -> tuple[CheckpointBinding, dict[str, Tensor]]:
    config = tiny_config(storage)
    tensors = checkpoint_tensors(config, storage)
    binding = verify(write_checkpoint(folder, config, tensors, files))
    assert not binding.faults
    return binding, tensors


def shards(binding: CheckpointBinding, layer: int, size: int) -> list[dict[str, Tensor]]:
    return [load_attention(binding, layer, DsaTpPlan(rank, size, binding.geometry)) for rank in range(size)]


def merged(binding: CheckpointBinding, size: int, layers: tuple[int, ...] = LAYERS) -> Iterator[LayerTensor]:
    for layer in layers:
        for name, tensor in merge_attention(shards(binding, layer, size), binding.geometry):
            yield layer, name, tensor


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


def test_only_the_planned_slices_are_read_and_one_tensor_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    binding, _ = saved(tmp_path)
    elements: dict[str, int] = {}
    opened: list[int] = []
    original = safetensors.safe_open

    class Spy:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = original(*args, **kwargs)

        def __enter__(self) -> "Spy":
            self.file.__enter__()
            opened.append(len(opened))
            return self

        def __exit__(self, *failure: Any) -> None:
            opened.pop()
            self.file.__exit__(*failure)

        def get_slice(self, name: str) -> "Slice":
            return Slice(name, self.file.get_slice(name))

    class Slice:
        def __init__(self, name: str, part: Any) -> None:
            self.name, self.part = name, part

        def __getitem__(self, index: Any) -> Tensor:
            assert opened == [0]
            tensor = self.part[index]
            elements[self.name] = elements.get(self.name, 0) + tensor.numel()
            return tensor

    monkeypatch.setattr(safetensors, "safe_open", Spy)
    plan = DsaTpPlan(1, 4, binding.geometry)
    load_attention(binding, 3, plan)
    assert elements == {full(tensor.name): tensor.local_rows * tensor.local_row_elems for tensor in plan.tensors}


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
        with pytest.raises(ValueError, match=r"layer must be one of \(1, 3, 4\), got"):
            load_attention(binding, layer, plan)
    other = DsaTpPlan(0, 1, DsaGeometry.from_config(tiny_config(hidden_size=176, index_n_heads=5)))
    with pytest.raises(ValueError, match="hidden_size=176, not 168, index_n_heads=5, not 3"):
        load_attention(binding, 3, other)


def test_a_file_that_changes_after_verification_is_named(tmp_path: Path) -> None:
    binding, _ = saved(tmp_path, files=1)
    (tmp_path / "model.safetensors").write_bytes(b"{}")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read any more"):
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
    refused(r"ranks \[1\] hold q_layernorm.weight otherwise", **{"q_layernorm.weight": drifted})
    refused(r"shards\[1\]\['q_layernorm.weight'\].*\[136\], got .*\[135\]", **{"q_layernorm.weight": norm[1:]})
    refused(r"must be torch.bfloat16 .* got torch.float32", **{"q_layernorm.weight": norm.float()})
    refused(r"shards\[1\] must hold the 14 .*\['q_layernorm.weight'\]", **{"q_layernorm.weight": None})
    refused(r"shards\[1\] must hold the 14 .*\['bias'\]", bias=norm)
    with pytest.raises(ValueError, match="num_attention_heads=4, got 3"):
        list(merge_attention(shards(binding, 3, 1) * 3, binding.geometry))
    with pytest.raises(ValueError, match="shards must hold at least one rank"):
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
    with pytest.raises(ValueError, match="otherwise than rank 0"):
        list(merge_attention(ranks, binding.geometry))


def everything_in(folder: Path) -> list[str]:
    return sorted(child.name for child in folder.iterdir())


@pytest.mark.parametrize("storage", [BF16, F32, NVFP4])
@pytest.mark.parametrize("files", [1, 3])
def test_exported_back_every_byte_is_the_same(tmp_path: Path, storage: DsaStorage, files: int) -> None:
    source, target = tmp_path / "source", tmp_path / "deep" / "target"
    binding, _ = saved(source, storage, files)
    (source / "tokenizer.json").write_text("{}")
    (source / "subfolder").mkdir()
    export_attention(merged(binding, 2), target, template=binding)
    copied = everything_in(target)
    assert copied == [name for name in everything_in(source) if name != "subfolder"]
    assert filecmp.cmpfiles(source, target, copied, shallow=False) == (copied, [], [])
    assert everything_in(target.parent) == ["target"]


def test_exported_tensors_take_the_place_of_the_template_s(tmp_path: Path) -> None:
    binding, tensors = saved(tmp_path / "source")
    doubled = ((layer, name, tensor * 2) for layer, name, tensor in merged(binding, 2, (3,)))
    export_attention(doubled, tmp_path / "target", template=binding)
    exported = verify(tmp_path / "target")
    assert not exported.faults
    for file in exported.files:
        with safetensors.safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                factor = 2 if name.startswith(f"{PREFIX}layers.3.self_attn.") else 1
                assert torch.equal(opened.get_tensor(name), tensors[name] * factor)


def test_a_single_file_is_exported_with_its_configuration_alone(tmp_path: Path) -> None:
    saved(tmp_path / "source", files=1)
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    binding = verify(tmp_path / "source" / "model.safetensors")
    export_attention(merged(binding, 1), tmp_path / "target", template=binding)
    assert everything_in(tmp_path / "target") == ["config.json", "model.safetensors"]
    assert not verify(tmp_path / "target").faults


@pytest.mark.parametrize(("storage", "mtp"), [(BF16, True), (BF16, False), (F32, True)])
def test_a_new_checkpoint_of_attention_alone(tmp_path: Path, storage: DsaStorage, mtp: bool) -> None:
    binding, tensors = saved(tmp_path / "source", FP8)
    layers = LAYERS if mtp else DSA_LAYERS
    write_attention(
        merged(binding, 2, layers), tmp_path / "target", config=tiny_config(FP8), storage=storage, prefix="", mtp=mtp
    )
    written = verify(tmp_path / "target")
    assert (written.faults, written.storage, written.prefix) == ((), storage, "")
    assert written.mtp_layers == (LAYERS[2:] if mtp else ())
    assert written.geometry == binding.geometry
    for layer, name, tensor in merged(written, 1, layers):
        whole = tensors[full(name, layer)]
        if name in FP8_WEIGHTS:
            whole = dequantised(whole, tensors[full(name, layer) + "_scale_inv"])
        assert torch.equal(tensor.float(), whole.float())
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert "quantization_config" not in config
    index = json.loads((tmp_path / "target" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(stored.stop - stored.start for stored in written.tensors.values())


def changed(tensors: Iterator[LayerTensor], change: Mapping[str, Any]) -> Iterator[LayerTensor]:
    """Tensors of layer 3 replaced, or left out where the replacement is None."""
    for layer, name, tensor in tensors:
        replacement = change.get(name, tensor) if layer == 3 else tensor
        if replacement is not None:
            yield layer, name, replacement


def test_tensors_that_do_not_fit_are_refused_and_leave_nothing_behind(tmp_path: Path) -> None:
    binding, _ = saved(tmp_path / "source")
    target = tmp_path / "target"
    third = torch.full((4, 20), 1 / 3)

    def refused(tensors: Iterator[LayerTensor], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            export_attention(tensors, target, template=binding)
        with pytest.raises(ValueError, match=match):
            write_attention(tensors_again, target, config=tiny_config())
        assert everything_in(tmp_path) == ["source"]

    for change, match in [
        ({APE: third}, f"{APE} of layer 3 must be exact in torch.bfloat16, got torch.float32"),
        ({APE: third[:3]}, rf"{APE} of layer 3 must be \[4, 20\], got \[3, 20\]"),
        ({APE: None}, f"missing: {APE} of layer 3"),
    ]:
        tensors_again = changed(merged(binding, 2, DSA_LAYERS), change)
        refused(changed(merged(binding, 2, DSA_LAYERS), change), match)
    tensors_again = iter([(2, APE, third)])
    refused(iter([(2, APE, third)]), "'indexer.index_kpool_compress_ape' of layer 2 is none of")
    twice = [(3, APE, third.bfloat16())] * 2
    tensors_again = iter(twice)
    refused(iter(twice), "compress_ape of layer 3 comes twice")


def test_what_cannot_be_exported_to_is_refused(tmp_path: Path) -> None:
    quantised, _ = saved(tmp_path / "fp8", FP8)
    with pytest.raises(ValueError, match="template must hold attention in BF16 or F32, got FP8"):
        export_attention(iter(()), tmp_path / "target", template=quantised)
    binding, _ = saved(tmp_path / "source")
    with pytest.raises(FileExistsError, match="target must not exist or be an empty folder"):
        export_attention(iter(()), tmp_path / "source", template=binding)
    with pytest.raises(FileExistsError):
        export_attention(iter(()), tmp_path / "source" / "config.json", template=binding)
    for arguments, match in [
        ({"storage": FP8}, "storage must be BF16 or F32"),
        ({"prefix": "x."}, "prefix must be one"),
    ]:
        with pytest.raises(ValueError, match=match):
            write_attention(iter(()), tmp_path / "target", config=tiny_config(), **arguments)
    (tmp_path / "source" / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="missing file"):
        export_attention(iter(()), tmp_path / "target", template=verify(tmp_path / "source"))
    assert everything_in(tmp_path) == ["fp8", "source"]


@pytest.mark.parametrize("function", ["fsync", "replace", "write"])
def test_a_write_that_fails_leaves_no_file_under_the_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    binding, _ = saved(tmp_path / "source")
    tensors = list(merged(binding, 1))

    def full_disk(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "target").mkdir()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        if function == "write":
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
        else:
            patch.setattr(os, function, full_disk)
        try:
            with pytest.raises(OSError, match=r"No space left|File too large"):
                export_attention(iter(tensors), tmp_path / "target", template=binding)
            with pytest.raises(OSError, match=r"No space left|File too large"):
                write_attention(iter(tensors), tmp_path / "target", config=tiny_config(), mtp=True)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert everything_in(tmp_path) == ["source", "target"]
    assert everything_in(tmp_path / "target") == []
    export_attention(iter(tensors), tmp_path / "target", template=binding)
    assert not verify(tmp_path / "target").faults


def test_an_interrupted_write_leaves_no_file_under_the_final_name(tmp_path: Path) -> None:
    binding, _ = saved(tmp_path / "source")

    def interrupted() -> Iterator[LayerTensor]:
        for count, item in enumerate(merged(binding, 1)):
            if count == 20:
                raise KeyboardInterrupt
            yield item

    with pytest.raises(KeyboardInterrupt):
        export_attention(interrupted(), tmp_path / "target", template=binding)
    assert everything_in(tmp_path) == ["source"]
