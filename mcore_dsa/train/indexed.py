"""Megatron's indexed data sets: token ids in PREFIX.bin, where documents lie in PREFIX.idx."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt


def prefix_of(path: str) -> str | None:
    """The prefix of the indexed data set that `path` names, by its prefix or by either file; None for anything else."""
    prefix = path.removesuffix(".idx").removesuffix(".bin")
    is_pair = os.path.isfile(f"{prefix}.idx") and os.path.isfile(f"{prefix}.bin")
    return prefix if is_pair and (path != prefix or not os.path.lexists(path)) else None


def indexed_documents(prefixes: Sequence[str], *, max_bytes: int, cut: list[str]) -> Iterator[npt.NDArray[np.int32]]:
    """The documents of indexed data sets, one data set after the other, at most `max_bytes` bytes as they are stored.

    Where there are more, the prefix of the set in which they end is put into `cut`.

    Raises: ValueError for a pair of files that Megatron cannot read.
    """
    # Here, because it takes a second that byte text does without.
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    left = max_bytes
    for prefix in prefixes:
        try:
            dataset = IndexedDataset(prefix)
            for first, stop in pairwise(dataset.document_indices):
                parts = [dataset[int(sequence)] for sequence in range(first, stop)]
                tokens = np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)
                count = left // tokens.itemsize
                if count < len(tokens):
                    cut.append(prefix)
                    if count:
                        yield tokens[:count].astype(np.int32)
                    return
                left -= tokens.nbytes
                yield tokens.astype(np.int32)
        except Exception as error:
            # Megatron's reader asserts, and unpacks what there is, in its index as in its data.
            raise ValueError(
                f"data has {prefix!r}; accepted are PREFIX.idx and PREFIX.bin of megatron.core.datasets: {error}"
            ) from error
