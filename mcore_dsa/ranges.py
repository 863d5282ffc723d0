"""Names under which a profiler shows what the package does.

They stand at the seams and not inside loops over tiles: entering one takes some microseconds, profiler or not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Literal

from torch.profiler import record_function

Range = Literal["projections", "compression", "scoring", "top-k", "exchange", "attention"]


def named(name: Range) -> record_function:
    """What is done inside appears to `torch.profiler`, and to NVTX under `emit_nvtx`, as `mcore_dsa.NAME`."""
    return record_function(f"mcore_dsa.{name}")


def ranged[**P, T](name: Range) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator: every call is done inside `named(name)`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> T:
            # A new one each time: it keeps its state in itself, and backward may call from another thread.
            with named(name):
                return function(*args, **kwargs)

        return inside

    return decorate
