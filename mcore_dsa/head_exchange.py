"""All-to-alls between attention cut by heads and attention cut by rows, in pieces that run while others are attended.

Letters of shapes: `mcore_dsa/__init__.py`. A rank holds every row of its own heads; it attends the rows of its own
shard with the heads of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_dsa.collectives import Group, all_to_all, exchanging, greatest, group_rank, group_size
from mcore_dsa.rows import RowPartition

# Copies of a piece that live at most, in backward: queries and gradients of this one, the same of the next, sent and
# received, the result, and that of the one before, sent and received.
PIECES_HELD = 9


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """Brings rows of all heads to the ranks that attend them, and what comes out back to the ranks of the heads.

    A shard goes in pieces of `piece_rows` rows, as many on every rank: those of a rank whose rows are at their end are
    empty.

    Attributes:
        partition: who attends which of the rows.
        group: the ranks, in whose order the heads stand.

    Raises: ValueError for a partition of another number of ranks, or in which every rank has every row.
    """

    partition: RowPartition
    group: Group
    piece_rows: int

    def __post_init__(self) -> None:
        ranks = group_size(self.group)
        replicated = bool(ranks > 1 and self.partition.num_rows and self.partition.is_replicated)
        if self.partition.group_size != ranks or replicated:
            kind = "all of them to each" if replicated else "shards"
            raise ValueError(
                f"partition gives {self.partition.group_size} ranks {kind}; accepted are shards for the group's "
                f"{ranks} ranks"
            )

    @classmethod
    def within(cls, nbytes: int, x_SBHC: Tensor, partition: RowPartition, group: Group) -> HeadExchange:
        """Pieces of which all that live at a time take `nbytes` at most, but for those of one row.

        `x_SBHC` is any tensor that will be exchanged, of this rank's heads.
        """
        row = x_SBHC[0].numel() if len(x_SBHC) else 1
        held = PIECES_HELD * partition.group_size * row * x_SBHC.element_size()
        return cls(partition, group, max(1, nbytes // held))

    @property
    def pieces(self) -> int:
        return -(-self.partition.rows_per_rank // self.piece_rows)

    def own(self, piece: int) -> slice:
        """The piece's places in this rank's shard."""
        rows = self.partition.rows_of(group_rank(self.group))
        return slice(*(min(rows, edge * self.piece_rows) for edge in (piece, piece + 1)))

    def each_piece(
        self, x: Sequence[Tensor], work: Callable[[int, list[Tensor], Tensor | None], None], out_SBHC: Tensor | None
    ) -> None:
        """Call `work` on each piece of this rank's rows, with all heads.

        Args:
            x: each `[s, b, h, c]`, every row of this rank's heads.
            work: takes a piece's number, its `[o, b, G * h, c]` of every tensor in `x`, and one of that shape to fill,
                whose rows and heads go where they belong in `out_SBHC`.
            out_SBHC: `[s, b, h, c]` to be filled, of the dtype of `x[0]`; None: nothing goes back.

        Raises: ValueError for another number of rows than the partition cuts, before anything is exchanged. What `work`
        raises, after all that is left of the exchange: other ranks wait in none of it, and get NaN for those rows.
        """
        if any(tensor.shape != x[0].shape for tensor in x) or len(x[0]) != self.partition.num_rows:
            raise ValueError(
                f"x has shapes {[tuple(tensor.shape) for tensor in x]}; accepted is one shape of the partition's "
                f"{self.partition.num_rows} rows"
            )
        arriving = [self._collect(tensor, 0) for tensor in x] if self.pieces else []
        leaving: _Moving | None = None
        raised: Exception | None = None
        for piece in range(self.pieces):
            here = [self._joined(moving) for moving in arriving]
            arriving.clear()
            if piece + 1 < self.pieces:
                arriving += [self._collect(tensor, piece + 1) for tensor in x]
            result = None if out_SBHC is None else here[0].new_empty(here[0].shape)
            if raised is None:
                try:
                    work(piece, here, result)
                except Exception as error:
                    raised = error
            if raised is not None and result is not None:
                result.fill_(float("nan"))
            del here
            if leaving is not None and out_SBHC is not None:
                leaving.place(out_SBHC)
            leaving = None
            leaving = None if result is None else self._spread(result, piece)
        if leaving is not None and out_SBHC is not None:
            leaving.place(out_SBHC)
        if raised is not None:
            raise raised

    def on_any_rank(self, flags: Tensor) -> Tensor:
        """Of each bool whether it is true on any rank of the group, on the CPU."""
        if self.group is None:
            return flags.cpu()
        return torch.tensor(greatest(flags.tolist(), [self.group], flags.device), device="cpu").bool()

    def _collect(self, x_SBHC: Tensor, piece: int) -> _Moving:
        """Send every rank the rows of its piece, of this rank's heads."""
        runs, sent, own = self._of_ranks(piece)
        outgoing = torch.cat([x_SBHC[run.start : run.stop] for run in runs]) if runs else x_SBHC[:0]
        return self._move(outgoing, [own] * len(sent), sent, runs)

    def _joined(self, moving: _Moving) -> Tensor:
        """`[o, b, G * h, c]` of what came from every rank."""
        ranks = self.partition.group_size
        of_ranks: Tensor = moving.arrived().unflatten(0, (ranks, len(moving.incoming) // ranks))
        return of_ranks.movedim(0, 2).flatten(2, 3)

    def _spread(self, x_OBHC: Tensor, piece: int) -> _Moving:
        """Send every rank its heads, of this rank's rows."""
        runs, sent, own = self._of_ranks(piece)
        outgoing = x_OBHC.unflatten(2, (self.partition.group_size, -1)).movedim(2, 0).flatten(0, 1)
        return self._move(outgoing, sent, [own] * len(sent), runs)

    def _of_ranks(self, piece: int) -> tuple[list[range], list[int], int]:
        """The rows of every rank's piece, rank after rank; how many each has, and this one."""
        places = range(piece * self.piece_rows, (piece + 1) * self.piece_rows)
        of_ranks = [self.partition.runs(rank, places) for rank in range(self.partition.group_size)]
        counts = [sum(map(len, runs)) for runs in of_ranks]
        return [run for runs in of_ranks for run in runs], counts, counts[group_rank(self.group)]

    def _move(self, outgoing: Tensor, received: list[int], sent: list[int], runs: list[range]) -> _Moving:
        outgoing = outgoing.contiguous()
        incoming = outgoing.new_empty(sum(received), *outgoing.shape[1:])
        work = all_to_all(incoming, outgoing, received, sent, self.group, wait=False)
        return _Moving(work, outgoing, incoming, runs)


@dataclass(frozen=True, eq=False)
class _Moving:
    """An exchange on its way: its buffers, and the rows that it is of, rank after rank."""

    work: dist.Work | None
    outgoing: Tensor
    incoming: Tensor
    runs: list[range]

    def arrived(self) -> Tensor:
        if self.work is not None:
            with exchanging():
                self.work.wait()
        return self.incoming

    def place(self, x_SBHC: Tensor) -> None:
        start, incoming = 0, self.arrived()
        for run in self.runs:
            x_SBHC[run.start : run.stop] = incoming[start : start + len(run)]
            start += len(run)
