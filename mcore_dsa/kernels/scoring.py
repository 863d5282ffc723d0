"""Scores of a strip of rows as integers in the contract's order, with the greatest of every 32 pools beside them.

Letters of shapes: `mcore_dsa/__init__.py`.

Tiles stand at multiples of `POOLS` pool slots whatever the document, and a row's columns begin with the tile that holds
its first pool: a tile then fills whole columns of every row that sees any of it, and rows of several documents share a
program at no cost. Keys stand on the product's first extent, rows and heads on its second: the sum over heads stays
within four lanes.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_dsa.kernels.tiles import GROUP, POOLS, rows_of_tile

# Tiles that a program scores: their keys are 8 times the bytes of its queries.
CHUNK = 32

# Leaves room for the programs' chunks behind it.
_NEVER = tl.constexpr(0x3FFFFFFF)
_COUNTS = ["at", "spot", "rows", "row_tiles", "batch", "sample", "pools", "budget", "begin", "tiles", "width", "head"]


def constants(heads: int, dim: int, use_relu: bool) -> dict[str, Any]:
    """What a binary of the kernel is compiled for, beside the architecture."""
    return {
        "HEADS": heads,
        "DIM": dim,
        "HEADS_2": triton.next_power_of_2(heads),
        "DIM_2": max(16, triton.next_power_of_2(dim)),
        "ROWS": rows_of_tile(heads),
        "POOLS": POOLS,
        "GROUP": GROUP,
        "CHUNK": CHUNK,
        "USE_RELU": use_relu,
        # The interpreter multiplies the bit patterns of bf16.
        "WIDEN": bool(triton.knobs.runtime.interpret),
    }


@functools.cache
def device_major(device: torch.device) -> int:
    """The first number of a device's compute capability; 0 for what has none."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


def options(major: int) -> dict[str, Any]:
    """How a binary is compiled for devices of capability `major`: for 9 as many registers as let two programs run."""
    registers = {"maxnreg": 128} if major == 9 else {}
    return {"num_warps": 8, "num_stages": 2, "enable_fp_fusion": False, **registers}


@triton.jit
def ordered(score):
    """uint32 in the order of fp32 scores: NaN is 1 whatever its sign, -0.0 is 0.0; 0 is left for what is not seen."""
    bits = score.to(tl.int32, bitcast=True)
    sign = bits >> 31
    order = (((bits & 0x7FFFFFFF) ^ sign) - sign).to(tl.uint32, bitcast=True) ^ 0x80000000
    return tl.where(score == score, order, 1)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=["weights_ptr"])
def score_kernel(
    q_ptr,
    weights_ptr,
    key_ptr,
    first_ptr,
    visible_ptr,
    order_ptr,
    peak_ptr,
    at,
    spot,
    rows,
    row_tiles,
    batch,
    sample,
    pools,
    budget,
    begin,
    tiles,
    width,
    head,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HEADS_2: tl.constexpr,
    DIM_2: tl.constexpr,
    ROWS: tl.constexpr,
    POOLS: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    USE_RELU: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Write tiles `begin ... begin + tiles - 1` of every row that sees more than `budget` pools, as far as it sees any.

    Program `i + row_tiles * c` has the i-th `ROWS` rows, and of the tiles from the first to the last that one of them
    needs the c-th `CHUNK`. `rows` stand from row `at` of the queries and entry `spot` of the bounds on. A row of orders
    has `width` columns of which `head` are not for scores; a row of peaks a `GROUP`-th of both.
    """
    place = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    inside = place < rows
    first = tl.load(first_ptr + spot + place, mask=inside, other=0)
    visible = tl.load(visible_ptr + spot + place, mask=inside, other=0)
    base = first // POOLS + begin
    end = tl.minimum((first + visible + POOLS - 1) // POOLS, base + tiles)
    end = tl.where(visible > budget, end, 0)
    begin_tile = tl.min(tl.where(base < end, base, _NEVER), 0) + tl.program_id(0) // row_tiles * CHUNK
    end_tile = tl.minimum(tl.max(end, 0), begin_tile + CHUNK)
    if begin_tile >= end_tile:
        return

    column = tl.arange(0, ROWS * HEADS_2)
    row, of_head = tl.program_id(0) % row_tiles * ROWS + column // HEADS_2, column % HEADS_2
    line = (row * batch + sample) * HEADS + of_head
    real = (row < rows) & (of_head < HEADS)
    channel = tl.arange(0, DIM_2)
    q_ptr += at.to(tl.int64) * batch * HEADS * DIM
    weights_ptr += at.to(tl.int64) * batch * HEADS
    q = tl.load(
        q_ptr + line[None, :].to(tl.int64) * DIM + channel[:, None],
        mask=real[None, :] & (channel < DIM)[:, None],
        other=0.0,
    )
    if WIDEN:
        q = q.to(tl.float32)
    out_at = place * width + head
    lane, group = tl.arange(0, POOLS), tl.arange(0, POOLS // GROUP)
    for tile in tl.range(begin_tile, end_tile):
        pool = tile * POOLS + lane
        key_line = (tile * POOLS * batch.to(tl.int64) + sample) * DIM
        key = tl.load(
            key_ptr + key_line + lane[:, None] * batch * DIM + channel[None, :],
            mask=(pool < pools)[:, None] & (channel < DIM)[None, :],
            other=0.0,
        )
        if WIDEN:
            key = key.to(tl.float32)
        part = tl.dot(key, q)
        if USE_RELU:
            part = tl.maximum(part, 0.0, propagate_nan=tl.PropagateNan.ALL)
        # Loaded again for every tile, and the bounds compared once: both for registers.
        part = part * tl.load(weights_ptr + line, mask=real, other=0.0)[None, :]
        if HEADS_2 != HEADS:
            # A head that is not there multiplies zeros by the key, and infinity times zero is NaN.
            part = tl.where((of_head < HEADS)[None, :], part, 0.0)
        order = ordered(tl.sum(tl.reshape(part, [POOLS, ROWS, HEADS_2]), 2))
        rank = (pool[:, None] - first[None, :]).to(tl.uint32, bitcast=True)
        order = tl.where(rank < visible[None, :].to(tl.uint32, bitcast=True), order, 0)
        mine = (base <= tile) & (tile < end)
        out = out_at + (tile - base) * POOLS
        tl.store(order_ptr + out[None, :] + lane[:, None], order, mask=mine[None, :])
        peak = tl.max(tl.reshape(order, [POOLS // GROUP, GROUP, ROWS]), 1)
        tl.store(peak_ptr + out[None, :] // GROUP + group[:, None], peak, mask=mine[None, :])


@dataclass(frozen=True)
class Block:
    """Scores that are in hand at a time.

    Attributes:
        sample, at, rows: `rows` rows of a sample, from row `at` on.
        begin, tiles: of each row's tiles of pools these, counted from the one with its first pool.
        head: columns before them, where the best of earlier tiles are kept; a multiple of `GROUP`.
    """

    sample: int
    at: int
    rows: int
    begin: int
    tiles: int
    head: int


def score(
    q_SBHD: Tensor,
    weights_SBH: Tensor,
    key_PBD: Tensor,
    first_BS: Tensor,
    visible_BS: Tensor,
    order_RM: Tensor,
    peak_RM: Tensor,
    block: Block,
    *,
    budget: int,
    chunks: int,
    use_relu: bool,
) -> None:
    """Fill the columns of a block, of rows that see more than `budget` pools; see `score_kernel`.

    Args:
        q_SBHD, key_PBD: bf16, contiguous, on 16 bytes; weights_SBH: fp32, contiguous.
        first_BS: int32, pool slots; visible_BS: int32.
        order_RM, peak_RM: uint32, `peak_RM` a `GROUP`-th as wide; less than 2**31 elements.
        chunks: `CHUNK` tiles of pools each, as many as the tile of rows needs that needs most.
    """
    (_, batch, heads, dim), row_tiles = q_SBHD.shape, triton.cdiv(block.rows, rows_of_tile(q_SBHD.shape[2]))
    score_kernel[(row_tiles * chunks,)](
        q_SBHD,
        weights_SBH,
        key_PBD,
        first_BS,
        visible_BS,
        order_RM,
        peak_RM,
        block.at,
        block.sample * first_BS.shape[1] + block.at,
        block.rows,
        row_tiles,
        batch,
        block.sample,
        key_PBD.shape[0],
        budget,
        block.begin,
        block.tiles,
        order_RM.shape[1],
        block.head,
        **constants(heads, dim, use_relu),
        **options(device_major(q_SBHD.device)),
    )
