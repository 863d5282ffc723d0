"""Orders for the top-k alone, and the selection that they come to; what several files of this folder compare with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_dsa.kernels import topk
from mcore_dsa.kernels.scoring import Block
from mcore_dsa.kernels.tiles import GROUP, POOLS

POISON = 2**32 - 1


@dataclass(frozen=True)
class Ranking:
    """Orders of every pool that one row sees, int64, in `tiles` tiles from the one with its first pool on."""

    first: int
    order_P: Tensor

    @property
    def columns(self) -> Tensor:
        """Every tile of the row, 0 where it sees nothing."""
        lead = self.first % POOLS
        padding = -(lead + len(self.order_P)) % POOLS
        return torch.nn.functional.pad(self.order_P, (lead, padding))

    def best(self, budget: int, first_pool_id: int) -> Tensor:
        """By a stable sort: the greatest, of equals the first, ascending, -1 behind."""
        place = self.order_P.argsort(descending=True, stable=True)[:budget].sort().values
        out = torch.full((budget,), -1, dtype=torch.int32)
        out[: len(place)] = (place + self.first + first_pool_id).int()
        return out


def select(
    rankings: list[Ranking], budget: int, *, tiles: int | None = None, first_pool_id: int = 0, device: str = "cpu"
) -> Tensor:
    """int32 `[rows, budget]` by the kernel alone, in blocks of `tiles` tiles; everything unwritten is poison."""
    columns = [ranking.columns for ranking in rankings]
    whole = max(len(column) for column in columns) // POOLS
    tiles = whole if tiles is None else tiles
    head = 0 if tiles >= whole else -(-budget // GROUP) * GROUP
    width, rows = head + tiles * POOLS, len(rankings)
    order_RM, peak_RM = (
        torch.full((rows, size), POISON).to(torch.uint32).to(device) for size in (width, width // GROUP)
    )
    first_BS = torch.tensor([[ranking.first for ranking in rankings]], dtype=torch.int32, device=device)
    visible_BS = torch.tensor([[len(ranking.order_P) for ranking in rankings]], dtype=torch.int32, device=device)
    selection_BSK = torch.full((1, rows, budget), 2**31 - 1, dtype=torch.int32, device=device)
    column_RM = torch.full((rows, width), 2**31 - 1, dtype=torch.int32, device=device)
    for begin in range(0, whole, tiles):
        for row, column in enumerate(columns):
            # Of rows that take all they see, and behind a row's last tile, the scores write nothing.
            part = column[begin * POOLS : (begin + tiles) * POOLS]
            if len(rankings[row].order_P) > budget and len(part):
                order_RM[row, head : head + len(part)] = part.to(torch.uint32).to(device)
                peaks = part.view(-1, GROUP).amax(1).to(torch.uint32).to(device)
                peak_RM[row, head // GROUP : head // GROUP + len(peaks)] = peaks
        topk.select(
            order_RM,
            peak_RM,
            column_RM,
            first_BS,
            visible_BS,
            selection_BSK,
            Block(0, 0, rows, begin, tiles, head),
            first_pool_id=first_pool_id,
            more=begin + tiles < whole,
        )
    return selection_BSK[0]
