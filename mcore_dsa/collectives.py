"""Everything that crosses ranks: gathers over an explicit group, and the agreement before the first selection.

Shapes by suffix: R ranks of the group, S rows of the call, O rows of a shard, B batch, K selected pools a row.

Every function takes the group it runs over. `None` stands for a group of one: it runs the same code, with a copy where
the collective would be. All ranks of a group always enter, also those that own no row.
"""

from __future__ import annotations

import weakref
from collections import deque
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

    Raises: ValueError for a tensor without dimensions.
    """
    if x.ndim == 0:
        raise ValueError("x has no dimensions; accepted is a tensor of rows, [n, ...]")
    gathered = x.new_empty(group_size(group) * x.shape[0], *x.shape[1:])
    _all_gather(gathered, x.contiguous(), group)
    return gathered


@torch.no_grad()
def exchange_rows(tensors: Sequence[Tensor], partition: RowPartition, group: Group) -> list[Tensor]:
    """Rows from the ranks that hold them in sequence order to the ranks that own them under `partition`.

    Args:
        tensors: each `[s / R, ...]`, rows `[r * s / R, (r + 1) * s / R)` of `partition.num_rows` on rank r.

    Returns: the same tensors, `[rows of this rank's shard, ...]`, slice after slice. All of them travel as bytes in one
    all-to-all; where every rank owns what it holds, nothing does.

    Raises: ValueError unless every tensor holds this rank's equal part of the rows.
    """
    ranks, me = group_size(group), group_rank(group)
    held = [
        range(rank * partition.num_rows // ranks, (rank + 1) * partition.num_rows // ranks) for rank in range(ranks)
    ]
    for tensor in tensors:
        if partition.num_rows % ranks or partition.group_size != ranks or tensor.shape[0] != len(held[me]):
            raise ValueError(
                f"a tensor holds {tensor.shape[0]} of {partition.num_rows} rows cut for {partition.group_size} ranks; "
                f"accepted are equal parts over the group's {ranks} ranks"
            )
    if all(_in_one_run(partition.slices(rank), held[rank]) for rank in range(ranks)):
        return list(tensors)
    start = held[me].start
    sent = [[_overlap(held[me], part) for part in partition.slices(rank)] for rank in range(ranks)]
    received = [[_overlap(held[rank], part) for part in partition.slices(me)] for rank in range(ranks)]
    outgoing = _as_bytes(tensors, [range(p.start - start, p.stop - start) for parts in sent for p in parts])
    incoming = outgoing.new_empty(partition.rows_of(me), outgoing.shape[1])
    _all_to_all(incoming, outgoing, [_rows(parts) for parts in received], [_rows(parts) for parts in sent], group)
    del outgoing
    # Rows arrive by sender, and by slice within a sender; they are wanted by slice, and within it in row order.
    first_of, place = {}, 0
    for part in partition.slices(me):
        first_of[part.start], place = place, place + len(part)
    owned = [tensor.new_empty(partition.rows_of(me), *tensor.shape[1:]) for tensor in tensors]
    arrived = 0
    for parts in received:
        for slice_, part in zip(partition.slices(me), parts, strict=True):
            place = first_of[slice_.start] + part.start - slice_.start
            _from_bytes(incoming[arrived : arrived + len(part)], [x[place : place + len(part)] for x in owned])
            arrived += len(part)
    return owned


def _as_bytes(tensors: Sequence[Tensor], parts: Sequence[range]) -> Tensor:
    """uint8 `[rows of the parts, bytes of a row of all tensors]`, part after part."""
    rows = [tensor.contiguous().flatten(1).view(torch.uint8) for tensor in tensors]
    packed = rows[0].new_empty(_rows(parts), sum(x.shape[1] for x in rows))
    for out, part in zip(packed.split([len(part) for part in parts]), parts, strict=True):
        for column, x in zip(out.split([x.shape[1] for x in rows], dim=1), rows, strict=True):
            column.copy_(x[part.start : part.stop])
    return packed


def _from_bytes(packed: Tensor, tensors: Sequence[Tensor]) -> None:
    rows = [tensor.flatten(1).view(torch.uint8) for tensor in tensors]
    for x, column in zip(rows, packed.split([x.shape[1] for x in rows], dim=1), strict=True):
        x.copy_(column)


class SelectionGather:
    """Collects the selection of every row, on every rank, from pieces of each rank's own shard.

    Every rank brings pieces of the same rows of its shard in the same order: `add` pads its piece with -1 to the common
    number of rows, and gathers R of them by one collective as `[R * b, rows, budget]`. Three dimensions, because a
    stacked `[R, b, rows, budget]` is refused by gloo and passes on NCCL only because it counts elements. A gather runs
    while the caller goes on: `add` returns with at most `in_flight` of them running, having waited for older ones.
    """

    def __init__(
        self,
        partition: RowPartition,
        group: Group,
        *,
        batch: int,
        budget: int,
        device: torch.device,
        in_flight: int = 2,
    ) -> None:
        self._partition, self._group, self._in_flight = partition, group, in_flight
        self._pending: deque[tuple[dist.Work | None, range, Tensor, Tensor]] = deque()
        self._selection_BSK = torch.empty(batch, partition.num_rows, budget, dtype=torch.int32, device=device)

    @torch.no_grad()
    def add(self, piece: range, selection_BOK: Tensor) -> None:
        """int32 `[b, o, budget]`, the selections of rows `piece` of this rank's shard, as far as the shard has them.

        Raises: TypeError unless int32, ValueError for another shape.
        """
        own = len(_overlap(piece, range(self._partition.rows_of(group_rank(self._group)))))
        batch, _, budget = self._selection_BSK.shape
        if selection_BOK.dtype != torch.int32:
            raise TypeError(f"selection_BOK is {selection_BOK.dtype}; accepted is torch.int32")
        if selection_BOK.shape != (batch, own, budget):
            raise ValueError(
                f"selection_BOK has shape {tuple(selection_BOK.shape)}; accepted is {[batch, own, budget]}, this "
                f"rank's part of rows {piece.start} ... {piece.stop - 1} of a shard"
            )
        padded = selection_BOK.new_full((batch, len(piece), budget), -1)
        padded[:, :own] = selection_BOK
        gathered = selection_BOK.new_empty(group_size(self._group) * batch, len(piece), budget)
        self._pending.append((_all_gather(gathered, padded, self._group, wait=False), piece, gathered, padded))
        while len(self._pending) > self._in_flight:
            self._place()

    @torch.no_grad()
    def finish(self) -> Tensor:
        """int32 `[b, partition.num_rows, budget]` in row order, once every rank has added every piece."""
        while self._pending:
            self._place()
        return self._selection_BSK

    def _place(self) -> None:
        work, piece, gathered, _ = self._pending.popleft()
        if work is not None:
            work.wait()
        for rank, shard_BOK in enumerate(gathered.unflatten(0, (self._partition.group_size, -1))):
            offset = -piece.start
            for rows in self._partition.slices(rank):
                part = _overlap(range(offset, offset + len(rows)), range(len(piece)))
                start = rows.start + part.start - offset
                self._selection_BSK[:, start : start + len(part)] = shard_BOK[:, part.start : part.stop]
                offset += len(rows)


def gather_selection(selection_BOK: Tensor, partition: RowPartition, group: Group) -> Tensor:
    """The selection of every row, on every rank, from each rank's whole shard, by one collective.

    Args:
        selection_BOK: int32 `[b, rows of this rank's shard, budget]`.
        partition: who owns which rows; equal on every rank.

    Returns: int32 `[b, partition.num_rows, budget]` in row order.

    Raises: TypeError unless int32, ValueError unless the shard has the rows the partition gives this rank.
    """
    if partition.group_size != group_size(group) or selection_BOK.ndim != 3:
        raise ValueError(
            f"selection_BOK has shape {tuple(selection_BOK.shape)} and the partition {partition.group_size} ranks; "
            f"accepted are three dimensions and the group's {group_size(group)} ranks"
        )
    batch, _, budget = selection_BOK.shape
    gather = SelectionGather(partition, group, batch=batch, budget=budget, device=selection_BOK.device)
    gather.add(range(partition.rows_per_rank), selection_BOK)
    return gather.finish()


def agree(values: Mapping[str, str], faults: Sequence[str], group: dist.ProcessGroup) -> bool:
    """Make sure that every rank of `group` runs with the same settings, before anything depends on it.

    Every call is one exchange, which all ranks must enter: nothing that a rank remembers may let it stay out, or a rank
    whose settings have changed would wait for it alone. A rank that could not read a setting, or found that it cannot
    keep the contract, passes what is wrong as `faults`, so that all ranks raise instead of waiting in a later
    collective.

    Returns: whether the group has not agreed on these values before.

    Raises: ValueError on every rank, naming the settings that differ with the ranks and values, and every fault.
    """
    mine = tuple(sorted(values.items()))
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
    agreed = _agreed.setdefault(group, set())
    newly = mine not in agreed
    agreed.add(mine)
    return newly


def _all_gather(output: Tensor, shard: Tensor, group: Group, *, wait: bool = True) -> dist.Work | None:
    if group is None:
        output.copy_(shard)
        return None
    # torch 2.13 renames the collective and deprecates the name that 2.11 and 2.12 have.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return cast(Callable[..., dist.Work | None], gather)(output, shard, group=group, async_op=not wait)


def _all_to_all(output: Tensor, shard: Tensor, received: list[int], sent: list[int], group: Group) -> None:
    if group is None:
        output.copy_(shard)
        return
    dist.all_to_all_single(output, shard, output_split_sizes=received, input_split_sizes=sent, group=group)


def _overlap(a: range, b: range) -> range:
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def _in_one_run(parts: Sequence[range], rows: range) -> bool:
    """Whether the parts, one after the other, are exactly `rows`."""
    edges = [rows.start, *(edge for part in parts if part for edge in (part.start, part.stop)), rows.stop]
    return all(first == second for first, second in zip(edges[::2], edges[1::2], strict=True))


def _rows(parts: Sequence[range]) -> int:
    return sum(len(part) for part in parts)
