"""The selection contract: a row's selection depends on its query, head weights, visible keys and budget alone."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from draw import EXACT, ROUNDED, Call, calls, layout_of, numbers, poisoned
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mcore_dsa.backends.torch import scoring
from mcore_dsa.backends.torch.select import smallest_score_bytes
from mcore_dsa.functions import select_pools

CPU = torch.device("cpu")


def smallest(call: Call) -> int:
    heads, dim = call.q_SBHD.shape[2:]
    return smallest_score_bytes(CPU, heads, dim, call.budget)


def dyed(call: Call, seen: torch.Tensor) -> Call:
    """The call with NaN in every pool key that `seen` (bool `[b, p]`) leaves out."""
    return replace(call, pool_key_PBD=call.pool_key_PBD.masked_fill(~seen.T.unsqueeze(-1), torch.nan))


@settings(max_examples=150)
@given(calls(EXACT))
def test_equals_the_oracle_in_float64(call: Call) -> None:
    assert torch.equal(call.select(), call.oracle())


@settings(max_examples=40)
@given(calls(EXACT, long=True, max_batch=2))
def test_equals_the_oracle_in_float64_over_many_blocks(call: Call) -> None:
    assert torch.equal(call.select(score_bytes=smallest(call)), call.oracle())


def chosen_and_seen(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """bool `[b, s, p]`: what the call selects, and what its rows see. Checks the form of the selection on the way."""
    selection = call.select()
    used = selection >= 0
    assert ((selection[..., 1:] > selection[..., :-1]) | ~used[..., 1:]).all()
    pool = torch.arange(call.layout.num_pools)
    bounds = call.layout.bounds(call.position_S)
    first_BS, visible_BS = bounds.first_BS.unsqueeze(-1), bounds.visible_BS.unsqueeze(-1)
    assert torch.equal(used.sum(-1, keepdim=True), visible_BS.clamp(max=call.budget))
    chosen = (selection.unsqueeze(-1) == pool).any(2)
    seen = (pool >= first_BS) & (pool < first_BS + visible_BS)
    assert torch.equal(chosen.sum(-1), used.sum(-1))
    assert not (chosen & ~seen).any()
    return chosen, seen


@settings(max_examples=60)
@given(calls(ROUNDED))
def test_selected_pools_score_no_less_than_others(call: Call) -> None:
    """Within the rounding of fp32 sums: `dim + heads + 2` roundings of terms no greater than `sum |w| |q| |k|`."""
    chosen, seen = chosen_and_seen(call)
    q, weights, key = (x.double().abs() for x in (call.q_SBHD, call.weights_SBH, call.pool_key_PBD))
    heads, dim = q.shape[2:]
    bound_BSP = torch.einsum("sbhd,pbd,sbh->bsp", q, key, weights) * (dim + heads + 2) * 2.0**-24
    score_BSP = call.scores64()
    least = (score_BSP + bound_BSP).masked_fill(~chosen, torch.inf)
    most = (score_BSP - bound_BSP).masked_fill(~seen | chosen, -torch.inf)
    assert (most.unsqueeze(2) <= least.unsqueeze(3)).all()


@settings(max_examples=40)
@given(calls(ROUNDED))
def test_budgets_nest_and_equal_keys_come_in_order(call: Call) -> None:
    """Budgets from 1 to every pool draw from one order over a row's pools, in which equal keys stand by id."""
    pools = call.layout.num_pools
    taken = torch.zeros(call.layout.batch, len(call.position_S), pools, dtype=torch.bool)
    place = torch.full(taken.shape, pools + 1)
    for budget in range(1, pools + 2):
        chosen, seen = chosen_and_seen(replace(call, budget=budget))
        assert not (taken & ~chosen).any()
        place = torch.where(chosen & ~taken, budget, place)
        taken = chosen
    if pools:
        assert torch.equal(taken, seen)
        equal_BPP = (call.pool_key_PBD.unsqueeze(1) == call.pool_key_PBD).all(-1).permute(2, 0, 1)
        ahead = equal_BPP.triu(1).unsqueeze(1) & seen.unsqueeze(-1) & seen.unsqueeze(-2)
        assert (place.unsqueeze(-1) < place.unsqueeze(-2))[ahead].all()


@settings(max_examples=40)
@given(calls(long=True, max_batch=2), st.lists(st.floats(0, 1), min_size=2, max_size=2))
def test_independent_of_the_score_budget(call: Call, fractions: list[float]) -> None:
    least = smallest(call)
    expected = call.select(score_bytes=1 << 33)
    for score_bytes in (least, *(least + int(fraction * least) for fraction in fractions)):
        assert torch.equal(call.select(score_bytes=score_bytes), expected)


@settings(max_examples=60)
@given(calls(), st.data())
def test_independent_of_the_rows_beside_it(call: Call, data: st.DataObject) -> None:
    """Any rows in any order, also doubled: a slice, a shard, one alone."""
    rows = len(call.position_S)
    assume(rows)
    expected = call.select()
    row = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=2 * rows)))
    assert torch.equal(call.rows(row).select(), expected[:, row])
    start = data.draw(st.integers(0, rows))
    assert torch.equal(call.rows(torch.arange(start, rows)).select(), expected[:, start:])
    assert torch.equal(call.rows(row[:1]).select(), expected[:, row[:1]])


@settings(max_examples=8)
@given(calls(long=True, max_batch=2))
def test_long_rows_are_independent_of_the_rows_beside_them(call: Call) -> None:
    """Also of thousands of them: rows fill tiles and strips up to the last place."""
    expected, rows = call.select(), len(call.position_S)
    for repeats in (1, 150):
        row = torch.arange(rows).flip(0).repeat(repeats)
        assert torch.equal(call.rows(row).select(), expected[:, row])


@settings(max_examples=40)
@given(calls(max_batch=3), st.integers(0, 2))
def test_independent_of_batch_neighbours(call: Call, sample: int) -> None:
    sample %= call.layout.batch
    one = slice(sample, sample + 1)
    expected = call.select()[one]
    layout = layout_of([call.segments[sample]], num_tokens=call.layout.num_tokens, pool_size=call.layout.pool_size)
    alone = replace(
        call,
        q_SBHD=call.q_SBHD[:, one],
        weights_SBH=call.weights_SBH[:, one],
        pool_key_PBD=call.pool_key_PBD[:, one],
        layout=layout,
    )
    assert torch.equal(alone.select(), expected)
    other = torch.arange(call.layout.batch) != sample
    ruined = replace(
        call,
        q_SBHD=call.q_SBHD.masked_fill(other[:, None, None], torch.nan),
        weights_SBH=call.weights_SBH.masked_fill(other[:, None], torch.inf),
        pool_key_PBD=call.pool_key_PBD.masked_fill(other[:, None], torch.nan),
    )
    assert torch.equal(ruined.select()[one], expected)


@settings(max_examples=60)
@given(calls(), st.data())
def test_independent_of_what_a_row_cannot_see(call: Call, data: st.DataObject) -> None:
    """NaN in the keys of its future, of other documents and of slots without a pool."""
    rows = len(call.position_S)
    assume(rows)
    row = torch.tensor([data.draw(st.integers(0, rows - 1))])
    bounds = call.layout.bounds(call.position_S[row])
    first_BS, visible_BS = bounds.first_BS, bounds.visible_BS
    pool = torch.arange(call.layout.num_pools)
    seen = (pool >= first_BS) & (pool < first_BS + visible_BS)
    assert torch.equal(dyed(call, seen).select()[:, row], call.select()[:, row])


@settings(max_examples=40)
@given(st.data())
def test_independent_of_the_place_in_a_pack(data: st.DataObject) -> None:
    """A document alone, and between others behind any number of tokens: the same pools, counted from its first."""
    pool_size, length = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 150))
    before, after = data.draw(st.integers(0, 300)), data.draw(st.integers(0, 9))
    kind = data.draw(st.sampled_from([*EXACT, *ROUNDED]))
    pools, others = length // pool_size, before // pool_size
    alone_layout = layout_of([[(0, length)]], num_tokens=length, pool_size=pool_size)
    q, weights, key = numbers(kind, length, pools, 1, data.draw(st.sampled_from([1, 3, 8])), 8, seed=length)
    budget = data.draw(st.integers(1, pools + 1))
    alone = Call(q, weights, key, [[(0, length)]], alone_layout, torch.arange(length), budget).select()

    tokens = before + length + after
    segments = [[(0, before), (before, before + length), (before + length, tokens)]]
    layout = layout_of(segments, num_tokens=tokens, pool_size=pool_size)
    other = numbers("special", tokens, layout.num_pools, 1, q.shape[2], 8, seed=before)
    for mine, theirs in zip((q, weights), other[:2], strict=True):
        theirs[before : before + length] = mine
    other[2][others : others + pools] = key
    packed = Call(*other, segments, layout, torch.arange(tokens), budget).select()[:, before : before + length]
    assert torch.equal(torch.where(packed >= 0, packed - others, -1), alone)


@settings(max_examples=30)
@given(calls(max_batch=2))
@example(Call(*numbers("near", 600, 600, 1, 8, 16, 0), [[(0, 600)]], layout_of([[(0, 600)]], num_tokens=600,
              pool_size=1), torch.arange(600), 5))  # fmt: skip
def test_independent_of_modes_and_memory(call: Call) -> None:
    expected = call.select()

    def strided(x: torch.Tensor) -> torch.Tensor:
        return (
            torch.stack([x, torch.full_like(x, torch.nan)], dim=-1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
        )

    for _ in range(2):
        assert torch.equal(call.select(), expected)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode, poisoned, nullcontext):
        grad = mode is torch.enable_grad
        with mode():
            changed = replace(
                call, q_SBHD=call.q_SBHD.clone().requires_grad_(grad), weights_SBH=call.weights_SBH.clone()
            )
            selection = changed.select()
        assert torch.equal(selection, expected)
        assert not selection.requires_grad
    wide = torch.stack([call.pool_key_PBD, torch.full_like(call.pool_key_PBD, torch.nan)], dim=-1)
    changed = replace(
        call, q_SBHD=strided(call.q_SBHD), weights_SBH=strided(call.weights_SBH), pool_key_PBD=wide[..., 0]
    )
    assert torch.equal(changed.select(), expected)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert torch.equal(call.select(), expected)


def forget_probes() -> None:
    """What was measured of tiles under other settings may not stand in for measuring it under these."""
    for value in vars(scoring).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


BIG = Call(
    *numbers("near", 300, 700, 2, 8, 32, 7),
    [[(0, 700)], [(3, 650)]],
    layout_of([[(0, 700)], [(3, 650)]], num_tokens=700, pool_size=1),
    torch.arange(400, 700),
    40,
)


def set_precision(name: str) -> Callable[[], None]:
    return lambda: torch.set_float32_matmul_precision(name)


@pytest.mark.parametrize(
    ("change", "restore"),
    [
        (set_precision("high"), set_precision("highest")),
        (set_precision("medium"), set_precision("highest")),
        (lambda: torch.set_num_threads(2), lambda: torch.set_num_threads(1)),
        (lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)),
        (lambda: torch.set_default_dtype(torch.bfloat16), lambda: torch.set_default_dtype(torch.float32)),
        (lambda: torch.set_default_device("meta"), lambda: torch.set_default_device(None)),
        (lambda: torch.use_deterministic_algorithms(True), lambda: torch.use_deterministic_algorithms(False)),
    ],
    ids=["high", "medium", "2 threads", "float64", "bfloat16", "default device", "deterministic"],
)
def test_independent_of_what_is_set_for_the_process(change: Callable[[], None], restore: Callable[[], None]) -> None:
    expected = BIG.select()
    change()
    try:
        forget_probes()
        assert torch.equal(BIG.select(), expected)
    finally:
        restore()


def test_independent_of_the_thread_it_runs_in() -> None:
    """Four at once, as a recomputation in autograd's thread may be, in a process that wants fast products."""
    expected, found = BIG.select(), []
    torch.set_float32_matmul_precision("medium")
    try:
        threads = [threading.Thread(target=lambda: found.extend(BIG.select() for _ in range(3))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert len(found) == 12
    assert all(torch.equal(selection, expected) for selection in found)


@settings(max_examples=30)
@given(calls(("plateau", "zeros", "special"), max_batch=2))
def test_every_slot_is_written(call: Call) -> None:
    """Buffers come full of what would win, or of what would be nowhere."""
    expected = call.oracle()
    for value in (3e38, torch.nan, -3e38):
        with poisoned(value):
            selection = select_pools(
                call.q_SBHD, call.weights_SBH, call.pool_key_PBD, call.layout, call.position_S, budget=call.budget,
                use_relu=call.use_relu,
            )  # fmt: skip
        assert selection.dtype == torch.int32
        assert torch.equal(selection, expected)
