"""Compression of keys: exact operations in one written order, so that a pool's key depends on the pool alone.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

from mcore_dsa.kpool import PoolLayout

# fp32 elements of scratch, which is elementwise: the size moves no bit of the result.
_SCRATCH_ELEMENTS = 1 << 20

_LOG2_E = 1.4426950408889634
# ln 2 in two parts: the first has 10 significant bits, so that n * _LN2_HIGH is exact for every |n| < 2**14.
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2.0) - _LN2_HIGH


def compress_keys(key_TBD: Tensor, gate_TBD: Tensor, ape_JD: Tensor, layout: PoolLayout) -> Tensor:
    """`mcore_dsa.compress_keys` for arguments that fit."""
    num_pools, batch, channels = layout.num_pools, layout.batch, key_TBD.shape[-1]
    pool_key_PBD = key_TBD.new_empty(num_pools, batch, channels)
    ape = ape_JD.float()
    sample = torch.arange(batch, device=layout.device)
    step = max(1, _SCRATCH_ELEMENTS // max(1, batch * channels * layout.pool_size))
    for begin in range(0, num_pools, step):
        token = layout.pool_token_BP[:, begin : begin + step].T
        exists = (token >= 0).unsqueeze(-1)
        token = token.clamp(min=0)
        logits = [gate_TBD[token + j, sample].float() + ape[j] for j in range(layout.pool_size)]
        highest = logits[0]
        for logit in logits[1:]:
            highest = torch.maximum(highest, logit)
        weights = [_exp_of_nonpositive(logit - highest) for logit in logits]
        total = weights[0]
        for weight in weights[1:]:
            total = total + weight
        pooled = torch.zeros_like(total)
        for j, weight in enumerate(weights):
            pooled = pooled + (weight / total) * key_TBD[token + j, sample].float()
        pool_key_PBD[begin : begin + step] = torch.where(exists, pooled, 0.0)
    return pool_key_PBD


def compress_bytes(pools: int, dim: int, pool_size: int) -> int:
    """Bytes that `compress_keys` takes beside its result: logits, weights, and a few values a pool and channel."""
    elements = min(_SCRATCH_ELEMENTS, pools * dim * pool_size)
    return elements * (8 + 28 // pool_size)


def key_fingerprint(
    compress: Callable[[Tensor, Tensor, Tensor, PoolLayout], Tensor], device: torch.device, dim: int
) -> int:
    """Digest of the bits to which `compress` brings fixed keys, of ordinary size and next to nothing."""
    generator = torch.Generator("cpu").manual_seed(21)
    layout = PoolLayout.dense(256, pool_size=4, device=device)
    key, gate = (torch.randn(256, 1, dim, generator=generator, dtype=torch.float32, device="cpu") for _ in range(2))
    key[128:] *= 1e-38
    ape = torch.zeros(4, dim, dtype=torch.float32, device=device)
    pool_key = compress(key.to(device), (4 * gate).to(device), ape, layout)
    return zlib.crc32(pool_key.cpu().numpy().tobytes())


def _exp_of_nonpositive(x: Tensor) -> Tensor:
    """fp32 `exp(x)` for `x <= 0`, within 2 ulp; below -87 the value at -87 (2e-38).

    torch's own `exp` gives its vectorised body and its scalar remainder other last bits on some builds, so the bits
    of a pool's key could depend on where the pool lies in a buffer. Here every step is a single IEEE operation:
    x = n ln 2 + r, |r| <= ln(2) / 2, the Taylor series of exp(r) to r**7 / 7! (truncation 5e-9), times 2**n.
    """
    x = x.clamp(min=-87.0)
    n = (x * _LOG2_E).round_()
    r = (x - n * _LN2_HIGH).sub_(n * _LN2_LOW)
    series = torch.full_like(r, 1.0 / math.factorial(7))
    for k in range(6, -1, -1):
        series.mul_(r).add_(1.0 / math.factorial(k))
    # A NaN has no integer exponent; any will do, since the series is NaN as well.
    exponent = n.nan_to_num_(0.0).to(torch.int32)
    return series.mul_(((exponent + 127) << 23).view(torch.float32))
