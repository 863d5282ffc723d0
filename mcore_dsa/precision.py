"""Numeric settings that a user may have changed for speed and that would change bits here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_MATMULS = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
_FULL = ("none", "ieee")


@contextmanager
def full_precision(device_type: str) -> Iterator[None]:
    """Autocast off for `device_type`, fp32 matrix products in fp32 on every device; both restored at the end.

    torch keeps the precision of fp32 products twice, under names of old (`set_float32_matmul_precision`) and of new
    (`torch.backends.<backend>.matmul.fp32_precision`), and raises where the two disagree: both are set here, unless a
    user of the new names made the old ones unreadable. The setting is one for the whole process, autocast one for each
    thread.
    """
    with torch.autocast(device_type, enabled=False):
        before = [matmul.fp32_precision for matmul in _MATMULS]
        if all(precision in _FULL for precision in before):
            yield
            return
        try:
            old_name = torch.get_float32_matmul_precision()
        except RuntimeError:
            old_name = "unreadable"
        if old_name != "unreadable":
            torch.set_float32_matmul_precision("highest")
        for matmul in _MATMULS:
            matmul.fp32_precision = "ieee"
        try:
            yield
        finally:
            if old_name != "unreadable":
                torch.set_float32_matmul_precision(old_name)
            for matmul, precision in zip(_MATMULS, before, strict=True):
                # "none" inherits from `torch.backends.fp32_precision`, and reading shows what is inherited: a name
                # that inherited must go on doing so.
                matmul.fp32_precision = "none"
                if matmul.fp32_precision != precision:
                    matmul.fp32_precision = precision
