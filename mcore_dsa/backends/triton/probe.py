"""Proof, on the device that runs them, that a score's place moves none of its bits; and a digest of those bits.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

import functools
import zlib

import torch
import triton
from torch import Tensor

from mcore_dsa.backends.torch.compress import key_fingerprint
from mcore_dsa.backends.triton.scratch import Strip
from mcore_dsa.backends.triton.select import spans
from mcore_dsa.checks import check_positive
from mcore_dsa.kernels import scoring
from mcore_dsa.kernels.compress import compress_keys
from mcore_dsa.kernels.scoring import CHUNK, Block
from mcore_dsa.kernels.tiles import GROUP, POOLS, rows_of_tile


def fingerprint(device: torch.device, heads: int, dim: int) -> str:
    """Digest of the bits of compression and scores, with what the binaries are made from.

    Raises: RuntimeError where a place in the tile matters.
    """
    scores, keys = probe(device, heads, dim, True), key_fingerprint(compress_keys, device, dim)
    major = scoring.device_major(device)
    return (
        f"{device.type} {major}, Triton {triton.__version__}, {rows_of_tile(heads)} x {POOLS}, "
        f"scores {scores:08x}, pool keys {keys:08x}"
    )


@functools.cache
def probe(device: torch.device, heads: int, dim: int, use_relu: bool) -> int:
    """Digest of orders; the first call for a device, a shape and a binary proves that no place matters.

    One query and one key stand in every place of two tiles of rows and three of pools, ends ragged; then others stand
    in several places each, alone, and in blocks of one tile, two and three.

    Raises: RuntimeError where an order differs.
    """
    check_positive("heads", heads)
    check_positive("dim", dim)
    rows, pools = 2 * rows_of_tile(heads) - 1, 3 * POOLS - 1
    generator = torch.Generator("cpu").manual_seed(20)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    ordered = functools.partial(orders, use_relu=use_relu)
    for _ in range(3):
        q, weights, key = draw(1, heads, dim), draw(1, heads), draw(1, dim)
        order = ordered(q.expand(rows, -1, -1), weights.expand(rows, -1), key.expand(pools, -1))
        _require_equal(order, order[:1, :1].expand_as(order), device, heads, dim)
    q, weights, key = draw(rows, heads, dim), draw(rows, heads), draw(pools, dim)
    order = ordered(q, weights, key)
    for tiles in (1, 2):
        _require_equal(ordered(q, weights, key, tiles=tiles), order, device, heads, dim)
    for turn in (1, 2, 5, 8, GROUP + 1, pools - 1):
        turned = ordered(q.roll(turn, 0), weights.roll(turn, 0), key.roll(turn, 0))
        _require_equal(turned, order.roll((turn, turn), (0, 1)), device, heads, dim)
    last = ordered(q[-1:], weights[-1:], key[-1:])
    _require_equal(last, order[-1:, -1:], device, heads, dim)
    return zlib.crc32(order.cpu().numpy().tobytes())


def orders(
    q_RHD: Tensor, weights_RH: Tensor, key_PD: Tensor, *, tiles: int | None = None, use_relu: bool = True
) -> Tensor:
    """int32 `[r, p]`, the order of every score as `score_kernel` writes it, in blocks of `tiles` tiles of pools."""
    rows, pools = len(q_RHD), len(key_PD)
    whole = -(-pools // POOLS)
    device, tile_rows = q_RHD.device, rows_of_tile(q_RHD.shape[1])
    first_1S = torch.zeros(1, rows, dtype=torch.int32, device=device)
    visible_1S = torch.full_like(first_1S, pools)
    blocks = []
    for begin in range(0, whole, whole if tiles is None else tiles):
        strip = Strip(rows, min(whole if tiles is None else tiles, whole - begin), 0)
        held = strip.workspace.allocate(device)
        span_T = spans(first_1S[0].cpu(), visible_1S[0].cpu(), 0, begin, strip.tiles, tile_rows)
        scoring.score(
            q_RHD.bfloat16().unsqueeze(1).contiguous(),
            weights_RH.float().unsqueeze(1).contiguous(),
            key_PD.bfloat16().unsqueeze(1).contiguous(),
            first_1S,
            visible_1S,
            held["order_RM"],
            held["peak_RM"],
            Block(0, 0, rows, begin, strip.tiles, 0),
            budget=0,
            chunks=-(-int(span_T.max()) // CHUNK),
            use_relu=use_relu,
        )
        blocks.append(held["order_RM"].view(torch.int32))
    return torch.cat(blocks, 1)[:, :pools]


def _require_equal(order: Tensor, expected: Tensor, device: torch.device, heads: int, dim: int) -> None:
    if not torch.equal(order, expected):
        raise RuntimeError(
            f"on {device} a score of the Triton kernel for {heads} heads x {dim} depends on the row's or the pool's "
            "place in it, so no selection here can be independent of slice and rank; accepted is a matrix product that "
            "rounds alike in every place, or MCORE_DSA_KERNELS=torch"
        )
