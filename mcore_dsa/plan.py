"""The plan of a micro-batch: everything about its rows and pools that no layer changes, built once for all of them.

Letters of shapes: `mcore_dsa/__init__.py`. Rows are those of one context-parallel rank, in its local order; tokens and
pools are those of the whole sequence. Under Megatron's context parallelism a document is cut into `2 * CP` equal
chunks, and rank c holds chunks c and `2 * CP - 1 - c` of every document, one document after the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mcore_dsa.checks import check_integer, check_natural, check_positive
from mcore_dsa.kpool import PoolLayout, RowBounds
from mcore_dsa.rows import RowPartition, check_ranks, partition_rows
from mcore_dsa.settings import Partition


@dataclass(frozen=True, eq=False)
class SelectionPlan:
    """Who sees what, and who selects for whom.

    Attributes:
        layout: the pools of the whole sequence, in token order.
        bounds: what each of this context-parallel rank's rows sees.
        partition: which rank of the query-shard group owns which of these rows.
        rank: this rank's place in that group.
        key_order_T: int64, where each token stands among keys gathered over context parallelism in rank order; None
            where they come in token order.
        documents: what tells the documents of a pack from others, equal on ranks that hold the same.
    """

    layout: PoolLayout
    bounds: RowBounds
    partition: RowPartition
    rank: int
    key_order_T: Tensor | None = None
    documents: str = ""

    @cached_property
    def key_token_T(self) -> Tensor:
        """int64, the inverse of `key_order_T`: which token each of the gathered keys is of."""
        assert self.key_order_T is not None
        return self.key_order_T.argsort()

    @cached_property
    def own(self) -> RowBounds:
        """The bounds of the rows this rank selects for, slice after slice."""
        if self.partition.is_replicated:
            return self.bounds
        own = [torch.arange(part.start, part.stop, device="cpu") for part in self.partition.slices(self.rank) if part]
        row_O = torch.cat(own) if own else torch.arange(0, device="cpu")
        return self.bounds.take(row_O.to(self.layout.device))

    @cached_property
    def attended(self) -> RowPartition:
        """Who attends which rows where attention is cut by rows: who selects for them; of rows for which every rank
        does, contiguous shards.
        """
        if self.partition.is_replicated:
            return RowPartition.contiguous(self.partition.num_rows, self.partition.group_size)
        return self.partition

    @cached_property
    def attended_own(self) -> RowBounds:
        """The bounds of the rows this rank attends then, slice after slice."""
        if not self.partition.is_replicated:
            return self.own
        (part,) = self.attended.slices(self.rank)
        return self.bounds.take(slice(part.start, part.stop))

    def attended_pieces(self, rows: int) -> tuple[RowBounds, ...]:
        """The bounds of each `rows` of those rows, as many pieces on every rank; the same objects for every layer."""
        if rows not in self._pieces:
            starts = range(0, self.attended.rows_per_rank, rows)
            self._pieces[rows] = tuple(self.attended_own.take(slice(start, start + rows)) for start in starts)
        return self._pieces[rows]

    @cached_property
    def _pieces(self) -> dict[int, tuple[RowBounds, ...]]:
        return {}

    @classmethod
    def dense(
        cls,
        rows: int,
        *,
        batch: int,
        pool_size: int,
        budget: int,
        partition: Partition,
        tp_rank: int,
        tp_size: int,
        cp_rank: int = 0,
        cp_size: int = 1,
        device: torch.device | str | None = None,
    ) -> SelectionPlan:
        """One unpadded document of `rows * cp_size` tokens in each of `batch` samples.

        Raises: ValueError for sizes that do not fit, and for `balanced` under context parallelism.
        """
        check_natural("rows", rows)
        check_ranks("cp_size", cp_size)
        layout = PoolLayout.dense(rows * cp_size, pool_size=pool_size, batch=batch, device=device)
        lengths = [rows * cp_size]
        return cls._of(layout, lengths, lengths, budget, partition, (tp_rank, tp_size), (cp_rank, cp_size))

    @classmethod
    def packed(
        cls,
        cu_seqlens: Tensor,
        cu_seqlens_padded: Tensor | None = None,
        *,
        pool_size: int,
        budget: int,
        partition: Partition,
        tp_rank: int,
        tp_size: int,
        cp_rank: int = 0,
        cp_size: int = 1,
    ) -> SelectionPlan:
        """Documents one behind the other in a single sample.

        Args:
            cu_seqlens: integer `[documents + 1]`, cumulative lengths from 0 on, of the whole sequence.
            cu_seqlens_padded: the same with padding, where documents begin; a row behind a document's own length
                selects nothing.

        Raises: TypeError, ValueError for lengths that are no such list, a document longer than its padded place, a
        padded length that is no multiple of `2 * cp_size`, and `balanced` under context parallelism.
        """
        check_ranks("cp_size", cp_size)
        check_positive("budget", budget)
        begins = _cumulative("cu_seqlens", cu_seqlens)
        places = begins if cu_seqlens_padded is None else _cumulative("cu_seqlens_padded", cu_seqlens_padded)
        if len(places) != len(begins):
            raise ValueError(
                f"cu_seqlens_padded holds {len(places)} values; accepted are as many as cu_seqlens, {len(begins)}"
            )
        lengths = [stop - start for start, stop in pairwise(places)]
        own = [stop - start for start, stop in pairwise(begins)]
        for document, (length, place) in enumerate(zip(own, lengths, strict=True)):
            if length > place:
                raise ValueError(
                    f"document {document} of cu_seqlens is {length} tokens; accepted is at most its place in "
                    f"cu_seqlens_padded, {place}"
                )
        ends = [start + length for start, length in zip(places, own, strict=False)]
        segments = torch.tensor([places[:-1], ends], device=cu_seqlens.device).unsqueeze(1)
        layout = PoolLayout.from_segments(*segments, num_tokens=places[-1], pool_size=pool_size)
        # Padding scores nothing, as a document does that sees no more pools than the budget.
        idle = (budget + 1) * pool_size - 1
        work = []
        for start, end, stop in zip(places, ends, places[1:], strict=False):
            work += [end - start, *[idle] * ((stop - end) // idle), (stop - end) % idle]
        plan = cls._of(layout, lengths, work, budget, partition, (tp_rank, tp_size), (cp_rank, cp_size))
        digest = hashlib.blake2b(repr((begins, places)).encode(), digest_size=8).hexdigest()
        return replace(plan, documents=f"{len(lengths)} in {places[-1]} tokens, {digest}")

    @classmethod
    def _of(
        cls,
        layout: PoolLayout,
        lengths: Sequence[int],
        work: Sequence[int],
        budget: int,
        partition: Partition,
        tp: tuple[int, int],
        cp: tuple[int, int],
    ) -> SelectionPlan:
        (tp_rank, tp_size), (cp_rank, cp_size) = tp, cp
        check_ranks("tp_size", tp_size)
        check_natural("tp_rank", tp_rank)
        check_natural("cp_rank", cp_rank)
        if not (0 <= cp_rank < cp_size and 0 <= tp_rank < tp_size):
            raise ValueError(
                f"tp_rank is {tp_rank} of {tp_size} and cp_rank {cp_rank} of {cp_size}; accepted are ranks below sizes"
            )
        if cp_size > 1 and partition == "balanced":
            raise ValueError(
                "partition is 'balanced' under context parallelism; accepted are the others, zigzag is even there"
            )
        rows = layout.num_tokens // cp_size
        owned = partition_rows(partition, rows, tp_size, work, pool_size=layout.pool_size, budget=budget)
        if cp_size == 1:
            position_S, order = torch.arange(rows, device=layout.device), None
        else:
            held = [context_rows(lengths, rank, cp_size) for rank in range(cp_size)]
            position_S, order = held[cp_rank].to(layout.device), torch.cat(held).argsort().to(layout.device)
        return cls(layout, layout.bounds(position_S), owned, tp_rank, order)


def context_rows(lengths: Sequence[int], rank: int, size: int) -> Tensor:
    """int64, the tokens that a context-parallel rank holds, in its order, of documents of `lengths`, padding included.

    Raises: ValueError for a length that is no multiple of `2 * size`.
    """
    for document, length in enumerate(lengths):
        if length % (2 * size):
            raise ValueError(
                f"document {document} is {length} tokens; accepted under context parallelism of {size} are multiples "
                f"of {2 * size}, {-(-length // (2 * size)) * 2 * size} here"
            )
    starts = accumulate(lengths, initial=0)
    chunks = [
        torch.arange(start + chunk * length, start + (chunk + 1) * length, device="cpu")
        for start, length in zip(starts, (length // (2 * size) for length in lengths), strict=False)
        for chunk in (rank, 2 * size - 1 - rank)
    ]
    return torch.cat(chunks) if chunks else torch.arange(0, device="cpu")


def _cumulative(name: str, values: Tensor) -> list[int]:
    check_integer(name, values, ndim=1)
    listed: list[int] = values.tolist()
    if len(listed) < 2 or listed[0] != 0 or any(stop < start for start, stop in pairwise(listed)):
        raise ValueError(
            f"{name} holds {listed[:8]}{' ...' * (len(listed) > 8)}; accepted are two or more ascending "
            "lengths, the first 0"
        )
    return listed
