"""The exact top-k alone, under Triton's interpreter: any orders, lengths and budgets, in one block or many."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scores import Ranking, select

from mcore_dsa.kernels.tiles import POOLS

# Distinct orders a row may have: ties everywhere, some at the cut, hardly any.
LEVELS = st.sampled_from([1, 2, 5, 300, 2**32 - 1])


def ranking(pools: int, first: int, levels: int, seed: int) -> Ranking:
    """Orders from 1, NaN's, to the greatest; 0 is what is not seen."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randint(1, levels + 1, (pools,), generator=generator)
    return Ranking(first, order if levels > 300 else (order * 0x01020408) % (2**32 - 1) + 1)


@st.composite
def rankings(draw: st.DrawFn) -> list[Ranking]:
    rows = draw(st.integers(1, 3))
    sizes = st.integers(1, 700)
    return [
        ranking(draw(sizes), draw(st.integers(0, 200)), draw(LEVELS), draw(st.integers(0, 1 << 20)))
        for _ in range(rows)
    ]


@settings(max_examples=15)
@given(rankings(), st.one_of(st.integers(1, 40), st.integers(1, 800)), st.integers(0, 5), st.integers(0, 1000))
def test_equals_a_stable_sort(rows: list[Ranking], budget: int, more: int, first_pool_id: int) -> None:
    """In one block and in blocks of any length that a budget allows."""
    expected = torch.stack([row.best(budget, first_pool_id) for row in rows])
    for tiles in (None, -(-budget // POOLS) + 1 + more):
        assert torch.equal(select(rows, budget, tiles=tiles, first_pool_id=first_pool_id), expected)


@pytest.mark.parametrize(
    ("pools", "budget", "tiles", "levels"),
    [(262_144, 512, None, 2**32 - 1), (262_144, 512, 1500, 2000), (50_001, 3000, 110, 2**32 - 1)],
)
def test_long_rows(pools: int, budget: int, tiles: int | None, levels: int) -> None:
    row = ranking(pools, 37, levels, pools)
    assert torch.equal(select([row], budget, tiles=tiles)[0], row.best(budget, 0))


def test_rows_as_data_come() -> None:
    """A slope, whose survivors are many, up and down; one group that holds all of the best; the cut in one group."""
    slope = torch.arange(1, 3001)
    clustered = torch.ones(3000, dtype=torch.int64)
    clustered[960:1024] = 2**31 + torch.arange(64)
    for order in (slope, slope.flip(0), clustered, clustered.flip(0)):
        rows = [Ranking(5, order)]
        for budget in (1, 31, 32, 33, 64, 500):
            assert torch.equal(select(rows, budget)[0], rows[0].best(budget, 0))


def test_rows_that_take_all_they_see() -> None:
    rows = [Ranking(3, torch.full((pools,), 9)) for pools in (1, 63, 64, 65, 2000)]
    for budget in (65, 2000, 5000):
        expected = torch.stack([row.best(budget, 11) for row in rows])
        assert torch.equal(select(rows, budget, first_pool_id=11), expected)
