"""Tensors as the kernels take them."""

from __future__ import annotations

from torch import Tensor


def on_16_bytes(tensor: Tensor) -> Tensor:
    """Contiguous, and from a multiple of 16 bytes on: pointers that are none are compiled for anew, to other loads."""
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
