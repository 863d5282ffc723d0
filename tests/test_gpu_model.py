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
    forward, backward = (gpu_model.attention_seconds(524_288, 8, backward=backward) for backward in (False, True))
    assert forward.by_heads * gpu_model.MEMORY == pytest.approx(1.10e12, rel=0.01)
    assert forward.by_rows == forward.by_heads / 8
    assert forward.products * gpu_model.PRODUCTS == pytest.approx(2.64e13, rel=0.01)
    assert backward.by_rows * gpu_model.MEMORY == pytest.approx(8.26e11, rel=0.01)
