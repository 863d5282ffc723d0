"""The straightforward selection that the benchmark compares with: every row against every pool, then a mask."""

from __future__ import annotations

import torch
from torch import Tensor

from mcore_dsa.settings import DEFAULT_BYTES


def select_by_mask(q_SBHD: Tensor, weights_SBH: Tensor, pool_key_PBD: Tensor, *, pool_size: int, budget: int) -> Tensor:
    """Pool ids int64 `[b, s, budget]` of dense causal rows in `torch.topk`'s order, -1 in unused slots.

    Rows go in chunks whose per-head scores take 256 MiB, the default budget of `select_pools`; per-head fp32 scores of
    all pools come from one einsum, and each step makes a new tensor. Ties fall as the library lets them.
    """
    rows, batch, heads, _ = q_SBHD.shape
    pools = pool_key_PBD.shape[0]
    chunk = max(1, DEFAULT_BYTES // (4 * batch * heads * pools))
    selection_BSK = torch.full((batch, rows, budget), -1)
    last_token_P = torch.arange(1, pools + 1) * pool_size - 1
    for start in range(0, rows, chunk):
        part = slice(start, min(start + chunk, rows))
        per_head = torch.einsum("sbhd,pbd->bshp", q_SBHD[part].float(), pool_key_PBD.float()).relu()
        score_BSP = torch.einsum("bshp,sbh->bsp", per_head, weights_SBH[part].float())
        visible_SP = last_token_P <= torch.arange(part.start, part.stop).unsqueeze(1)
        best = score_BSP.masked_fill(~visible_SP, float("-inf")).topk(min(budget, pools), dim=-1)
        ids = best.indices.masked_fill(best.values == float("-inf"), -1)
        selection_BSK[:, part, : ids.shape[-1]] = ids
    return selection_BSK
