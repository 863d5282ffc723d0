"""Values of a checkpoint that no header shows: NaN, infinities, zeros throughout, scales of zero."""

import json
import math
import struct
from pathlib import Path

import pytest
import torch
from command_line import command
from hf_checkpoints import FP8_WEIGHTS, LAYERS, checkpoint_tensors, full, layer_shapes, tiny_config, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_dsa import values
from mcore_dsa.binding import CheckpointBinding, DsaStorage, verify
from mcore_dsa.safetensors_files import FaultKind
from mcore_dsa.values import value_faults

NAMES = sorted(layer_shapes(tiny_config()["text_config"]))
SCALES = [f"{name}_scale_inv" for name in FP8_WEIGHTS]


@pytest.fixture(scope="module")
def bindings(tmp_path_factory: pytest.TempPathFactory) -> dict[DsaStorage, CheckpointBinding]:
    """A sound checkpoint of each storage; the layer norm's bias is as a fresh one's."""
    found = {}
    for storage in DsaStorage:
        tensors = checkpoint_tensors(tiny_config(storage), storage)
        tensors[full("indexer.k_norm.bias")].zero_()
        folder = write_checkpoint(tmp_path_factory.mktemp(storage), tiny_config(storage), tensors, files=2)
        found[storage] = verify(folder)
        assert not found[storage].faults
    return found


def faults_with(binding: CheckpointBinding, name: str, start: int, written: bytes) -> set[tuple[FaultKind, str, str]]:
    """What is found once these bytes stand in a tensor, which then is what it was."""
    stored = binding.tensors[name]
    with stored.file.open("r+b") as stream:
        stream.seek(stored.start + start)
        before = stream.read(len(written))
        for content, found in ((written, True), (before, False)):
            stream.seek(stored.start + start)
            stream.write(content)
            stream.flush()
            if found:
                faults = value_faults(binding)
    return {(fault.kind, fault.tensor, fault.found) for fault in faults}


@pytest.mark.parametrize("storage", DsaStorage)
def test_sound_values_have_no_fault(bindings: dict[DsaStorage, CheckpointBinding], storage: DsaStorage) -> None:
    assert value_faults(bindings[storage]) == ()


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from([*NAMES, *SCALES]),
    layer=st.sampled_from(LAYERS),
    what=st.sampled_from(["nan", "inf", "-inf", "zeros", "a zero"]),
    at=st.integers(0, 2**31),
    strip=st.sampled_from([40, 1000, values._STRIP_ELEMENTS]),
)
def test_each_value_that_cannot_be_is_named_with_its_row(
    bindings: dict[DsaStorage, CheckpointBinding], name: str, layer: int, what: str, at: int, strip: int
) -> None:
    """In any tensor of any layer and anywhere in it, however few of its rows are looked at together."""
    is_scale = name in SCALES
    binding = bindings[DsaStorage.FP8 if is_scale else DsaStorage.F32]
    shape = binding.tensors[full(name, layer)].shape
    elements = math.prod(shape)
    place = at % elements
    row = place // (elements // shape[0])
    start, written = (0, bytes(4 * elements)) if what == "zeros" else (4 * place, bytes(4))
    if "zero" not in what:
        written = struct.pack("<f", float(what))
    before, values._STRIP_ELEMENTS = values._STRIP_ELEMENTS, strip
    try:
        found = faults_with(binding, full(name, layer), start, written)
    finally:
        values._STRIP_ELEMENTS = before
    expected = set()
    if "zero" not in what:
        expected = {(FaultKind.NOT_FINITE, f"1 that are not, first {what} in row {row}")}
    elif is_scale:
        expected = {(FaultKind.SCALE_ZERO, f"{elements if what == 'zeros' else 1} of {elements}")}
    elif what == "zeros" and name != "indexer.k_norm.bias":
        expected = {(FaultKind.ZEROS, f"{elements} zeros")}
    assert found == {(kind, full(name, layer), said) for kind, said in expected}


def test_a_nan_of_eight_bits_is_seen(bindings: dict[DsaStorage, CheckpointBinding]) -> None:
    binding, name = bindings[DsaStorage.FP8], full("o_proj.weight")
    found = faults_with(binding, name, 7 * binding.tensors[name].shape[1] + 9, b"\xff")
    assert found == {(FaultKind.NOT_FINITE, name, "1 that are not, first nan in row 7")}


def test_what_headers_and_files_lack_is_left_to_them(tmp_path: Path) -> None:
    """A file that ends too early is a fault of the file, and is not read beyond its end."""
    tensors = checkpoint_tensors(tiny_config())
    tensors[full("indexer.wk.weight")] = torch.full((3, 3), float("nan"), dtype=torch.bfloat16)
    folder = write_checkpoint(tmp_path, tiny_config(), tensors)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    binding = verify(folder)
    assert {fault.kind for fault in binding.faults} == {FaultKind.TRUNCATED, FaultKind.SHAPE}
    assert value_faults(binding) == ()


def test_the_command_reads_values_when_asked(tmp_path: Path) -> None:
    tensors = checkpoint_tensors(tiny_config())
    tensors[full("q_b_proj.weight")][11] = float("inf")
    folder = write_checkpoint(tmp_path, tiny_config(), tensors)
    assert command("verify", folder)[0] == 0
    status, out, err = command("verify", folder, "--values")
    assert (status, err) == (1, "")
    assert f"not finite        {full('q_b_proj.weight')}" in out
    assert "expected finite values, found 136 that are not, first inf in row 11, in model.safetensors" in out
    status, out, _ = command("verify", folder, "--values", "--json")
    (fault,) = json.loads(out)["faults"]
    assert (status, fault["kind"], fault["tensor"]) == (1, "not finite", full("q_b_proj.weight"))
