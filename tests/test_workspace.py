"""Scratch as a description: what it counts is what it allocates, and what operations take inside is counted only."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from mcore_dsa.workspace import Buffer, Workspace

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
