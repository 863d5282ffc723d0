"""Which query rows a rank of the query-shard group owns, and how much work a row is: integers only, no tensors.

The work of a row is its *scored pairs*: the pools it sees, if they are more than the budget, else none, for then it
takes them all without scoring. Row t of a document (counted from 1) sees `t // pool_size` complete pools.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import get_args

from mcore_dsa.hf_config import shown
from mcore_dsa.settings import Partition

# Python measures ranges with 63 bits.
_ROWS = 2**62
_RANKS = 2**16


@dataclass(frozen=True)
class RowPartition:
    """The rows of a call cut over the ranks of a group; every rank can compute every other rank's rows.

    Attributes:
        num_rows: rows of the call.
        shards: for each rank its slices, in the order in which it holds them. Either they hold every row once, or each
            rank holds all rows as one slice.

    Raises: ValueError for a negative `num_rows`, a group without ranks, or shards that do neither.
    """

    num_rows: int
    shards: tuple[tuple[range, ...], ...]

    def __post_init__(self) -> None:
        _check_sizes(self.num_rows, len(self.shards))
        parts = sorted((part for own in self.shards for part in own if part), key=lambda part: part.start)
        edges = [0, *(edge for part in parts for edge in (part.start, part.stop)), self.num_rows]
        disjoint = all(part.step == 1 for part in parts) and edges[::2] == edges[1::2]
        if not disjoint and not self.is_replicated:
            raise ValueError(
                f"shards is {self.shards}; accepted are ranges that hold each row 0 ... {self.num_rows - 1} once, or "
                "all of them on every rank"
            )

    @classmethod
    def replicated(cls, num_rows: int, group_size: int) -> RowPartition:
        """Every rank owns every row."""
        _check_sizes(num_rows, group_size)
        return cls(num_rows, ((range(num_rows),),) * group_size)

    @classmethod
    def contiguous(cls, num_rows: int, group_size: int) -> RowPartition:
        """Rank r owns `[min(s, r * n), min(s, (r + 1) * n))`, `n = ceil(s / R)`; the last shards may be empty."""
        _check_sizes(num_rows, group_size)
        return cls(num_rows, tuple((part,) for part in _equal_slices(num_rows, group_size)))

    @classmethod
    def zigzag(cls, num_rows: int, group_size: int) -> RowPartition:
        """2R slices of `ceil(s / 2R)` rows; rank r owns slices r and 2R-1-r, which evens out causal work."""
        _check_sizes(num_rows, group_size)
        parts = _equal_slices(num_rows, 2 * group_size)
        return cls(num_rows, tuple((parts[rank], parts[-1 - rank]) for rank in range(group_size)))

    @classmethod
    def balanced(cls, num_rows: int, group_size: int, work: PackWork) -> RowPartition:
        """Contiguous shards of unequal length, each with its share of `work`'s scored pairs, to within one row.

        Without any scored pair the rows are cut equally. `work` describes the rows from 0 on; those behind it are none.
        """
        _check_sizes(num_rows, group_size)
        if work.scored_pairs == 0:
            return cls.contiguous(num_rows, group_size)
        shares = (work.scored_pairs * rank // group_size for rank in range(1, group_size))
        cuts = [0, *(min(num_rows, work.first_row_reaching(share)) for share in shares), num_rows]
        return cls(num_rows, tuple((range(start, stop),) for start, stop in pairwise(cuts)))

    @property
    def group_size(self) -> int:
        return len(self.shards)

    @property
    def is_replicated(self) -> bool:
        """Whether every rank owns every row, in row order: then nothing has to be gathered."""
        return all(own == (range(self.num_rows),) for own in self.shards)

    @property
    def rows_per_rank(self) -> int:
        """Rows of the longest shard, to which every shard is padded for the exchange."""
        return max(self.rows_of(rank) for rank in range(self.group_size))

    def rows_of(self, rank: int) -> int:
        """How many rows `rank` owns."""
        return sum(len(part) for part in self.slices(rank))

    def slices(self, rank: int) -> tuple[range, ...]:
        """The rows of `rank`.

        Raises: ValueError for a rank outside the group.
        """
        if not 0 <= rank < self.group_size:
            raise ValueError(f"rank is {rank}; accepted is 0 <= rank < {self.group_size}")
        return self.shards[rank]

    def runs(self, rank: int, places: range) -> list[range]:
        """Which rows stand at `places` of the shard of `rank`, counted through its slices; places behind it hold none.

        Raises: as `slices`.
        """
        runs, offset = [], 0
        for part in self.slices(rank):
            here = overlap(range(offset, offset + len(part)), places)
            if here:
                runs.append(range(part.start + here.start - offset, part.start + here.stop - offset))
            offset += len(part)
        return runs


@dataclass(frozen=True)
class RowExchange:
    """How rows get from the ranks that hold them, in equal parts in row order, to the ranks that own them.

    Attributes:
        send: rows to send, as ranges into the rows this rank holds, receiver after receiver.
        send_counts: how many of them each rank gets.
        receive_counts: how many rows come from each rank.
        place: where they go, in the order of their coming, as ranges into the rows this rank owns.
        moves: whether any rank sends a row to another, or gets its own in another order.
    """

    send: tuple[range, ...]
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    place: tuple[range, ...]
    moves: bool

    @classmethod
    def of(cls, partition: RowPartition, rank: int) -> RowExchange:
        """The exchange that gives `rank` its rows.

        Raises: ValueError for rows that are no multiple of the ranks, or a rank outside the group.
        """
        ranks, own = partition.group_size, partition.slices(rank)
        if partition.num_rows % ranks:
            raise ValueError(f"num_rows is {partition.num_rows}; accepted are multiples of the group's {ranks} ranks")
        held = _equal_slices(partition.num_rows, ranks)
        sent = [[overlap(held[rank], part) for part in partition.slices(receiver)] for receiver in range(ranks)]
        received = [[overlap(home, part) for part in own] for home in held]
        starts = list(accumulate(map(len, own), initial=0))
        place = [
            range(start + run.start - part.start, start + run.stop - part.start)
            for runs in received
            for start, part, run in zip(starts[:-1], own, runs, strict=True)
            if run
        ]
        home = held[rank].start
        return cls(
            tuple(range(run.start - home, run.stop - home) for runs in sent for run in runs if run),
            tuple(sum(map(len, runs)) for runs in sent),
            tuple(sum(map(len, runs)) for runs in received),
            tuple(place),
            any(_joined(partition.slices(each)) != held[each] for each in range(ranks)),
        )

    @property
    def outgoing(self) -> tuple[range, ...]:
        """Where the runs of `send` stand, one after the other, in what is sent."""
        return _in_a_row(self.send)

    @property
    def incoming(self) -> tuple[range, ...]:
        """Where the runs of `place` stand in what arrives."""
        return _in_a_row(self.place)


@dataclass(frozen=True)
class PackWork:
    """Pairs that indexing a pack of documents takes, as prefix sums over its rows, in closed form for each document.

    Attributes:
        lengths: tokens of each document, in pack order.
        pool_size: `index_kpool`. budget: pools a row may select.

    Raises: TypeError for what is no integer, ValueError for a negative length, a `pool_size` or a `budget` below 1.
    """

    lengths: tuple[int, ...]
    pool_size: int
    budget: int
    _row_ends: tuple[int, ...] = field(init=False, repr=False)
    _visible_ends: tuple[int, ...] = field(init=False, repr=False)
    _scored_ends: tuple[int, ...] = field(init=False, repr=False)
    _selected_ends: tuple[int, ...] = field(init=False, repr=False)
    _tail_ends: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not _integers(*self.lengths, self.pool_size, self.budget):
            raise TypeError(
                "lengths, pool_size and budget hold something else than integers; accepted are integers, "
                f"pool_size is {self.pool_size!r} and budget {self.budget!r}"
            )
        if min(self.lengths, default=0) < 0 or self.pool_size < 1 or self.budget < 1:
            raise ValueError(
                f"lengths has a least of {min(self.lengths, default=0)}, pool_size is {self.pool_size}, budget "
                f"{self.budget}; accepted are lengths >= 0, pool_size >= 1 and budget >= 1"
            )
        object.__setattr__(self, "_row_ends", tuple(accumulate(self.lengths)))
        for name in ("visible", "scored", "selected", "tail"):
            ends = tuple(accumulate(map(getattr(self, f"_{name}"), self.lengths)))
            object.__setattr__(self, f"_{name}_ends", ends)

    @property
    def rows(self) -> int:
        return self._row_ends[-1] if self._row_ends else 0

    @property
    def visible_pairs(self) -> int:
        """(row, pool) pairs in which the row sees the pool."""
        return self._visible_ends[-1] if self._visible_ends else 0

    @property
    def scored_pairs(self) -> int:
        """Those of them whose row sees more pools than the budget."""
        return self._scored_ends[-1] if self._scored_ends else 0

    def scored_pairs_before(self, row: int) -> int:
        """Scored pairs of rows `0 ... row - 1`; rows behind the last document have none."""
        return self._before(row, self._scored_ends, self._scored)

    def visible_pairs_before(self, row: int) -> int:
        """Visible pairs of rows `0 ... row - 1`."""
        return self._before(row, self._visible_ends, self._visible)

    def selected_pairs_before(self, row: int) -> int:
        """Pools that rows `0 ... row - 1` select, summed over rows; rows behind the last document select none."""
        return self._before(row, self._selected_ends, self._selected)

    def tail_tokens_before(self, row: int) -> int:
        """Tokens of the rows' own incomplete pools, summed over rows `0 ... row - 1`."""
        return self._before(row, self._tail_ends, self._tail)

    def first_row_reaching(self, pairs: int) -> int:
        """The least row with at least `pairs` scored pairs before it."""
        return bisect_left(range(self.rows), pairs, key=self.scored_pairs_before)

    @property
    def _unscored_rows(self) -> int:
        """Rows at the head of a document that see no more pools than the budget."""
        return (self.budget + 1) * self.pool_size - 1

    def _before(self, row: int, ends: Sequence[int], of_rows: Callable[[int], int]) -> int:
        document = bisect_right(self._row_ends, row)
        complete, start = (ends[document - 1], self._row_ends[document - 1]) if document else (0, 0)
        return complete if document == len(self.lengths) else complete + of_rows(row - start)

    def _visible(self, rows: int) -> int:
        """`sum(t // P for t in 1 ... rows)`: P rows see each of 1 ... n-1 pools, the last `rows % P + 1` see n."""
        pools, rest = divmod(rows, self.pool_size)
        return self.pool_size * (pools * (pools - 1) // 2) + pools * (rest + 1)

    def _scored(self, rows: int) -> int:
        return max(0, self._visible(rows) - self._visible(self._unscored_rows))

    def _selected(self, rows: int) -> int:
        taking_all = min(rows, self._unscored_rows)
        return self._visible(taking_all) + self.budget * (rows - taking_all)

    def _tail(self, rows: int) -> int:
        pools, rest = divmod(rows, self.pool_size)
        return pools * (self.pool_size * (self.pool_size - 1) // 2) + rest * (rest + 1) // 2


def partition_rows(
    kind: Partition, num_rows: int, group_size: int, lengths: Sequence[int], *, pool_size: int, budget: int
) -> RowPartition:
    """The partition that `SKYRL_DSA_INDEXER_TP_SHARD` names; `lengths` of the documents matter to `balanced` alone.

    Raises: TypeError for lengths that are none, ValueError for another kind, and as `RowPartition` and `PackWork`.
    """
    if not isinstance(lengths, Sequence) or isinstance(lengths, str):
        raise TypeError(f"lengths is {shown(lengths)}; accepted is a sequence of integers")
    if kind == "off":
        return RowPartition.replicated(num_rows, group_size)
    if kind == "contiguous":
        return RowPartition.contiguous(num_rows, group_size)
    if kind == "zigzag":
        return RowPartition.zigzag(num_rows, group_size)
    if kind == "balanced":
        return RowPartition.balanced(num_rows, group_size, PackWork(tuple(lengths), pool_size, budget))
    raise ValueError(f"partition is {kind!r}; accepted are {', '.join(map(repr, get_args(Partition)))}")


def overlap(a: range, b: range) -> range:
    """What two ranges have in common; empty, and inside neither, where that is nothing."""
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))


def _joined(parts: Sequence[range]) -> range | None:
    """The parts as one range, None where they do not follow one another."""
    parts = [part for part in parts if part] or [range(0)]
    follow = all(before.stop == after.start for before, after in pairwise(parts))
    return range(parts[0].start, parts[-1].stop) if follow else None


def _in_a_row(runs: Sequence[range]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise(accumulate(map(len, runs), initial=0)))


def _equal_slices(num_rows: int, parts: int) -> list[range]:
    length = -(-num_rows // parts)
    cuts = [min(num_rows, part * length) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def check_ranks(name: str, value: int) -> None:
    """Refuse anything but a number of ranks, of which tables are made: an integer from 1 to 65,536."""
    if not _integers(value) or not 1 <= value <= _RANKS:
        raise ValueError(f"{name} is {shown(value)}; accepted is an integer >= 1, at most {_RANKS}")


def _check_sizes(num_rows: int, group_size: int) -> None:
    check_ranks("group_size", group_size)
    if not _integers(num_rows) or not 0 <= num_rows < _ROWS:
        raise ValueError(f"num_rows is {shown(num_rows)}; accepted is an integer >= 0, below 2**62")


def _integers(*values: object) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)
