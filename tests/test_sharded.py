"""Selection over shards of the rows equals the unsharded bit for bit, on every rank, and shards share the work."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from draw import Call, layout_of, numbers, poisoned
from harness import run_ranks
from recorder import Recorder
from torch import Tensor

from mcore_dsa import fused_qk_topk_kpool, select_pools_sharded, sharded
from mcore_dsa.backends import SelectionCounters
from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.backends.torch.select import smallest_score_bytes
from mcore_dsa.functions import select_pools
from mcore_dsa.rows import RowPartition

CPU = torch.device("cpu")
HEADS, DIM, POOL_SIZE, BUDGET = 8, 16, 2, 5


def pack(rows: int, kind: str, *, batch: int = 2, seed: int = 0) -> Call:
    """`rows` tokens in documents that differ by sample, every token a row."""
    segments = [[(0, rows)], [(rows // 10, rows // 3), (rows // 3, rows - rows // 50)]][:batch]
    layout = layout_of(segments, num_tokens=rows, pool_size=POOL_SIZE)
    data = numbers(kind, rows, layout.num_pools, batch, HEADS, DIM, seed)
    return Call(*data, segments, layout, torch.arange(rows), BUDGET)


def share(call: Call, group: Any, **options: Any) -> Tensor:
    """This rank's part of the sharded selection."""
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    (own,) = RowPartition.contiguous(len(call.position_S), ranks).slices(rank)
    return select_pools_sharded(
        call.q_SBHD[own.start : own.stop],
        call.weights_SBH[own.start : own.stop],
        call.pool_key_PBD,
        call.layout,
        call.position_S,
        budget=call.budget,
        query_shard_group=group,
        **options,
    )


def drop_in(call: Call, group: Any, *, ape: float = 1.0, **options: Any) -> Tensor:
    """Token ids of the dense call over tokens whose keys and gates are made of the same numbers."""
    key = call.pool_key_PBD.repeat_interleave(POOL_SIZE, dim=0)
    rows = len(call.position_S)
    key = torch.cat([key, key.new_ones(rows - len(key), *key.shape[1:])])
    _, token_ids = fused_qk_topk_kpool(
        call.q_SBHD,
        key,
        call.weights_SBH,
        BUDGET * POOL_SIZE,
        POOL_SIZE,
        gate_score=key.flip(0),
        ape=torch.linspace(-ape, ape, POOL_SIZE).unsqueeze(1).expand(-1, DIM),
        query_shard_group=group,
        **options,
    )
    return token_ids


def every_rank_selects(rows: int, kinds: tuple[str, ...]) -> list[tuple[Tensor, Tensor, int, int]]:
    return [every_rank_selects_of(rows, kind) for kind in kinds]


def every_rank_selects_of(rows: int, kind: str) -> tuple[Tensor, Tensor, int, int]:
    """The selection and token ids on this rank, with what it scored and saw; fresh buffers are full of winners."""
    rank, counters, call = dist.get_rank(), SelectionCounters(), pack(rows, kind)
    with Recorder() as log, poisoned():
        selection = share(call, dist.group.WORLD, counters=counters, agreed=True)
    ranks = dist.get_world_size()
    longest = -(-rows // ranks)
    assert [(made.group, made.output, made.input) for made in log.calls] == [
        (
            dist.group.WORLD,
            (torch.int32, (ranks * 2, longest + 1, BUDGET)),
            (torch.int32, (2, longest + 1, BUDGET)),
        )
    ] * (rows > 0 and ranks > 1)
    with Recorder() as log, poisoned():
        token_ids = drop_in(call, dist.group.WORLD, agreed=True)
    assert [made.output for made in log.calls] == [(torch.int32, (ranks * 2, longest + 1, BUDGET))] * (
        rows > 0 and ranks > 1
    )
    # Ranks may have other budgets, and split the exchange or not.
    least = smallest_score_bytes(CPU, HEADS, DIM, BUDGET)
    assert torch.equal(share(call, dist.group.WORLD, score_bytes=least << rank, overlap=False), selection)
    return selection, token_ids, counters.rows, counters.scored_rows


@pytest.mark.parametrize(
    ("ranks", "rows"), [(1, 1001), (2, 1001), (3, 1001), (4, 1001), (4, 5), (4, 3), (4, 1), (3, 0), (8, 5)]
)
def test_every_rank_gets_the_unsharded_selection(ranks: int, rows: int) -> None:
    """Documents of two samples; fewer rows than ranks; none at all; ties in most rows, and in none."""
    kinds = ("zeros", "plateau", "near") if rows == 1001 else ("plateau",)
    of_kinds = zip(*run_ranks(every_rank_selects, ranks, rows, kinds), strict=True)
    for kind, found in zip(kinds, of_kinds, strict=True):
        call, alone = pack(rows, kind), SelectionCounters()
        expected, expected_ids = call.select(counters=alone), drop_in(call, None)
        for selection, token_ids, _, _ in found:
            assert selection.dtype == token_ids.dtype == torch.int32
            assert torch.equal(selection, expected)
            assert torch.equal(token_ids, expected_ids)
        longest = -(-rows // ranks)
        shards = [max(0, min(rows, (rank + 1) * longest) - rank * longest) for rank in range(ranks)]
        assert [seen for _, _, seen, _ in found] == [2 * shard for shard in shards]
        assert sum(scored for *_, scored in found) == alone.scored_rows
        if rows == 1001:
            assert alone.scored_rows >= 1800
            assert all(0 < scored < alone.scored_rows for *_, scored in found if ranks > 1)
        if kind == "zeros":
            assert torch.equal(expected[0, -1], torch.arange(BUDGET, dtype=torch.int32))


def rows_scored_with_and_without() -> tuple[list[int], list[int]]:
    """Rows this rank selects for, and collectives, in a drop-in call with a group and without."""
    call, scored = pack(400, "near"), []
    original = TorchBackend.select

    def counted(q: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        scored.append(q.shape[0])
        return original(q, *args, **kwargs)

    TorchBackend.select = staticmethod(counted)
    rows, collectives = [], []
    for group in (dist.group.WORLD, None):
        with Recorder() as log:
            drop_in(call, group, agreed=True)
            share(call, group, agreed=True)
        rows.append(sum(scored))
        collectives.append(len(log.calls))
        scored.clear()
    return rows, collectives


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_group_reaches_the_collective_and_none_does_not(ranks: int) -> None:
    """Fails if `query_shard_group` is dropped on the way, and if a call without one begins to communicate."""
    found = run_ranks(rows_scored_with_and_without, ranks)
    assert found == [([2 * 400 // ranks, 2 * 400], [2, 0])] * ranks


def groups_select_for_themselves(split: list[list[int]]) -> Tensor:
    """Each group of a bigger world has its own data, at the same time."""
    groups = [dist.new_group(ranks) for ranks in split]
    mine = next(index for index, ranks in enumerate(split) if dist.get_rank() in ranks)
    call = pack(203 + mine, "plateau", seed=mine)
    with Recorder() as log:
        selection = share(call, groups[mine], agreed=True)
        token_ids = drop_in(call, groups[mine], agreed=True)
    assert [made.group for made in log.calls] == [groups[mine]] * (2 if len(split[mine]) > 1 else 0)
    assert torch.equal(token_ids, drop_in(call, None))
    return selection


@pytest.mark.parametrize("split", [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[3], [0, 1, 2]]])
def test_groups_inside_a_bigger_world(split: list[list[int]]) -> None:
    expected = [pack(203 + index, "plateau", seed=index).select() for index in range(len(split))]
    found = run_ranks(groups_select_for_themselves, 4, split)
    for index, ranks in enumerate(split):
        for rank in ranks:
            assert torch.equal(found[rank], expected[index])


def long_shards_overlap() -> None:
    """Shards of more rows than are gathered together: still the same, and 3-D each time."""
    call, ranks = pack(2 * sharded.OVERLAP_ROWS + 77, "near", batch=1), dist.get_world_size()
    expected = call.select()
    for overlap in (True, False):
        with Recorder() as log, poisoned():
            assert torch.equal(share(call, dist.group.WORLD, overlap=overlap, agreed=True), expected)
        assert len(log.calls) == (2 if overlap else 1)
        assert all(len(made.output[1]) == 3 and made.output[1][0] == ranks for made in log.calls)


def test_long_shards_are_gathered_piece_by_piece() -> None:
    run_ranks(long_shards_overlap, 2)


def modes() -> None:
    """Grad mode, inference mode and autocast move no id, and no gradient flows back."""
    call = pack(150, "near")
    expected = call.select()
    q = call.q_SBHD.clone().requires_grad_()
    wanting = Call(q, *(getattr(call, name) for name in list(vars(call))[1:]))
    for mode in (torch.enable_grad(), torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with mode:
            selection = share(wanting, dist.group.WORLD)
        assert torch.equal(selection, expected)
        assert not selection.requires_grad


def test_modes_do_not_matter() -> None:
    run_ranks(modes, 2)


def test_without_a_process_group() -> None:
    assert not dist.is_initialized()
    call = pack(90, "special")
    with poisoned():
        assert torch.equal(share(call, None), call.oracle())
    assert torch.equal(share(call, None), select_pools(*(getattr(call, name) for name in (
        "q_SBHD", "weights_SBH", "pool_key_PBD", "layout", "position_S")), budget=BUDGET))  # fmt: skip


BAD: list[tuple[str, dict[str, Any]]] = [
    ("q_OBHD", {"q_OBHD": None}),
    ("q_OBHD", {"q_OBHD": torch.zeros(11, 2, 2, 3)}),
    ("q_OBHD", {"q_OBHD": torch.zeros(12, 2, 6)}),
    ("q_OBHD", {"q_OBHD": torch.zeros(12, 2, 2, 3, dtype=torch.int32)}),
    ("weights_OBH", {"weights_OBH": None}),
    ("weights_OBH", {"weights_OBH": torch.zeros(13, 2, 2)}),
    ("weights_OBH", {"weights_OBH": torch.zeros(12, 2, 3)}),
    ("pool_key_PBD", {"pool_key_PBD": torch.zeros(5, 2, 3)}),
    ("position_S", {"position_S": None}),
    ("position_S", {"position_S": torch.zeros(12)}),
    ("position_S", {"position_S": torch.zeros(2, 6, dtype=torch.int64)}),
    ("position_S", {"position_S": torch.zeros(12, dtype=torch.int64, device="meta")}),
    ("budget", {"budget": 0}),
    ("budget", {"budget": 2.0}),
    ("budget", {"budget": True}),
    ("score_bytes", {"score_bytes": 1}),
    ("score_bytes", {"score_bytes": "1GiB"}),
    ("q_OBHD", {"q_OBHD": torch.zeros(12, 2, 2, 3).to(torch.float8_e4m3fn)}),
    ("layout", {"layout": None}),
    ("query_shard_group", {"query_shard_group": 5}),
    ("partition", {"partition": "zigzag"}),
    ("counters", {"counters": 3}),
    ("use_relu", {"use_relu": "no"}),
    ("overlap", {"overlap": "no"}),
    ("partition", {"partition": RowPartition.contiguous(11, 1)}),
    ("partition", {"partition": RowPartition.contiguous(12, 2)}),
]


@pytest.mark.parametrize(("name", "changed"), BAD)
def test_bad_input_is_refused_by_name(name: str, changed: dict[str, Any]) -> None:
    q, weights, key = numbers("normal", 12, 6, 2, 2, 3, 0)
    good = {
        "q_OBHD": q,
        "weights_OBH": weights,
        "pool_key_PBD": key,
        "layout": layout_of([[(0, 12)]] * 2, num_tokens=12, pool_size=2),
        "position_S": torch.arange(12),
        "budget": 2,
        "query_shard_group": None,
    }
    select_pools_sharded(**good)
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b.*accepted"):
        select_pools_sharded(**{**good, **changed})
