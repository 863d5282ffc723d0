"""What is wrong with the values of a checkpoint's DSA tensors, read a strip at a time.

Letters of shapes: `mcore_dsa/__init__.py`; X are the bytes of a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from torch import Tensor

from mcore_dsa.binding import SCALE_SUFFIX, CheckpointBinding
from mcore_dsa.safetensors_files import Fault, FaultKind, StoredTensor
from mcore_dsa.tensor_files import DTYPES, copied, mapped

# Values looked at together; of the file the same strip is mapped anew, for pages that were looked at stay in memory.
_STRIP_ELEMENTS = 1 << 22
# A layer norm begins with a bias of zeros, and a frozen one keeps it.
_MAY_BE_ZERO = "indexer.k_norm.bias"


def value_faults(binding: CheckpointBinding) -> tuple[Fault, ...]:
    """NaN, infinities, tensors of zeros and scales of zero among what `binding` found to lie where it belongs.

    Tensors whose headers or files are faulty are left out: their faults are `binding`'s.

    Raises: ValueError for a file that has changed since it was verified.
    """
    faulty = {fault.tensor for fault in binding.faults}
    return tuple(
        fault
        for name, stored in binding.tensors.items()
        if name not in faulty and stored.dtype in DTYPES and stored.stop <= stored.size
        for fault in _faults_of(name, stored)
    )


def _faults_of(name: str, stored: StoredTensor) -> Iterator[Fault]:
    is_scale, bad, zeros, first = name.endswith(SCALE_SUFFIX), 0, 0, ""
    for start, strip_RX in _strips(stored):
        bad_RX = ~strip_RX.isfinite()
        zeros += int((strip_RX == 0).sum())
        if not first and bool(bad_RX.any()):
            row, column = bad_RX.nonzero()[0].tolist()
            first = f"{strip_RX[row, column]} in row {start + row}"
        bad += int(bad_RX.sum())
    elements = prod(stored.shape)
    if bad:
        found = f"{bad} that are not, first {first}"
        yield Fault(FaultKind.NOT_FINITE, name, "finite values", found, stored.file.name)
    if is_scale and zeros:
        yield Fault(FaultKind.SCALE_ZERO, name, "no scale of 0", f"{zeros} of {elements}", stored.file.name)
    elif elements and zeros == elements and not name.endswith(_MAY_BE_ZERO):
        yield Fault(FaultKind.ZEROS, name, "other values than 0", f"{elements} zeros", stored.file.name)


def _strips(stored: StoredTensor) -> Iterator[tuple[int, Tensor]]:
    """A few rows at a time in float32, and the first of them."""
    dtype = DTYPES[stored.dtype]
    rows = stored.shape[0] if stored.shape else 1
    step = max(1, _STRIP_ELEMENTS // max(1, prod(stored.shape) // max(1, rows)))
    for start in range(0, rows, step):
        part_RX = mapped(stored)[start : start + step]
        yield start, copied(part_RX, dtype).view(len(part_RX), -1).float()
