"""The tables of docs/gpu.md are those that the model prints, and the model counts what the design says."""

from pathlib import Path

import pytest

from benchmarks import gpu_model

ROOT = Path(__file__).parents[1]


def test_the_page_holds_the_tables_of_the_model() -> None:
    assert {line for line in gpu_model.lines() if line} <= set((ROOT / "docs" / "gpu.md").read_text().splitlines())


def test_an_even_rank_of_eight_at_524288_tokens() -> None:
    """3.5e13 FLOP of products and 17 GB of scores a layer: two figures derived by hand."""
    seconds = gpu_model.selection_seconds(524_288, 8)
    assert seconds.products * gpu_model.PRODUCTS == pytest.approx(3.52e13, rel=0.01)
    assert seconds.writing * gpu_model.MEMORY == pytest.approx(1.77e10, rel=0.01)


@pytest.mark.parametrize("backward", [False, True])
def test_attention_at_524288_tokens(backward: bool) -> None:
    """A row's 2,051 latents of 1 KiB, for 64 heads or for 8 in a tile of 16; by hand."""
    rows, latents, query = 65_536, 2051 * 1024, 1024
    by_heads, by_rows = (
        gpu_model.attention_seconds(524_288, 8, by_rows=cut, backward=backward) for cut in (False, True)
    )
    products = (10 if backward else 3) * 2 * 64 * 2051 * 512
    assert by_rows.products * gpu_model.PRODUCTS == pytest.approx(rows * products)
    assert by_heads.products == pytest.approx(2 * by_rows.products)
    if backward:
        memory, cache = 6 * latents + 7 * 64 * query, 9 * latents + (5 + 2 * 129) * 64 * query
    else:
        memory, cache = latents + 2 * 64 * query, 4 * latents + 2 * 64 * query
    assert by_rows.memory * gpu_model.MEMORY == pytest.approx(rows * memory)
    assert by_rows.cache * gpu_model.CACHE == pytest.approx(rows * cache)
    assert by_heads.memory == pytest.approx(8 * by_rows.memory, rel=0.07)
    assert by_heads.exchange == 0.0 < by_rows.exchange
