"""Scores by tiles: where a query or a key stands moves no bit of a score, which is measured before one is used."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from draw import EXACT, Call, calls
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_dsa import precision
from mcore_dsa.backends.torch import scoring, select
from mcore_dsa.backends.torch.scoring import TileScorer, operands_of, tile_fingerprint, tile_for
from mcore_dsa.functions import select_pools
from mcore_dsa.kpool import PoolLayout
from mcore_dsa.reference import reference_scores, reference_topk

CPU = torch.device("cpu")
SHAPES = [(1, 1), (1, 64), (3, 5), (7, 33), (8, 16), (12, 24), (32, 128), (64, 128), (600, 2)]


def forget_probes() -> None:
    for value in vars(scoring).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


@pytest.fixture
def _fresh() -> Iterator[None]:
    forget_probes()
    yield
    forget_probes()


def tile_scores(q_RHD: Tensor, weights_RH: Tensor, key_CD: Tensor, *, use_relu: bool = True) -> Tensor:
    """fp32 `[r, c]` of up to a strip of rows and a tile of keys, as the selection sees them."""
    heads, dim = q_RHD.shape[1:]
    tile = tile_for(CPU, heads)
    scorer = TileScorer(tile, heads, dim, CPU, use_relu=use_relu)
    scorer.load_rows(q_RHD, weights_RH)
    scorer.load_keys(key_CD)
    tiles = range(-(-q_RHD.shape[0] // tile.rows))
    return torch.cat([scorer.score(index).clone() for index in tiles])[: q_RHD.shape[0], : key_CD.shape[0]]


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_a_score_is_the_same_in_every_place(heads: int, dim: int) -> None:
    """Random neighbours, each query and key alone, and all of them in another order."""
    tile = tile_for(CPU, heads)
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(tile.strip_rows, heads, dim, generator=generator)
    weights = torch.randn(tile.strip_rows, heads, generator=generator)
    key = torch.randn(tile.pools, dim, generator=generator)
    scores = tile_scores(q, weights, key)
    row, pool = torch.randperm(tile.strip_rows, generator=generator), torch.randperm(tile.pools, generator=generator)
    assert torch.equal(tile_scores(q[row], weights[row], key[pool]), scores[row][:, pool])
    for count in (1, 2, tile.pools - 1):
        some = row[:count]
        assert torch.equal(tile_scores(q[some], weights[some], key[pool[:count]]), scores[some][:, pool[:count]])


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 70), st.booleans(), st.integers(0, 1 << 20))
def test_scores_are_the_formula(heads: int, dim: int, use_relu: bool, seed: int) -> None:
    """Within fp32's roundings of `dim + heads` sums, against float64."""
    generator = torch.Generator().manual_seed(seed)
    q, weights, key = (torch.randn(shape, generator=generator) for shape in ((5, heads, dim), (5, heads), (9, dim)))
    scores = tile_scores(q, weights, key, use_relu=use_relu).double()
    dots = torch.einsum("rhd,cd->rhc", q.double(), key.double())
    expected = torch.einsum("rhc,rh->rc", dots.relu() if use_relu else dots, weights.double())
    terms = torch.einsum("rhd,cd,rh->rc", q.double().abs(), key.double().abs(), weights.double().abs())
    assert ((scores - expected).abs() <= terms * (dim + heads + 2) * 2.0**-24).all()
    if use_relu:
        oracle = reference_scores(q.unsqueeze(1), weights.unsqueeze(1), key.unsqueeze(1), dtype=torch.float64)[0]
        assert ((expected - oracle).abs() <= 2 * terms * (dim + heads + 2) * 2.0**-53).all()


@settings(max_examples=40)
@given(st.sampled_from([1, 2, 8, 32]), st.integers(1, 40), st.integers(1, 128), st.integers(0, 1 << 20))
def test_the_selection_orders_by_these_scores(heads: int, pools: int, budget: int, seed: int) -> None:
    """Near ties too, which float64 would order otherwise: the oracle's order over the engine's own scores."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((6, heads, 4), (6, heads), (pools, 4))
    q, weights, key = (torch.randn(shape, generator=generator) for shape in shapes)
    key = key[:1] * (1 + torch.randint(0, 6, (pools, 1), generator=generator) * 2.0**-22)
    expected = [reference_topk(row, 0, pools, budget) for row in tile_scores(q, weights, key)]
    selection = select_pools(
        q.unsqueeze(1),
        weights.unsqueeze(1),
        key.unsqueeze(1),
        PoolLayout.dense(pools, pool_size=1),
        torch.full((6,), pools - 1),
        budget=budget,
    )
    assert selection[0].tolist() == expected


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 31, 32, 64, 512, 513, 5000])
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_a_tile_fits_any_number_of_heads(heads: int, device: str) -> None:
    tile = tile_for(torch.device(device), heads)
    assert min(tile.rows, tile.pools, tile.strip_rows) >= 1
    assert tile.strip_rows % tile.rows == 0
    # Left-over rows of a kernel's block may be summed in another order: M with MKL_CBWR=COMPATIBLE, 146 rows x 7 heads.
    assert tile.rows < 8 or tile.rows % 8 == 0
    assert tile == tile_for(torch.device(device), heads)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_fingerprint_is_a_function_of_the_shape(heads: int, dim: int) -> None:
    found = set()
    state = torch.random.get_rng_state()
    for seed in range(2):
        torch.manual_seed(seed)
        forget_probes()
        found.add(tile_fingerprint(CPU, heads, dim))
    assert len(found) == 1
    torch.random.set_rng_state(state)
    tile_fingerprint(CPU, heads, dim)
    assert torch.equal(torch.random.get_rng_state(), state)


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("one_in", [1, 64, 512])
def test_fingerprint_tells_roundings_apart(one_in: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another last bit in few scores, wherever they stand, is another digest."""
    before = tile_fingerprint(CPU, 8, 16)
    assert before != tile_fingerprint(CPU, 8, 17)
    original = TileScorer.score

    def otherwise(self: TileScorer, *args: int) -> Tensor:
        bits = original(self, *args).view(torch.int32)
        return torch.where(bits % one_in == 0, bits ^ 1, bits).view(torch.float32)

    monkeypatch.setattr(TileScorer, "score", otherwise)
    forget_probes()
    assert tile_fingerprint(CPU, 8, 16) != before


PLACES = [(0, 0), (0, 1), (1, 0), (0, -1), (-1, 0), (-1, -1), (13, 77)]


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize("place", PLACES)
def test_a_place_that_matters_is_refused(place: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that rounds otherwise in a single place selects nothing: neither measured by name nor on the way."""
    original = TileScorer.score

    def by_place(self: TileScorer, *args: int) -> Tensor:
        scores = original(self, *args)
        scores[place] = torch.nextafter(scores[place], torch.tensor(torch.inf))
        return scores

    monkeypatch.setattr(TileScorer, "score", by_place)
    with pytest.raises(RuntimeError, match=r"place in it.*accepted is"):
        tile_fingerprint(CPU, 8, 16)
    q, weights, key = torch.randn(9, 1, 8, 16), torch.randn(9, 1, 8), torch.randn(9, 1, 16)
    layout = PoolLayout.dense(9, pool_size=1)
    with pytest.raises(RuntimeError, match="place in it"):
        select_pools(q, weights, key, layout, budget=2)
    assert select_pools(q, weights, key, layout, budget=9).shape == (1, 9, 9)


@pytest.mark.usefixtures("_fresh")
def test_every_tile_of_a_strip_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = tile_for(CPU, 8)
    if tile.strip_rows == tile.rows:
        pytest.skip("a strip of one tile")
    original = TileScorer.score

    def by_tile(self: TileScorer, index: int, *args: int) -> Tensor:
        scores = original(self, index, *args)
        return scores if index == 0 else torch.nextafter(scores, torch.tensor(torch.inf))

    monkeypatch.setattr(TileScorer, "score", by_tile)
    with pytest.raises(RuntimeError, match="place in it"):
        tile_fingerprint(CPU, 8, 16)


@pytest.mark.parametrize("bad", [0, -1, True, 8.0, None])
def test_bad_sizes_are_refused_by_name(bad: object) -> None:
    for refused in (
        lambda: tile_for(CPU, bad),  # type: ignore[arg-type]
        lambda: tile_fingerprint(CPU, bad, 8),  # type: ignore[arg-type]
    ):
        with pytest.raises((TypeError, ValueError), match=r"\bheads\b.*accepted"):
            refused()
    with pytest.raises((TypeError, ValueError), match=r"\bdim\b.*accepted"):
        tile_fingerprint(CPU, 8, bad)  # type: ignore[arg-type]


def test_the_workspace_counts_what_is_held() -> None:
    for heads, dim in SHAPES:
        tile = tile_for(CPU, heads)
        scorer = TileScorer(tile, heads, dim, CPU, use_relu=True)
        held = [x for value in vars(scorer).values() for x in (value if isinstance(value, list) else [value])]
        storages = {id(x.untyped_storage()): x.untyped_storage() for x in held if isinstance(x, Tensor)}
        owned = {storage.data_ptr(): storage.nbytes() for storage in storages.values()}
        assert owned
        counted = tile.workspace(heads, dim).buffers.values()
        assert sum(owned.values()) == sum(buffer.nbytes for buffer in counted if not buffer.inside)


def multiply_bf16(left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor) -> Tensor:
    """In the place of the product that torch has for CUDA alone."""
    assert (left.dtype, right.dtype, dtype, out.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    return torch.mm(left.float(), right.float(), out=out)


@pytest.fixture
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """bf16 queries and keys multiplied as they are."""
    forget_probes()
    cuda = torch.device("cuda")
    monkeypatch.setattr(scoring, "operands_of", lambda _, *dtypes: operands_of(cuda, *dtypes))
    monkeypatch.setattr(select, "operands_of", lambda _, *dtypes: operands_of(cuda, *dtypes))
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm.dtype_out", multiply_bf16, "CPU")
        yield
    forget_probes()


@pytest.mark.usefixtures("_as_on_cuda")
@settings(max_examples=20)
@given(calls(EXACT))
def test_bf16_products_select_what_the_oracle_does(call: Call) -> None:
    narrow = replace(call, q_SBHD=call.q_SBHD.bfloat16(), pool_key_PBD=call.pool_key_PBD.bfloat16())
    assert torch.equal(narrow.select(), call.oracle())


@pytest.mark.usefixtures("_as_on_cuda")
def test_bf16_products_leave_the_switches_of_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def pinned() -> None:
        raise AssertionError("the precision of the process is set")

    monkeypatch.setattr(precision, "_pin_products", pinned)
    q, weights, key = torch.randn(9, 1, 8, 16), torch.randn(9, 1, 8), torch.randn(9, 1, 16)
    layout = PoolLayout.dense(9, pool_size=1)
    select_pools(q.bfloat16(), weights, key.bfloat16(), layout, budget=2)
    with pytest.raises(AssertionError, match="precision of the process"):
        select_pools(q.bfloat16(), weights, key, layout, budget=2)
