"""What an `IndexerState` refuses and leaves as it was, how far it rewinds, what it counts, and its low tiles."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mcore_dsa.backends import SelectionCounters
from mcore_dsa.backends.torch import scoring
from mcore_dsa.backends.torch.scoring import TileScorer, tile_for, tile_for_rows
from mcore_dsa.state import IndexerState

CPU = torch.device("cpu")
BATCH, CAPACITY, POOL, DIM, HEADS = 2, 30, 4, 6, 8


def state_of(length: int = 20, **options: Any) -> IndexerState:
    chosen = {"batch": BATCH, "capacity": CAPACITY, "dtype": torch.float32, "rewind_window": 3} | options
    state = IndexerState(torch.zeros(POOL, DIM), **chosen)
    state.append(*tokens(length))
    return state


def tokens(count: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    return torch.randn(count, batch, DIM), torch.randn(count, batch, DIM)


def rows(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, BATCH, HEADS, DIM), torch.randn(count, BATCH, HEADS)


@given(st.integers(0, CAPACITY), st.integers(0, 2 * CAPACITY), st.integers(0, 2 * CAPACITY))
def test_capacity_is_never_exceeded(length: int, first: int, second: int) -> None:
    """Of either sequence; an append that is refused leaves both, and an append of what fits goes through."""
    state = state_of(length)
    valid_BS = torch.arange(max(first, second)) < torch.tensor([[first], [second]])
    fits = length + max(first, second) <= CAPACITY
    if fits:
        state.append(*tokens(valid_BS.shape[1]), valid_BS)
    else:
        over = int(length + first <= CAPACITY)
        with pytest.raises(ValueError, match=rf"sequence {over}, .*holds {length}; accepted are at most {CAPACITY} "):
            state.append(*tokens(valid_BS.shape[1]), valid_BS)
    assert state.length_B.tolist() == ([length + first, length + second] if fits else [length] * 2)
    state.append(*tokens(CAPACITY - int(state.length_B.max())))


@given(st.integers(0, CAPACITY), st.integers(0, CAPACITY), st.integers(0, 8))
def test_how_far_a_rewind_goes(length: int, target: int, window: int) -> None:
    """To the end of any pool; within one while all of its tokens are among the last window + pool - 1."""
    state = state_of(length, rewind_window=window)
    length_B = torch.tensor([target, length])
    pool_begin = target - target % POOL
    if target > length:
        with pytest.raises(ValueError, match=r"length_B is .*; accepted are lengths from 0 to "):
            state.rewind(length_B)
    elif target != pool_begin and length - pool_begin > window + POOL - 1:
        assert length - target > window
        with pytest.raises(ValueError, match=rf"length_B is {target} for sequence 0, .*rewind_window, {window} tokens"):
            state.rewind(length_B)
    else:
        state.rewind(length_B)
        assert state.length_B.tolist() == [target, length]
        return
    assert state.length_B.tolist() == [length, length]


def test_a_rewind_is_not_forgotten_by_growing_again() -> None:
    """The places of tokens before the window were taken by tokens that a rewind cut off."""
    state = state_of(20)
    state.rewind(torch.full((BATCH,), 17))
    with pytest.raises(ValueError, match="length_B is 13 for sequence 0"):
        state.rewind(torch.full((BATCH,), 13))
    state.rewind(torch.full((BATCH,), 12))
    state.append(*tokens(2))
    state.rewind(torch.full((BATCH,), 13))
    state.reset()
    assert state.length_B.tolist() == [0, 0]


@given(
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(1, 5),
    st.integers(1, 9),
    st.integers(0, 9),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_bytes_are_those_that_are_held(
    batch: int, capacity: int, pool_size: int, dim: int, window: int, dtype: torch.dtype
) -> None:
    """By formula, by what hangs on the object, and at any length."""
    ape = torch.zeros(pool_size, dim)
    state = IndexerState(ape, batch=batch, capacity=capacity, dtype=dtype, rewind_window=window)
    pools, kept = -(-capacity // pool_size), max(1, window + pool_size - 1)
    a_sequence = (pools + 2 * kept) * dim * dtype.itemsize + 8 * pools + 3 * 8 + 2 * 8
    assert state.nbytes == batch * a_sequence
    held = [*vars(state).values(), *vars(state._layout).values()]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held if isinstance(x, Tensor)}
    assert sum(storages.values()) - ape.nbytes == state.nbytes
    state.append(*(torch.randn(capacity, batch, dim).to(dtype) for _ in range(2)))
    assert state.nbytes == batch * a_sequence
    assert state.take(torch.zeros(3, dtype=torch.int64)).nbytes == 3 * a_sequence


def test_lengths_are_handed_out_as_a_copy() -> None:
    state = state_of(20)
    state.length_B.fill_(0)
    assert state.length_B.tolist() == [20, 20]


MASK = torch.ones(BATCH, 2, dtype=torch.bool)
REFUSED: list[tuple[str, Callable[[IndexerState], object], type[Exception]]] = [
    ("batch", lambda s: state_of(batch=0), ValueError),
    ("capacity", lambda s: state_of(capacity=0), ValueError),
    ("rewind_window", lambda s: state_of(rewind_window=-1), ValueError),
    ("dtype", lambda s: state_of(dtype=torch.int32), TypeError),
    ("dtype", lambda s: state_of(dtype=torch.float8_e4m3fn), TypeError),
    ("dtype", lambda s: state_of(dtype="float32"), TypeError),
    ("ape_JD", lambda s: IndexerState(torch.zeros(4), batch=1, capacity=1, dtype=torch.float32), ValueError),
    ("ape_JD", lambda s: IndexerState(torch.zeros(0, 4), batch=1, capacity=1, dtype=torch.float32), ValueError),
    ("key_SBD", lambda s: s.append(torch.zeros(2, 3, DIM), tokens(2)[1]), ValueError),
    ("key_SBD", lambda s: s.append(torch.zeros(2, BATCH, DIM + 1), tokens(2)[1]), ValueError),
    ("key_SBD", lambda s: s.append(tokens(2)[0].double(), tokens(2)[1]), TypeError),
    ("key_SBD", lambda s: s.append(*(x.to("meta") for x in tokens(2))), ValueError),
    ("gate_SBD", lambda s: s.append(tokens(2)[0], tokens(3)[1]), ValueError),
    ("gate_SBD", lambda s: s.append(tokens(2)[0], tokens(2)[1].bfloat16()), TypeError),
    ("valid_BS", lambda s: s.append(*tokens(2), MASK.int()), TypeError),
    ("valid_BS", lambda s: s.append(*tokens(2), MASK[:, :1]), ValueError),
    ("q_SBHD", lambda s: s.select(rows(2)[0][:, :1], rows(2)[1], budget=2), ValueError),
    ("q_SBHD", lambda s: s.select(rows(2)[0][:, :, :0], rows(2)[1][..., :0], budget=2), ValueError),
    ("q_SBHD", lambda s: s.select(*rows(21), budget=2), ValueError),
    ("q_SBHD", lambda s: s.select(*rows(21), torch.ones(BATCH, 21, dtype=torch.bool), budget=2), ValueError),
    ("weights_SBH", lambda s: s.select(rows(2)[0], rows(1)[1], budget=2), ValueError),
    ("valid_BS", lambda s: s.select(*rows(2), MASK.int(), budget=2), TypeError),
    ("budget", lambda s: s.select(*rows(2), budget=0), ValueError),
    ("score_bytes", lambda s: s.select(*rows(2), budget=2, score_bytes=1.5), TypeError),
    ("use_relu", lambda s: s.select(*rows(2), budget=2, use_relu=1), TypeError),
    ("counters", lambda s: s.select(*rows(2), budget=2, counters=1), TypeError),
    ("length_B", lambda s: s.rewind(3), TypeError),
    ("length_B", lambda s: s.rewind(torch.tensor([3.0, 3.0])), TypeError),
    ("length_B", lambda s: s.rewind(torch.tensor([4])), ValueError),
    ("length_B", lambda s: s.rewind(torch.tensor([4, -4])), ValueError),
    ("sample_B", lambda s: s.take([0]), TypeError),
    ("sample_B", lambda s: s.take(torch.tensor([0, BATCH])), ValueError),
    ("sample_B", lambda s: s.take(torch.tensor([-1])), ValueError),
    ("sample_B", lambda s: s.take(torch.tensor([], dtype=torch.int64)), ValueError),
]


@pytest.mark.parametrize(("name", "call", "error"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    name: str, call: Callable[[IndexerState], object], error: type[Exception]
) -> None:
    state = state_of()
    with pytest.raises(error, match=rf"(?s)\b{name}\b.*accepted"):
        call(state)
    assert state.length_B.tolist() == [20, 20]


def test_a_decoded_row_takes_a_low_tile_and_scores_what_it_sees() -> None:
    counters, state = SelectionCounters(), state_of()
    state.select(*rows(1), budget=2, counters=counters)
    tile = tile_for_rows(CPU, HEADS, DIM, 1)
    assert tile.rows < tile_for(CPU, HEADS).rows
    assert (counters.calls, counters.rows, counters.scored_rows) == (1, BATCH, BATCH)
    assert counters.scored_pairs == BATCH * (20 // POOL)
    assert counters.tile_pairs == BATCH * tile.rows * tile.pools


@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (3, 5), (7, 33), (8, 16), (12, 24), (32, 128), (64, 128)])
def test_a_low_tile_gives_the_bits_of_the_whole(heads: int, dim: int) -> None:
    """Of numbers that no probe has seen, whatever stands in the other places."""
    generator = torch.Generator().manual_seed(heads)
    whole = tile_for(CPU, heads)
    scorer = TileScorer(whole, heads, dim, CPU, use_relu=True)
    for count in (1, 2, 3, 5, 8, 9):
        tile = tile_for_rows(CPU, heads, dim, count)
        assert count <= tile.strip_rows
        lower = TileScorer(tile, heads, dim, CPU, use_relu=True)
        for _ in range(20):
            q, weights = (
                torch.randn(count, heads, dim, generator=generator),
                torch.randn(count, heads, generator=generator),
            )
            key = torch.randn(whole.pools, dim, generator=generator)
            for one in (scorer, lower):
                one.load_rows(q, weights)
                one.load_keys(key)
            assert torch.equal(lower.score(0)[:count], scorer.score(0)[:count])


def test_a_low_tile_that_rounds_otherwise_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one place of its own; tiles twice as high, and then the whole, stand in."""
    original = TileScorer.score
    wrong = {1, 2}

    def otherwise(self: TileScorer, *args: int) -> Tensor:
        scores = original(self, *args)
        if self.tile.rows in wrong:
            scores[-1, 77] = torch.nextafter(scores[-1, 77], torch.tensor(torch.inf))
        return scores

    monkeypatch.setattr(TileScorer, "score", otherwise)
    scoring._rounds_as_whole.cache_clear()
    assert tile_for_rows(CPU, HEADS, 16, 1).rows == 4
    wrong |= {4, 8}
    scoring._rounds_as_whole.cache_clear()
    assert tile_for_rows(CPU, HEADS, 16, 1) == tile_for(CPU, HEADS)
    monkeypatch.undo()
    scoring._rounds_as_whole.cache_clear()


def test_bounds_on_the_host_are_those_of_the_device() -> None:
    state = state_of(19)
    bounds = state._bounds(torch.ones(BATCH, 7, dtype=torch.bool))
    located = state._layout.bounds(bounds.position_S)
    for name in ("first_BS", "visible_BS", "tail_BS"):
        assert torch.equal(getattr(bounds, name), getattr(located, name))
    assert torch.equal(
        torch.stack([*bounds.on_host, bounds.tail_on_host]), torch.stack([*located.on_host, located.tail_on_host])
    )
