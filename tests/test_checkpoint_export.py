"""Checkpoints that are written, and folders that appear whole or not at all."""

import errno
import filecmp
import json
import math
import os
import resource
import stat
from collections.abc import Iterator, Mapping
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
    MTP_LAYER,
    PREFIX,
    TINY,
    bits,
    checkpoint_tensors,
    dequantised,
    full,
    layer_shapes,
    merged,
    saved,
    tiny_config,
    write_checkpoint,
)
from torch import Tensor

from mcore_dsa.binding import DsaStorage, verify
from mcore_dsa.checkpoint import LayerTensor, export_attention, write_attention

BF16, F32, FP8, NVFP4 = DsaStorage.BF16, DsaStorage.F32, DsaStorage.FP8, DsaStorage.NVFP4


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
    copied.remove("SHA256SUMS")
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
    assert everything_in(tmp_path / "target") == ["SHA256SUMS", "config.json", "model.safetensors"]
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


def test_views_of_one_storage_are_written_as_what_they_show(tmp_path: Path) -> None:
    shared = torch.randn(400_000).bfloat16()
    right: dict[tuple[int, str], Tensor] = {}
    for layer in DSA_LAYERS:
        for name, shape in layer_shapes(TINY).items():
            elements = math.prod(shape)
            view = shared[layer : layer + elements]
            right[layer, name] = view.view(shape[::-1]).T if len(shape) == 2 else view
    given = ((layer, name, tensor) for (layer, name), tensor in right.items())
    write_attention(given, tmp_path / "target", config=tiny_config())
    written = verify(tmp_path / "target")
    for layer, name, tensor in merged(written, 1, DSA_LAYERS):
        assert torch.equal(tensor.bfloat16(), right[layer, name])


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
        ({APE: third}, f"{APE} of layer 3 is torch.float32 that is not exact in torch.bfloat16"),
        ({APE: third[:3]}, rf"{APE} of layer 3 has shape \[3, 20\]; accepted is \[4, 20\]"),
        ({APE: None}, f"tensors lacks {APE} of layer 3"),
    ]:
        tensors_again = changed(merged(binding, 2, DSA_LAYERS), change)
        refused(changed(merged(binding, 2, DSA_LAYERS), change), match)
    tensors_again = iter([(2, APE, third)])
    refused(iter([(2, APE, third)]), "tensors has 'indexer.index_kpool_compress_ape' of layer 2; accepted")
    twice = [(3, APE, third.bfloat16())] * 2
    tensors_again = iter(twice)
    refused(iter(twice), "compress_ape of layer 3 twice")


def test_what_cannot_be_exported_to_is_refused(tmp_path: Path) -> None:
    quantised, _ = saved(tmp_path / "fp8", FP8)
    with pytest.raises(ValueError, match="template is FP8; accepted is attention in BF16 or F32"):
        export_attention(iter(()), tmp_path / "target", template=quantised)
    binding, _ = saved(tmp_path / "source")
    with pytest.raises(FileExistsError, match=r"target is .*; accepted is a new name or an empty folder"):
        export_attention(iter(()), tmp_path / "source", template=binding)
    with pytest.raises(FileExistsError):
        export_attention(iter(()), tmp_path / "source" / "config.json", template=binding)
    for arguments, match in [
        ({"storage": FP8}, "storage is FP8; accepted are"),
        ({"prefix": "x."}, "prefix is 'x.'; accepted are"),
    ]:
        with pytest.raises(ValueError, match=match):
            write_attention(iter(()), tmp_path / "target", config=tiny_config(), **arguments)
    (tmp_path / "source" / "model-00001-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match="missing file"):
        export_attention(iter([(3, APE, torch.ones(4, 20))]), tmp_path / "target", template=verify(tmp_path / "source"))
    assert everything_in(tmp_path) == ["fp8", "source"]


def test_a_template_s_faults_elsewhere_do_not_block(tmp_path: Path) -> None:
    """The multi-token-prediction block in FP8: it stays as it is while the other layers are replaced."""
    config = tiny_config(NVFP4)
    tensors = checkpoint_tensors(config, NVFP4)
    fp8 = {name: tensor for name, tensor in checkpoint_tensors(config, FP8).items() if f".{MTP_LAYER}.self_" in name}
    binding = verify(write_checkpoint(tmp_path / "source", config, tensors | fp8, files=3))
    assert binding.faults
    doubled = ((layer, name, tensor * 2) for layer, name, tensor in merged(binding, 2, DSA_LAYERS))
    export_attention(doubled, tmp_path / "target", template=binding)
    exported = verify(tmp_path / "target")
    assert exported.faults == binding.faults
    for name, tensor in (tensors | fp8).items():
        factor = 2 if any(f"layers.{layer}.self_attn." in name for layer in DSA_LAYERS) else 1
        for file in exported.files:
            with safetensors.safe_open(file, framework="pt") as opened:
                if name in opened.keys():  # noqa: SIM118
                    right = tensor * factor if factor == 2 else tensor
                    assert torch.equal(bits(opened.get_tensor(name)), bits(right))
    with pytest.raises(ValueError, match="fault"):
        export_attention(iter([(MTP_LAYER, APE, torch.ones(4, 20))]), tmp_path / "other", template=binding)
    assert everything_in(tmp_path) == ["source", "target"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    binding, _ = saved(tmp_path / "source")
    before = os.umask(umask)
    try:
        export_attention(merged(binding, 2), tmp_path / "copy", template=binding)
        write_attention(merged(binding, 2), tmp_path / "alone", config=tiny_config(), mtp=True)
    finally:
        os.umask(before)
    for folder in ("copy", "alone"):
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / folder).iterdir()}
        assert modes == dict.fromkeys(modes, 0o666 & ~umask)
        assert len(modes) == 6


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
