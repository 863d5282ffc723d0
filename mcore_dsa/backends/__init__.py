"""Implementations of compression, selection and attention behind one protocol."""

from mcore_dsa.backends.protocol import AttentionCall, Backend, SelectionCounters
from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.settings import Kernels

__all__ = ["AttentionCall", "Backend", "SelectionCounters", "resolve"]

_TORCH: Backend = TorchBackend()


def resolve(kernels: Kernels = "auto") -> Backend:
    """The backend that a setting comes to on this machine; torch is the only one there is."""
    return {"auto": _TORCH, "torch": _TORCH}[kernels]
