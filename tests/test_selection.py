"""`select_pools` by hand-made cases: ties, ids, lengths and blocks at their edges, counters, refusals."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from draw import Call, calls, layout_of, numbers
from hypothesis import given, settings
from torch import Tensor

from mcore_dsa.backends import SelectionCounters
from mcore_dsa.backends.torch.scoring import tile_for
from mcore_dsa.backends.torch.select import smallest_score_bytes
from mcore_dsa.functions import select_pools
from mcore_dsa.kpool import PoolLayout
from mcore_dsa.reference import reference_visible

CPU = torch.device("cpu")


def scored_alike(score_P: Tensor, *, rows: int = 1, heads: int = 1, **layout: Any) -> Call:
    """Rows at the end of one document whose pools score exactly `score_P` (of any sign), for all of them."""
    pools = len(score_P)
    q, weights = torch.ones(rows, 1, heads, 1), torch.zeros(rows, 1, heads)
    weights[..., 0] = 1.0
    segments = [[(0, pools)]]
    return Call(
        q,
        weights,
        score_P.float().view(pools, 1, 1),
        segments,
        layout_of(segments, num_tokens=pools, pool_size=1, **layout),
        torch.full((rows,), pools - 1),
        budget=1,
        use_relu=False,
    )


def greatest(score_P: Tensor, budget: int) -> Tensor:
    """The contract in one line of torch: a stable descending sort of float64, its first ids, ascending."""
    return score_P.double().sort(descending=True, stable=True).indices[:budget].sort().values.int()


@pytest.mark.parametrize("pools", [1, 2, 3, 7, 127, 128, 129, 1000])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, torch.inf, -torch.inf, torch.nan, -torch.nan])
def test_equal_scores_go_to_the_smaller_id(pools: int, value: float) -> None:
    call = scored_alike(torch.full((pools,), value), rows=2)
    for budget in {1, 2, pools // 2 + 1, pools, pools + 1}:
        selection = replace(call, budget=budget).select()
        expected = [*range(min(budget, pools)), *[-1] * (budget - pools)]
        assert selection.tolist() == [[expected, expected]]


def test_relu_plateau_at_zero() -> None:
    """No query agrees with a key: every score is 0.0 or -0.0 by the sign of the weight, and all are equal."""
    q, weights, key = -torch.rand(6, 1, 8, 16), torch.randn(6, 1, 8), torch.rand(500, 1, 16)
    segments = [[(0, 500)]]
    layout = layout_of(segments, num_tokens=500, pool_size=1)
    call = Call(q, weights, key, segments, layout, torch.arange(494, 500), budget=33)
    assert torch.equal(call.select(), torch.arange(33, dtype=torch.int32).expand(1, 6, 33))


@pytest.mark.parametrize(
    ("scores", "order"),
    [
        ([1, 2, 3], [2, 1, 0]),
        ([3, 2, 1], [0, 1, 2]),
        ([1, 2, 2], [1, 2, 0]),
        ([2, 1, 2], [0, 2, 1]),
        ([0.0, -0.0, 0.0], [0, 1, 2]),
        ([-0.0, 1e-45, -1e-45], [1, 0, 2]),
        ([torch.nan, -torch.inf, -1], [2, 1, 0]),
        ([torch.inf, torch.nan, -3e38], [0, 2, 1]),
    ],
)
def test_rows_with_three_visible_pools(scores: list[float], order: list[int]) -> None:
    for budget in range(1, 6):
        selection = replace(scored_alike(torch.tensor(scores)), budget=budget).select()[0, 0].tolist()
        assert selection == [*sorted(order[:budget]), *[-1] * (budget - 3)]


@pytest.mark.parametrize("first_pool_id", [0, 16_777_215, 16_777_217, 2**31 - 700])
def test_ids_are_integers_all_the_way(first_pool_id: int) -> None:
    """fp32 has no odd number above 16,777,216."""
    score = torch.randint(-9, 9, (700,), generator=torch.Generator().manual_seed(1))
    call = replace(scored_alike(score, rows=3, first_pool_id=first_pool_id), budget=101)
    selection = call.select(score_bytes=smallest_score_bytes(CPU, 1, 1, 101))
    assert selection.dtype == torch.int32
    assert torch.equal(selection[0], (greatest(score, 101) + first_pool_id).expand(3, -1))
    everything = replace(call, budget=800).select()[0, 0]
    assert everything.tolist() == [*range(first_pool_id, first_pool_id + 700), *[-1] * 100]


@pytest.mark.parametrize("spread", [3, 1000, 10**9])
def test_seventy_thousand_pools(spread: int) -> None:
    score = torch.randint(0, spread, (70_000,), generator=torch.Generator().manual_seed(spread)).float()
    for budget in (1, 512, 2048):
        call = replace(scored_alike(score, rows=3, heads=32), budget=budget)
        expected = greatest(score, budget).expand(1, 3, budget)
        assert torch.equal(call.select(), expected)
        assert torch.equal(call.select(score_bytes=smallest_score_bytes(CPU, 32, 1, budget)), expected)


@pytest.mark.parametrize("levels", [1, 2, 8])
def test_scores_that_differ_in_their_last_bits(levels: int) -> None:
    """20,000 scores within one part in 2**20, exact in fp32: `levels` neighbouring floats from 1.0 on."""
    step = torch.randint(0, levels, (20_000,), generator=torch.Generator().manual_seed(levels))
    score = 1.0 + step * 2.0**-23
    # Every level is a float of its own, and what the call makes of it in its queries loses none.
    assert score.unique().tolist() == [1.0 + level * 2.0**-23 for level in range(levels)]
    assert scored_alike(score, heads=32).scores64()[0, 0].unique().tolist() == score.double().unique().tolist()
    for budget in (1, 2, 500, 2048, 19_999):
        assert torch.equal(
            replace(scored_alike(score, heads=32), budget=budget).select()[0, 0], greatest(score, budget)
        )


def test_a_winner_is_found_at_every_place() -> None:
    """The greatest score in each single place, also the first and last of tiles and blocks."""
    tile = tile_for(CPU, 1)
    pools = 3 * tile.pools + 5
    row = torch.arange(pools)
    segments = [[(0, pools)]]
    layout = layout_of(segments, num_tokens=pools, pool_size=1)
    # Row i scores pool p with q_i . key_p = -(i - p)**2, as (i**2, i, 1) . (-1, 2 p, -p**2): exact in fp32 here.
    q = torch.stack([row**2, row, row**0], dim=-1).view(pools, 1, 1, 3).float()
    key = torch.stack([-(row**0), 2 * row, -(row**2)], dim=-1).view(pools, 1, 3).float()
    call = Call(q, torch.ones(pools, 1, 1), key, segments, layout, torch.full((pools,), pools - 1), 1, use_relu=False)
    for score_bytes in (smallest_score_bytes(CPU, 1, 3, 1), 1 << 30):
        assert torch.equal(call.select(score_bytes=score_bytes)[0, :, 0], row.int())


def test_a_pool_is_seen_from_its_last_token_on() -> None:
    length, pool_size = 41, 4
    segments = [[(2, length)]]
    layout = layout_of(segments, num_tokens=length, pool_size=pool_size)
    selection = Call(
        *numbers("normal", length, layout.num_pools, 1, 8, 8, 0), segments, layout, torch.arange(length), budget=20
    ).select()
    counts = (selection >= 0).sum(-1)[0].tolist()
    assert counts == [max(0, row + 1 - 2) // pool_size for row in range(length)]


def test_no_position_means_every_token() -> None:
    call = Call(*numbers("normal", 90, 22, 2, 8, 8, 0), [], PoolLayout.dense(90, pool_size=4, batch=2),
                torch.arange(90), 3)  # fmt: skip
    assert torch.equal(replace(call, position_S=None).select(), call.select())


@pytest.mark.parametrize(("rows", "tokens"), [(0, 0), (0, 50), (5, 0), (5, 3)])
def test_no_rows_and_no_pools(rows: int, tokens: int) -> None:
    layout = PoolLayout.dense(tokens, pool_size=4, batch=2)
    q, weights, key = numbers("normal", rows, layout.num_pools, 2, 8, 8, 0)
    selection = select_pools(q, weights, key, layout, torch.arange(rows), budget=2)
    assert torch.equal(selection, torch.full((2, rows, 2), -1, dtype=torch.int32))


@settings(max_examples=50)
@given(calls())
def test_counters_count_what_was_done(call: Call) -> None:
    counters = SelectionCounters()
    call.select(counters=counters)
    seen = [
        high - low
        for sample in call.segments
        for low, high in (reference_visible(sample, row, call.layout.pool_size) for row in call.position_S.tolist())
    ]
    scored = [count for count in seen if count > call.budget]
    assert (counters.calls, counters.rows) == (1, len(seen))
    assert (counters.scored_rows, counters.scored_pairs) == (len(scored), sum(scored))
    tile = tile_for(CPU, call.q_SBHD.shape[2])
    assert counters.tile_pairs % tile.pools == 0
    assert counters.scored_pairs <= counters.tile_pairs <= len(scored) * tile.rows * tile.pools
    call.select(counters=counters)
    assert (counters.calls, counters.rows, counters.scored_rows) == (2, 2 * len(seen), 2 * len(scored))


def test_what_no_row_sees_is_not_scored() -> None:
    """A tile's worth beyond the causal half and beyond a row's own document, and nothing of rows that take all."""
    heads, length = 8, 8192
    tile, counters = tile_for(CPU, heads), SelectionCounters()
    q, weights, key = numbers("plateau", length, length, 1, heads, 2, 0)
    select_pools(q, weights, key, PoolLayout.dense(length, pool_size=1), budget=1, counters=counters)
    beyond_diagonal = length * (tile.pools + tile.rows)
    assert counters.scored_pairs == length * (length + 1) // 2 - 1
    assert counters.tile_pairs <= counters.scored_pairs + beyond_diagonal

    packed, documents = SelectionCounters(), 8
    cuts = torch.arange(0, length + 1, length // documents)
    select_pools(q, weights, key, PoolLayout.from_cu_seqlens(cuts, pool_size=1), budget=1, counters=packed)
    assert packed.tile_pairs <= packed.scored_pairs + beyond_diagonal
    assert packed.scored_pairs == documents * (1024 * 1025 // 2 - 1)

    taken = SelectionCounters()
    select_pools(q[:500], weights[:500], key, PoolLayout.dense(length, pool_size=1), torch.arange(500),
                 budget=500, counters=taken)  # fmt: skip
    assert (taken.scored_rows, taken.scored_pairs, taken.tile_pairs) == (0, 0, 0)


@pytest.mark.parametrize(("heads", "dim", "budget"), [(1, 1, 1), (8, 16, 8), (32, 128, 512), (64, 128, 2048)])
def test_a_budget_too_small_is_refused_with_the_least_that_works(heads: int, dim: int, budget: int) -> None:
    pools = budget + 300
    layout = PoolLayout.dense(pools, pool_size=1)
    q, weights, key = numbers("normal", 2, pools, 1, heads, dim, 0)
    position = torch.tensor([pools - 1, pools - 2])
    least = smallest_score_bytes(CPU, heads, dim, budget)
    with pytest.raises(ValueError, match=rf"score_bytes is {least - 1}; accepted .* {least} or more"):
        select_pools(q, weights, key, layout, position, budget=budget, score_bytes=least - 1)
    selection = select_pools(q, weights, key, layout, position, budget=budget, score_bytes=least)
    assert torch.equal(selection, select_pools(q, weights, key, layout, position, budget=budget))


def arguments() -> dict[str, Any]:
    q, weights, key = numbers("normal", 20, 5, 2, 8, 4, 0)
    return {
        "q_SBHD": q,
        "weights_SBH": weights,
        "pool_key_PBD": key,
        "layout": PoolLayout.dense(20, pool_size=4, batch=2),
        "position_S": torch.arange(20),
        "budget": 2,
    }


BAD: list[tuple[str, Any, type[Exception]]] = [
    ("q_SBHD", [1.0], TypeError),
    ("q_SBHD", None, TypeError),
    ("q_SBHD", torch.zeros(20, 2, 8, 4, dtype=torch.int32), TypeError),
    ("q_SBHD", torch.zeros(20, 2, 8, 4, dtype=torch.bool), TypeError),
    ("q_SBHD", torch.zeros(20, 2, 8, 4, dtype=torch.complex64), TypeError),
    ("q_SBHD", torch.zeros(20, 2, 8, 4).to(torch.float8_e4m3fn), TypeError),
    ("use_relu", "no", TypeError),
    ("counters", 3, TypeError),
    ("q_SBHD", torch.zeros(20, 2, 8), ValueError),
    ("q_SBHD", torch.zeros(20, 1, 8, 4), ValueError),
    ("q_SBHD", torch.zeros(20, 2, 0, 4), ValueError),
    ("q_SBHD", torch.zeros(20, 2, 8, 0), ValueError),
    ("q_SBHD", torch.zeros(20, 2, 8, 4, device="meta"), ValueError),
    ("weights_SBH", None, TypeError),
    ("weights_SBH", torch.zeros(20, 2, 8, dtype=torch.int64), TypeError),
    ("weights_SBH", torch.zeros(20, 2), ValueError),
    ("weights_SBH", torch.zeros(20, 2, 7), ValueError),
    ("weights_SBH", torch.zeros(21, 2, 8), ValueError),
    ("weights_SBH", torch.zeros(20, 2, 8, device="meta"), ValueError),
    ("pool_key_PBD", None, TypeError),
    ("pool_key_PBD", torch.zeros(5, 2, 4, dtype=torch.int8), TypeError),
    ("pool_key_PBD", torch.zeros(4, 2, 4), ValueError),
    ("pool_key_PBD", torch.zeros(6, 2, 4), ValueError),
    ("pool_key_PBD", torch.zeros(5, 1, 4), ValueError),
    ("pool_key_PBD", torch.zeros(5, 2, 5), ValueError),
    ("pool_key_PBD", torch.zeros(5, 8), ValueError),
    ("pool_key_PBD", torch.zeros(5, 2, 4, device="meta"), ValueError),
    ("position_S", list(range(20)), TypeError),
    ("position_S", torch.arange(20.0), TypeError),
    ("position_S", torch.zeros(20, dtype=torch.bool), TypeError),
    ("position_S", torch.zeros(20, dtype=torch.int16), TypeError),
    ("position_S", torch.zeros(1, 20, dtype=torch.int64), ValueError),
    ("position_S", torch.arange(19), ValueError),
    ("position_S", torch.arange(20, device="meta"), ValueError),
    ("budget", 0, ValueError),
    ("budget", -1, ValueError),
    ("budget", 2.0, (TypeError, ValueError)),
    ("budget", True, (TypeError, ValueError)),
    ("budget", None, (TypeError, ValueError)),
    ("score_bytes", 0, ValueError),
    ("score_bytes", -1, ValueError),
    ("score_bytes", 1e9, TypeError),
    ("score_bytes", True, TypeError),
    ("score_bytes", "1GiB", TypeError),
]


@pytest.mark.parametrize(("name", "value", "error"), BAD)
def test_bad_input_is_refused_by_name(name: str, value: Any, error: type[Exception]) -> None:
    select_pools(**arguments())
    with pytest.raises(error, match=rf"(?s)\b{name}\b.*accepted"):
        select_pools(**{**arguments(), name: value})


@pytest.mark.parametrize("bad", [0, -3, True, 2.0, None])
@pytest.mark.parametrize("name", ["heads", "dim", "budget"])
def test_smallest_score_bytes_refuses_bad_numbers(name: str, bad: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b.*accepted"):
        smallest_score_bytes(CPU, **{"heads": 8, "dim": 8, "budget": 8, name: bad})
