"""The model of attention's work against rows counted one by one, and against what really travels and is held."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attend_cases import Case
from harness import run_ranks
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from layouts import random_selection
from live_bytes import live_bytes
from recorder import Recorder

from mcore_dsa import DsaGeometry, PoolLayout
from mcore_dsa.attention_work import LINK_BYTES_PER_S, MEMORY_BYTES_PER_S, attention_work, best_shard
from mcore_dsa.rows import PackWork, partition_rows
from mcore_dsa.selection_gather import SelectionGather
from mcore_dsa.settings import AttendShard, Kernels, Partition
from mcore_dsa.sharded import OVERLAP_ROWS, sparse_attention_sharded

FLASH = Path(__file__).parents[1] / "configs" / "glm-5.3-flash.json"
KINDS: tuple[Partition, ...] = ("off", "contiguous", "zigzag", "balanced")
SHARDS: tuple[AttendShard, ...] = ("heads", "rows")
KERNELS: tuple[Kernels, ...] = ("torch", "triton")


def geometry(**sizes: Any) -> DsaGeometry:
    small = {"num_attention_heads": 12, "kv_lora_rank": 16, "index_kpool": 4, "index_topk": 12}
    return dataclasses.replace(DsaGeometry.from_config(FLASH), **{**small, **sizes})


@given(
    st.lists(st.integers(0, 60), max_size=6), st.integers(1, 5), st.integers(1, 6), st.integers(0, 400), st.booleans()
)
@hypothesis_settings(max_examples=100)
def test_tokens_are_those_of_the_rows(lengths: list[int], pool_size: int, budget: int, cut: int, tail: bool) -> None:
    work = PackWork(tuple(lengths), pool_size, budget)
    rows = [row + 1 for length in lengths for row in range(length)][:cut]
    assert work.selected_pairs_before(cut) == sum(min(row // pool_size, budget) for row in rows)
    assert work.tail_tokens_before(cut) == sum(row % pool_size for row in rows)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.sampled_from(KINDS), st.sampled_from([1, 2, 3]))
@hypothesis_settings(max_examples=40)
def test_the_ranks_share_the_whole(lengths: list[int], kind: Partition, ranks: int) -> None:
    """By rows the tokens of one rank, cut; by heads all of them everywhere. Products are the same together."""
    (alone,) = attention_work(lengths, geometry(), group_size=1, partition="off", shard="heads")
    by_heads, by_rows = (
        attention_work(lengths, geometry(), group_size=ranks, partition=kind, shard=shard) for shard in SHARDS
    )
    assert sum(rank.rows for rank in by_rows) == alone.rows == sum(lengths)
    assert sum(rank.tokens for rank in by_rows) == alone.tokens
    assert {rank.tokens for rank in by_heads} == {alone.tokens}
    for name in ("forward_flops", "backward_flops"):
        for parts in (by_heads, by_rows):
            assert sum(getattr(rank, name) for rank in parts) == getattr(alone, name)
    assert alone.forward_flops == 4 * 12 * 16 * alone.tokens
    assert alone.backward_flops == 10 * 12 * 16 * alone.tokens
    assert (alone.forward_received_bytes, alone.backward_received_bytes) == (0, 0)


def travelled(lengths: list[int], attend_bytes: int) -> dict[tuple[str, str], tuple[int, int]]:
    """Bytes received in forward and in backward, by partition and cut."""
    group, ranks, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    sizes, rows = geometry(), sum(lengths)
    cuts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    layout, position = PoolLayout.from_cu_seqlens(cuts, pool_size=4), torch.arange(rows)
    whole = random_selection(layout, position, sizes.pool_budget)
    found = {}
    for kind in KINDS:
        partition = partition_rows(kind, rows, ranks, lengths, pool_size=4, budget=sizes.pool_budget)
        own = whole[:, [row for part in partition.slices(rank) for row in part]]
        with Recorder() as gathered:
            SelectionGather(
                partition, group, batch=1, budget=sizes.pool_budget, device=own.device, piece_rows=OVERLAP_ROWS
            ).finish(own)
        found[kind, "heads"] = gathered.received(), gathered.received()
        q = torch.randn(rows, 1, 12 // ranks, 16).bfloat16().requires_grad_()
        kv = torch.randn(rows, 1, 16).bfloat16()
        if kind == "off":
            own = whole[:, rank * -(-rows // ranks) : (rank + 1) * -(-rows // ranks)]
        with Recorder() as forward:
            out = sparse_attention_sharded(
                q,
                kv,
                own,
                layout,
                position,
                softmax_scale=0.3,
                always_select_tail=True,
                query_shard_group=group,
                partition=partition,
                attend_bytes=attend_bytes,
            )
        with Recorder() as backward:
            out.backward(torch.ones_like(out))
        moved = [call.received for call in forward.calls if call.name == "all_to_all_single"]
        found[kind, "rows"] = sum(filter(None, moved)), backward.received()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("lengths", [[96], [40, 3, 20]])
def test_the_model_says_what_travels(ranks: int, lengths: list[int]) -> None:
    measured = run_ranks(travelled, ranks, lengths, 2**15)
    for kind in KINDS:
        for shard in SHARDS:
            model = attention_work(lengths, geometry(), group_size=ranks, partition=kind, shard=shard)
            for rank, work in enumerate(model):
                told = work.forward_received_bytes, work.backward_received_bytes
                assert told == measured[rank][kind, shard], (kind, shard, rank)


def peaks(attend_bytes: int) -> tuple[int, int]:
    """Bytes that forward and backward hold beyond results and sums."""
    group, rank, rows = dist.group.WORLD, dist.get_rank(), 512
    case = Case.random([[(0, rows)]], rows, heads=4, channels=64, budget=4).to(torch.bfloat16)
    q, kv = case.q.clone().requires_grad_(), case.kv.clone().requires_grad_()
    own = case.selection[:, rank * rows // 2 : (rank + 1) * rows // 2]
    made: list[torch.Tensor] = []

    def forward() -> None:
        made.append(
            sparse_attention_sharded(
                q,
                kv,
                own,
                case.layout,
                case.position,
                softmax_scale=0.3,
                always_select_tail=True,
                query_shard_group=group,
                attend_bytes=attend_bytes,
            )
        )

    def backward() -> None:
        made.extend(torch.autograd.grad(made[-1], (q, kv), case.out_grad))

    forward()
    ahead, _ = live_bytes(forward)
    back, _ = live_bytes(backward)
    return ahead - q.nbytes, back - q.nbytes - kv.numel() * 4 - kv.nbytes


@pytest.mark.parametrize("attend_bytes", [2**19, 2**21])
def test_peaks_of_both_passes_are_the_models(attend_bytes: int) -> None:
    """At two ranks. The classes of a piece's rows are found anew where the call is, 24 bytes a row."""
    sizes = geometry(num_attention_heads=8, kv_lora_rank=64, index_topk=16)
    model = attention_work([512], sizes, group_size=2, partition="contiguous", shard="rows", attend_bytes=attend_bytes)
    for rank, (forward, backward) in enumerate(run_ranks(peaks, 2, attend_bytes)):
        assert forward <= backward <= model[rank].peak_bytes
        assert backward >= model[rank].peak_bytes // 3


def test_what_is_read_is_cut_by_rows() -> None:
    """The figures of one document of 524,288 tokens on eight ranks."""
    flash = DsaGeometry.from_config(FLASH)
    by_heads, by_rows = (
        attention_work([524288], flash, group_size=8, partition="zigzag", shard=shard, kernels="triton")
        for shard in SHARDS
    )
    assert by_heads[0].forward_memory_bytes == pytest.approx(1.1e12, rel=0.01)
    assert by_heads[0].backward_memory_bytes == pytest.approx(6.6e12, rel=0.01)
    assert max(rank.forward_memory_bytes for rank in by_rows) == pytest.approx(1.1e12 / 8, rel=0.01)
    # Queries and outputs, 3.76 GB a rank each way.
    assert by_rows[0].forward_received_bytes == 2 * 7 * 65536 * 8 * 512 * 2
    rank = by_rows[0]
    received = rank.forward_received_bytes + rank.backward_received_bytes
    moved = rank.forward_memory_bytes + rank.backward_memory_bytes
    assert rank.transfer_seconds == moved / MEMORY_BYTES_PER_S + received / LINK_BYTES_PER_S


@pytest.mark.parametrize("shard", SHARDS)
def test_memory_is_that_of_the_kernels(shard: AttendShard) -> None:
    """Torch copies what it gathers and reads it product by product; Triton keeps outputs and sums for backward."""
    options: dict[str, Any] = {"group_size": 4, "partition": "zigzag", "shard": shard}
    for lengths in ([96], [40, 3, 20]):
        of_torch, of_triton = (attention_work(lengths, geometry(), kernels=name, **options) for name in KERNELS)
        for ours, theirs in zip(of_triton, of_torch, strict=True):
            heads = 12 if shard == "rows" else 3
            assert ours.saved_bytes - theirs.saved_bytes == ours.rows * heads * (16 * 2 + 4)
            elements = ours.tokens * 16
            assert (ours.forward_memory_bytes, theirs.forward_memory_bytes) == (2 * elements, 10 * elements)
            assert (ours.backward_memory_bytes, theirs.backward_memory_bytes) == (12 * elements, 44 * elements)


def test_the_best_cut_follows_the_lengths() -> None:
    flash = DsaGeometry.from_config(FLASH)

    def best(lengths: list[int], ranks: int, **options: Any) -> AttendShard:
        sizes: dict[str, Any] = {"group_size": ranks, "partition": "zigzag", "kernels": "triton", **options}
        return best_shard({shard: attention_work(lengths, flash, shard=shard, **sizes) for shard in SHARDS})

    assert best([524288], 8) == best([65536], 2) == best([524288], 8, context_size=2) == "rows"
    # Rows that see few tokens are cheap to read and as dear to move.
    assert best([64] * 1024, 8) == "heads"
    assert best([524288], 1) == "heads"


def test_heads_that_the_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^group_size is 5; accepted are divisors of 12, the attention heads$"):
        attention_work([96], geometry(), group_size=5, partition="off", shard="heads")
