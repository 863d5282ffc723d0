"""The exchange of a sharded selection: own rows in, every row's selection out, in pieces while a rank still selects.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_dsa.agreement import header
from mcore_dsa.collectives import Group, all_gather, exchanging, group_rank, group_size
from mcore_dsa.rows import RowPartition

# Selections gathered over a group so far: what tells the gathers of one call from those of the next.
_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
# Pieces of a call that have numbers of their own.
_PIECES = 1 << 16
# In place of a piece's number: the rank has left the call.
_LEFT = -2


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

    def check(self, selection_BOK: Tensor) -> None:
        """Refuse anything but this rank's shard: TypeError unless int32, ValueError for another shape."""
        if selection_BOK.dtype != torch.int32:
            raise TypeError(f"selection_BOK is {selection_BOK.dtype}; accepted is torch.int32")
        if selection_BOK.shape != self._own_shape:
            raise ValueError(
                f"selection_BOK has shape {tuple(selection_BOK.shape)}; accepted is {list(self._own_shape)}, this "
                "rank's shard"
            )

    @torch.no_grad()
    def advance(self, selection_BOK: Tensor, done: int) -> None:
        """Gather what is complete of this rank's rows.

        Args:
            selection_BOK: int32 `[b, o, budget]`, the selections of this rank's shard.
            done: how many of its rows, from the first on, are written.

        Raises: as `check`; ValueError where another rank is in another call, or has left this one.
        """
        self.check(selection_BOK)
        if self._selection_BSK is None:
            return
        _, own, _ = self._own_shape
        while (start := self._next_row) < self._partition.rows_per_rank:
            stop = min(start + self.piece_rows, self._partition.rows_per_rank)
            if done < min(stop, own):
                break
            self._next_row = stop
            self._enter(range(start, stop), selection_BOK[:, start : min(stop, own)])

    @torch.no_grad()
    def finish(self, selection_BOK: Tensor) -> Tensor:
        """int32 `[b, partition.num_rows, budget]` in row order, of a shard that is complete; it is the whole where
        every rank owns every row.
        """
        self.advance(selection_BOK, selection_BOK.shape[1])
        while self._pending:
            self._place()
        return selection_BOK if self._selection_BSK is None else self._selection_BSK

    @torch.no_grad()
    def leave(self) -> None:
        """Enter what is left of the call with nothing to give: a rank that raises tells the others, who wait for it.

        Every rank enters every piece of a call, whatever becomes of it, and the next call begins in step.
        """
        if self._selection_BSK is None:
            return
        nothing_BOK = self._selection_BSK[:, :0]
        for start in range(self._next_row, self._partition.rows_per_rank, self.piece_rows):
            rows = range(start, min(start + self.piece_rows, self._partition.rows_per_rank))
            self._pending.append(self._entered(rows, nothing_BOK, tag=_LEFT))
        self._next_row = self._partition.rows_per_rank
        while self._pending:
            if (work := self._pending.popleft().work) is not None:
                with exchanging():
                    work.wait()

    def _enter(self, rows: range, selection_BOK: Tensor) -> None:
        self._pending.append(self._entered(rows, selection_BOK))
        while len(self._pending) > self._in_flight:
            self._place()

    def _entered(self, rows: range, selection_BOK: Tensor, tag: int | None = None) -> _Piece:
        if self._call == 0 and self._group is not None:
            self._call = _calls[self._group] = _calls.get(self._group, 0) + 1
        batch, own, budget = selection_BOK.shape
        padded = selection_BOK.new_full((batch, len(rows) + 1, budget), -1)
        padded[:, :own] = selection_BOK
        if tag is None:
            tag = self._call % 2**15 * _PIECES + rows.start // self.piece_rows % _PIECES
        padded[:, -1] = tag
        gathered = selection_BOK.new_empty(group_size(self._group) * batch, len(rows) + 1, budget)
        work = all_gather(gathered, padded, self._group, wait=False)
        return _Piece(work, rows, tag, gathered, padded)

    def _place(self) -> None:
        piece = self._pending.popleft()
        if piece.work is not None:
            with exchanging():
                piece.work.wait()
        of_ranks = piece.gathered.unflatten(0, (self._partition.group_size, -1))
        if bool((of_ranks[:, :, -1] != piece.tag).any()):
            numbers = of_ranks[:, 0, -1, 0].tolist()
            if left := [rank for rank, number in enumerate(numbers) if number == _LEFT]:
                self.leave()
                raise ValueError(
                    f"ranks {left} of the query-shard group raised in the middle of a call; accepted is a call that "
                    "every rank ends: their own errors say why"
                )
            tags = [f"{tag // _PIECES}.{tag % _PIECES}" for tag in numbers]
            # Ranks in different calls have no end of this one in common.
            self._next_row = self._partition.rows_per_rank
            self._pending.clear()
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


def gather_selection(selection_BOK: Tensor, partition: RowPartition, group: Group, *, agreed: bool = False) -> Tensor:
    """The selection of every row, on every rank, from each rank's whole shard, by one collective.

    Args:
        selection_BOK: int32 `[b, rows of this rank's shard, budget]`.
        partition: who owns which rows; equal on every rank.

    Returns: int32 `[b, partition.num_rows, budget]` in row order.

    Raises: TypeError unless int32, ValueError unless the shard has the rows the partition gives this rank, and on every
    rank where partitions, batch or budget differ.
    """
    group_size(group)
    with header("gather_selection", group, agreed=agreed) as compared:
        if selection_BOK.ndim != 3:
            raise ValueError(f"selection_BOK has shape {tuple(selection_BOK.shape)}; accepted are three dimensions")
        batch, _, budget = selection_BOK.shape
        gather = SelectionGather(partition, group, batch=batch, budget=budget, device=selection_BOK.device)
        gather.check(selection_BOK)
        if not agreed:
            compared |= {"batch": batch, "budget": budget, "partition": partition.described}
    return gather.finish(selection_BOK)
