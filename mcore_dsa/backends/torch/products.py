"""Batched products of attention: in the dtype of the results, or of bf16 operands as they are, summed in fp32.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def multiply(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Fill `out` with `left @ right`."""
    if left.dtype == out.dtype:
        return torch.bmm(left, right, out=out)
    product: Tensor = torch.ops.aten.bmm.dtype_out(left, right, out.dtype, out=out)
    return product


def weigh(weights: Tensor, values: Tensor, halves: Tensor, out: Tensor, *, add: bool = False) -> Tensor:
    """Fill `out` with `weights @ values`, or add that to it.

    Beside narrower values weights go as two numbers of their dtype, `halves`, which leave out at most 2**-16 of each.
    """
    if values.dtype == out.dtype:
        return out.baddbmm_(weights, values) if add else torch.bmm(weights, values, out=out)
    high, low = halves.view(2, *weights.shape)
    high.copy_(weights)
    torch.sub(weights, high, out=low)
    for half, beta in ((high, int(add)), (low, 1)):
        torch.ops.aten.baddbmm.dtype_out(out, half, values, out.dtype, beta=beta, out=out)
    return out
