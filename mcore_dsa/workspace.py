"""Scratch memory as a description that both allocates and counts, so that no count can lag behind an allocation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


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
