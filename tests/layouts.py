"""Random batches of segments, and any selection that a selector could make of their pools."""

import torch
from draw import Segments, sample_segments
from hypothesis import strategies as st

from mcore_dsa.kpool import PoolLayout


@st.composite
def segmentations(draw: st.DrawFn, *, max_tokens: int = 40, max_batch: int = 3) -> tuple[Segments, int]:
    """The segments of every sample, and the number of tokens."""
    num_tokens = draw(st.integers(0, max_tokens))
    return [draw(sample_segments(num_tokens)) for _ in range(draw(st.integers(1, max_batch)))], num_tokens


def random_selection(layout: PoolLayout, position_S: torch.Tensor, budget: int) -> torch.Tensor:
    """Of every row's visible pools at most `budget`, the other slots left free."""
    bounds = layout.bounds(position_S)
    first_BS, count_BS = bounds.first_BS, bounds.visible_BS
    selection_BSK = torch.full((*count_BS.shape, budget), -1, dtype=torch.int32)
    for b, s in ((b, s) for b in range(count_BS.shape[0]) for s in range(count_BS.shape[1])):
        count = int(count_BS[b, s])
        taken = torch.randperm(count)[: int(torch.randint(0, budget + 1, ()))].sort().values + first_BS[b, s]
        selection_BSK[b, s, : len(taken)] = taken.int()
    return selection_BSK
