"""The command line: verifying checkpoints, converting them, and that no folder is ever left incomplete."""

import filecmp
import hashlib
import json
import os
import resource
import shutil
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from command_line import command, tiny_checkpoint
from hf_checkpoints import (
    DSA_LAYERS,
    LAYERS,
    MTP_LAYER,
    PREFIX,
    TINY,
    checkpoint_tensors,
    full,
    layer_shapes,
    tiny_config,
    write_checkpoint,
)
from safetensors.torch import load_file, save_file

from mcore_dsa import safetensors_files
from mcore_dsa.binding import MEGATRON_NAMES, DsaStorage, verify
from mcore_dsa.checkpoint import load_attention
from mcore_dsa.cli import convert
from mcore_dsa.files import digest_of, names_in, write_digests
from mcore_dsa.tp_plan import DsaTpPlan


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path)


def test_a_sound_checkpoint_is_verified(checkpoint: Path, tmp_path: Path) -> None:
    status, out, err = command("verify", checkpoint)
    assert (status, err) == (0, "")
    assert "no fault" in out
    assert json.loads(command("verify", checkpoint, "--json")[1]) == json.loads(
        json.dumps(verify(checkpoint).to_dict())
    )
    elsewhere = tmp_path / "elsewhere.json"
    (checkpoint / "config.json").rename(elsewhere)
    assert command("verify", checkpoint)[0] == 2
    assert command("verify", checkpoint, "--config", elsewhere)[0] == 0


def test_a_faulty_checkpoint_is_reported_with_one(tmp_path: Path) -> None:
    config = tiny_config()
    tensors = checkpoint_tensors(config)
    del tensors[full("indexer.k_norm.bias")]
    tensors[full("o_proj.weight", layer=1)] = tensors[full("o_proj.weight", layer=1)].T
    write_checkpoint(tmp_path / "bad", config, tensors)
    target = tmp_path / "target"
    for words in (["verify", tmp_path / "bad"], ["convert", "hf2mcore", tmp_path / "bad", target, "--tp", 2]):
        status, out, err = command(*words)
        assert (status, err) == (1, "")
        assert full("indexer.k_norm.bias") in out
        assert full("o_proj.weight", layer=1) in out
        status, out, err = command(*words, "--json")
        assert (status, err) == (1, "")
        assert json.loads(out) == json.loads(json.dumps(verify(tmp_path / "bad").to_dict()))
    template = ["convert", "mcore2hf", tmp_path / "ranks", target, "--template", tmp_path / "bad"]
    sound = write_checkpoint(tmp_path / "good", config, checkpoint_tensors(config))
    assert command("convert", "hf2mcore", sound, tmp_path / "ranks", "--tp", 2)[0] == 0
    assert command(*template)[0] == 1
    assert not target.exists()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_ranks_hold_what_they_load_and_go_back_to_the_byte(checkpoint: Path, tmp_path: Path, tp: int) -> None:
    ranks, back, alone = (tmp_path / name for name in ("ranks", "back", "alone"))
    status, out, _ = command("convert", "hf2mcore", checkpoint, ranks, "--tp", tp, "--json")
    report = json.loads(out)
    assert (status, report["layers"], report["tp"]) == (0, [*LAYERS], tp)
    assert sorted(path.name for path in ranks.iterdir()) == sorted(["SHA256SUMS", "config.json", *report["files"]])
    binding = verify(checkpoint)
    for rank, file in enumerate(report["files"]):
        held = load_file(ranks / file)
        assert len(held) == 14 * len(LAYERS)
        for layer in LAYERS:
            for name, tensor in load_attention(binding, layer, DsaTpPlan(rank, tp, binding.geometry)).items():
                assert torch.equal(held[f"layers.{layer}.self_attention.{name}"], tensor)
    assert command("convert", "mcore2hf", ranks, back, "--template", checkpoint)[0] == 0
    files = sorted(path.name for path in checkpoint.iterdir())
    assert filecmp.cmpfiles(checkpoint, back, files, shallow=False) == (files, [], [])
    status, out, _ = command("convert", "mcore2hf", ranks, alone, "--json")
    assert (status, json.loads(out)["layers"]) == (0, [*LAYERS])
    assert not verify(alone).faults
    written = {name: tensor for file in alone.glob("*.safetensors") for name, tensor in load_file(file).items()}
    whole = checkpoint_tensors(tiny_config())
    assert written.keys() == {full(name, layer) for layer in LAYERS for name in layer_shapes(TINY)}
    assert all(torch.equal(tensor, whole[name]) for name, tensor in written.items())


def test_a_range_of_layers_goes_into_a_template_alone(checkpoint: Path, tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    assert command("convert", "hf2mcore", checkpoint, ranks, "--tp", 2, "--layers", "2-3")[0] == 0
    assert {name.split(".")[1] for file in ranks.glob("*.safetensors") for name in load_file(file)} == {"3"}
    assert command("convert", "mcore2hf", ranks, tmp_path / "back", "--template", checkpoint)[0] == 0
    status, _, err = command("convert", "mcore2hf", ranks, tmp_path / "alone")
    assert status == 2
    assert "--template is absent; accepted is a checkpoint to copy, where source lacks DSA layers: [1]" in err
    single = tmp_path / "single"
    assert command("convert", "hf2mcore", checkpoint, single, "--tp", 1, "--layers", "1")[0] == 0
    assert len(load_file(single / "tp-00000-of-00001.safetensors")) == 14


@pytest.mark.parametrize("storage", [DsaStorage.FP8, DsaStorage.F32, DsaStorage.NVFP4])
def test_other_storages_come_back_as_what_ranks_hold(tmp_path: Path, storage: DsaStorage) -> None:
    config = tiny_config(storage)
    tensors = checkpoint_tensors(config, storage, layers=DSA_LAYERS, prefix="model.")
    source = write_checkpoint(tmp_path / "source", config, tensors)
    assert command("convert", "hf2mcore", source / "model.safetensors", tmp_path / "ranks", "--tp", 2)[0] == 0
    assert command("convert", "mcore2hf", tmp_path / "ranks", tmp_path / "back")[0] == 0
    binding, back = verify(source), verify(tmp_path / "back")
    assert not back.faults
    assert back.prefix == "model."
    assert back.storage is (DsaStorage.F32 if storage is DsaStorage.F32 else DsaStorage.BF16)
    for layer in DSA_LAYERS:
        ours, theirs = (load_attention(each, layer, DsaTpPlan(1, 2, each.geometry)) for each in (binding, back))
        assert all(torch.equal(ours[name], theirs[name]) for name in MEGATRON_NAMES.values())


def unusual_block(folder: Path) -> Path:
    """An NVFP4 checkpoint whose multi-token-prediction block is in FP8."""
    config = tiny_config(DsaStorage.NVFP4)
    tensors = checkpoint_tensors(config, DsaStorage.NVFP4)
    fp8 = checkpoint_tensors(config, DsaStorage.FP8)
    own = {name: tensor for name, tensor in fp8.items() if f"layers.{MTP_LAYER}.self_attn." in name}
    return write_checkpoint(folder, config, tensors | own, files=3)


def test_one_unusual_block_keeps_no_other_layer(tmp_path: Path) -> None:
    source, ranks, back = unusual_block(tmp_path / "source"), tmp_path / "ranks", tmp_path / "back"
    faults = json.loads(json.dumps(verify(source).to_dict()["faults"]))
    assert faults
    for layers in ([], ["--layers", "1-4"], ["--layers", str(MTP_LAYER)]):
        assert command("convert", "hf2mcore", source, ranks, "--tp", 2, *layers)[:1] == (1,)
        assert not ranks.exists()
    status, out, err = command("convert", "hf2mcore", source, ranks, "--tp", 2, "--layers", "1-3", "--json")
    report = json.loads(out)
    assert (status, err, report["ok"], report["layers"]) == (0, "", True, list(DSA_LAYERS))
    assert report["other_faults"] == faults
    status, out, err = command("convert", "mcore2hf", ranks, back, "--template", source)
    assert (status, err) == (0, "")
    assert "Faults elsewhere in the checkpoint, which none of these layers needs" in out
    assert all(fault["tensor"] in out for fault in faults)
    files = sorted(path.name for path in source.iterdir())
    assert filecmp.cmpfiles(source, back, files, shallow=False) == (files, [], [])


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_files_have_the_permissions_that_the_umask_leaves(checkpoint: Path, tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        assert command("convert", "hf2mcore", checkpoint, tmp_path / "ranks", "--tp", 2)[0] == 0
        assert command("convert", "mcore2hf", tmp_path / "ranks", tmp_path / "back")[0] == 0
    finally:
        os.umask(before)
    files = [path for folder in ("ranks", "back") for path in (tmp_path / folder).iterdir()]
    assert len(files) == 4 + 6
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}


def test_each_header_is_read_once(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length is another checkpoint's 200,000 names: to read it for each tensor or layer takes minutes."""
    read: list[str] = []
    original = safetensors_files.read_header

    def spy(file: Path, faults: Any) -> Any:
        read.append(file.name)
        return original(file, faults)

    monkeypatch.setattr(safetensors_files, "read_header", spy)
    monkeypatch.setattr(convert, "read_header", spy)
    monkeypatch.setattr(safetensors, "safe_open", None)
    assert command("convert", "hf2mcore", checkpoint, tmp_path / "ranks", "--tp", 4)[0] == 0
    assert sorted(read) == sorted(path.name for path in checkpoint.glob("*.safetensors"))
    read.clear()
    assert command("convert", "mcore2hf", tmp_path / "ranks", tmp_path / "back")[0] == 0
    assert sorted(read) == sorted(path.name for path in (tmp_path / "ranks").glob("*.safetensors"))


def test_a_disk_that_is_full_is_no_traceback(checkpoint: Path, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        status, out, err = command("convert", "hf2mcore", checkpoint, tmp_path / "ranks", "--tp", 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (status, out) == (2, "")
    assert "tp-00000-of-00002.safetensors cannot be written: " in err
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def damaged(ranks: Path, how: str) -> str:
    """Damage one of two files, rank 1's, as its writer might have; what is to be found in the report."""
    found = written_wrong(ranks, how)
    write_digests(ranks, {name: digest_of(ranks / name) for name in names_in(ranks)})
    return found


def written_wrong(ranks: Path, how: str) -> str:
    file = ranks / "tp-00001-of-00002.safetensors"
    tensors = load_file(file)
    metadata = {"format": "pt", "tp_rank": "1", "tp_size": "2", "storage": "BF16", "prefix": PREFIX}
    norm = "layers.3.self_attention.q_layernorm.weight"
    if how == "absent":
        file.unlink()
        return "expected ranks 0 to 1, found [0]"
    if how == "truncated":
        file.write_bytes(file.read_bytes()[:-7])
        return f"{file.name}: truncated"
    if how == "twice":
        shutil.copyfile(ranks / "tp-00000-of-00002.safetensors", file)
        return f"{file.name}: rank 0, and so is tp-00000-of-00002.safetensors"
    found = {
        "no metadata": "its metadata describe no rank",
        "many ranks": f"{file.name}: expected",
        "half": f"layer 3: {file.name} holds F16; accepted are BF16, F32, F8_E4M3",
        "other storage": f"{file.name}: expected",
        "drifted": "layer 3: shards[1]['q_layernorm.weight'] is not as on rank 0",
        "missing": "layer 3: shards[1] lacks or adds ['q_layernorm.weight']; accepted are the 14 tensors of a layer",
        "ill-shaped": "layer 3: shards[1]['q_layernorm.weight'] is torch.bfloat16 [135]; accepted is",
        "unknown": f"{file.name}: unexpected model.layers.3.q_layernorm.weight",
        "other layers": f"{file.name}: expected",
    }[how]
    if how == "no metadata":
        metadata = {"format": "pt"}
    elif how == "many ranks":
        metadata["tp_size"] = str(10**12)
    elif how == "half":
        tensors[norm] = tensors[norm].half()
    elif how == "other storage":
        metadata["storage"] = "F32"
    elif how == "drifted":
        tensors[norm][5] += 1
    elif how == "missing":
        del tensors[norm]
    elif how == "ill-shaped":
        tensors[norm] = tensors[norm][:-1].clone()
    elif how == "unknown":
        tensors["model.layers.3.q_layernorm.weight"] = tensors.pop(norm)
    else:
        tensors = {name: tensor for name, tensor in tensors.items() if ".4." not in name}
    save_file(tensors, file, metadata=metadata)
    return found


@pytest.mark.parametrize(
    "how",
    [
        "absent",
        "truncated",
        "twice",
        "no metadata",
        "many ranks",
        "half",
        "other storage",
        "drifted",
        "missing",
        "ill-shaped",
        "unknown",
        "other layers",
    ],
)
def test_faulty_ranks_are_reported_and_nothing_is_written(how: str, checkpoint: Path, tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    assert command("convert", "hf2mcore", checkpoint, ranks, "--tp", 2)[0] == 0
    found = damaged(ranks, how)
    before = sorted(path.name for path in tmp_path.iterdir())
    for options in ([], ["--template", checkpoint]):
        status, out, err = command("convert", "mcore2hf", ranks, tmp_path / "target", *options)
        assert (status, err) == (1, "")
        assert found in out
        status, out, err = command("convert", "mcore2hf", ranks, tmp_path / "target", *options, "--json")
        assert (status, err) == (1, "")
        report = json.loads(out)
        assert report["ok"] is False
        assert any(found in fault for fault in report["faults"])
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_ranks_of_a_group_that_is_not_there_are_counted_without_a_list(checkpoint: Path, tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    assert command("convert", "hf2mcore", checkpoint, ranks, "--tp", 1)[0] == 0
    (file,) = ranks.glob("*.safetensors")
    metadata = {"tp_rank": "0", "tp_size": str(10**12), "storage": "BF16", "prefix": PREFIX}
    save_file(load_file(file), file, metadata=metadata)
    status, out, _ = command("convert", "mcore2hf", ranks, tmp_path / "target")
    assert (status, out) == (1, f"{ranks}: expected ranks 0 to {10**12 - 1}, found [0]\n")


def test_files_are_what_was_written_or_named(checkpoint: Path, tmp_path: Path) -> None:
    ranks, back = tmp_path / "ranks", tmp_path / "back"
    assert command("convert", "hf2mcore", checkpoint, ranks, "--tp", 2)[0] == 0
    assert command("convert", "mcore2hf", ranks, back)[0] == 0
    for folder in (ranks, back):
        subprocess.run(["sha256sum", "--quiet", "--check", "SHA256SUMS"], cwd=folder, check=True)
    for read, *options in (
        (back, "hf2mcore", back, "--tp", 2),
        (ranks, "mcore2hf", ranks),
        (back, "mcore2hf", ranks, "--template", back),
    ):
        file = max(read.glob("*.safetensors"))
        sound = file.read_bytes()
        flipped = bytearray(sound)
        flipped[-1] ^= 1
        file.write_bytes(flipped)
        status, out, err = command("convert", *options[:2], tmp_path / "target", *options[2:])
        assert (status, err) == (1, "")
        assert out.count("\n") == 1
        assert f"{file} has SHA-256 {hashlib.sha256(flipped).hexdigest()[:16]}…" in out
        assert not (tmp_path / "target").exists()
        file.write_bytes(sound)
    (ranks / "SHA256SUMS").unlink()
    status, out, err = command("convert", "mcore2hf", ranks, tmp_path / "target")
    assert (status, err) == (1, "")
    assert out.startswith(f"{ranks / 'SHA256SUMS'} is missing; accepted is hf2mcore's")


def test_what_a_killed_conversion_left_is_named_and_removed(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    left, others, strange = (tmp_path / f".{name}.partial" for name in ("ranks.0badcafe", "rank.0badcafe", "ranks.old"))
    for folder in (left, others, strange):
        folder.mkdir()
        (folder / "file").touch()
    assert command("convert", "hf2mcore", checkpoint, tmp_path / "ranks", "--tp", 2)[0] == 0
    assert (left.exists(), others.exists(), strange.exists()) == (False, True, True)
    assert f"removed {left}, which a process that was killed had left" in caplog.messages


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_a_conversion_that_ends_early_leaves_nothing(
    error: BaseException, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []

    def fail_in_the_second(tensors: Any, path: Path, metadata: Any) -> None:
        save_file(tensors, path, metadata=metadata)
        written.append(path)
        if len(written) == 2:
            raise error

    monkeypatch.setattr(safetensors.torch, "save_file", fail_in_the_second)
    status, out, err = command("convert", "hf2mcore", checkpoint, tmp_path / "target", "--tp", 4)
    assert (status, out) == (130 if isinstance(error, KeyboardInterrupt) else 2, "")
    assert err.count("\n") == 1
    assert len(written) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
