"""Everything that crosses ranks: gathers over an explicit group, and the agreement before the first selection.

Shapes by suffix: R ranks of the group, S rows of the call, O rows of a shard, B batch, K selected pools a row.

Every function takes the group it runs over. `None` stands for a group of one: it runs the same code, with a copy where
the collective would be. All ranks of a group always enter, also those that own no row.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_dsa.rows import RowPartition

type Group = dist.ProcessGroup | None

_agreed: weakref.WeakKeyDictionary[dist.ProcessGroup, set[tuple[tuple[str, str], ...]]] = weakref.WeakKeyDictionary()


def group_size(group: Group) -> int:
    return 1 if group is None else dist.get_world_size(group)


def group_rank(group: Group) -> int:
    return 0 if group is None else dist.get_rank(group)


@torch.no_grad()
def gather_rows(x: Tensor, group: Group) -> Tensor:
    """Shards of equal length joined along dim 0 in rank order: `[n, ...]` on each of R ranks to `[R * n, ...]` on all.

    No gradient flows back: what is gathered here feeds a frozen selection.
    """
    gathered = x.new_empty(group_size(group) * x.shape[0], *x.shape[1:])
    _all_gather(gathered, x.contiguous(), group)
    return gathered


@torch.no_grad()
def gather_selection(selection_BOK: Tensor, partition: RowPartition, group: Group) -> Tensor:
    """The selection of every row, on every rank, from each rank's own shard.

    Args:
        selection_BOK: int32 `[b, rows of this rank's shard, budget]`.
        partition: who owns which rows; equal on every rank.

    Returns: int32 `[b, partition.num_rows, budget]` in row order.

    A shard is padded with -1 to the longest, R of them are gathered by one collective as `[R * b, n, budget]`, and
    shard r's rows go to their places; padding goes nowhere. Three dimensions, because a stacked `[R, b, n, budget]` is
    refused by gloo and passes on NCCL only because it counts elements.

    Raises: TypeError unless int32, ValueError unless the shard has the rows the partition gives this rank.
    """
    ranks, own = group_size(group), partition.shard(group_rank(group))
    if selection_BOK.dtype != torch.int32:
        raise TypeError(f"selection_BOK is {selection_BOK.dtype}; accepted is torch.int32")
    if selection_BOK.ndim != 3 or selection_BOK.shape[1] != len(own) or partition.group_size != ranks:
        raise ValueError(
            f"selection_BOK has shape {tuple(selection_BOK.shape)}, the partition {partition.group_size} ranks; "
            f"accepted are [batch, {len(own)}, budget] and the group's {ranks} ranks"
        )
    batch, _, budget = selection_BOK.shape
    padded = selection_BOK.new_full((batch, partition.rows_per_rank, budget), -1)
    padded[:, : len(own)] = selection_BOK
    gathered = selection_BOK.new_empty(ranks * batch, partition.rows_per_rank, budget)
    _all_gather(gathered, padded, group)
    shards_RBOK = gathered.view(ranks, batch, partition.rows_per_rank, budget)
    selection_BSK = selection_BOK.new_empty(batch, partition.num_rows, budget)
    for rank in range(ranks):
        rows = partition.shard(rank)
        selection_BSK[:, rows.start : rows.stop] = shards_RBOK[rank, :, : len(rows)]
    return selection_BSK


def agree(values: Mapping[str, str], faults: Sequence[str], group: dist.ProcessGroup) -> bool:
    """Make sure that every rank of `group` runs with the same settings, before anything depends on it.

    The first call with these values exchanges them and returns True; later ones cost nothing and return False. A rank
    that could not read a setting passes what is wrong with it as `faults`, so that all ranks raise instead of waiting
    for it in a later collective.

    Raises: ValueError on every rank, naming the settings that differ with the ranks and values, and every fault.
    """
    mine = tuple(sorted(values.items()))
    agreed = _agreed.setdefault(group, set())
    if mine in agreed and not faults:
        return False
    told: list[Any] = [None] * group_size(group)
    dist.all_gather_object(told, (dict(values), tuple(faults)), group=group)
    problems = [f"rank {rank}: {fault}" for rank, (_, its_faults) in enumerate(told) for fault in its_faults]
    for name in sorted({name for its_values, _ in told for name in its_values}):
        ranks_of: dict[str, list[int]] = {}
        for rank, (its_values, _) in enumerate(told):
            ranks_of.setdefault(its_values.get(name, "not set"), []).append(rank)
        if len(ranks_of) > 1:
            said = ", ".join(f"{value!r} on ranks {ranks}" for value, ranks in ranks_of.items())
            problems.append(f"{name} differs over the group: {said}")
    if problems:
        raise ValueError("settings of the query-shard group (ranks within it): " + "; ".join(problems))
    agreed.add(mine)
    return True


def _all_gather(output: Tensor, shard: Tensor, group: Group) -> None:
    if group is None:
        output.copy_(shard)
        return
    # torch 2.13 renames the collective and deprecates the name that 2.11 and 2.12 have.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    cast(Callable[..., Any], gather)(output, shard, group=group)
