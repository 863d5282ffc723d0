"""Which query rows a rank of the query-shard group owns: integers only, no tensors, no communication."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowPartition:
    """`num_rows` rows cut into contiguous shards over `group_size` ranks.

    Rank r owns rows `[min(s, r * n), min(s, (r + 1) * n))` with `n = ceil(s / R)`: the last shard may be short, and
    shards behind it are empty. Every rank can compute every other rank's rows.

    Raises: ValueError for a negative `num_rows` or a `group_size` below 1.
    """

    num_rows: int
    group_size: int

    def __post_init__(self) -> None:
        if self.num_rows < 0 or self.group_size < 1:
            raise ValueError(
                f"num_rows is {self.num_rows} and group_size {self.group_size}; accepted are num_rows >= 0 and "
                "group_size >= 1"
            )

    @property
    def rows_per_rank(self) -> int:
        """Rows of the longest shard, to which every shard is padded for the exchange."""
        return -(-self.num_rows // self.group_size)

    def shard(self, rank: int) -> range:
        """The rows of `rank`, in ascending order.

        Raises: ValueError for a rank outside the group.
        """
        if not 0 <= rank < self.group_size:
            raise ValueError(f"rank is {rank}; accepted is 0 <= rank < {self.group_size}")
        start = min(self.num_rows, rank * self.rows_per_rank)
        return range(start, min(self.num_rows, start + self.rows_per_rank))
