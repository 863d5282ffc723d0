"""Scratch as a description: what it counts is what it allocates, and what operations take inside is counted only."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_dsa.settings import read_settings
from mcore_dsa.workspace import Buffer, Workspace, bytes_allowed, device_bytes

BUFFERS = st.builds(
    Buffer,
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.sampled_from([torch.float32, torch.bool, torch.int64, torch.bfloat16]),
    zeroed=st.booleans(),
    inside=st.booleans(),
)


@given(st.dictionaries(st.sampled_from("abcdef"), BUFFERS))
def test_it_counts_what_it_allocates(buffers: dict[str, Buffer]) -> None:
    workspace = Workspace(buffers)
    held = workspace.allocate(torch.device("cpu"))
    assert held.keys() == {name for name, buffer in buffers.items() if not buffer.inside}
    for name, tensor in held.items():
        assert (tensor.dtype, tuple(tensor.shape)) == (buffers[name].dtype, buffers[name].shape)
        assert not buffers[name].zeroed or not tensor.any()
    inside = sum(math.prod(b.shape) * b.dtype.itemsize for b in buffers.values() if b.inside)
    assert workspace.nbytes == inside + sum(tensor.nbytes for tensor in held.values())


@pytest.mark.parametrize("gib", [0, 1, 79, 139])
def test_a_budget_that_nobody_gave_is_that_of_the_module(gib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=gib << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        settings = read_settings({}, device_bytes=device_bytes(device))
        assert bytes_allowed("score_bytes", None, device) == settings.score_bytes.value == settings.attend_bytes.value
        assert bytes_allowed("score_bytes", 7, device) == 7
