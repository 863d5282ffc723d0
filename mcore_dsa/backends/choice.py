"""Which backend runs: a function of the setting and of what it is to run on, never of the size of a call."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor

from mcore_dsa.backends.protocol import Backend
from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.backends.triton import TritonBackend
from mcore_dsa.kernels.tiles import MOST_HEADS
from mcore_dsa.settings import KERNELS_VARIABLE, Kernels

# Tokens of a pool: the most that the kernels are compiled for, and looked at, without a card.
MOST_POOL_SIZE = 16

_TORCH: Backend = TorchBackend()
_TRITON: Backend = TritonBackend()


@dataclass(frozen=True)
class Target:
    """What a backend is chosen by: where and for what it is to run, and never the size of a call.

    Attributes:
        device_type: as torch names it.
        capability: of a CUDA device.
        triton: Triton's version, None where it is not installed.
        dtypes: of queries and keys.
        heads, dim: of the index queries; None where nothing is scored.
        channels: of the latents; None where nothing is attended.
        pool_size: of the pools; None where nothing is compressed or attended.
    """

    device_type: str
    capability: tuple[int, int] | None
    triton: str | None
    dtypes: tuple[torch.dtype, ...]
    heads: int | None = None
    dim: int | None = None
    channels: int | None = None
    pool_size: int | None = None

    @classmethod
    def of(cls, device: torch.device, *dtypes: torch.dtype, **sizes: int | None) -> Target:
        """`sizes` are `heads`, `dim`, `channels` and `pool_size`."""
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return cls(device.type, capability, _triton_version(), dtypes, **sizes)

    @classmethod
    def of_scores(cls, q_SBHD: Tensor, pool_key_PBD: Tensor) -> Target:
        heads, dim = q_SBHD.shape[2:]
        return cls.of(q_SBHD.device, q_SBHD.dtype, pool_key_PBD.dtype, heads=heads, dim=dim)

    @classmethod
    def of_attention(cls, q_SBHC: Tensor, kv_TBC: Tensor, pool_size: int) -> Target:
        return cls.of(q_SBHC.device, q_SBHC.dtype, kv_TBC.dtype, channels=kv_TBC.shape[2], pool_size=pool_size)


@dataclass(frozen=True)
class Choice:
    """The backend that a setting comes to.

    Attributes:
        reason: what keeps "auto" from the kernels, for the log.
        fault: what is asked for and cannot run, where every rank has to refuse it; `backend` is then torch.
    """

    backend: Backend
    reason: str = ""
    fault: str = ""


def resolve(kernels: Kernels = "auto", target: Target | None = None) -> Backend:
    """The backend of `choose`; without a target torch, which runs on any.

    Raises: ValueError for kernels that are named and cannot run.
    """
    if target is None:
        return {"auto": _TORCH, "torch": _TORCH, "triton": _TRITON}[kernels]
    choice = choose(kernels, target)
    if choice.fault:
        raise ValueError(choice.fault)
    return choice.backend


def choose(kernels: Kernels, target: Target) -> Choice:
    """What a setting comes to on a target. It does not raise: ranks must refuse together (`agreement.py`)."""
    if kernels == "torch":
        return Choice(_TORCH)
    refusal = triton_refusal(target)
    if not refusal:
        return Choice(_TRITON)
    if kernels == "triton":
        return Choice(_TORCH, fault=f"{KERNELS_VARIABLE} is 'triton' and {refusal}")
    return Choice(_TORCH, f"not triton: {refusal}")


def triton_refusal(target: Target) -> str:
    """Why Triton's kernels cannot run on a target, in one sentence; empty where they can."""
    if target.device_type != "cuda":
        return f"device is {target.device_type}; accepted is cuda"
    if target.capability is None or target.capability[0] not in (9, 10):
        return f"compute capability is {target.capability}; accepted are (9, x) and (10, x)"
    if target.triton is None:
        return "Triton is not installed; accepted is 3.7"
    if not target.triton.startswith("3.7."):
        return f"Triton is {target.triton}; accepted is 3.7"
    if set(target.dtypes) != {torch.bfloat16}:
        return f"dtype is {', '.join(sorted({str(dtype) for dtype in target.dtypes}))}; accepted is torch.bfloat16"
    if target.heads is not None and not 1 <= target.heads <= MOST_HEADS:
        return f"heads is {target.heads}; accepted are 1 to {MOST_HEADS}"
    if target.dim is not None and target.dim not in range(16, 129, 16):
        return f"dim is {target.dim}; accepted are multiples of 16 up to 128"
    if target.channels is not None and target.channels > 512:
        return f"channels is {target.channels}; accepted are at most 512"
    if target.pool_size is not None and target.pool_size > MOST_POOL_SIZE:
        return f"pool_size is {target.pool_size}; accepted are at most {MOST_POOL_SIZE}"
    return ""


@functools.cache
def _triton_version() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None
