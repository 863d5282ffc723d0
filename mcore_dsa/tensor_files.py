"""Tensors out of safetensors files and into new ones.

Writing needs the extra `hf` (safetensors). U are the rows of a tensor, X the bytes of a row, or of a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mcore_dsa.safetensors_files import StoredTensor

DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}


def read_tensor(stored: StoredTensor) -> Tensor:
    """A whole tensor of a file.

    Raises: ValueError for a dtype other than BF16, F32 and F8_E4M3, and for a file that is not as its header was read.
    """
    if stored.dtype not in DTYPES:
        raise ValueError(f"{stored.file.name} holds {stored.dtype}; accepted are {', '.join(DTYPES)}")
    return copied(mapped(stored), DTYPES[stored.dtype]).view(stored.shape)


def mapped(stored: StoredTensor) -> Tensor:
    """A tensor's bytes as a view of its file, a row of them for each of its rows.

    What has been looked at counts as memory as long as the view lives.

    Not with the library, which parses the whole header whenever it opens a file: with 200,000 names in it 0.4 s for
    each tensor, and a file that stays open keeps all its pages.
    """
    path = str(stored.file)
    try:
        size = os.stat(path).st_size
        if size != stored.size:
            raise ValueError(f"{path} has {size} bytes; accepted are the {stored.size} it had when it was verified")
        bytes_X = torch.from_file(path, shared=False, size=stored.stop, dtype=torch.uint8)
    except (RuntimeError, OSError) as error:
        raise ValueError(f"{path} cannot be read any more: {error}") from error
    rows = stored.shape[0] if stored.shape else 1
    return bytes_X[stored.start : stored.stop].view(rows, (stored.stop - stored.start) // max(rows, 1))


def copied(bytes_UX: Tensor, dtype: torch.dtype) -> Tensor:
    """A part of what `mapped` gives, out of the file, where bytes need not lie as the dtype wants them."""
    return bytes_UX.clone(memory_format=torch.contiguous_format).view(dtype)


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """A safetensors file that is there whole or not at all, with the permissions that any new file of this process has.

    Raises: OSError where it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    partial = path.with_name(f"{path.name}.partial")
    partial.touch()
    mode = partial.stat().st_mode & 0o777
    try:
        save_file(dict(_apart(tensors)), partial, metadata=dict(metadata))
        # The library leaves what it writes to its owner alone.
        partial.chmod(mode)
        partial.replace(path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def _apart(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """What the library accepts: contiguous, and no two in one storage."""
    storages = set()
    for name, tensor in tensors.items():
        whole = tensor.contiguous()
        storage = whole.untyped_storage().data_ptr()
        yield name, whole.clone() if storage in storages else whole
        storages.add(storage)
