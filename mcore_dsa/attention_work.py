"""What attention costs before it is run, cut by heads and cut by rows: FLOPs, bytes read, exchanged and saved by rank.

Integers only, from the lengths of the documents alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from mcore_dsa.checks import check_bytes, check_positive
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.head_exchange import PIECES_HELD
from mcore_dsa.hf_config import shown
from mcore_dsa.rows import PackWork, RowPartition, check_ranks, partition_rows
from mcore_dsa.settings import DEFAULT_BYTES, AttendShard, Kernels, Partition
from mcore_dsa.sharded import OVERLAP_ROWS
from mcore_dsa.work import Held, backend_named, check_request

_INT32 = 4
# Bytes a second of one H200, by NVIDIA's data sheet: of its memory, and of NVLink in one direction.
MEMORY_BYTES_PER_S, LINK_BYTES_PER_S = 4.8e12, 450e9


@dataclass(frozen=True)
class AttentionRank:
    """One rank's part of a layer's attention.

    Attributes:
        rows: rows it attends. tokens: those that they attend, summed.
        forward_flops, backward_flops: of products alone; backward computes the logits anew.
        forward_memory_bytes, backward_memory_bytes: of latents, copies of them and what contributes to their gradients,
            as the backend moves them (`Backend.attend_traffic`): a row's once for all heads of the rank, and from one
            row or step to the next nothing stays in a cache.
        forward_received_bytes, backward_received_bytes: from other ranks: selections (by heads; those of forward are
            among the selection's own), or queries, outputs and their gradients.
        saved_bytes: kept for backward: queries and latents, the selection of own rows, and what the backend keeps, with
            Triton the output (by heads that which goes on to the next step) and a number a row and head.
        peak_bytes: scratch of a pass at most, beside what comes in, goes out and is kept, and the fp32 sum of latent
            gradients.
    """

    rows: int
    tokens: int
    forward_flops: int
    backward_flops: int
    forward_memory_bytes: int
    backward_memory_bytes: int
    forward_received_bytes: int
    backward_received_bytes: int
    saved_bytes: int
    peak_bytes: int

    @property
    def transfer_seconds(self) -> float:
        """Estimate of both passes on one H200: what is moved in memory and received, nothing of it at the same time."""
        received = self.forward_received_bytes + self.backward_received_bytes
        return self.memory_seconds + received / LINK_BYTES_PER_S

    @property
    def memory_seconds(self) -> float:
        """What of it memory takes."""
        return (self.forward_memory_bytes + self.backward_memory_bytes) / MEMORY_BYTES_PER_S


def attention_work(
    lengths: Sequence[int],
    geometry: DsaGeometry,
    *,
    group_size: int,
    partition: Partition,
    shard: AttendShard,
    context_size: int = 1,
    elem_bytes: int = 2,
    kernels: Kernels = "torch",
    attend_bytes: int = DEFAULT_BYTES,
) -> tuple[AttentionRank, ...]:
    """The parts of all ranks of a tensor-parallel group, in rank order, for one pack of documents of `lengths` tokens.

    `elem_bytes` is an element of the model's dtype. By rows a rank attends those that it selects for; with "off", of
    which it selects for all, a contiguous shard. Under context parallelism the group is the one that attends most.

    Raises: as `selection_work`; ValueError for heads that are no multiple of the ranks.
    """
    check_request(lengths, geometry, context_size)
    _check_sizes(shard, group_size, elem_bytes, attend_bytes)
    heads, channels = geometry.num_attention_heads, geometry.kv_lora_rank
    if heads % group_size:
        raise ValueError(f"group_size is {group_size}; accepted are divisors of {heads}, the attention heads")
    work = PackWork(tuple(lengths), geometry.index_kpool, geometry.pool_budget)
    held = _held(work, context_size, geometry.index_kpool_always_select_tail)
    sizes = {"pool_size": work.pool_size, "budget": work.budget}
    selected = partition_rows(partition, held.rows, group_size, work.lengths, **sizes)
    rows_cut = RowPartition.contiguous(held.rows, group_size) if selected.is_replicated else selected
    backend, row = backend_named(kernels), heads // group_size * channels * elem_bytes
    forward, backward = backend.attend_traffic(elem_bytes)
    parts = []
    for rank in range(group_size):
        own = rows_cut.rows_of(rank)
        slices = rows_cut.slices(rank) if shard == "rows" else (range(held.rows),)
        tokens = sum(held.attended_before(part.stop) - held.attended_before(part.start) for part in slices)
        attended, own_heads = sum(map(len, slices)), heads if shard == "rows" else heads // group_size
        product = 2 * channels * tokens * own_heads
        saved = attended * backend.saved_row_bytes(heads=own_heads, channels=channels, elem_bytes=elem_bytes)
        if shard == "rows":
            arriving, returning = (group_size - 1) * own * row, (held.rows - own) * row
            received, kept = (arriving + returning, 2 * arriving + returning), own
        else:
            received, kept = (_gathered(selected, work.budget),) * 2, selected.rows_of(rank)
        parts.append(
            AttentionRank(
                rows=attended,
                tokens=tokens,
                # Logits and mixture; logits, gradients of weights and of queries, and twice those of latents.
                forward_flops=2 * product,
                backward_flops=5 * product,
                forward_memory_bytes=tokens * channels * forward,
                backward_memory_bytes=tokens * channels * backward,
                forward_received_bytes=received[0],
                backward_received_bytes=received[1],
                saved_bytes=held.rows * (row + channels * elem_bytes) + kept * work.budget * _INT32 + saved,
                peak_bytes=attend_bytes + (_exchanging(rows_cut, row, attend_bytes) if shard == "rows" else 0),
            )
        )
    return tuple(parts)


def _held(work: PackWork, context_size: int, tail: bool) -> Held:
    def attended_before(row: int) -> int:
        return work.pool_size * work.selected_pairs_before(row) + (work.tail_tokens_before(row) if tail else 0)

    return Held.of(work, context_size, attended_before)


def _check_sizes(shard: AttendShard, group_size: int, elem_bytes: int, attend_bytes: int) -> None:
    if shard not in get_args(AttendShard):
        raise ValueError(f"shard is {shown(shard)}; accepted are {', '.join(map(repr, get_args(AttendShard)))}")
    check_ranks("group_size", group_size)
    check_positive("elem_bytes", elem_bytes)
    check_bytes("attend_bytes", attend_bytes)


def _exchanging(cut: RowPartition, row: int, nbytes: int) -> int:
    """The most that `HeadExchange.within(nbytes)` holds; `row` is one of a rank's heads."""
    if cut.group_size == 1:
        return 0
    held = PIECES_HELD * cut.group_size * row
    return held * min(cut.rows_per_rank, max(1, nbytes // held))


def _gathered(selected: RowPartition, budget: int) -> int:
    """Bytes of other ranks' selections, as `SelectionGather` moves them."""
    if selected.is_replicated:
        return 0
    pieces = -(-selected.rows_per_rank // OVERLAP_ROWS)
    return (selected.group_size - 1) * (selected.rows_per_rank + pieces) * budget * _INT32


def best_shard(shards: Mapping[AttendShard, Sequence[AttentionRank]]) -> AttendShard:
    """What to cut attention by: what moves and receives in less time on the busiest rank, by an H200's figures.

    Products are the same in both cuts, to within how even the shards are.
    """
    return min(shards, key=lambda shard: max(rank.transfer_seconds for rank in shards[shard]))
