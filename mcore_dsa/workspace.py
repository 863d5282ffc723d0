"""Scratch memory: what it may take, and a description of it that both allocates and counts, so that no count lags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_dsa.checks import check_bytes
from mcore_dsa.settings import default_bytes


def device_bytes(device: torch.device) -> int:
    """Memory of a CUDA device; 0 for what computes in the host's."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def bytes_allowed(name: str, value: int | None, device: torch.device) -> int:
    """A caller's budget, checked; for None the default on `device`."""
    if value is None:
        return default_bytes(device_bytes(device))
    check_bytes(name, value)
    return value


@dataclass(frozen=True)
class Buffer:
    """One piece of scratch: `shape` elements of `dtype`.

    Attributes:
        zeroed: filled with zeros; otherwise what is read must have been written.
        inside: not allocated here: the most that the operation it is named after takes in its own right.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool = False
    inside: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Workspace:
    """Named buffers that live at the same time."""

    buffers: Mapping[str, Buffer]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def allocate(self, device: torch.device) -> dict[str, Tensor]:
        """The buffers by name, each an allocation of its own, on `device`."""
        return {
            name: (torch.zeros if buffer.zeroed else torch.empty)(buffer.shape, dtype=buffer.dtype, device=device)
            for name, buffer in self.buffers.items()
            if not buffer.inside
        }
