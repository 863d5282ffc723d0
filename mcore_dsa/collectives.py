"""Everything that crosses ranks, over an explicit group.

Letters of shapes: `mcore_dsa/__init__.py`.

Every function takes the group it runs over. `None` stands for a group of one: it runs the same code, with a copy where
the collective would be. All ranks of a group always enter, also those that own no row.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_dsa.checks import kind_of
from mcore_dsa.ranges import named
from mcore_dsa.rows import RowExchange, RowPartition

type Group = dist.ProcessGroup | None

# Selections gathered over a group so far: what tells the gathers of one call from those of the next.
_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# Pieces of a call that have numbers of their own.
_PIECES = 1 << 16


@dataclass
class Traffic:
    """What this process has exchanged with others so far: read it twice, as a network card's counters.

    Attributes:
        seconds: of the host inside collectives, waiting for slower ranks included; on CUDA the time to launch them.
        received_bytes: of other ranks' rows and selections.
    """

    seconds: float = 0.0
    received_bytes: int = 0


traffic = Traffic()


@contextmanager
def exchanging(received_bytes: int = 0) -> Iterator[None]:
    """Around every collective, and every wait for one: what is done inside counts as traffic."""
    started = time.perf_counter()
    with named("exchange"):
        yield
    traffic.seconds += time.perf_counter() - started
    traffic.received_bytes += received_bytes


def group_size(group: Group) -> int:
    """Ranks of the group.

    Raises: TypeError for what is no group, ValueError for a group that this rank is not in.
    """
    return _place_in(group)[0]


def group_rank(group: Group) -> int:
    """This rank's place in the group.

    Raises: as `group_size`.
    """
    return _place_in(group)[1]


def _place_in(group: object) -> tuple[int, int]:
    if group is None:
        return 1, 0
    # What torch gives a rank in place of a group that it is not in is an integer.
    stranger = isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER
    if not stranger and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"query_shard_group is {kind_of(group)}; accepted are a torch.distributed.ProcessGroup and None"
        )
    if not isinstance(group, dist.ProcessGroup) or (rank := dist.get_rank(group)) < 0:
        raise ValueError("query_shard_group is a group without this rank; accepted are groups that hold it")
    return dist.get_world_size(group), rank


@torch.no_grad()
def gather_rows(x: Tensor, group: Group) -> Tensor:
    """Shards of equal length joined along dim 0 in rank order: `[n, ...]` on each of G ranks to `[G * n, ...]` on all.

    No gradient flows back: what is gathered here feeds a frozen selection.

    Raises: ValueError for a tensor without dimensions.
    """
    if x.ndim == 0:
        raise ValueError("x has no dimensions; accepted is a tensor of rows, [n, ...]")
    gathered = x.new_empty(group_size(group) * x.shape[0], *x.shape[1:])
    _all_gather(gathered, x.contiguous(), group)
    return gathered


@torch.no_grad()
def reduce_rows(x: Tensor, group: Group) -> Tensor:
    """What `gather_rows` is the transpose of: `[G * n, ...]` on each of G ranks to the sum of this rank's `[n, ...]`.

    The sum is taken in the dtype of `x`, in an order that is the group's.

    Raises: ValueError for rows that are no multiple of the ranks.
    """
    ranks = group_size(group)
    if x.ndim == 0 or x.shape[0] % ranks:
        raise ValueError(f"x has shape {tuple(x.shape)}; accepted are rows in a multiple of the group's {ranks} ranks")
    reduced = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    if group is None:
        return reduced.copy_(x)
    # torch 2.13 renames this one too.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with exchanging((ranks - 1) * reduced.nbytes):
        cast(Callable[..., object], scatter)(reduced, x.contiguous(), group=group)
    return reduced


@torch.no_grad()
def exchange_rows(tensors: Sequence[Tensor], partition: RowPartition, group: Group) -> list[Tensor]:
    """Rows from the ranks that hold them in sequence order to the ranks that own them under `partition`.

    Args:
        tensors: each `[s / G, ...]`, rows `[g * s / G, (g + 1) * s / G)` of `partition.num_rows` on rank g.

    Returns: the same tensors, `[rows of this rank's shard, ...]`, slice after slice. Where every rank owns every row
    they are gathered; where there are no tensors, no rows, or every rank owns what it holds, nothing moves; else all of
    them travel as bytes in one all-to-all.

    Raises: ValueError unless every tensor holds this rank's equal part of the rows.
    """
    ranks = group_size(group)
    for index, tensor in enumerate(tensors):
        if partition.group_size != ranks or tensor.ndim == 0 or tensor.shape[0] * ranks != partition.num_rows:
            raise ValueError(
                f"tensors[{index}] has shape {tuple(tensor.shape)} and partition cuts {partition.num_rows} rows for "
                f"{partition.group_size} ranks; accepted are equal parts of the rows over the group's {ranks} ranks"
            )
    if not tensors or not partition.num_rows:
        return list(tensors)
    if partition.is_replicated:
        return list(tensors) if ranks == 1 else [gather_rows(tensor, group) for tensor in tensors]
    exchange = RowExchange.of(partition, group_rank(group))
    if not exchange.moves:
        return list(tensors)
    outgoing = _packed(tensors, exchange)
    incoming = outgoing.new_empty(sum(exchange.receive_counts), outgoing.shape[1])
    all_to_all(incoming, outgoing, exchange.receive_counts, exchange.send_counts, group)
    del outgoing
    owned = [tensor.new_empty(len(incoming), *tensor.shape[1:]) for tensor in tensors]
    for column, tensor in zip(incoming.split(_row_bytes(tensors), dim=1), owned, strict=True):
        _copy_runs(_bytes_of_rows(tensor), exchange.place, column, exchange.incoming)
    return owned


def _packed(tensors: Sequence[Tensor], exchange: RowExchange) -> Tensor:
    """uint8 `[rows to send, bytes of a row of all tensors]`, receiver after receiver."""
    widths = _row_bytes(tensors)
    packed = torch.empty(sum(exchange.send_counts), sum(widths), dtype=torch.uint8, device=tensors[0].device)
    for column, tensor in zip(packed.split(widths, dim=1), tensors, strict=True):
        _copy_runs(column, exchange.outgoing, _bytes_of_rows(tensor), exchange.send)
    return packed


def _row_bytes(tensors: Sequence[Tensor]) -> list[int]:
    return [math.prod(tensor.shape[1:]) * tensor.element_size() for tensor in tensors]


def _bytes_of_rows(x: Tensor) -> Tensor:
    """uint8 `[n, bytes of a row]`, a view where `x` is contiguous."""
    return x.contiguous().view(x.shape[0], math.prod(x.shape[1:])).view(torch.uint8)


def _copy_runs(out: Tensor, into: Sequence[range], x: Tensor, of: Sequence[range]) -> None:
    for there, here in zip(into, of, strict=True):
        out[there.start : there.stop] = x[here.start : here.stop]


class SelectionGather:
    """Collects the selection of every row, on every rank, while a rank is still selecting for its own.

    A shard goes in pieces of `piece_rows` rows, the same on every rank whatever gives the selections: padded with -1 to
    a common length, each is gathered by one collective as `[G * b, rows + 1, budget]`. Three dimensions, because a
    stacked `[G, b, rows + 1, budget]` is refused by gloo and passes on NCCL only because it counts elements. The row
    more holds the number of the call and of the piece: a rank that raised in the middle of a call and begins another
    would lay its first piece beside the others' second, and every rank would select wrong tokens without an error.

    A gather runs while the caller goes on: at most `in_flight` of them at a time.

    Attributes:
        piece_rows: rows of a shard that are gathered together.
    """

    def __init__(
        self,
        partition: RowPartition,
        group: Group,
        *,
        batch: int,
        budget: int,
        device: torch.device,
        piece_rows: int | None = None,
        in_flight: int = 2,
    ) -> None:
        ranks, rank = group_size(group), group_rank(group)
        if partition.group_size != ranks:
            raise ValueError(
                f"partition cuts rows for {partition.group_size} ranks; accepted are the group's {ranks} ranks"
            )
        self._partition, self._group, self._in_flight = partition, group, in_flight
        self._own_shape = batch, partition.rows_of(rank), budget
        self.piece_rows = max(1, partition.rows_per_rank if piece_rows is None else piece_rows)
        self._next_row = 0
        self._pending: deque[_Piece] = deque()
        self._call, self._selection_BSK = 0, None
        if not partition.is_replicated:
            self._selection_BSK = torch.empty(batch, partition.num_rows, budget, dtype=torch.int32, device=device)

    @torch.no_grad()
    def advance(self, selection_BOK: Tensor, done: int) -> None:
        """Gather what is complete of this rank's rows.

        Args:
            selection_BOK: int32 `[b, o, budget]`, the selections of this rank's shard.
            done: how many of its rows, from the first on, are written.

        Raises: TypeError unless int32, ValueError for another shape; ValueError where another rank is in another call.
        """
        if selection_BOK.dtype != torch.int32:
            raise TypeError(f"selection_BOK is {selection_BOK.dtype}; accepted is torch.int32")
        if selection_BOK.shape != self._own_shape:
            raise ValueError(
                f"selection_BOK has shape {tuple(selection_BOK.shape)}; accepted is {list(self._own_shape)}, this "
                "rank's shard"
            )
        if self._selection_BSK is None:
            return
        _, own, _ = self._own_shape
        while (start := self._next_row) < self._partition.rows_per_rank:
            stop = min(start + self.piece_rows, self._partition.rows_per_rank)
            if done < min(stop, own):
                break
            self._enter(range(start, stop), selection_BOK[:, start : min(stop, own)])
            self._next_row = stop

    @torch.no_grad()
    def finish(self, selection_BOK: Tensor) -> Tensor:
        """int32 `[b, partition.num_rows, budget]` in row order, of a shard that is complete; it is the whole where
        every rank owns every row.
        """
        self.advance(selection_BOK, selection_BOK.shape[1])
        while self._pending:
            self._place()
        return selection_BOK if self._selection_BSK is None else self._selection_BSK

    def _enter(self, rows: range, selection_BOK: Tensor) -> None:
        if self._call == 0 and self._group is not None:
            self._call = _calls[self._group] = _calls.get(self._group, 0) + 1
        batch, own, budget = selection_BOK.shape
        padded = selection_BOK.new_full((batch, len(rows) + 1, budget), -1)
        padded[:, :own] = selection_BOK
        tag = self._call % 2**15 * _PIECES + rows.start // self.piece_rows % _PIECES
        padded[:, -1] = tag
        gathered = selection_BOK.new_empty(group_size(self._group) * batch, len(rows) + 1, budget)
        work = _all_gather(gathered, padded, self._group, wait=False)
        self._pending.append(_Piece(work, rows, tag, gathered, padded))
        while len(self._pending) > self._in_flight:
            self._place()

    def _place(self) -> None:
        piece = self._pending.popleft()
        if piece.work is not None:
            with exchanging():
                piece.work.wait()
        of_ranks = piece.gathered.unflatten(0, (self._partition.group_size, -1))
        if bool((of_ranks[:, :, -1] != piece.tag).any()):
            numbers = of_ranks[:, 0, -1, 0].tolist()
            tags = [f"{tag // _PIECES}.{tag % _PIECES}" for tag in numbers]
            if self._group is not None:
                # All ranks read the same numbers, and are in step again from the next call on.
                _calls[self._group] = max(numbers) // _PIECES
            raise ValueError(
                f"the ranks of the query-shard group are in calls and pieces {', '.join(tags)}; accepted is the same "
                "on every rank: one of them raised in the middle of a call, or left one out"
            )
        assert self._selection_BSK is not None
        rows = piece.rows
        for rank, shard_BOK in enumerate(of_ranks):
            start = 0
            for run in self._partition.runs(rank, rows):
                self._selection_BSK[:, run.start : run.stop] = shard_BOK[:, start : start + len(run)]
                start += len(run)


@dataclass(frozen=True, eq=False)
class _Piece:
    """One gather: rows of every shard, what marks it, and buffers that live until it is placed."""

    work: dist.Work | None
    rows: range
    tag: int
    gathered: Tensor
    padded: Tensor


def gather_selection(selection_BOK: Tensor, partition: RowPartition, group: Group) -> Tensor:
    """The selection of every row, on every rank, from each rank's whole shard, by one collective.

    Args:
        selection_BOK: int32 `[b, rows of this rank's shard, budget]`.
        partition: who owns which rows; equal on every rank.

    Returns: int32 `[b, partition.num_rows, budget]` in row order.

    Raises: TypeError unless int32, ValueError unless the shard has the rows the partition gives this rank.
    """
    if selection_BOK.ndim != 3:
        raise ValueError(f"selection_BOK has shape {tuple(selection_BOK.shape)}; accepted are three dimensions")
    batch, _, budget = selection_BOK.shape
    return SelectionGather(partition, group, batch=batch, budget=budget, device=selection_BOK.device).finish(
        selection_BOK
    )


def greatest(values: Sequence[int], groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[int]:
    """Of each of these int64 the greatest that a rank says, of all whom one reaches through group after group.

    Every rank has to ask. Of a bool it tells whether any rank says so; of a number and its negative, whether all ranks
    have the same.
    """
    groups = [group for group in groups if group_size(group) > 1]
    words = torch.tensor(values, dtype=torch.int64, device=device if groups else "cpu")
    with exchanging():
        for group in groups:
            dist.all_reduce(words, dist.ReduceOp.MAX, group=group)
        most: list[int] = words.tolist()
    return most


def _all_gather(output: Tensor, shard: Tensor, group: Group, *, wait: bool = True) -> dist.Work | None:
    if group is None:
        output.copy_(shard)
        return None
    # torch 2.13 renames the collective and deprecates the name that 2.11 and 2.12 have.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with exchanging(output.nbytes - shard.nbytes):
        return cast(Callable[..., dist.Work | None], gather)(output, shard, group=group, async_op=not wait)


def all_to_all(
    output: Tensor, shard: Tensor, received: Sequence[int], sent: Sequence[int], group: Group, *, wait: bool = True
) -> dist.Work | None:
    """Rows of `shard` to all ranks and from them, `sent` to each and `received` of each, in the order of ranks."""
    if group is None:
        output.copy_(shard)
        return None
    exchange = cast(Callable[..., dist.Work | None], dist.all_to_all_single)
    others = sum(received) - received[dist.get_rank(group)]
    sizes = {"output_split_sizes": list(received), "input_split_sizes": list(sent)}
    with exchanging(others * output[:1].nbytes):
        return exchange(output, shard, **sizes, group=group, async_op=not wait)
