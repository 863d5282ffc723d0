"""Random records, and requests of a rollout engine that say the same."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from mcore_dsa.record import SelectionRecord


def random_record(
    lengths: Sequence[int],
    padded: Sequence[int] | None = None,
    *,
    layers: int = 2,
    pool_size: int = 3,
    budget: int = 4,
    seed: int = 0,
) -> SelectionRecord:
    """Every row selects as many of the pools that it sees as the budget lets it, anew in each layer."""
    padded = lengths if padded is None else padded
    generator = torch.Generator().manual_seed(seed)
    selection_xTK = torch.full((layers, sum(padded), budget), -1, dtype=torch.int32)
    for start, length in zip(accumulate(padded, initial=0), lengths, strict=False):
        for row in range(length):
            seen = (row + 1) // pool_size
            for layer in range(layers):
                chosen = torch.randperm(seen, generator=generator)[:budget].sort().values
                selection_xTK[layer, start + row, : len(chosen)] = chosen.int()
    return SelectionRecord(
        selection_xTK=selection_xTK,
        recorded_T=torch.ones(sum(padded), dtype=torch.bool),
        lengths=tuple(lengths),
        padded_lengths=tuple(padded),
        pool_size=pool_size,
    )


def without(record: SelectionRecord, rows: Sequence[int]) -> SelectionRecord:
    """The record, some rows of which are not recorded."""
    selection_xTK, recorded_T = record.selection_xTK.clone(), record.recorded_T.clone()
    selection_xTK[:, rows], recorded_T[list(rows)] = -1, False
    return replace(record, selection_xTK=selection_xTK, recorded_T=recorded_T)


def as_rollout(record: SelectionRecord, *, tail: bool = True, seed: int = 0) -> list[Tensor]:
    """int32 `[tokens - 1, layers, width]` of each document: tokens of its pools and of its tail, shuffled in each row.

    A row without a record is all -1.
    """
    generator, pool_size = torch.Generator().manual_seed(seed), record.pool_size
    width = record.budget * pool_size + (pool_size - 1) * tail
    requests = []
    for start, length in zip(record.starts, record.lengths, strict=True):
        request = torch.full((length - 1, record.layers, width), -1, dtype=torch.int32)
        for row in range(length - 1):
            for layer in range(record.layers if record.recorded_T[start + row] else 0):
                pools = [pool for pool in record.selection_xTK[layer, start + row].tolist() if pool >= 0]
                tokens = [pool * pool_size + place for pool in pools for place in range(pool_size)]
                tokens += range((row + 1) // pool_size * pool_size, row + 1) if tail else ()
                mixed = torch.randperm(width, generator=generator)[: len(tokens)]
                request[row, layer, mixed] = torch.tensor(tokens, dtype=torch.int32)
        requests.append(request)
    return requests


def assert_records_equal(found: SelectionRecord, wanted: SelectionRecord) -> None:
    assert torch.equal(found.selection_xTK, wanted.selection_xTK)
    assert torch.equal(found.recorded_T, wanted.recorded_T)
    for name in ("lengths", "padded_lengths", "pool_size"):
        assert getattr(found, name) == getattr(wanted, name)


def changed(record: SelectionRecord, layer: int, row: int, ids: Sequence[int]) -> SelectionRecord:
    """The record with other ids at the head of one row."""
    selection_xTK = record.selection_xTK.clone()
    selection_xTK[layer, row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return replace(record, selection_xTK=selection_xTK)


def fields_of(record: SelectionRecord, **other: Any) -> dict[str, Any]:
    names = ("selection_xTK", "recorded_T", "lengths", "padded_lengths", "pool_size")
    return {name: getattr(record, name) for name in names} | other
