"""Index scores in products of one fixed shape, so that a score depends on its query, weights and key alone.

Letters of shapes: `mcore_dsa/__init__.py`.

A matrix library picks its kernel by shape, and another kernel rounds otherwise: scoring a row against 17 keys instead
of 512 changes the last bits of 64% of its scores (M, torch's CPU build). So every product here has the shape of the
device's `Tile`, rows and keys are copied into aligned buffers of that shape, and heads are summed inside it. That a
row's place in the tile does not matter either is measured, for every place, before the first score is used.

On CUDA bf16 queries and keys are multiplied as they are, summed in fp32 and never rounded to bf16 again: matrix
instructions do that some ten times faster than fp32 (H200, data sheet), and no switch of the process concerns them.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from mcore_dsa.checks import check_positive
from mcore_dsa.precision import product_precision
from mcore_dsa.workspace import Buffer, Workspace

# Rows of the greatest tile that is tried in place of the whole one: a decoded token, or a few drafted ones.
_LOW_ROWS = 8
# Elements of which a CPU operation gives some to each of up to 8 threads.
_EVERY_THREAD = 1 << 18


@dataclass(frozen=True)
class Tile:
    """The one shape in which a device scores: `rows * heads` by `dim`, times `dim` by `pools`.

    `strip_tiles` of them, one above the other, make a strip: as many rows as go through the top-k together.
    """

    rows: int
    pools: int
    strip_tiles: int

    @property
    def strip_rows(self) -> int:
        return self.rows * self.strip_tiles

    def workspace(self, heads: int, dim: int, operands: torch.dtype = torch.float32) -> Workspace:
        """What a `TileScorer` of this tile holds, and the copies made to fill it; of fp32 operands at least as much."""
        fp32, tiles = torch.float32, range(self.strip_tiles)
        # One allocation a tile: products may round by alignment, and an allocation's is always the same.
        return Workspace(
            {f"q {tile}": Buffer((self.rows, heads, dim), operands, zeroed=True) for tile in tiles}
            | {f"weights {tile}": Buffer((self.rows, 1, heads), fp32, zeroed=True) for tile in tiles}
            | {
                "key": Buffer((self.pools, dim), operands, zeroed=True),
                "per head": Buffer((self.rows, heads, self.pools), fp32),
                "score": Buffer((self.rows, 1, self.pools), fp32),
                "loaded rows": Buffer((self.strip_rows, heads, dim + 1), fp32, inside=True),
                "loaded keys": Buffer((self.pools, dim), fp32, inside=True),
            }
        )


def operands_of(device: torch.device, *dtypes: torch.dtype) -> torch.dtype:
    """What queries and keys of these dtypes are multiplied as on a device."""
    narrow = device.type == "cuda" and set(dtypes) == {torch.bfloat16}
    return torch.bfloat16 if narrow else torch.float32


def tile_for(device: torch.device, heads: int) -> Tile:
    """The tile of a device: on the CPU its scores are 512 KiB and stay in an L2; on a GPU they fill the chip.

    `select_pools` over the bare products of what must be scored, one core, 32 heads, 128 channels, 8,192 tokens (M):
    32 x 128 1.45, 64 x 128 1.48, 16 x 128 1.52, 32 x 64 1.52, 8 x 128 1.60. Fewer pools starve the product, more waste
    work at the causal edge, half a tile a row. With few heads the rows end at 256: the top-k's buffers grow with them.
    Rows come in eights where they can: what is left over by a kernel's block may be summed in another order (M, 146 x 7
    rows and heads with MKL_CBWR=COMPATIBLE).
    """
    check_positive("heads", heads)
    on_cpu = device.type == "cpu"
    rows = min(256, max(1, (1024 if on_cpu else 8192) // heads))
    rows -= rows % 8 if rows > 8 else 0
    return Tile(rows, pools=128, strip_tiles=2) if on_cpu else Tile(rows, pools=1024, strip_tiles=1)


def tile_for_rows(device: torch.device, heads: int, dim: int, rows: int) -> Tile:
    """The tile for strips of up to `rows` rows: the device's, or a lower one that was measured to give the same bits.

    The lowest power of two, up to 8, that holds the rows and passes. On one core at 128 channels (M): a tile of 1 row
    of 32 heads takes 24 us, of 8 rows 97, the whole 1,006; of 64 heads 84, 412 and 1,103. Not every one passes: at one
    head of 64 channels 1 and 2 rows round 40% of the scores otherwise, 4 rows none. On a GPU nothing was measured.
    """
    whole = tile_for(device, heads)
    lower = 1 << (rows - 1).bit_length()
    while device.type == "cpu" and lower <= _LOW_ROWS and lower < whole.rows:
        if _rounds_as_whole(device, heads, dim, lower, numerics(device)):
            return Tile(lower, whole.pools, strip_tiles=1)
        lower *= 2
    return whole


@functools.cache
def _rounds_as_whole(device: torch.device, heads: int, dim: int, rows: int, numerics: Hashable) -> bool:
    """Whether a tile of `rows` rows scores every row of random whole tiles, in every place, as the whole tile does.

    Another order of summation moves a quarter of the scores or more, so that thousands of equal ones leave no doubt.
    """
    whole = tile_for(device, heads)
    generator = torch.Generator("cpu").manual_seed(22)
    randn = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    scorer = TileScorer(whole, heads, dim, device, use_relu=True)
    lower = TileScorer(Tile(rows, whole.pools, strip_tiles=1), heads, dim, device, use_relu=True)
    for draw in range(_LOW_ROWS):
        q, weights, key = (
            randn(shape) for shape in ((whole.rows, heads, dim), (whole.rows, heads), (whole.pools, dim))
        )
        scorer.load_rows(q, weights)
        scorer.load_keys(key)
        lower.load_keys(key)
        score_RM = scorer.score(0)
        for begin in range(draw % rows, whole.rows, rows):
            some = slice(begin, min(begin + rows, whole.rows))
            lower.load_rows(q[some], weights[some])
            if not torch.equal(lower.score(0)[: some.stop - some.start], score_RM[some]):
                return False
    return True


class TileScorer:
    """Scores of a strip of rows against any pools, tile by tile. Owns its buffers; not for use by two threads."""

    def __init__(
        self,
        tile: Tile,
        heads: int,
        dim: int,
        device: torch.device,
        *,
        use_relu: bool,
        operands: torch.dtype = torch.float32,
    ) -> None:
        self.tile = tile
        self._use_relu, self._operands = use_relu, operands
        held = tile.workspace(heads, dim, operands).allocate(device)
        self._q = [held[f"q {index}"] for index in range(tile.strip_tiles)]
        self._weights = [held[f"weights {index}"] for index in range(tile.strip_tiles)]
        self._key, per_head, score = held["key"], held["per head"], held["score"]
        # Views made once: four of them a product cost 2% of it (M, CPU).
        self._q_flat, self._key_T = [q.flatten(0, 1) for q in self._q], self._key.T
        self._per_head, self._per_head_flat = per_head, per_head.flatten(0, 1)
        self._score, self._score_RM = score, score.squeeze(1)

    def load_rows(self, q_RHD: Tensor, weights_RH: Tensor) -> None:
        """Take up to `tile.strip_rows` rows; what stood in the other places stays there and reaches nothing."""
        parts = zip(q_RHD.split(self.tile.rows), weights_RH.split(self.tile.rows), strict=True)
        for index, (q, weights) in enumerate(parts):
            self._q[index][: q.shape[0]] = q
            self._weights[index][: q.shape[0], 0] = weights

    def load_keys(self, key_MD: Tensor) -> None:
        """Take up to `tile.pools` keys, likewise."""
        self._key[: key_MD.shape[0]] = key_MD

    def score(self, index: int) -> Tensor:
        """fp32 `[tile.rows, tile.pools]`, `sum_h weights_h * relu(q_h . key)` of tile `index`; valid until the next."""
        if self._operands == torch.float32:
            torch.mm(self._q_flat[index], self._key_T, out=self._per_head_flat)
        else:
            fp32 = torch.float32
            torch.ops.aten.mm.dtype_out(self._q_flat[index], self._key_T, fp32, out=self._per_head_flat)
        if self._use_relu:
            self._per_head.clamp_min_(0)
        if self._operands == torch.float32:
            torch.bmm(self._weights[index], self._per_head, out=self._score)
        else:
            # As a product it would follow the process's switch for fp32 products.
            torch.sum(self._per_head.mul_(self._weights[index].mT), 1, keepdim=True, out=self._score)
        return self._score_RM


def numerics(device: torch.device) -> Hashable:
    """What may change the bits of scores on this device while the process runs; equal values mean equal bits.

    The number of threads, and whether numbers below the normal range are flushed to zero (`torch.set_flush_denormal`,
    which torch cannot be asked for: a product of two small numbers tells).
    """
    if device.type != "cpu":
        return None
    small = torch.full((), 1e-30, dtype=torch.float32, device="cpu")
    return torch.get_num_threads(), bool(small * 1e-10 == 0)


def tile_fingerprint(device: torch.device, heads: int, dim: int) -> int:
    """Digest of the bits in which this device scores fixed data; equal on two ranks whose scores agree.

    Raises: as `probe_tile`.
    """
    operands = dict.fromkeys(operands_of(device, dtype) for dtype in (torch.float32, torch.bfloat16))
    digests = [probe_tile(device, heads, dim, dtype) for dtype in operands]
    return zlib.crc32(repr(digests).encode())


def probe_tile(device: torch.device, heads: int, dim: int, operands: torch.dtype) -> int:
    """Digest for operands of one dtype.

    The first call for a device, shape and `numerics` proves that a place in the tile does not matter: one query and one
    key are copied into every place, and all scores must be equal.

    Raises: RuntimeError where they are not.
    """
    check_positive("heads", heads)
    check_positive("dim", dim)
    with torch.no_grad(), product_precision(device.type, operands):
        return _probe(device, heads, dim, operands, numerics(device))


@functools.cache
def _probe(device: torch.device, heads: int, dim: int, operands: torch.dtype, numerics: Hashable) -> int:
    tile = tile_for(device, heads)
    generator = torch.Generator("cpu").manual_seed(20)
    randn = functools.partial(torch.randn, generator=generator, dtype=torch.float32, device="cpu")
    scorer = TileScorer(tile, heads, dim, device, use_relu=True, operands=operands)
    for _ in range(3):
        q_HD, weights_H, key_D = (randn(shape).to(device) for shape in ((heads, dim), (heads,), (dim,)))
        scorer.load_rows(q_HD.expand(tile.strip_rows, -1, -1), weights_H.expand(tile.strip_rows, -1))
        scorer.load_keys(key_D.expand(tile.pools, -1))
        score_RM = torch.cat([scorer.score(index).clone() for index in range(tile.strip_tiles)])
        if not torch.equal(score_RM, score_RM[:1, :1].expand_as(score_RM)):
            raise RuntimeError(
                f"on {device} with {torch.get_num_threads()} threads a score of the {tile.rows} x {heads} x {dim} by "
                f"{tile.pools} tile of {operands} depends on the row's or the pool's place in it, so no selection here "
                "can be independent of slice and rank; accepted is a matrix product that rounds alike in every place"
            )
    # Two devices may round most scores alike, so a tile of other ones goes into the digest.
    scorer.load_rows(randn(tile.rows, heads, dim).to(device), randn(tile.rows, heads).to(device))
    scorer.load_keys(randn(tile.pools, dim).to(device))
    digest = zlib.crc32(scorer.score(0).cpu().numpy().tobytes())
    # Enough elements for every thread: each has its own switch that flushes what is below the normal range.
    small = torch.full((_EVERY_THREAD,), 1e-30, dtype=torch.float32, device=device)
    return zlib.crc32(small.mul_(1e-10).cpu().numpy().tobytes(), digest)
