"""Calls of the selection for property tests, and poison for buffers that nobody wrote."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from mcore_dsa.functions import select_pools
from mcore_dsa.kpool import PoolLayout
from mcore_dsa.reference import reference_scores, reference_select

Segments = list[list[tuple[int, int]]]

# Kinds of data whose every fp32 sum is exact (small integers), so that float64 gives the same scores, ties included.
EXACT = ("plateau", "zeros", "equal", "special")
# Of the others, "near" holds scores that differ in their last bits alone: what moves one of them moves a selection.
ROUNDED = ("normal", "duplicates", "near")

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint32)
GREATEST = {dtype: torch.iinfo(dtype).max for dtype in INTEGERS}


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Call:
    """Arguments of `select_pools`, with the segments as the oracle takes them."""

    q_SBHD: Tensor
    weights_SBH: Tensor
    pool_key_PBD: Tensor
    segments: Segments
    layout: PoolLayout
    position_S: Tensor
    budget: int
    use_relu: bool = True

    def select(self, **options: Any) -> Tensor:
        return select_pools(
            self.q_SBHD,
            self.weights_SBH,
            self.pool_key_PBD,
            self.layout,
            self.position_S,
            budget=self.budget,
            use_relu=self.use_relu,
            **options,
        )

    def rows(self, row: Tensor) -> "Call":
        """The call of some of the rows, in any order."""
        return replace(
            self, q_SBHD=self.q_SBHD[row], weights_SBH=self.weights_SBH[row], position_S=self.position_S[row]
        )

    def scores64(self) -> Tensor:
        """float64 `[b, s, p]`."""
        if self.use_relu:
            return reference_scores(self.q_SBHD, self.weights_SBH, self.pool_key_PBD, dtype=torch.float64)
        q, weights, key = (x.double() for x in (self.q_SBHD, self.weights_SBH, self.pool_key_PBD))
        return torch.einsum("sbhd,pbd,sbh->bsp", q, key, weights)

    def oracle(self) -> Tensor:
        """The selection by float64 scores."""
        return reference_select(
            self.scores64(), self.segments, self.position_S, pool_size=self.layout.pool_size, budget=self.budget
        )


def layout_of(segments: Segments, *, num_tokens: int, pool_size: int, first_pool_id: int = 0) -> PoolLayout:
    """Samples with fewer segments than the longest get empty ones behind their last."""
    most = max(1, *(len(sample) for sample in segments))
    filled = [sample + [(sample[-1][1] if sample else 0,) * 2] * (most - len(sample)) for sample in segments]
    bounds = torch.tensor(filled)
    return PoolLayout.from_segments(
        bounds[..., 0], bounds[..., 1], num_tokens=num_tokens, pool_size=pool_size, first_pool_id=first_pool_id
    )


def numbers(kind: str, rows: int, pools: int, batch: int, heads: int, dim: int, seed: int) -> tuple[Tensor, ...]:
    """fp32 queries, head weights and pool keys of a kind."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows, batch, heads, dim), (rows, batch, heads), (pools, batch, dim))
    if kind in ROUNDED:
        q, weights, key = (torch.randn(shape, generator=generator) for shape in shapes)
        if kind == "duplicates" and pools:
            key = key[torch.randint(0, 1 + pools // 4, (pools,), generator=generator)]
        if kind == "near":
            key = key[:1] * (1 + torch.randint(0, 6, (pools, 1, 1), generator=generator) * 2.0**-22)
        return q, weights, key
    q, weights, key = (torch.randint(-2, 3, shape, generator=generator).float() for shape in shapes)
    if kind == "zeros":
        q, key = -q.abs(), key.abs()
    elif kind == "equal":
        key = key[:1].expand_as(key).clone()
    elif kind == "special":
        special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.0])
        for x in (q, weights, key):
            hit = torch.rand(x.shape, generator=generator) < 0.3 / dim
            value = special[torch.randint(0, len(special), x.shape, generator=generator)]
            x.copy_(torch.where(hit, value, x))
    return q, weights, key


@st.composite
def sample_segments(draw: st.DrawFn, num_tokens: int) -> list[tuple[int, int]]:
    """Ascending documents with padding before, between and after some of them."""
    cuts = sorted(draw(st.lists(st.integers(0, num_tokens), max_size=7)))
    if draw(st.booleans()):
        cuts = [0, *cuts, num_tokens]
    pieces = list(pairwise(cuts))
    keep = draw(st.lists(st.sampled_from([True, True, True, False]), min_size=len(pieces), max_size=len(pieces)))
    return [piece for piece, kept in zip(pieces, keep, strict=True) if kept]


@st.composite
def calls(draw: st.DrawFn, kinds: tuple[str, ...] = EXACT + ROUNDED, *, long: bool = False, max_batch: int = 3) -> Call:
    """Calls with any segments; `long` ones hold one document a sample, of more pools than a tile and few rows."""
    batch = draw(st.integers(1, max_batch))
    pool_size = 1 if long else draw(st.integers(1, 5))
    num_tokens = draw(st.integers(129, 900) if long else st.integers(0, 70))
    if long:
        segments = [[(draw(st.integers(0, 3)), num_tokens - draw(st.integers(0, 3)))] for _ in range(batch)]
        places = st.lists(st.integers(num_tokens // 2, num_tokens), min_size=1, max_size=8)
    else:
        segments = [draw(sample_segments(num_tokens)) for _ in range(batch)]
        places = st.one_of(
            st.just(list(range(num_tokens))), st.lists(st.integers(-2, num_tokens + 2), min_size=0, max_size=20)
        )
    position = torch.tensor(draw(places), dtype=draw(st.sampled_from([torch.int32, torch.int64])))
    heads, dim = draw(st.sampled_from([1, 2, 3, 4, 8, 16])), draw(st.sampled_from([1, 2, 3, 8, 16, 33]))
    layout = layout_of(segments, num_tokens=num_tokens, pool_size=pool_size)
    seed = draw(st.integers(0, 1 << 20))
    q, weights, key = numbers(draw(st.sampled_from(kinds)), len(position), layout.num_pools, batch, heads, dim, seed)
    dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float64]))
    budget = draw(st.integers(1, 300) if long else st.integers(1, 12))
    use_relu = draw(st.sampled_from([True, True, False]))
    return Call(q.to(dtype), weights, key.to(dtype), segments, layout, position, budget, use_relu)


@contextmanager
def poisoned(value: float = 3e38) -> Iterator[None]:
    """Fresh buffers come full of `value` (integers of their greatest), which wins every comparison it gets into."""

    def filled(make: Any) -> Any:
        def poison(*args: Any, **kwargs: Any) -> Tensor:
            fresh = make(*args, **kwargs)
            if kwargs.get("out") is None and fresh.device.type != "meta":
                fresh.fill_(value if fresh.is_floating_point() else GREATEST.get(fresh.dtype, 1))
            return fresh

        return poison

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, filled(getattr(owner, name)))
        yield
