"""Everything that crosses ranks, over an explicit group.

Letters of shapes: `mcore_dsa/__init__.py`.

Every function takes the group it runs over. `None` stands for a group of one: it runs the same code, with a copy where
the collective would be. All ranks of a group always enter, also those that own no row.

The functions over whole tensors first compare their calls by `agreement.header`, two small collectives and a wait of
the host: ranks with other shapes or dtypes would get rows made up of other rows' bytes, without an error. A caller who
has compared what the ranks call with says `agreed=True`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from mcore_dsa.agreement import header
from mcore_dsa.checks import form_of, kind_of
from mcore_dsa.ranges import named
from mcore_dsa.rows import RowExchange, RowPartition

type Group = dist.ProcessGroup | None


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
def gather_rows(x: Tensor, group: Group, *, agreed: bool = False) -> Tensor:
    """Shards of equal length joined along dim 0 in rank order: `[n, ...]` on each of G ranks to `[G * n, ...]` on all.

    No gradient flows back: what is gathered here feeds a frozen selection.

    Raises: ValueError for a tensor without dimensions, and on every rank where theirs differ in shape or dtype.
    """
    ranks = group_size(group)
    with header("gather_rows", group, agreed=agreed) as compared:
        if x.ndim == 0:
            raise ValueError("x has no dimensions; accepted is a tensor of rows, [n, ...]")
        compared["x"] = form_of(x)
    gathered = x.new_empty(ranks * x.shape[0], *x.shape[1:])
    all_gather(gathered, x.contiguous(), group)
    return gathered


@torch.no_grad()
def reduce_rows(x: Tensor, group: Group, *, agreed: bool = False) -> Tensor:
    """What `gather_rows` is the transpose of: `[G * n, ...]` on each of G ranks to the sum of this rank's `[n, ...]`.

    The sum is taken in the dtype of `x`, in an order that is the group's.

    Raises: ValueError for rows that are no multiple of the ranks, and as `gather_rows`.
    """
    ranks = group_size(group)
    with header("reduce_rows", group, agreed=agreed) as compared:
        if x.ndim == 0 or x.shape[0] % ranks:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; accepted are rows in a multiple of the group's {ranks} ranks"
            )
        compared["x"] = form_of(x)
    reduced = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
    if group is None:
        return reduced.copy_(x)
    # torch 2.13 renames this one too.
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with exchanging((ranks - 1) * reduced.nbytes):
        cast(Callable[..., object], scatter)(reduced, x.contiguous(), group=group)
    return reduced


@torch.no_grad()
def exchange_rows(
    tensors: Sequence[Tensor], partition: RowPartition, group: Group, *, agreed: bool = False
) -> list[Tensor]:
    """Rows from the ranks that hold them in sequence order to the ranks that own them under `partition`.

    Args:
        tensors: each `[s / G, ...]`, rows `[g * s / G, (g + 1) * s / G)` of `partition.num_rows` on rank g.

    Returns: the same tensors, `[rows of this rank's shard, ...]`, slice after slice. Where every rank owns every row
    they are gathered; where there are no tensors, no rows, or every rank owns what it holds, nothing moves; else all of
    them travel as bytes in one all-to-all.

    Raises: ValueError unless every tensor holds this rank's equal part of the rows, and on every rank where tensors
    differ in shape or dtype, or partitions differ.
    """
    ranks = group_size(group)
    with header("exchange_rows", group, agreed=agreed) as compared:
        for index, tensor in enumerate(tensors):
            if partition.group_size != ranks or tensor.ndim == 0 or tensor.shape[0] * ranks != partition.num_rows:
                raise ValueError(
                    f"tensors[{index}] has shape {tuple(tensor.shape)} and partition cuts {partition.num_rows} rows "
                    f"for {partition.group_size} ranks; accepted are equal parts of the rows over the group's {ranks} "
                    "ranks"
                )
        if not agreed:
            compared |= {"tensors": ", ".join(map(form_of, tensors)), "partition": partition.described}
    if not tensors or not partition.num_rows:
        return list(tensors)
    if partition.is_replicated:
        return list(tensors) if ranks == 1 else [gather_rows(tensor, group, agreed=True) for tensor in tensors]
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


def all_gather(output: Tensor, shard: Tensor, group: Group, *, wait: bool = True) -> dist.Work | None:
    """Shards of equal length into `output`, in the order of ranks."""
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
