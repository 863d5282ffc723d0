"""Attention cut by rows equals attention cut by heads, outputs and gradients of queries bit for bit, on every rank."""

import random
from dataclasses import replace
from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from attend_cases import Case, smallest_budget
from harness import run_ranks
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from layouts import segmentations
from recorder import Recorder
from torch import Tensor

from mcore_dsa import sparse_attention_sharded
from mcore_dsa.attend import RowCut, attend
from mcore_dsa.backends import AttentionCall
from mcore_dsa.backends.torch import TorchBackend
from mcore_dsa.head_exchange import PIECES_HELD, HeadExchange
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.rows import PackWork, RowPartition

EPS = torch.finfo(torch.float32).eps


def shuffled(rows: int, ranks: int, seed: int) -> RowPartition:
    """Ragged slices in any order, some of them empty."""
    draw = random.Random(seed)
    cuts = sorted(draw.randint(0, rows) for _ in range(3 * ranks - 1))
    parts = [range(*edges) for edges in pairwise([0, *cuts, rows])]
    draw.shuffle(parts)
    return RowPartition(rows, tuple(tuple(parts[rank::ranks]) for rank in range(ranks)))


def partitions(rows: int, ranks: int, seed: int) -> list[RowPartition]:
    work = PackWork((rows,), 4, 2)
    return [
        RowPartition.contiguous(rows, ranks),
        RowPartition.zigzag(rows, ranks),
        RowPartition.balanced(rows, ranks, work),
        shuffled(rows, ranks, seed),
    ]


def drawn(seed: int, ranks: int) -> Case:
    draw = random.Random(seed)
    rows, batch = draw.choice([0, 1, 3, 21, 64]), draw.choice([1, 2])
    segments = [[(0, rows // 3), (rows // 3, max(rows // 3, rows - sample))] for sample in range(batch)]
    heads, channels = ranks * draw.choice([1, 2, 5]), draw.choice([3, 16, 32])
    case = Case.random(segments, rows, heads=heads, channels=channels, budget=draw.choice([1, 4]), seed=seed)
    return case.to(draw.choice([torch.float32, torch.bfloat16]))


def by_rows(case: Case, group: Any, **options: Any) -> Tensor:
    return sparse_attention_sharded(
        case.q,
        case.kv,
        case.selection,
        case.layout,
        case.position,
        softmax_scale=case.scale,
        always_select_tail=case.tail,
        query_shard_group=group,
        **options,
    )


def share(case: Case, partition: RowPartition, rank: int) -> Case:
    """This rank's heads of every row, and the selection of its own rows."""
    heads = case.q.shape[2] // partition.group_size
    own = [row for part in partition.slices(rank) for row in part]
    here = slice(rank * heads, (rank + 1) * heads)
    return replace(case, q=case.q[:, :, here], out_grad=case.out_grad[:, :, here], selection=case.selection[:, own])


def run_by_rows(case: Case, group: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    leaves = replace(case, q=case.q.detach().requires_grad_(), kv=case.kv.detach().requires_grad_())
    out = by_rows(leaves, group, **options)
    return out.detach(), *torch.autograd.grad(out, (leaves.q, leaves.kv), case.out_grad)


def every_case(group: Any, seeds: range) -> int:
    ranks, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    compared = 0
    for seed in seeds:
        case = drawn(seed, ranks)
        rows, least = len(case.position), smallest_budget(case)
        whole = case.run()
        exact, in_fp32 = (case.to(dtype).run()[2].double() for dtype in (torch.float64, torch.float32))
        # Sums of the same products in another order: what fp32 costs here is shown by one rank's own, some times over.
        summing = 4 * (in_fp32 - exact).abs().max() + 8 * EPS * exact.abs().max() if rows else 0.0
        by_heads = replace(share(case, RowPartition.contiguous(rows, ranks), rank), selection=case.selection).run()
        # Three seeds give each partition every budget.
        budgets = cycle((least, 4 * least, 2**28))
        for _ in range(seed % 3):
            next(budgets)
        for partition, attend_bytes in zip(partitions(rows, ranks, seed), budgets, strict=False):
            mine = share(case, partition, rank)
            heads = mine.q.shape[2]
            out, q_grad, kv_grad = run_by_rows(mine, group, partition=partition, attend_bytes=attend_bytes)
            for ours, theirs, all_heads in zip((out, q_grad), by_heads, whole, strict=False):
                assert torch.equal(ours, theirs)
                assert torch.equal(ours, all_heads[:, :, rank * heads : (rank + 1) * heads])
            total, sizes = kv_grad.double(), kv_grad.double().abs()
            if group is not None:
                dist.all_reduce(total, group=group)
                dist.all_reduce(sizes, group=group)
            # Each rank's part is rounded once more to the dtype of the latents.
            assert bool(((total - exact).abs() <= summing + torch.finfo(kv_grad.dtype).eps * sizes).all())
            compared += 1
    return compared


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_rows_and_heads_give_equal_bits(ranks: int) -> None:
    """Dense and packed, one and two samples, every partition, ragged and empty shards, one row a piece and all."""
    assert run_ranks(in_world, ranks, range(6), timeout=120) == [24] * ranks


def in_world(seeds: range) -> int:
    return every_case(dist.group.WORLD, seeds)


def test_a_group_of_one_is_none() -> None:
    assert every_case(None, range(6)) == 24


def in_halves(seeds: range) -> int:
    group, _ = dist.new_subgroups(2)
    return every_case(group, seeds)


def test_in_sub_groups() -> None:
    assert run_ranks(in_halves, 4, range(9, 12), timeout=120) == [12] * 4


@given(segmentations(max_tokens=60), st.integers(0, 999), st.sampled_from([torch.float32, torch.bfloat16]))
@hypothesis_settings(max_examples=25)
def test_a_head_keeps_its_bits_whatever_heads_stand_beside_it(segmentation, seed, dtype) -> None:
    """What the cut by rows rests on: an item's products have equal bits for 1 to 64 heads a call."""
    draw = random.Random(seed)
    heads, channels = draw.choice([2, 7, 16, 64]), draw.choice([5, 16, 64])
    case = Case.random(*segmentation, heads=heads, channels=channels, budget=draw.randint(0, 6), seed=seed).to(dtype)
    first, last = sorted(draw.sample(range(heads + 1), 2))
    some = replace(case, q=case.q[:, :, first:last], out_grad=case.out_grad[:, :, first:last])
    for ours, theirs in zip(some.run()[:2], case.run()[:2], strict=True):
        assert torch.equal(ours, theirs[:, :, first:last])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_head_keeps_its_bits_at_the_models_sizes(dtype: torch.dtype) -> None:
    """64 heads of 512 channels over 2,051 slots, of which a rank of eight has eight."""
    case = Case.random([[(0, 2100)]], 2100, heads=64, channels=512, budget=512)
    case.position = torch.tensor([2098, 2086])
    case.selection = torch.arange(512, dtype=torch.int32).expand(1, 2, -1).contiguous()
    case = replace(case, q=case.q[:2], out_grad=case.out_grad[:2]).to(dtype)
    whole = case.run()[:2]
    for first in (0, 24):
        some = replace(case, q=case.q[:, :, first : first + 8], out_grad=case.out_grad[:, :, first : first + 8])
        for ours, theirs in zip(some.run()[:2], whole, strict=True):
            assert torch.equal(ours, theirs[:, :, first : first + 8])


class Tagging(TorchBackend):
    """Keeps of each piece where its rows stand, and makes sure that backward gets it back with that piece."""

    def attend(self, q_SBHC: Any, kv_TBC: Any, selection_BSK: Any, call: Any, out_SBHC: Any) -> tuple[Tensor, ...]:
        TorchBackend.attend(q_SBHC, kv_TBC, selection_BSK, call, out_SBHC)
        return call.bounds.position_S.clone(), torch.tensor(len(call.bounds.position_S))

    def attend_backward(
        self, q: Any, kv: Any, selection: Any, call: Any, saved: tuple[Tensor, ...], *gradients: Any
    ) -> None:
        position, rows = saved
        assert torch.equal(position, call.bounds.position_S)
        assert int(rows) == len(position)
        TorchBackend.attend_backward(q, kv, selection, call, (), *gradients)


def tagged() -> int:
    group, rank = dist.group.WORLD, dist.get_rank()
    case = Case.random([[(0, 41)]], 41, heads=2)
    plan = SelectionPlan(case.layout, case.layout.bounds(case.position), RowPartition.zigzag(41, 2), rank)
    mine = share(case, plan.partition, rank)
    cut = RowCut(HeadExchange(plan.partition, group, 4), plan.attended_pieces(4))
    call = AttentionCall(case.layout, plan.attended_own, case.scale, case.tail, 2**20)
    q = mine.q.clone().requires_grad_()
    out = attend(q, mine.kv, mine.selection, call, backend=Tagging(), cut=cut)
    (grad,) = torch.autograd.grad(out, q, mine.out_grad)
    _, expected, _ = replace(mine, selection=case.selection).run()
    assert torch.equal(grad, expected)
    return cut.exchange.pieces


def test_what_a_backend_keeps_of_a_piece_comes_back_with_it() -> None:
    assert run_ranks(tagged, 2) == [6, 6]


class Raising(TorchBackend):
    """Raises in one of its passes, in the piece after the first."""

    def __init__(self, in_pass: str) -> None:
        self.in_pass, self.calls = in_pass, {"forward": 0, "backward": 0}

    def count(self, in_pass: str) -> None:
        self.calls[in_pass] += 1
        if in_pass == self.in_pass and self.calls[in_pass] == 2:
            raise RuntimeError(f"raised in {in_pass}")

    def attend(self, *call: Any) -> tuple[Tensor, ...]:
        self.count("forward")
        return TorchBackend.attend(*call)

    def attend_backward(self, *call: Any) -> None:
        self.count("backward")
        TorchBackend.attend_backward(*call)


def left_alone() -> list[str]:
    group, rank = dist.group.WORLD, dist.get_rank()
    case = Case.random([[(0, 41)]], 41, heads=2)
    plan = SelectionPlan(case.layout, case.layout.bounds(case.position), RowPartition.zigzag(41, 2), rank)
    mine = share(case, plan.partition, rank)
    cut = RowCut(HeadExchange(plan.partition, group, 4), plan.attended_pieces(4))
    call = AttentionCall(case.layout, plan.attended_own, case.scale, case.tail, 2**20)
    said = []
    for in_pass in ("forward", "backward"):
        q = mine.q.clone().requires_grad_()
        backend = Raising(in_pass) if rank == 1 else TorchBackend()
        try:
            out = attend(q, mine.kv, mine.selection, call, backend=backend, cut=cut)
            (grad,) = torch.autograd.grad(out, q, mine.out_grad)
            of_others = torch.zeros(41, dtype=torch.bool)
            for part in plan.partition.slices(1):
                of_others[part.start : part.stop] = True
            said.append(f"NaN in {int(grad.isnan().any(-1).any(-1).any(-1)[of_others].sum())} rows of the other rank")
            assert not grad[~of_others].isnan().any()
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    # Whatever became of the calls, the ranks are in step.
    assert torch.equal(by_rows(mine, group, partition=plan.partition), replace(mine, selection=case.selection).out())
    return said


def test_a_rank_that_raises_leaves_nobody_waiting() -> None:
    first, second = run_ranks(left_alone, 2, timeout=30.0)
    assert second == ["raised in forward", "raised in backward"]
    assert first[0].startswith("a rank of the query-shard group raised in the middle of a call")
    rows = RowPartition.zigzag(41, 2).rows_of(1)
    assert first[1] == f"NaN in {rows - 4} rows of the other rank"


def what_travels(attend_bytes: int) -> tuple[int, int, int]:
    """Bytes received in forward and in backward, and the exchanges of forward."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    case = Case.random([[(0, 50)]], 50, heads=2 * ranks, channels=16)
    partition = RowPartition.zigzag(50, ranks)
    mine = share(case, partition, dist.get_rank())
    q = mine.q.clone().requires_grad_()
    with Recorder() as forward:
        out = by_rows(replace(mine, q=q), group, partition=partition, attend_bytes=attend_bytes, agreed=True)
    with Recorder() as backward:
        out.backward(mine.out_grad)
    for call in (*forward.calls, *backward.calls):
        assert call.group is group
        # Faults found on any rank, and whether one raised: three numbers.
        assert (call.name, call.output) == ("all_reduce", (torch.int64, (3,))) or call.name == "all_to_all_single"
        assert call.name == "all_reduce" or call.output[0] == torch.float32
    exchanges = [call for call in forward.calls if call.name == "all_to_all_single"]
    assert len(forward.calls) == len(exchanges) + 1
    return sum(x.received for x in exchanges), backward.received(), len(exchanges)


@pytest.mark.parametrize("ranks", [2, 3])
def test_queries_and_outputs_travel_and_no_selection(ranks: int) -> None:
    row = 2 * 16 * 4
    own = [RowPartition.zigzag(50, ranks).rows_of(rank) for rank in range(ranks)]
    # Queries of own rows from other heads, outputs of other rows; in backward queries, gradients, and theirs back.
    forward = [row * ((ranks - 1) * rows + 50 - rows) for rows in own]
    backward = [row * (2 * (ranks - 1) * rows + 50 - rows) for rows in own]
    for attend_bytes in (2**24, 2**14):
        pieces = -(-max(own) // (attend_bytes // (PIECES_HELD * ranks * row)))
        assert (pieces > 1) == (attend_bytes == 2**14)
        found = run_ranks(what_travels, ranks, attend_bytes)
        assert found == [(*travelled, 2 * pieces) for travelled in zip(forward, backward, strict=True)]


def faults() -> list[str]:
    group, rank = dist.group.WORLD, dist.get_rank()
    case = Case.random([[(0, 40)]], 40, heads=2)
    mine = share(case, RowPartition.contiguous(40, 2), rank)
    said = []
    spoilt = mine.selection.clone()
    if rank == 1:
        spoilt[0, 3, 0] = 9
    for selection in (spoilt, spoilt.flip(2)):
        try:
            by_rows(replace(mine, selection=selection), group)
        except ValueError as error:
            said.append(str(error))
    with Recorder() as log:
        for change in (
            {"q": mine.q[:39]},
            {"selection": mine.selection[:, :-1]},
            {"partition": RowPartition.contiguous(39, 2)},
        ):
            options = {"agreed": True, "partition": change.pop("partition", None)}
            try:
                by_rows(replace(mine, **change), group, **options)
            except ValueError as error:
                said.append(str(error))
        exchange = HeadExchange(RowPartition.contiguous(40, 2), group, 8)
        for x in ([mine.q[:39]], [mine.q, mine.q[:39]]):
            try:
                exchange.each_piece(x, lambda *_: None, None)
            except ValueError as error:
                said.append(str(error))
    assert log.calls == []
    # Whatever one of them was refused, the ranks are in step.
    assert torch.equal(by_rows(mine, group), replace(mine, selection=case.selection).out())
    return said


def test_faults() -> None:
    """Of a selection with faults on one rank every rank hears; other rows are refused before anything travels."""
    first, second = run_ranks(faults, 2)
    assert first == second
    unseen, disordered, q, selection, partition, rows, shapes = first
    assert "cannot see" in unseen
    assert "repeats or disorders" in disordered or "cannot see" in disordered
    assert q == "q_SBHC has shape (39, 1, 1, 16); accepted is [40, 1, heads, channels]"
    assert selection == "selection_BSK has shape (1, 19, 3); accepted is [1, 20, budget]"
    assert partition.startswith("partition cuts 39 rows for 2 ranks; accepted are 40 rows")
    assert rows == "x has shapes [(39, 1, 1, 16)]; accepted is one shape of the partition's 40 rows"
    assert "[(40, 1, 1, 16), (39, 1, 1, 16)]" in shapes


def replicated_or_wrong() -> list[str]:
    said = []
    for partition in (RowPartition.replicated(8, 2), RowPartition.contiguous(8, 3)):
        with pytest.raises(ValueError, match=r"^partition gives ") as refusal:
            HeadExchange(partition, dist.group.WORLD, 1)
        said.append(str(refusal.value))
    return said


def test_an_exchange_needs_shards() -> None:
    expected = ["2 ranks all of them to each", "3 ranks shards"]
    for said in run_ranks(replicated_or_wrong, 2):
        assert said == [f"partition gives {what}; accepted are shards for the group's 2 ranks" for what in expected]
