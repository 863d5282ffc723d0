"""What one DSA layer should take on a GPU, from counts and rates alone: the tables of docs/gpu.md. Nothing is run.

`python -m benchmarks.gpu_model`. Counts come from `mcore_dsa.work` and the geometry, rates from the constants below.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.kernels.tiles import CHAIN
from mcore_dsa.work import selection_work

GEOMETRY = DsaGeometry.from_config(Path(__file__).parents[1] / "configs" / "glm-5.3-flash.json")
TOKENS = (65_536, 524_288, 1_048_576)
SIZES = (1, 2, 4, 8, 16, 32, 64)

# H200 SXM's data sheet: 989 TFLOP/s of dense bf16 products, 4.8 TB/s of memory, 900 GB/s of NVLink, half each way.
MEMORY, LINK = 4.8e12, 450e9
# Assumed, four fifths of the data sheet's.
PRODUCTS = 800e12
# 132 multiprocessors, four warp instructions a cycle each, at the data sheet's 67 TFLOP/s: 1.98 GHz.
WARP_INSTRUCTIONS = 132 * 4 * 1.98e9
# Maximum, product and sum of each (row, head, pool), one instruction for 32 of them.
EPILOGUE_INSTRUCTIONS = 3
# Estimated, of the top-k, for 32 values in one pass over them.
SELECT_INSTRUCTIONS = 100
# Four digits and an ordered copy: passes of the top-k over group maxima, and over what survives their bound.
PASSES = 5
GROUP = 32
# Of a long row's Gaussian scores at a budget of 512, counted (`benchmarks/LOG.md`, 2026-12-03).
SURVIVORS = 550
ELEMENT = 2
# Of a slot and head, of `channels` multiply-adds each, as the kernels do them: fp32 weights go as two bf16 numbers.
FORWARD_PRODUCTS, BACKWARD_PRODUCTS = 3, 10
# Heads of a tile, and slots of one of backward's second kernel (`kernels/attend_rows.py`, `kernels/tiles.py`).
TILE_HEADS, GRAD_TILE_SLOTS = 16, 16
# Assumed: bytes a second between the L2 and all multiprocessors, and from a load to its value.
CACHE, LATENCY = 5.5e12, 700e-9


@dataclass(frozen=True)
class Seconds:
    """One rank's seconds for one layer, each part by itself and nothing overlapped."""

    products: float
    epilogue: float
    writing: float
    selecting: float
    exchange: float

    @property
    def bound(self) -> float:
        """At least: products and what the multiprocessors do beside them overlap at best, the exchange too."""
        return max(self.products, self.epilogue, self.writing) + self.selecting


def selection_seconds(tokens: int, ranks: int) -> Seconds:
    """The busiest rank under zigzag, whose shards are even; one document, all of whose scores look Gaussian."""
    work = selection_work([tokens], GEOMETRY, group_size=ranks, partition="zigzag")
    rank = max(work.ranks, key=lambda rank: rank.scored_pairs)
    read, survive = _read_and_kept(tokens)
    values = PASSES * rank.scored_pairs / GROUP + (read + PASSES * survive) / ranks
    return Seconds(
        products=rank.flops / PRODUCTS,
        epilogue=rank.scored_pairs * GEOMETRY.index_n_heads / 32 * EPILOGUE_INSTRUCTIONS / WARP_INSTRUCTIONS,
        writing=rank.scored_pairs * 4 * (1 + 1 / GROUP) / MEMORY,
        selecting=values / 32 * SELECT_INSTRUCTIONS / WARP_INSTRUCTIONS,
        exchange=rank.received_bytes / LINK if ranks > 1 else 0.0,
    )


def _read_and_kept(tokens: int) -> tuple[int, int]:
    """Scores in groups that reach the bound, and those that do, over all rows of a document.

    A row of fewer groups than the budget has no bound, and keeps all its scores.
    """
    most, pools = GEOMETRY.pool_budget * GROUP, tokens // GEOMETRY.index_kpool
    short = min(most, pools)
    of_short, long_rows = GEOMETRY.index_kpool * short * short // 2, GEOMETRY.index_kpool * (pools - short)
    return of_short + long_rows * most, of_short + long_rows * SURVIVORS


@dataclass(frozen=True)
class Attention:
    """One rank's seconds for one pass of one layer's attention under one cut, each part by itself, nothing overlapped.

    Attributes:
        products: of tiles, which have `TILE_HEADS` heads each however few a rank has.
        cache: what multiprocessors take from the L2 and leave there.
        memory: of that what comes from memory, were nothing of one row there for the next.
        exchange: what ranks send each other.
    """

    products: float
    cache: float
    memory: float
    exchange: float


def attention_seconds(tokens: int, ranks: int, *, by_rows: bool, backward: bool = False) -> Attention:
    """By rows a rank has its share of the rows and all heads, by heads the reverse; one document."""
    slots = GEOMETRY.index_topk + GEOMETRY.index_kpool - 1
    rows = tokens // ranks if by_rows else tokens
    heads = GEOMETRY.num_attention_heads // (1 if by_rows else ranks)
    tiles, slot_tiles = -(-heads // TILE_HEADS), -(-slots // GRAD_TILE_SLOTS)
    line = GEOMETRY.kv_lora_rank * ELEMENT
    latents, queries = slots * line, heads * line
    if backward:
        # Queries, both gradients and the output, twice; then for every tile of slots queries and output gradients.
        # A slot's contribution is in fp32, written and read.
        contributed = 2 * slots * GEOMETRY.kv_lora_rank * 4
        cache = (tiles + 1) * latents + (5 + 2 * slot_tiles) * queries + contributed
        memory = 2 * latents + 7 * queries + contributed
    else:
        cache, memory = tiles * latents + 2 * queries, latents + 2 * queries
    # Queries and outputs; or queries and both gradients.
    moved = (3 if backward else 2) * (tokens // ranks) * GEOMETRY.num_attention_heads * line * (ranks - 1) / ranks
    products = (BACKWARD_PRODUCTS if backward else FORWARD_PRODUCTS) * 2 * tiles * TILE_HEADS * slots * line / ELEMENT
    return Attention(
        products=rows * products / PRODUCTS,
        cache=rows * cache / CACHE,
        memory=rows * memory / MEMORY,
        exchange=moved / LINK if by_rows else 0.0,
    )


def chain_seconds(rows: int) -> float:
    """Backward's program of a pool that as many rows of a rank select, one after another.

    The places of `CHAIN` rows take two latencies, what they contribute one for every two: as ptxas orders the loads.
    """
    return rows * (2 / CHAIN + 1 / 2) * LATENCY


def lines() -> Iterator[str]:
    yield "| tokens | TP | products | ReLU and sum | writing | top-k | exchange | selection, at least |"
    yield "|---|---|---|---|---|---|---|---|"
    for tokens in TOKENS:
        for ranks in SIZES:
            it = selection_seconds(tokens, ranks)
            parts = (it.products, it.epilogue, it.writing, it.selecting, it.exchange, it.bound)
            yield f"| {tokens:,} | {ranks} | " + " | ".join(map(milliseconds, parts)) + " |"
    for backward in (False, True):
        yield ""
        kind = "backward" if backward else "forward"
        of_cut = "products | L2 | memory"
        yield f"| tokens | TP | {kind}, by heads: {of_cut} | by rows: {of_cut} | exchange |"
        yield "|---" * 9 + "|"
        for tokens in TOKENS:
            for ranks in SIZES:
                cuts = [attention_seconds(tokens, ranks, by_rows=cut, backward=backward) for cut in (False, True)]
                parts = [part for cut in cuts for part in vars(cut).values()]
                # By heads nothing is exchanged.
                yield f"| {tokens:,} | {ranks} | " + " | ".join(map(milliseconds, parts[:3] + parts[4:])) + " |"
    yield ""
    yield "| rows of a rank, all of which select one pool | sum of its gradients, alone |"
    yield "|---|---|"
    for rows in (8192, *TOKENS):
        yield f"| {rows:,} | {milliseconds(chain_seconds(rows))} |"


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g}"


if __name__ == "__main__":
    print("\n".join(lines()))
