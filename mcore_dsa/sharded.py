"""Selection and attention with their rows sharded over a group.

Letters of shapes: `mcore_dsa/__init__.py`.

Sharded and unsharded are one function with a group argument, and their results are equal bit for bit: what comes of a
row does not depend on the rows beside it nor, in attention on CPUs, on the heads beside its own; an exchange moves
bits.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mcore_dsa.agreement import header, weights_digest
from mcore_dsa.attend import RowCut, attend
from mcore_dsa.backends import AttentionCall, Backend, SelectionCounters, Target, resolve
from mcore_dsa.checks import check_bool, check_integer, check_kind, check_positive, form_of
from mcore_dsa.collectives import Group, group_rank, group_size
from mcore_dsa.eager import uncompiled
from mcore_dsa.functions import check_attention, check_scoring
from mcore_dsa.kpool import PoolLayout, check_layout, check_selection
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.rows import RowPartition
from mcore_dsa.selection_gather import SelectionGather
from mcore_dsa.watch import whole_digest
from mcore_dsa.workspace import bytes_allowed

# Rows of a shard that are gathered together while the next are scored: 2 MiB a rank at a budget of 512 pools.
OVERLAP_ROWS = 1024
# Gathers whose buffers live at a time: one that is being filled or placed, the rest on their way.
GATHERS_HELD = 3

_OWN = ("q_OBHD", "weights_OBH", "pool_key_PBD")


@uncompiled
@torch.no_grad()
def select_pools_sharded(
    q_OBHD: Tensor,
    weights_OBH: Tensor,
    pool_key_PBD: Tensor,
    layout: PoolLayout,
    position_S: Tensor,
    *,
    budget: int,
    query_shard_group: Group,
    partition: RowPartition | None = None,
    overlap: bool = True,
    score_bytes: int | None = None,
    counters: SelectionCounters | None = None,
    use_relu: bool = True,
    agreed: bool = False,
) -> Tensor:
    """`select_pools` for all rows, of which this rank brings and scores those of its own shard.

    Args:
        q_OBHD, weights_OBH: queries and head weights of this rank's rows, slice after slice; none where it owns none.
        pool_key_PBD, layout: equal on every rank.
        position_S: the token of every row, not only of this rank's.
        query_shard_group: ranks that share the rows; None stands for a group of one, which owns them all.
        partition: who owns which of the `s` rows, contiguous shards by default.
        overlap: gather a shard in pieces, each while the next is scored.
        agreed: the caller answers for what ranks must have in common; else it is compared before the first collective:
            dtypes and shapes, budget, partition, pieces, and digests of layout, positions and pool keys, for which the
            host waits where they lie on a device.

    Returns: `selection_BSK` int32 `[b, s, budget]`, the same on every rank.

    Raises: as `select_pools`; TypeError for what is no group, partition or counters; ValueError for a group without
    this rank and a partition of other rows or another number of ranks. ValueError on every rank where they differ,
    where another refuses its arguments or raises while it selects, and where one is in another call.
    """
    group_size(query_shard_group)
    with header("select_pools_sharded", query_shard_group, agreed=agreed) as compared:
        check_positive("budget", budget)
        check_bool(overlap=overlap, use_relu=use_relu)
        check_kind(SelectionCounters, counters=counters)
        plan = _plan(layout, position_S, partition, query_shard_group)
        score_bytes = bytes_allowed("score_bytes", score_bytes, layout.device)
        check_scoring(q_OBHD, weights_OBH, pool_key_PBD, layout, rows=plan.partition.rows_of(plan.rank), names=_OWN)
        gather = gather_of(plan, query_shard_group, budget=budget, overlap=overlap)
        if not agreed:
            compared |= {"budget": budget, "use_relu": use_relu, "overlap": f"{gather.piece_rows} rows at a time"}
            compared |= _described(plan, q_OBHD=q_OBHD[:0], weights_OBH=weights_OBH[:0], pool_key_PBD=pool_key_PBD)
            compared |= _values(pool_key_PBD=pool_key_PBD)
        backend = resolve("auto", Target.of_scores(q_OBHD, pool_key_PBD))
    select = partial(select_own_rows, backend, q_OBHD, weights_OBH, pool_key_PBD, plan, gather=gather)
    counters = SelectionCounters() if counters is None else counters
    return gather.finish(select(budget=budget, score_bytes=score_bytes, use_relu=use_relu, counters=counters))


@uncompiled
def sparse_attention_sharded(
    q_SBHC: Tensor,
    kv_TBC: Tensor,
    selection_BOK: Tensor,
    layout: PoolLayout,
    position_S: Tensor,
    *,
    softmax_scale: float,
    always_select_tail: bool,
    query_shard_group: Group,
    partition: RowPartition | None = None,
    attend_bytes: int | None = None,
    agreed: bool = False,
) -> Tensor:
    """`sparse_attention` for all rows and this rank's heads; each rank computes it for its own rows and all heads.

    Queries go to the ranks of their rows and outputs come back, in pieces, each while another is attended.

    Args:
        q_SBHC: floating `[s, b, heads / G, c]`, all rows; kv_TBC, layout, position_S: equal on every rank.
        selection_BOK: int32 `[b, o, budget]`, of this rank's own rows, slice after slice.
        partition: who owns which of the `s` rows, contiguous shards by default and in place of replicated rows.
        attend_bytes: equal on every rank, as is the partition (the default of unequal devices is not): bytes that
            attention may hold, as in `sparse_attention` with all heads, and the exchange again, unless one row takes
            more.
        agreed: as for `select_pools_sharded`; compared are the arguments but for what queries and selections
            hold.

    Returns: `[s, b, heads / G, c]`, differentiable once. The gradient of `kv_TBC` is that of this rank's rows and all
    heads: the sum over ranks is the whole one, as it is of gradients of all rows and own heads.

    Raises: as `sparse_attention`, a selection with faults on every rank; TypeError for what is no group or partition;
        ValueError for a group without this rank, and a partition of other rows or another number of ranks; on every
        rank where calls differ or another refuses its own.
    """
    group_size(query_shard_group)
    with header("sparse_attention_sharded", query_shard_group, agreed=agreed) as compared:
        check_layout(layout)
        check_integer("position_S", position_S, ndim=1)
        check_attention(q_SBHC, kv_TBC, layout, position_S, softmax_scale, always_select_tail)
        attend_bytes = bytes_allowed("attend_bytes", attend_bytes, layout.device)
        plan = _plan(layout, position_S, partition, query_shard_group)
        own = plan.attended_own
        check_selection(selection_BOK, layout, own.position_S)
        if not agreed:
            compared |= {"softmax_scale": softmax_scale, "always_select_tail": always_select_tail}
            compared |= {"budget": selection_BOK.shape[2], "attend_bytes": attend_bytes}
            compared |= _described(plan, q_SBHC=q_SBHC, kv_TBC=kv_TBC) | _values(kv_TBC=kv_TBC)
        backend = resolve("auto", Target.of_attention(q_SBHC, kv_TBC))
    return attend(
        q_SBHC,
        kv_TBC.contiguous(),
        selection_BOK,
        AttentionCall(layout, own, float(softmax_scale), always_select_tail, attend_bytes),
        backend=backend,
        cut=RowCut.of(plan, q_SBHC, query_shard_group, attend_bytes),
    )


def _plan(layout: PoolLayout, position_S: Tensor, partition: RowPartition | None, group: Group) -> SelectionPlan:
    check_layout(layout)
    check_integer("position_S", position_S, ndim=1)
    check_kind(RowPartition, partition=partition)
    ranks, rank, rows = group_size(group), group_rank(group), position_S.shape[0]
    partition = RowPartition.contiguous(rows, ranks) if partition is None else partition
    if (partition.num_rows, partition.group_size) != (rows, ranks):
        raise ValueError(
            f"partition cuts {partition.num_rows} rows for {partition.group_size} ranks; accepted are {rows} rows and "
            f"{ranks} ranks"
        )
    return SelectionPlan(layout, layout.bounds(position_S), partition, rank)


def _described(plan: SelectionPlan, **tensors: Tensor) -> dict[str, str]:
    """The plan and the forms of tensors, as text that is equal on two ranks if and only if they are."""
    layout, position_S = plan.layout, plan.bounds.position_S
    segments = weights_digest([("start", layout.segment_start_BN), ("end", layout.segment_end_BN)])
    return {
        **{name: form_of(tensor) for name, tensor in tensors.items()},
        "partition": plan.partition.described,
        "layout": f"{layout.batch} samples of {layout.num_tokens} tokens in pools of {layout.pool_size}, the first "
        f"{layout.first_pool_id}, segments {segments}",
        "position_S": f"{len(position_S)} tokens, {weights_digest([('', position_S)])}",
    }


def _values(**tensors: Tensor) -> dict[str, str]:
    """Digests of what every rank has to hold alike: of pool keys, 0.1 to 0.3% of the time that selecting takes."""
    return {f"values of {name}": f"{int(whole_digest(x.detach())) % 2**64:016x}" for name, x in tensors.items()}


def gather_of(plan: SelectionPlan, group: Group, *, budget: int, overlap: bool) -> SelectionGather:
    """What collects the selections of a plan's rows; with `overlap` in pieces of `OVERLAP_ROWS` rows of a shard."""
    return SelectionGather(
        plan.partition,
        group,
        batch=plan.layout.batch,
        budget=budget,
        device=plan.layout.device,
        piece_rows=OVERLAP_ROWS if overlap and not plan.partition.is_replicated else None,
        in_flight=GATHERS_HELD - 1,
    )


def select_own_rows(
    backend: Backend,
    q_OBHD: Tensor,
    weights_OBH: Tensor,
    pool_key_PBD: Tensor,
    plan: SelectionPlan,
    *,
    budget: int,
    score_bytes: int,
    use_relu: bool,
    counters: SelectionCounters,
    gather: SelectionGather | None,
) -> Tensor:
    """int32 `[b, o, budget]`, this rank's rows, selected in the pieces of `gather`, which hears of each.

    Whatever it raises, no other rank waits for this one in `gather`.
    """
    rows = plan.own.rows
    select = partial(backend.select, budget=budget, score_bytes=score_bytes, use_relu=use_relu, counters=counters)
    if gather is None:
        return select(q_OBHD, weights_OBH, pool_key_PBD, plan.layout, plan.own)
    try:
        if rows <= gather.piece_rows:
            return select(q_OBHD, weights_OBH, pool_key_PBD, plan.layout, plan.own)
        selection_BOK = q_OBHD.new_empty(plan.layout.batch, rows, budget, dtype=torch.int32)
        for start in range(0, rows, gather.piece_rows):
            piece = slice(start, min(start + gather.piece_rows, rows))
            selection_BOK[:, piece] = select(
                q_OBHD[piece], weights_OBH[piece], pool_key_PBD, plan.layout, plan.own.take(piece)
            )
            gather.advance(selection_BOK, piece.stop)
    except BaseException:
        gather.leave()
        raise
    return selection_BOK
