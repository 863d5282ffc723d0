"""Compression of keys in one kernel: the operations of `backends/torch/compress.py`, in its order, each rounded once.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mcore_dsa.kpool import PoolLayout

# Elements of a program: pools times channels.
BLOCK = 512
# A fused multiply-add rounds once where the contract rounds twice.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}

_LOG2_E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts: the first has 10 significant bits, so that n * _LN2_HIGH is exact for every |n| < 2**14.
_LN2_HIGH = tl.constexpr(0.693359375)
_LN2_LOW = tl.constexpr(math.log(2.0) - 0.693359375)
# Added and taken away, it rounds to the nearest integer, half to even, below 2**22.
_INTEGERS = tl.constexpr(1.5 * 2.0**23)
_SERIES = tuple(1.0 / math.factorial(k) for k in range(7, -1, -1))


@triton.jit
def _exp_of_nonpositive(x, SERIES: tl.constexpr):
    x = tl.maximum(x, -87.0, propagate_nan=tl.PropagateNan.ALL)
    n = (x * _LOG2_E + _INTEGERS) - _INTEGERS
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    series = r * 0.0 + SERIES[0]
    for k in tl.static_range(1, 8):
        series = series * r + SERIES[k]
    exponent = tl.where(n == n, n, 0.0).to(tl.int32)
    return series * ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _logit(gate_ptr, ape_ptr, line, channel, inside, j, DIM: tl.constexpr):
    gate = tl.load(gate_ptr + line * DIM + channel, mask=inside, other=0.0).to(tl.float32)
    return gate + tl.load(ape_ptr + j * DIM + channel, mask=inside, other=0.0)


@triton.jit(
    do_not_specialize=["elements", "batch", "pools"], do_not_specialize_on_alignment=["key_ptr", "gate_ptr", "ape_ptr"]
)
def compress_kernel(
    key_ptr,
    gate_ptr,
    ape_ptr,
    token_ptr,
    out_ptr,
    elements,
    batch,
    pools,
    DIM: tl.constexpr,
    SIZE: tl.constexpr,
    SERIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Elements `[p, b, d]` of the pooled keys, `BLOCK` a program; `token_ptr` holds `pool_token_BP`."""
    element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < elements
    channel, sample, pool = element % DIM, element // DIM % batch, element // DIM // batch
    token = tl.load(token_ptr + sample * pools + pool, mask=inside, other=-1)
    exists = token >= 0
    line = tl.maximum(token, 0) * batch + sample
    highest = _logit(gate_ptr, ape_ptr, line, channel, inside, 0, DIM)
    for j in tl.static_range(1, SIZE):
        logit = _logit(gate_ptr, ape_ptr, line + j * batch, channel, inside, j, DIM)
        highest = tl.maximum(highest, logit, propagate_nan=tl.PropagateNan.ALL)
    total = tl.zeros_like(highest)
    for j in tl.static_range(SIZE):
        weight = _exp_of_nonpositive(
            _logit(gate_ptr, ape_ptr, line + j * batch, channel, inside, j, DIM) - highest, SERIES
        )
        total = weight if j == 0 else total + weight
    pooled = tl.zeros_like(highest)
    for j in tl.static_range(SIZE):
        weight = _exp_of_nonpositive(
            _logit(gate_ptr, ape_ptr, line + j * batch, channel, inside, j, DIM) - highest, SERIES
        )
        key = tl.load(key_ptr + (line + j * batch) * DIM + channel, mask=inside, other=0.0).to(tl.float32)
        pooled += tl.div_rn(weight, total) * key
    tl.store(out_ptr + element, tl.where(exists, pooled, 0.0), mask=inside)


def compress_keys(key_TBD: Tensor, gate_TBD: Tensor, ape_JD: Tensor, layout: PoolLayout) -> Tensor:
    """`mcore_dsa.compress_keys` for arguments that fit; every bit as `backends/torch/compress.py`."""
    pools, batch, channels = layout.num_pools, layout.batch, key_TBD.shape[-1]
    # The interpreter cuts off where a device rounds to bf16.
    dtype = torch.float32 if triton.knobs.runtime.interpret else key_TBD.dtype
    pool_key_PBD = torch.empty(pools, batch, channels, dtype=dtype, device=key_TBD.device)
    if pool_key_PBD.numel():
        compress_kernel[(triton.cdiv(pool_key_PBD.numel(), BLOCK),)](
            key_TBD.contiguous(),
            gate_TBD.contiguous(),
            ape_JD.float().contiguous(),
            layout.pool_token_BP.contiguous(),
            pool_key_PBD,
            pool_key_PBD.numel(),
            batch,
            pools,
            DIM=channels,
            SIZE=layout.pool_size,
            SERIES=_SERIES,
            BLOCK=BLOCK,
            **OPTIONS,
        )
    return pool_key_PBD.to(key_TBD.dtype)
