"""Sparse attention under Triton's interpreter, against float64 and the torch backend.

The interpreter takes some 30 ms for a row, forward and backward: cases are small. It cuts numbers off where they
become bf16, where a device rounds them.
"""

import functools
from dataclasses import replace

import pytest
import torch
from attend_bounds import error_bounds
from attend_cases import Case, assert_equal
from draw import poisoned
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from layouts import segmentations
from live_bytes import allocated_bytes
from strict_interpreter import backwards
from torch import Tensor

from mcore_dsa.attend import Kept, LatentShards, RowCut, attend
from mcore_dsa.backends import AttentionCall
from mcore_dsa.backends.triton import TritonBackend
from mcore_dsa.backends.triton.scratch import smallest_attend_bytes
from mcore_dsa.head_exchange import HeadExchange
from mcore_dsa.kernels.tiles import CHAIN
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.rows import RowPartition

NAN = float("nan")
ROUNDOFF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-7}
SPLIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-14}

GEOMETRIES = st.fixed_dictionaries(
    {
        "pool_size": st.integers(1, 5),
        "budget": st.integers(0, 5),
        "heads": st.sampled_from([1, 2, 3, 8, 16, 17, 40]),
        "channels": st.sampled_from([1, 16, 20]),
        "tail": st.booleans(),
        "seed": st.integers(0, 99),
    }
)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
LAYOUTS = segmentations(max_tokens=16, max_batch=2)


def least(case: Case) -> int:
    """The smallest budget: it holds one row."""
    slots = case.selection.shape[2] * case.layout.pool_size + (case.layout.pool_size - 1) * case.tail
    return smallest_attend_bytes(batch=case.layout.batch, channels=case.kv.shape[2], slots=slots)


def attended(case: Case, q: Tensor, kv: Tensor, attend_bytes: int = 1 << 28, bounds=None, **options) -> Tensor:
    bounds = case.layout.bounds(case.position) if bounds is None else bounds
    call = AttentionCall(case.layout, bounds, case.scale, case.tail, attend_bytes)
    return attend(q, kv, case.selection, call, backend=TritonBackend(), **options)


def run(case: Case, **options) -> tuple[Tensor, Tensor, Tensor]:
    """Output and the gradients of q and kv."""
    q, kv = case.q.detach().requires_grad_(), case.kv.detach().requires_grad_()
    out = attended(case, q, kv, **options)
    return out.detach(), *torch.autograd.grad(out, (q, kv), case.out_grad)


def assert_within_bounds(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Against float64, and against the torch backend, whose own errors are within the same bounds."""
    got, exact = run(case), case.to(torch.float64)
    dtype = case.q.dtype
    allowed = error_bounds(exact, out=ROUNDOFF[dtype], split=SPLIT[dtype])
    for ours, torchs, want, bound in zip(got, case.run(), exact.run_oracle(), allowed, strict=True):
        assert ours.dtype == dtype
        assert ours.shape == want.shape
        assert bool(((ours - want).abs() <= bound).all())
        assert bool(((ours.double() - torchs.double()).abs() <= 2 * bound).all())
    return got


@given(LAYOUTS, GEOMETRIES, DTYPES)
@hypothesis_settings(max_examples=10)
def test_within_the_bound_of_float64(segmentation, geometry, dtype) -> None:
    assert_within_bounds(Case.random(*segmentation, **geometry).to(dtype))


@functools.cache
def wide_case(dtype: torch.dtype = torch.float32, rows: int = 4) -> Case:
    """Rows of several tiles of slots; later tokens weigh more, so that the peak moves from tile to tile."""
    case = Case.random([[(0, 110)], [(7, 104)]], 110, budget=22, heads=3, channels=24, rows=rows, seed=5)
    case.position[:3] = torch.tensor([109, 103, 90])
    bounds = case.layout.bounds(case.position)
    columns = torch.arange(22).expand(2, rows, 22)
    some = columns < bounds.visible_BS.unsqueeze(-1)
    selection = torch.where(some, bounds.first_BS.unsqueeze(-1) + columns, -1).int()
    growing = case.kv * torch.linspace(0.5, 3, 110).reshape(-1, 1, 1)
    return replace(case, selection=selection, kv=growing).to(dtype)


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float32, 0.3), (torch.bfloat16, 0.3), (torch.float32, 30.0)])
def test_rows_of_several_tiles(dtype: torch.dtype, scale: float) -> None:
    """At the greater scale the peaks of tiles lie further apart than an exponential reaches."""
    assert_within_bounds(replace(wide_case(dtype), scale=scale))


def test_a_row_of_one_token_has_no_gradient_through_its_weight() -> None:
    """Its output is its token's latent: what its bf16 rounding leaves of `delta` would show in the query's gradient."""
    case = Case.random([[(i, i + 1) for i in range(12)]], 12, budget=0, heads=5).to(torch.bfloat16)
    _, q_grad, _ = assert_within_bounds(case)
    assert float(q_grad.abs().max()) < 2.0**-9


def test_a_cell_ends_with_its_segment() -> None:
    """The tail's cell of the first document reaches into the second, whose rows are added beside it."""
    case = Case.random([[(0, 6), (6, 9)], [(0, 9)]], 9, heads=2)
    assert_within_bounds(case.rows(torch.tensor([4, 5, 5, 4, 5, 6, 7, 8])))


@given(segmentations(max_tokens=9, max_batch=2), GEOMETRIES)
@hypothesis_settings(max_examples=4)
def test_gradients_of_latents_are_added_in_the_order_of_rows(segmentation, geometry) -> None:
    """Bit for bit those of each row alone, the first of them first, however many go through at a time."""
    case = Case.random(*segmentation, **geometry)
    whole = run(case)
    assert_equal(run(case, attend_bytes=least(case)), whole)
    assert torch.equal(added_row_by_row(case), whole[2])


@pytest.mark.parametrize("rows", [CHAIN, CHAIN + 1, 2 * CHAIN + 3])
def test_so_are_those_of_a_pool_that_every_row_selects(rows: int) -> None:
    case = popular_pool(rows)
    assert torch.equal(assert_within_bounds(case)[2], added_row_by_row(case))


def popular_pool(rows: int) -> Case:
    """Rows that select the first pool, and no other."""
    case = Case.random([[(0, 8 + rows)]], 8 + rows, heads=1, channels=16, budget=1).rows(slice(8, 8 + rows))
    return replace(case, selection=torch.zeros_like(case.selection))


def added_row_by_row(case: Case) -> Tensor:
    total = torch.zeros_like(case.kv)
    for row in range(len(case.position)):
        total += run(case.rows(slice(row, row + 1)))[2]
    return total


@given(LAYOUTS, GEOMETRIES, st.data())
@hypothesis_settings(max_examples=4)
def test_a_row_and_head_alone_is_itself(segmentation, geometry, data) -> None:
    case = Case.random(*segmentation, **geometry)
    out, q_grad, _ = run(case)
    head = data.draw(st.integers(0, geometry["heads"] - 1))
    few = case.rows(torch.arange(len(case.position)).flip(0)[data.draw(st.integers(0, 3)) :: 3])
    part = slice(head, head + data.draw(st.integers(1, 17)))
    few = replace(few, q=few.q[:, :, part], out_grad=few.out_grad[:, :, part])
    rows = [case.position.tolist().index(int(p)) for p in few.position]
    assert_equal(run(few)[:2], (out[rows][:, :, part], q_grad[rows][:, :, part]))


def test_neither_pack_nor_batch_nor_budget_moves_a_bit() -> None:
    """Gradients of latents too: rows are added in order, three at a time or all at once."""
    documents = [(0, 5), (5, 13), (14, 17)]
    case = Case.random([documents, [(2, 12)]], 17, heads=3)
    whole = run(case)
    assert_equal(run(case, attend_bytes=3 * least(case)), whole)
    for begin, end in documents:
        alone = Case.random([[(0, end - begin)]], end - begin, heads=3)
        first = int(case.layout.bounds(torch.tensor([begin])).first_BS[0, 0])
        selection = case.selection[:1, begin:end]
        alone = replace(
            alone,
            q=case.q[begin:end, :1],
            kv=case.kv[begin:end, :1],
            out_grad=case.out_grad[begin:end, :1],
            selection=torch.where(selection < 0, selection, selection - first),
        )
        assert_equal(run(alone), tuple(x[begin:end, :1] for x in whole))


def test_the_order_of_programs_moves_no_bit() -> None:
    """None writes where another does."""
    case = Case.random([[(0, 9), (9, 14)], [(2, 13)]], 14, heads=17, rows=6, budget=2)
    expected = run(case)
    with backwards(), poisoned(NAN):
        assert_equal(run(case), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_keeps_what_it_says(dtype: torch.dtype) -> None:
    case = Case.random([[(0, 9)], [(1, 8)]], 9, rows=5, heads=3, channels=20).to(dtype)
    call = AttentionCall(case.layout, case.layout.bounds(case.position), case.scale, case.tail, 1 << 28)
    saved = TritonBackend.attend(case.q, case.kv, case.selection, call, torch.empty_like(case.q))
    a_row = TritonBackend.saved_row_bytes(heads=3, channels=20, elem_bytes=dtype.itemsize)
    assert sum(x.nbytes for x in saved) == 5 * 2 * a_row


def test_backward_holds_what_it_says() -> None:
    """The gradients, the sum of those of latents, 4 bytes a row and head; of the budget at least half."""
    case = Case.random([[(0, 160)]], 160, rows=12, heads=1, budget=12)
    attend_bytes = 3 * least(case)
    q, kv = case.q.requires_grad_(), case.kv.requires_grad_()
    out = attended(case, q, kv, attend_bytes)
    peak, _ = allocated_bytes(lambda: torch.autograd.grad(out, (q, kv), case.out_grad))
    beside = q.nbytes + (len(kv) + 1) * kv[0].nbytes + 12 * 4
    assert beside + attend_bytes // 2 <= peak <= beside + attend_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_slot_is_written_and_nothing_else_read(dtype: torch.dtype) -> None:
    """Padding holds NaN, and so do fresh buffers and what comes back to rows on padding and before the start."""
    segments = [[(3, 14), (14, 20)], [(0, 0)]]
    case = Case.random(segments, 22, rows=12, channels=20).to(dtype)
    padding = torch.ones(22, 2, dtype=torch.bool)
    padding[3:20, 0] = False
    empty = (case.tokens() < 0).all(-1).T
    dirty = replace(
        case,
        kv=case.kv.masked_fill(padding.unsqueeze(-1), NAN),
        out_grad=case.out_grad.masked_fill(empty[..., None, None], NAN),
    )
    expected = run(case)
    with poisoned(NAN):
        out, q_grad, kv_grad = run(dirty)
    assert_equal((out, q_grad, kv_grad), expected)
    assert 0 < int(empty[:, 0].sum()) < 12
    assert not out[empty].any()
    assert not q_grad[empty].any()
    assert not kv_grad[padding].any()
    assert bool(out[~empty].any(-1).all())


def test_a_latent_that_is_no_number_spoils_the_rows_that_attend_it_and_no_other() -> None:
    case = Case.random([[(0, 18)]], 18, heads=2)
    attends = (case.tokens() == 5).any(-1)[0]
    case.kv[5] = NAN
    out = attended(case, case.q, case.kv)
    assert torch.equal(out.isnan().any(-1).any(-1)[:, 0], attends)
    assert 0 < int(attends.sum()) < 18


POOLS = 10
REFUSED: dict[str, tuple[int, list[int], str]] = {
    "behind the last pool": (39, [POOLS, -1, -1], "cannot see"),
    "far behind it": (36, [0, 1, 2**31 - 1], "cannot see"),
    "below -1": (39, [-(2**31), -1, -1], "ascending ids"),
    "of the future": (0, [POOLS - 1, -1, -1], "cannot see"),
    "no pool of the sample": (36, [0, 8, 9], "cannot see"),
    "next to be complete": (36, [0, 7, 8], "cannot see"),
    "descending": (36, [1, 0, -1], "ascending ids"),
    "twice": (36, [2, 2, 3], "ascending ids"),
    "-1 before others": (36, [-1, 0, 1], "ascending ids"),
    "beyond what the row can fill": (7, [0, 1, 9], "cannot see"),
    "behind -1 beyond what the row can fill": (7, [0, -1, 0], "ascending ids"),
}


@pytest.mark.parametrize(("row", "ids", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_ids_are_refused(row: int, ids: list[int], said: str) -> None:
    case = Case.random([[(0, 40)], [(3, 37)]], 40, heads=1).rows(torch.tensor([row]))
    case.selection[:] = -1
    case.selection[1, 0] = torch.tensor(ids, dtype=torch.int32)
    with pytest.raises(ValueError, match=said):
        attended(case, case.q, case.kv)
    with pytest.raises(ValueError, match=said):
        case.attend(case.layout.bounds(case.position))


def test_ids_of_wide_rows_are_checked_to_the_last() -> None:
    case = Case.random([[(0, 300)]], 300, pool_size=1, budget=300, heads=1).rows(torch.tensor([299]))
    case.selection[:] = torch.arange(300)
    attended(case, case.q, case.kv)
    for place in (127, 128, 299):
        case.selection[0, 0, place] -= 1
        with pytest.raises(ValueError, match="ascending ids"):
            attended(case, case.q, case.kv)
        case.selection[0, 0, place] += 1


def test_shards_and_a_kept_selection() -> None:
    """Latents of two ranks, of which this one keeps the second; the selection goes and comes back in another form."""
    case = Case.random([[(0, 14)]], 14, heads=2)
    out, q_grad, kv_grad = run(case)
    own = replace(case, kv=case.kv[6:])
    shards = LatentShards(lambda kv: torch.cat([case.kv[:6], kv]), lambda grad: grad[6:])
    kept = Kept(case.selection + 7, lambda selection: selection - 7)
    assert_equal(run(own, shards=shards, kept=kept), (out, q_grad, kv_grad[6:]))


def test_rows_in_pieces() -> None:
    """Gradients of latents are added in the order of rows, whatever the pieces."""
    case = Case.random([[(0, 9)], [(1, 8)]], 9, heads=2)
    plan = SelectionPlan(case.layout, case.layout.bounds(case.position), RowPartition.contiguous(9, 1), 0)
    cut = RowCut(HeadExchange(plan.attended, None, 4), plan.attended_pieces(4))
    assert len(cut.pieces) == 3
    assert_equal(run(case, cut=cut), run(case))


def test_one_gradient_only_and_strided_inputs() -> None:
    case = Case.random([[(0, 9)], [(1, 8)]], 9, heads=2)
    out, q_grad, kv_grad = run(case)
    q, kv = case.q.clone().requires_grad_(), case.kv.clone().requires_grad_()
    assert torch.equal(torch.autograd.grad(attended(case, q, case.kv), q, case.out_grad)[0], q_grad)
    assert torch.equal(torch.autograd.grad(attended(case, case.q, kv), kv, case.out_grad)[0], kv_grad)
    turned = {name: getattr(case, name).mT.contiguous().mT for name in ("q", "kv", "selection", "out_grad")}
    assert not any(x.is_contiguous() for x in turned.values())
    bounds = case.layout.bounds(torch.cat([case.position.flip(0), case.position])).take(slice(9, 18))
    assert not bounds.first_BS.is_contiguous()
    assert_equal(run(replace(case, **turned), bounds=bounds), (out, q_grad, kv_grad))


def test_what_is_written_between_the_passes_is_an_error() -> None:
    case = Case.random([[(0, 9)]], 9, heads=2)
    out = attended(case, case.q.requires_grad_(), case.kv)
    case.layout.pool_token_BP.sub_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize(
    ("segments", "num_tokens", "options"),
    [
        ([[(0, 9)]], 9, {"rows": 0}),
        ([[(0, 0)]], 0, {"rows": 3}),
        ([[(0, 9)]], 9, {"budget": 0, "tail": False}),
        ([[(0, 3)]], 3, {}),
    ],
)
def test_degenerate_shapes(segments, num_tokens, options) -> None:
    assert_within_bounds(Case.random(segments, num_tokens, **options))


def test_what_it_cannot_do_is_refused() -> None:
    case = Case.random([[(0, 5)]], 5)
    smallest = least(case)
    with pytest.raises(ValueError, match=f"attend_bytes is {smallest - 1}; accepted are at least {smallest}, which"):
        run(case, attend_bytes=smallest - 1)
    with pytest.raises(TypeError, match=r"kv_TBC is torch\.float64; accepted is one of torch\.bfloat16"):
        run(case.to(torch.float64))
    with pytest.raises(TypeError, match=r"q_SBHC is torch\.float32 and kv_TBC is torch\.bfloat16; accepted is one of"):
        run(replace(case, kv=case.kv.bfloat16()))
    with pytest.raises(ValueError, match="channels is 513; accepted are at most 512"):
        run(Case.random([[(0, 5)]], 5, channels=513))
