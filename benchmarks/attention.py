"""One rank's attention cut by heads and cut by rows: GLM-5.3-Flash's sizes, ratios measured side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from benchmarks.cases import BUDGET, POOL_SIZE, seconds
from mcore_dsa.attend import attend
from mcore_dsa.backends import AttentionCall, resolve
from mcore_dsa.kpool import PoolLayout

HEADS, CHANNELS, TAIL = 64, 512, POOL_SIZE - 1
SLOTS = BUDGET * POOL_SIZE + TAIL
# Rows of a call, of which a rank takes its part; latents beyond a core's cache.
ROWS, TOKENS = 64, 16384
# Products of a pass, in units of heads x slots x channels: logits and mixture; those again, and three of gradients.
PRODUCTS = {"forward": 2, "backward": 5}

type Timing = dict[str, float]


@dataclass(frozen=True)
class Rank:
    """One rank's part of a call: inputs that ask for gradients, and the gradient of its output."""

    q: Tensor
    kv: Tensor
    selection: Tensor
    call: AttentionCall

    @classmethod
    def of(cls, rows: int, heads: int) -> Rank:
        """The last rows of a document, each with its whole budget, and three of four with a tail."""
        generator = torch.Generator().manual_seed(rows)
        layout = PoolLayout.dense(TOKENS, pool_size=POOL_SIZE)
        bounds = layout.bounds(torch.arange(TOKENS - 1 - rows, TOKENS - 1))
        pools = int(bounds.visible_BS.min())
        chosen = [torch.randperm(pools, generator=generator)[:BUDGET].sort().values for _ in range(rows)]
        return cls(
            torch.randn(rows, 1, heads, CHANNELS, generator=generator, requires_grad=True),
            torch.randn(TOKENS, 1, CHANNELS, generator=generator, requires_grad=True),
            torch.stack(chosen).int().unsqueeze(0),
            AttentionCall(layout, bounds, CHANNELS**-0.5, True, 256 * 2**20),
        )

    def time(self) -> Timing:
        """Seconds of forward and of backward."""
        made: list[Tensor] = []
        forward = seconds(lambda: made.append(attend(self.q, self.kv, self.selection, self.call, backend=resolve())))
        grad = torch.ones_like(made[0])
        return {"forward": forward, "backward": seconds(lambda: torch.autograd.grad(made[0], (self.q, self.kv), grad))}


def bare_seconds() -> float:
    """Time of one product of 64 heads x 2,051 slots x 512 channels, operands in cache."""
    q, kv, out = torch.randn(HEADS, CHANNELS), torch.randn(SLOTS, CHANNELS), torch.empty(HEADS, SLOTS)
    return median(seconds(lambda: torch.mm(q, kv.T, out=out)) for _ in range(30))


def over_bare_products(repetitions: int) -> Mapping[str, list[float]]:
    """Forward and backward of rows with all heads over their bare products."""
    rank = Rank.of(ROWS // 4, HEADS)
    rank.time()
    ratios: dict[str, list[float]] = {"forward": [], "backward": []}
    for _ in range(repetitions):
        before, took = bare_seconds(), rank.time()
        bare = (before + bare_seconds()) / 2
        for name, products in PRODUCTS.items():
            ratios[name].append(took[name] / (bare * products * (ROWS // 4)))
    return ratios


def heads_over_rows(repetitions: int) -> Mapping[tuple[int, str], list[float]]:
    """By number of ranks and pass: one rank's time for its heads of all rows over that for its rows with all heads."""
    ratios: dict[tuple[int, str], list[float]] = {}
    for ranks in (2, 4, 8):
        by_heads, by_rows = Rank.of(ROWS, HEADS // ranks), Rank.of(ROWS // ranks, HEADS)
        by_heads.time(), by_rows.time()
        for _ in range(repetitions):
            heads, rows = by_heads.time(), by_rows.time()
            for name in PRODUCTS:
                ratios.setdefault((ranks, name), []).append(heads[name] / rows[name])
    return ratios
