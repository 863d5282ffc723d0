"""Numeric settings that a user may have changed for speed and that would change bits here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_MATMULS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_FULL = ("none", "ieee")


# How many callers are inside, over all threads, what the first of them found, and how the last puts it back.
_lock = threading.Lock()
_inside = 0
_found: list[str] = []
_restore: Callable[[], None] | None = None


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Autocast off for `device_type`, fp32 matrix products in fp32 on every device; both restored at the end.

    The precision of products is one for the whole process: with several threads inside, the first sets it and the last
    restores it. Autocast is each thread's own.
    """
    global _inside, _found, _restore
    with torch.autocast(device_type, enabled=False):
        with _lock:
            if _inside == 0:
                _found = _precisions()
                _restore = _pin_products()
            _inside += 1
        try:
            yield
        finally:
            with _lock:
                _inside -= 1
                if _inside == 0 and _restore is not None:
                    _restore()


def user_precision() -> str:
    """How the process multiplies fp32 matrices outside `full_precision`, equal on two ranks if they do it alike."""
    with _lock:
        found = _found if _inside else _precisions()
    return " and ".join("ieee" if precision in _FULL else precision for precision in found)


def product_precision(device_type: str, operands: torch.dtype) -> AbstractContextManager[object]:
    """`full_precision`; for operands of bf16 summed in fp32, which no switch concerns, autocast off alone."""
    return torch.autocast(device_type, enabled=False) if operands == torch.bfloat16 else full_precision(device_type)


def _precisions() -> list[str]:
    return [matmul.fp32_precision for matmul in _MATMULS]


def _pin_products() -> Callable[[], None] | None:
    """Set fp32 products to fp32; returns what puts back the user's choice, None where nothing had to change.

    torch keeps the precision of fp32 products twice, under names of old (`set_float32_matmul_precision`) and of new
    (`torch.backends.<backend>.matmul.fp32_precision`), and raises where the two disagree: both are set, unless a user
    of the new names made the old ones unreadable.
    """
    before = _precisions()
    if all(precision in _FULL for precision in before):
        return None
    try:
        old_name = torch.get_float32_matmul_precision()
    except RuntimeError:
        old_name = None
    if old_name is not None:
        torch.set_float32_matmul_precision("highest")
    for matmul in _MATMULS:
        matmul.fp32_precision = "ieee"

    def restore() -> None:
        if old_name is not None:
            torch.set_float32_matmul_precision(old_name)
        for matmul, precision in zip(_MATMULS, before, strict=True):
            # "none" inherits from `torch.backends.fp32_precision`, and reading shows what is inherited: a name that
            # inherited must go on doing so.
            matmul.fp32_precision = "none"
            if matmul.fp32_precision != precision:
                matmul.fp32_precision = precision

    return restore
