"""Selection in strips of rows under the byte budget: scores of a block of pools, then the best of it and of earlier.

Letters of shapes: `mcore_dsa/__init__.py`; a strip's buffers have one column M a pool.

The kernels read the bounds of every row on the device. What the host has of them, once a plan (`RowBounds.on_host`),
sizes launches and buffers and counts the work; no bit depends on it, and nothing waits for the device here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from mcore_dsa.backends.protocol import SelectionCounters
from mcore_dsa.backends.triton.scratch import Strip, strip_for
from mcore_dsa.checks import kind_of
from mcore_dsa.kernels import scoring, topk
from mcore_dsa.kernels.operands import on_16_bytes
from mcore_dsa.kernels.scoring import CHUNK, Block
from mcore_dsa.kernels.tiles import POOLS, rows_of_tile
from mcore_dsa.kpool import PoolLayout, RowBounds
from mcore_dsa.ranges import named

_NEVER = 2**62


def select_pools(
    q_SBHD: Tensor,
    weights_SBH: Tensor,
    pool_key_PBD: Tensor,
    layout: PoolLayout,
    bounds: RowBounds,
    *,
    budget: int,
    score_bytes: int,
    use_relu: bool,
    counters: SelectionCounters,
) -> Tensor:
    """`mcore_dsa.select_pools` for arguments that fit, of rows that are located, queries and keys in bf16."""
    for name, tensor in (("q_SBHD", q_SBHD), ("pool_key_PBD", pool_key_PBD)):
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{name} is {kind_of(tensor)}; accepted by the Triton kernels is torch.bfloat16")
    strip = strip_for(q_SBHD.shape[2], budget, score_bytes, pools=bounds.max_visible)
    strip = replace(strip, rows=max(1, min(strip.rows, bounds.rows)))
    selection_BSK = torch.empty(layout.batch, bounds.rows, budget, dtype=torch.int32, device=layout.device)
    counters.calls += 1
    counters.rows += layout.batch * bounds.rows
    call = _Call(
        on_16_bytes(q_SBHD),
        weights_SBH.float().contiguous(),
        on_16_bytes(pool_key_PBD),
        (
            (bounds.first_BS - layout.first_pool_id).to(torch.int32).contiguous(),
            bounds.visible_BS.to(torch.int32).contiguous(),
        ),
        selection_BSK,
        layout.first_pool_id,
        use_relu,
    )
    held = strip.workspace.allocate(layout.device)
    host_first_BS, host_visible_BS = bounds.on_host
    scored_BS = host_visible_BS > budget
    counters.scored_rows += int(scored_BS.sum())
    counters.scored_pairs += int(host_visible_BS[scored_BS].sum())
    for sample in range(layout.batch):
        first_S, visible_S = host_first_BS[sample] - layout.first_pool_id, host_visible_BS[sample]
        for at in range(0, bounds.rows, strip.rows):
            part = slice(at, at + strip.rows)
            call.take_strip(sample, at, strip, first_S[part], visible_S[part], held, counters)
    return selection_BSK


@dataclass(frozen=True, eq=False)
class _Call:
    """One call's tensors as the kernels take them; `bounds` are the first pool slots and visible pools in int32."""

    q_SBHD: Tensor
    weights_SBH: Tensor
    key_PBD: Tensor
    bounds: tuple[Tensor, Tensor]
    selection_BSK: Tensor
    first_pool_id: int
    use_relu: bool

    def take_strip(
        self,
        sample: int,
        at: int,
        strip: Strip,
        first_R: Tensor,
        visible_R: Tensor,
        held: dict[str, Tensor],
        counters: SelectionCounters,
    ) -> None:
        """Select for the rows of one strip, whose bounds `first_R` and `visible_R` are on the host."""
        budget = self.selection_BSK.shape[2]
        tiles_R = (first_R + visible_R + POOLS - 1) // POOLS - first_R // POOLS
        whole = int((tiles_R * (visible_R > budget)).max())
        tile_rows = rows_of_tile(self.q_SBHD.shape[2])
        for begin in range(0, max(whole, 1), strip.tiles):
            block = Block(sample, at, len(first_R), begin, strip.tiles, strip.head)
            span_T = spans(first_R, visible_R, budget, begin, strip.tiles, tile_rows)
            counters.tile_pairs += tile_rows * POOLS * int(span_T.sum())
            buffers = held["order_RM"], held["peak_RM"]
            if whole:
                with named("scoring"):
                    scoring.score(
                        self.q_SBHD,
                        self.weights_SBH,
                        self.key_PBD,
                        *self.bounds,
                        *buffers,
                        block,
                        budget=budget,
                        chunks=-(-int(span_T.max()) // CHUNK),
                        use_relu=self.use_relu,
                    )
            with named("top-k"):
                topk.select(
                    *buffers,
                    held["column_RM"],
                    *self.bounds,
                    self.selection_BSK,
                    block,
                    first_pool_id=self.first_pool_id,
                    more=begin + strip.tiles < whole,
                )


def spans(first_R: Tensor, visible_R: Tensor, budget: int, begin: int, tiles: int, tile_rows: int) -> Tensor:
    """int64, for each tile of rows the tiles of pools from the first to the last that one of its rows needs."""
    base_R = first_R.long() // POOLS + begin
    end_R = torch.minimum((first_R + visible_R + POOLS - 1) // POOLS, base_R + tiles)
    needed_R = (visible_R > budget) & (base_R < end_R)
    pad = (0, -len(first_R) % tile_rows)
    from_T = F.pad(base_R.masked_fill(~needed_R, _NEVER), pad, value=_NEVER).view(-1, tile_rows).amin(1)
    to_T = F.pad(end_R.masked_fill(~needed_R, 0), pad).view(-1, tile_rows).amax(1)
    return (to_T - from_T).clamp(min=0)
