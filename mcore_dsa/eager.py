"""Functions that run as they are inside a caller's `torch.compile`."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def uncompiled[**P, Result](function: Callable[P, Result]) -> Callable[P, Result]:
    """`function`, at which a compiled caller breaks its graph.

    What runs here is bound to exact shapes and reads the host: traced, it failed at a caller's second length.
    `torch.compiler.disable` at import would do the same, and doubles the time that importing this package takes.
    """

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> Result:
        if torch.compiler.is_compiling():
            disabled: Callable[P, Result] = torch.compiler.disable(function)
            return disabled(*arguments, **options)
        return function(*arguments, **options)

    return call
