"""Cases of tests/ brought to the device, and what a call asks of the device's allocator."""

import gc
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch

DEVICE = torch.device("cuda", 0)


def moved[T](value: T, device: torch.device | str = DEVICE) -> T:
    """`value` with every tensor in it on `device`, through dataclasses."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes = {field.name: moved(getattr(value, field.name), device) for field in fields(value) if field.init}
    return replace(value, **changes)


def requested_at_peak(call: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes that `call` asks of the allocator, at its peak, beyond what was held before; and its result.

    What was asked for, not `max_memory_allocated`: that counts blocks, and of a block that it does not split the
    allocator counts up to 1 MiB that nobody asked for.
    """
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    result = call()
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before, result
