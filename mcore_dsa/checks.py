"""Refusals that name argument, value and what is accepted: TypeError for another kind, ValueError for the rest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mcore_dsa.hf_config import shown

# Ids of tokens and pools are int32.
_IDS = 2**31
FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def kind_of(value: object) -> str:
    """What stands in a message for something that is of the wrong kind."""
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def check_integer(name: str, tensor: Tensor, *, ndim: int) -> None:
    """Refuse anything but an integer tensor of `ndim` dimensions."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {kind_of(tensor)}; accepted is a torch.int32 or torch.int64 tensor")
    if tensor.ndim != ndim:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted are {ndim} dimensions")


def check_floating(name: str, tensor: Tensor, shape: tuple[int | None, ...]) -> None:
    """Refuse anything but a 16 to 64 bit floating-point tensor of this shape, None standing for any size."""
    if not isinstance(tensor, Tensor) or tensor.dtype not in FLOATING:
        raise TypeError(f"{name} is {kind_of(tensor)}; accepted is a floating-point tensor of 16, 32 or 64 bits")
    matches = tensor.ndim == len(shape)
    matches = matches and all(want in (None, got) for want, got in zip(shape, tensor.shape, strict=True))
    if not matches:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted is {list(shape)} (None: any)")


def check_device(device: torch.device, **tensors: Tensor) -> None:
    """Refuse tensors that are not on the device of the layout."""
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}; accepted is the layout's device, {device}")


def check_savable(**tensors: Tensor) -> None:
    """Refuse what autograd cannot save for backward, where gradients are needed."""
    for name, tensor in tensors.items():
        if tensor.is_inference():
            raise ValueError(
                f"{name} is made in inference mode; accepted is one made outside it where gradients are needed"
            )


def check_positive(name: str, value: int) -> None:
    """Refuse anything but an integer from 1 to 2**31, which is what ids of tokens and pools can count."""
    _check_count(name, value, least=1)


def check_natural(name: str, value: int) -> None:
    """Refuse anything but an integer from 0 to 2**31."""
    _check_count(name, value, least=0)


def _check_count(name: str, value: int, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _IDS:
        raise ValueError(f"{name} is {shown(value)}; accepted is an integer >= {least}, at most 2**31")


def check_bool(**values: bool) -> None:
    """Refuse anything but True and False."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} is {value!r}; accepted are True and False")


def check_bytes(name: str, value: int) -> None:
    """Refuse anything but an integer below 2**63; how many bytes are enough is for its user to say."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {shown(value)}; accepted is an integer number of bytes")
    if value >= 2**63:
        raise ValueError(f"{name} is {shown(value)}; accepted is an integer number of bytes below 2**63")


def check_sequence[T](name: str, values: Sequence[T]) -> Sequence[T]:
    """Refuse anything but a list, a tuple or the like; a word and a tensor are none."""
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise TypeError(f"{name} is {kind_of(values)}; accepted is a sequence")
    return values


def check_kind(kind: type, **values: object) -> None:
    """Refuse anything but None and objects of this kind."""
    for name, value in values.items():
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} is {kind_of(value)}; accepted are a {kind.__name__} and None")
