"""What is wrong with files rather than tensors: cut, damaged, missing, no files at all, at odds with their index."""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_checkpoints import (
    checkpoint_tensors,
    faults_of,
    full,
    read_index,
    refused,
    tiny_config,
    write_checkpoint,
    write_index,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

from mcore_dsa import hf_config
from mcore_dsa.binding import verify
from mcore_dsa.safetensors_files import FaultKind

SECOND = "model-00002-of-00003.safetensors"
O_PROJ = full("o_proj.weight")


@pytest.fixture
def three_files(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, tiny_config(), checkpoint_tensors(tiny_config()), 3)


def dsa_tensors_of(folder: Path, file: str) -> list[str]:
    """The DSA tensors that the index places in `file`."""
    names = [name for name, place in read_index(folder).items() if place == file and ".self_attn." in name]
    return [name for name in names if "layers.0." not in name]


def test_a_missing_file_is_named_with_its_tensors(three_files: Path) -> None:
    (three_files / SECOND).unlink()
    missing = dsa_tensors_of(three_files, SECOND)
    assert len(missing) >= 10
    binding = refused(three_files, {(FaultKind.MISSING_FILE, ""), *((FaultKind.MISSING, name) for name in missing)})
    assert {fault.file for fault in binding.faults} == {SECOND}


@pytest.mark.parametrize("length", [0, 7, 8, 200])
def test_a_file_cut_in_its_header_is_named_with_its_tensors(three_files: Path, length: int) -> None:
    whole = (three_files / SECOND).read_bytes()
    (three_files / SECOND).write_bytes(whole[:length])
    missing = dsa_tensors_of(three_files, SECOND)
    refused(three_files, {(FaultKind.TRUNCATED, ""), *((FaultKind.MISSING, name) for name in missing)})


def test_a_file_cut_in_its_data_names_the_tensors_that_are_cut(three_files: Path) -> None:
    whole = (three_files / SECOND).read_bytes()
    (header_length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + header_length])
    start, stop = next(header[name]["data_offsets"] for name in header if name in dsa_tensors_of(three_files, SECOND))
    kept = (start + stop) // 2
    cut = {entry for entry in header if entry != "__metadata__" and header[entry]["data_offsets"][1] > kept}
    (three_files / SECOND).write_bytes(whole[: 8 + header_length + kept])
    named = {name for name in cut if name in dsa_tensors_of(three_files, SECOND)}
    assert named
    refused(three_files, {(FaultKind.TRUNCATED, ""), *((FaultKind.TRUNCATED, name) for name in named)})


def test_a_duplicate_over_files_is_named(three_files: Path) -> None:
    name = O_PROJ
    other = next(place for place in set(read_index(three_files).values()) if place != read_index(three_files)[name])
    tensors = {}
    with safe_open(three_files / other, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    save_file(tensors | {name: torch.zeros(168, 192, dtype=torch.bfloat16)}, three_files / other)
    found = faults_of(verify(three_files))
    assert (FaultKind.DUPLICATE, name) in found
    assert found <= {(FaultKind.DUPLICATE, name), (FaultKind.INDEX, name)}


def test_an_index_at_odds_with_its_files_is_named(three_files: Path) -> None:
    weight_map = read_index(three_files)
    gone, astray, outside = O_PROJ, full("q_b_proj.weight"), full("kv_b_proj.weight")
    del weight_map[gone]
    weight_map[astray] = next(place for place in set(weight_map.values()) if place != weight_map[astray])
    weight_map[outside] = "../elsewhere.safetensors"
    weight_map[full("q_a_proj.bias")] = SECOND
    write_index(three_files, weight_map)
    refused(
        three_files,
        {
            (FaultKind.INDEX, gone),
            (FaultKind.INDEX, astray),
            (FaultKind.INDEX, outside),
            (FaultKind.UNEXPECTED, full("q_a_proj.bias")),
        },
    )


@pytest.mark.parametrize("text", ["", "[]", "{", '{"weight_map": {}}', '{"weight_map": 3}', '{"a": 1, "a": 2}', "\xff"])
def test_an_unusable_index_is_named(three_files: Path, text: str) -> None:
    (three_files / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    assert faults_of(verify(three_files)) == {(FaultKind.UNREADABLE, "")}
    found = faults_of(verify(three_files / "model.safetensors.index.json", tiny_config()))
    assert found == {(FaultKind.UNREADABLE, ""), (FaultKind.PREFIX, "")}


def rewritten(whole: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """A file with another header and the same data."""
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + whole[8 + length :]


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        (lambda header: header[O_PROJ].update(data_offsets=[0, 64512]), O_PROJ),
        (lambda header: header[O_PROJ].update(shape=[168, 191]), O_PROJ),
        (lambda header: header[O_PROJ].update(shape=[168, -192]), O_PROJ),
        (lambda header: header[O_PROJ].pop("dtype"), O_PROJ),
        (lambda header: header[O_PROJ].update(shape=[10**30, 0], data_offsets=[0, 0]), O_PROJ),
        (lambda header: header[O_PROJ].update(shape=[2] * 100_000), O_PROJ),
        (lambda header: header.update({O_PROJ: 7}), O_PROJ),
        (lambda header: header.update(__metadata__={"format": 3}), ""),
    ],
)
def test_an_ill_formed_header_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], Any], tensor: str) -> None:
    write_checkpoint(tmp_path, tiny_config(), checkpoint_tensors(tiny_config()))
    file = tmp_path / "model.safetensors"
    file.write_bytes(rewritten(file.read_bytes(), change))
    kinds = {kind for kind, name in faults_of(verify(tmp_path)) if name == tensor}
    assert FaultKind.UNREADABLE in kinds


def pointer(size: int) -> bytes:
    """What stands in the place of a file that Git LFS has not fetched."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{64 * 'a'}\nsize {size}\n".encode()


@pytest.mark.parametrize("name", [SECOND, "model.safetensors.index.json"])
def test_a_git_lfs_pointer_is_called_what_it_is(three_files: Path, name: str) -> None:
    missing = dsa_tensors_of(three_files, SECOND) if name == SECOND else []
    (three_files / name).write_bytes(pointer((three_files / name).stat().st_size))
    binding = refused(three_files, {(FaultKind.UNREADABLE, ""), *((FaultKind.MISSING, tensor) for tensor in missing)})
    (fault,) = (fault for fault in binding.faults if not fault.tensor)
    assert fault.file == name
    assert "a Git LFS pointer, not the file itself; git lfs pull fetches it" in fault.found


def test_a_file_of_another_kind_is_told_by_its_first_bytes(three_files: Path) -> None:
    (three_files / SECOND).write_bytes(b"<!DOCTYPE html><html>not found</html>")
    (fault,) = (fault for fault in verify(three_files).faults if not fault.tensor)
    assert (fault.kind, fault.found) == (FaultKind.UNREADABLE, "a file that begins with b'<!DOCTYP'")


@pytest.mark.parametrize("name", [SECOND, "model.safetensors.index.json"])
@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir])
def test_a_pipe_is_not_waited_for(three_files: Path, name: str, make: Callable[[Path], None]) -> None:
    missing = dsa_tensors_of(three_files, SECOND) if name == SECOND else []
    (three_files / name).unlink()
    make(three_files / name)
    binding = refused(three_files, {(FaultKind.UNREADABLE, ""), *((FaultKind.MISSING, tensor) for tensor in missing)})
    assert {fault.expected for fault in binding.faults if not fault.tensor} == {"a regular file"}


def test_a_pipe_in_place_of_a_checkpoint_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    assert (FaultKind.UNREADABLE, "") in faults_of(verify(tmp_path))
    with pytest.raises(ValueError, match=r"model\.safetensors; accepted is a \.safetensors file"):
        verify(tmp_path / "model.safetensors")


def test_a_consolidated_copy_is_not_read_beside_the_model(tmp_path: Path) -> None:
    config = tiny_config()
    write_checkpoint(tmp_path, config, checkpoint_tensors(config))
    copy = tmp_path / "consolidated.safetensors"
    save_file({**checkpoint_tensors(config, seed=1)}, copy)
    binding = verify(tmp_path)
    assert (binding.faults, binding.files) == ((), (tmp_path / "model.safetensors",))
    # Where the model is divided its index counts, and not that of the copy.
    write_checkpoint(tmp_path / "divided", config, checkpoint_tensors(config), files=3)
    copy.rename(tmp_path / "divided" / copy.name)
    (tmp_path / "divided" / "consolidated.safetensors.index.json").write_text("{}")
    binding = verify(tmp_path / "divided")
    assert (binding.faults, len(binding.files)) == ((), 3)
    for file in binding.files:
        file.unlink()
    for index in (tmp_path / "divided").glob("*.index.json"):
        index.unlink()
    assert verify(tmp_path / "divided").files == (tmp_path / "divided" / copy.name,)


class Counted(str):
    """A name that counts how often it is compared."""

    comparisons = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.comparisons += 1
        return str.__eq__(self, str(other))


def test_a_name_that_stands_twice_is_found_in_linear_time() -> None:
    pairs = [(Counted(number), 0) for number in range(2000)] + [(Counted(1999), 1)]
    with pytest.raises(ValueError, match="1999 stands there twice"):
        hf_config._unique(pairs)
    assert Counted.comparisons < 10 * len(pairs)


def opens(file: Path) -> bool:
    try:
        with safe_open(file, framework="pt") as opened:
            return bool(opened.keys())
    except Exception:
        return False


def test_bytes_behind_the_last_tensor_are_reported(three_files: Path) -> None:
    with (three_files / SECOND).open("ab") as file:
        file.write(b"\0")
    binding = refused(three_files, {(FaultKind.UNREADABLE, "")})
    assert [fault.file for fault in binding.faults] == [SECOND]


def test_a_damaged_file_blocks_the_layers_that_it_holds_and_no_other(three_files: Path) -> None:
    """Every layer has tensors in each of the three files; the fourth is none of theirs."""
    other = "model-00004-of-00004.safetensors"
    save_file({"lm_head.weight": torch.ones(3)}, three_files / other)
    write_index(three_files, read_index(three_files) | {"lm_head.weight": other})
    for name, blocked in ((other, False), (SECOND, True)):
        with (three_files / name).open("ab") as file:
            file.write(b"\0")
        binding = verify(three_files)
        assert name in {fault.file for fault in binding.faults}
        for layer in (*binding.layers, *binding.mtp_layers):
            assert bool(binding.faults_of((layer,))) is blocked


def test_a_tensor_that_a_header_names_twice_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), checkpoint_tensors(tiny_config()))
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    text = whole[8 : 8 + length].rstrip()[:-1] + f',"{O_PROJ}":{{}}}}'.encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    binding = verify(tmp_path)
    assert faults_of(binding) == {(FaultKind.UNREADABLE, ""), (FaultKind.PREFIX, "")}
    assert f"{O_PROJ} stands there twice" in str(binding)


def test_a_number_of_many_digits_in_a_header_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, tiny_config(), checkpoint_tensors(tiny_config()))
    file = tmp_path / "model.safetensors"
    text = b'{"a":{"dtype":"U8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}'
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    (fault,) = (fault for fault in verify(tmp_path).faults if fault.kind is FaultKind.UNREADABLE)
    assert fault.found == "a number of 5000 digits stands there; accepted are at most 40"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A checkpoint of one file, and what that file held."""
    folder = tmp_path_factory.mktemp("damaged")
    kinds = ["linear_attention", "deepseek_sparse_attention"]
    config = tiny_config(num_hidden_layers=2, layer_types=kinds, indexer_types=["full"] * 2)
    write_checkpoint(folder, config, checkpoint_tensors(config, layers=(1,)))
    assert not verify(folder).faults
    return folder, (folder / "model.safetensors").read_bytes()


@settings(max_examples=300)
@given(data=st.data())
def test_damaged_files_are_reported_and_never_raise(sound: tuple[Path, bytes], data: st.DataObject) -> None:
    folder, whole = sound
    damaged = bytearray(whole)
    (length,) = struct.unpack("<Q", whole[:8])
    for _ in range(data.draw(st.integers(0, 3))):
        damaged[data.draw(st.integers(0, 8 + length - 1))] = data.draw(st.sampled_from(b'0129{}[],:"aF \x00\xff'))
    kept = data.draw(st.sampled_from([len(damaged), len(damaged) - 1, length, 8 + length, 3]))
    (folder / "model.safetensors").write_bytes(damaged[:kept])
    binding = verify(folder)
    str(binding)
    # What the library refuses must have been reported; the reverse need not hold, the library knows no geometry.
    assert binding.faults or opens(folder / "model.safetensors")
