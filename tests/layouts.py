"""Random segmentations for property tests, as plain data and as the layout built from them."""

import torch
from hypothesis import strategies as st

from mcore_dsa.kpool import PoolLayout


@st.composite
def segmentations(draw, *, max_tokens: int = 40, max_batch: int = 3, max_segments: int = 4):
    """`(segments, num_tokens)`: for every sample ascending, disjoint, possibly empty `(start, end)` ranges."""
    num_tokens = draw(st.integers(0, max_tokens))
    count = draw(st.integers(1, max_segments))
    boundary = st.integers(0, num_tokens)
    segments = []
    for _ in range(draw(st.integers(1, max_batch))):
        bounds = sorted(draw(st.lists(boundary, min_size=2 * count, max_size=2 * count)))
        segments.append(list(zip(bounds[::2], bounds[1::2], strict=True)))
    return segments, num_tokens


def layout_of(segments, num_tokens: int, pool_size: int, *, first_pool_id: int = 0) -> PoolLayout:
    bounds = torch.tensor(segments)
    return PoolLayout.from_segments(
        bounds[..., 0], bounds[..., 1], num_tokens=num_tokens, pool_size=pool_size, first_pool_id=first_pool_id
    )


def random_selection(layout: PoolLayout, position_S: torch.Tensor, budget: int) -> torch.Tensor:
    """Any selection a selector could make: of every row's visible pools at most `budget`, some slots left free."""
    first_BS, count_BS = layout.visible(position_S)
    selection_BSK = torch.full((*count_BS.shape, budget), -1, dtype=torch.int32)
    for b, s in ((b, s) for b in range(count_BS.shape[0]) for s in range(count_BS.shape[1])):
        count = int(count_BS[b, s])
        taken = torch.randperm(count)[: int(torch.randint(0, budget + 1, ()))].sort().values + first_BS[b, s]
        selection_BSK[b, s, : len(taken)] = taken.int()
    return selection_BSK
