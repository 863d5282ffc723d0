"""Slots of a row follow from what it sees itself: classes, the order of sums, what is saved between the passes."""

from dataclasses import replace

import pytest
import torch
from attend_cases import Case, assert_equal, assert_sums_rows_in_order, smallest_budget
from draw import threads
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from layouts import segmentations
from test_attend import GEOMETRIES
from torch import Tensor

from mcore_dsa.attend import Kept
from mcore_dsa.backends.torch.slots import LANES, SlotClass, slot_classes
from mcore_dsa.kpool import PoolLayout, RowBounds

# Documents long enough for several classes, budgets on both sides of what they hold.
WIDE = st.fixed_dictionaries(
    {
        "pool_size": st.integers(1, 5),
        "budget": st.integers(1, 80),
        "heads": st.sampled_from([1, 4]),
        "channels": st.sampled_from([1, 16, 17]),
        "tail": st.booleans(),
        "seed": st.integers(0, 99),
    }
)


def classes_of(case: Case, bounds: RowBounds) -> tuple[SlotClass, ...]:
    tail_slots = case.layout.pool_size - 1 if case.tail else 0
    return slot_classes(bounds, budget=case.selection.shape[2], pool_size=case.layout.pool_size, tail_slots=tail_slots)


@given(segmentations(max_tokens=300), WIDE)
@hypothesis_settings(max_examples=25)
def test_every_item_with_tokens_is_in_the_narrowest_class_that_holds_it(segmentation, geometry) -> None:
    case = Case.random(*segmentation, rows=30, **geometry)
    size, budget, batch = geometry["pool_size"], geometry["budget"], case.layout.batch
    bounds = case.layout.bounds(case.position)
    tail_slots = size - 1 if case.tail else 0
    full = -(-(budget * size + tail_slots) // LANES) * LANES
    of_item = {int(item): group for group in classes_of(case, bounds) for item in group.item_I}
    for row in range(30):
        for sample in range(batch):
            visible = int(bounds.visible_BS[sample, row])
            group = of_item.pop(row * batch + sample, None)
            if visible == 0 and (not case.tail or int(bounds.tail_BS[sample, row]) == 0):
                assert group is None
                continue
            needed = min(visible, budget) * size + tail_slots
            powers = [slots for slots in (LANES * 2**i for i in range(8)) if needed <= slots < full]
            assert group.slots == (full if visible >= budget else min([*powers, full]))
            assert min(visible, budget) <= group.pools
            assert group.pools * size + tail_slots <= group.slots
    assert not of_item
    for group in classes_of(case, bounds):
        assert bool((group.item_I.diff() > 0).all())


def test_a_pack_has_no_slot_more_for_a_greater_budget() -> None:
    """Slots, and with them all work but on the selection itself, of 256 documents of 64 tokens."""
    layout = PoolLayout.from_cu_seqlens(torch.arange(257) * 64, pool_size=4)
    bounds = layout.bounds(torch.arange(256 * 64))

    def slots(budget: int) -> int:
        groups = slot_classes(bounds, budget=budget, pool_size=4, tail_slots=3)
        return sum(group.slots * len(group.item_I) for group in groups)

    assert slots(512) == slots(31) <= 1.05 * slots(16)
    assert slots(512) <= 1.5 * 256 * sum(range(1, 65))


def test_layers_share_the_classes() -> None:
    case = Case.random([[(0, 70)]], 70)
    bounds = case.layout.bounds(case.position)
    first, second = (classes_of(case, bounds) for _ in range(2))
    assert first is second
    assert classes_of(replace(case, tail=False), bounds) is not first


@given(segmentations(max_tokens=120, max_batch=2), WIDE, st.sampled_from([1.0, 2.5, 20.0]))
@hypothesis_settings(max_examples=10)
def test_sums_of_several_classes_are_in_row_order(segmentation, geometry, factor) -> None:
    """Rows in token order: the gradient of kv is the rows' own, added first row first, in whatever chunks."""
    case = Case.random(*segmentation, **geometry)
    assert_sums_rows_in_order(case, case.run(attend_bytes=int(factor * smallest_budget(case))))


@given(segmentations(max_tokens=120, max_batch=2), WIDE)
@hypothesis_settings(max_examples=8)
def test_rows_in_any_order_keep_their_bits(segmentation, geometry) -> None:
    """Sums are then in the order of class and row, and each row's own output and gradient are what they were."""
    case = Case.random(*segmentation, **geometry)
    out, q_grad, _ = case.run()
    shuffled = case.rows(torch.randperm(len(case.position)))
    got = shuffled.run()
    order = shuffled.position
    assert_equal(got[:2], (out[order], q_grad[order]))
    total = torch.zeros_like(case.kv)
    for group in classes_of(shuffled, shuffled.layout.bounds(order)):
        for item in group.item_I.tolist():
            row, sample = divmod(item, case.layout.batch)
            total[:, sample] += shuffled.rows(slice(row, row + 1)).run()[2][:, sample]
    assert torch.equal(total, got[2])


def test_no_thread_count_moves_a_bit_of_a_pack() -> None:
    case = Case.random([[(0, 80), (80, 87), (87, 150)], [(5, 20), (20, 140)]], 150, channels=20, budget=18)
    assert len(classes_of(case, case.layout.bounds(case.position))) >= 4
    expected = case.run()
    for count in (2, 3):
        with threads(count):
            assert_equal(case.run(), expected)
            assert_equal(case.run(attend_bytes=10 * smallest_budget(case)), expected)


@given(segmentations(max_tokens=150), WIDE)
@hypothesis_settings(max_examples=15)
def test_a_budget_that_no_row_reaches_moves_no_bit(segmentation, geometry) -> None:
    case = Case.random(*segmentation, **geometry)
    spare = torch.full((*case.selection.shape[:2], 300), -1, dtype=torch.int32)
    # Budgets of 151 pools and more, which are the more than 150 tokens can hold.
    wide = replace(case, selection=torch.cat([case.selection, spare], -1))
    assert_equal(wide.run(), replace(wide, selection=wide.selection[..., :200]).run())


@pytest.mark.parametrize("column", [3, 50, 99])
def test_ids_in_columns_that_no_row_can_fill_are_refused(column: int) -> None:
    case = Case.random([[(0, 9), (9, 21)]], 21, budget=100)
    case.selection[0, 20, column] = 4
    with pytest.raises(ValueError, match="repeats or disorders"):
        case.out()
    case.selection[0, 12, column] = 4
    with pytest.raises(ValueError, match="cannot see"):
        case.out()


def test_empty_items_take_no_work() -> None:
    case = Case.random([[(0, 0)]], 400, rows=300)
    assert classes_of(case, case.layout.bounds(case.position)) == ()
    for tensor in case.run():
        assert not tensor.any()


@given(segmentations(), GEOMETRIES)
@hypothesis_settings(max_examples=20)
def test_backward_of_a_kept_selection(segmentation, geometry) -> None:
    """It holds what is kept and not the selection, and restores once, whichever gradient is asked for."""
    case = Case.random(*segmentation, **geometry)
    whole, expected = case.selection.clone(), case.run()
    restored: list[Tensor] = []

    def restore(own: Tensor) -> Tensor:
        restored.append(own)
        return whole

    for wanted in ((True, True), (True, False), (False, True)):
        q, kv = (x.clone().requires_grad_(on) for x, on in zip((case.q, case.kv), wanted, strict=True))
        own = whole[:, ::3].clone()
        held: list[Tensor] = []
        used = replace(case, q=q, kv=kv, selection=whole.clone())
        with torch.autograd.graph.saved_tensors_hooks(lambda x, held=held: held.append(x) or x, lambda x: x):
            out = used.attend(case.layout.bounds(case.position), kept=Kept(own, restore))
        assert not restored
        assert [x is own for x in held].count(True) == 1
        assert not any(x is used.selection for x in held)
        # In place afterwards: backward takes the restored one.
        used.selection.fill_(-1)
        leaves = [x for x in (q, kv) if x.requires_grad]
        grads = torch.autograd.grad(out, leaves, case.out_grad)
        assert_equal(grads, tuple(x for x, on in zip(expected[1:], wanted, strict=True) if on))
        assert len(restored) == 1
        assert restored.pop() is own


def test_saves_inputs_and_where_rows_stand_and_nothing_else() -> None:
    case = Case.random([[(0, 21)]], 21)
    bounds = case.layout.bounds(case.position)
    out = replace(case, q=case.q.requires_grad_()).attend(bounds)
    # `out` lives on: torch 2.11 frees what is saved with the last output.
    saved = out.grad_fn.saved_tensors
    table, rows = case.layout.pool_token_BP, (bounds.position_S, bounds.first_BS, bounds.visible_BS, bounds.tail_BS)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in (case.q, case.kv, case.selection, table, *rows)]


@pytest.mark.parametrize("name", ["q", "kv", "selection", "table", "position", "first_BS", "visible_BS", "tail_BS"])
def test_what_changes_in_place_between_the_passes_is_refused(name: str) -> None:
    case = Case.random([[(0, 9), (9, 21)]], 21)
    q, kv = case.q.clone().requires_grad_(), case.kv.clone().requires_grad_()
    bounds = case.layout.bounds(case.position)
    out = replace(case, q=q, kv=kv).attend(bounds)
    changed = {"q": q, "kv": kv, "selection": case.selection, "table": case.layout.pool_token_BP}
    changed["position"] = bounds.position_S
    tensor = changed.get(name, getattr(bounds, name, None))
    with torch.no_grad():
        tensor.add_(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_segments_of_the_layout_do_not_matter_between_the_passes() -> None:
    """Rows are located once: whatever becomes of the segments, backward differentiates what forward did."""
    case = Case.random([[(0, 9), (9, 21)]], 21)
    expected = case.run()
    q, kv = case.q.clone().requires_grad_(), case.kv.clone().requires_grad_()
    out = replace(case, q=q, kv=kv).out()
    for tensor in (case.layout.segment_start_BN, case.layout.segment_end_BN, case.layout.segment_first_pool_BN):
        tensor.fill_(3)
    assert_equal(torch.autograd.grad(out, (q, kv), case.out_grad), expected[1:])
