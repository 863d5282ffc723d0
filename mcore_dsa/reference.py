"""The oracle: what the other modules compute, one sample, segment and row at a time, in plain loops.

Slow by design and independent of the code it judges: it imports torch and nothing of this package.

Shapes by suffix: S rows (queries), T tokens (keys), B batch, P pools, K selected pools a row, W selected tokens a row,
H heads, D index channels, C latent channels, J tokens of one pool.

Segments are plain data: for every sample a list of half-open `(start, end)` token ranges, ascending and disjoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

SampleSegments = Sequence[tuple[int, int]]


def reference_pools(segments: Sequence[SampleSegments], pool_size: int) -> list[list[int]]:
    """First token of every pool, a list a sample; the place in the list is the pool's id."""
    pools: list[list[int]] = []
    for sample in segments:
        tokens: list[int] = []
        for start, end in sample:
            while start + pool_size <= end:
                tokens.append(start)
                start += pool_size
        pools.append(tokens)
    return pools


def reference_visible(sample: SampleSegments, position: int, pool_size: int) -> tuple[int, int]:
    """Half-open range of pool ids that a row standing at token `position` of this sample may select."""
    first_pool = 0
    for start, end in sample:
        if start <= position < end:
            return first_pool, first_pool + (position - start + 1) // pool_size
        first_pool += (end - start) // pool_size
    return 0, 0


def reference_tail(sample: SampleSegments, position: int, pool_size: int) -> list[int]:
    """Tokens of the row's own incomplete pool, itself the last; empty on padding and where its pool is complete."""
    for start, end in sample:
        if start <= position < end:
            count = (position - start + 1) % pool_size
            return list(range(position - count + 1, position + 1))
    return []


def reference_compress(
    key_TBD: Tensor,
    gate_TBD: Tensor,
    ape_JD: Tensor,
    segments: Sequence[SampleSegments],
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Pool keys `[t // pool_size, b, d]` computed and returned in `dtype`, zeros in slots without a pool.

    Source: transformers' `Glm5NextTextIndexer.get_pooled_states`.
    """
    pool_size = ape_JD.shape[0]
    num_tokens, batch, channels = key_TBD.shape
    pool_key_PBD = torch.zeros(num_tokens // pool_size, batch, channels, dtype=dtype, device=key_TBD.device)
    for b, sample_pools in enumerate(reference_pools(segments, pool_size)):
        for pool, token in enumerate(sample_pools):
            logits = gate_TBD[token : token + pool_size, b].to(dtype) + ape_JD.to(dtype)
            probability = logits.softmax(dim=0)
            pool_key_PBD[pool, b] = (probability * key_TBD[token : token + pool_size, b].to(dtype)).sum(dim=0)
    return pool_key_PBD


def reference_scores(
    q_SBHD: Tensor, weights_SBH: Tensor, pool_key_PBD: Tensor, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`score_BSP[b, s, p] = sum_h weights[s, b, h] * relu(q[s, b, h] . pool_key[p, b])`, computed in `dtype`.

    The weights carry both scales, `heads ** -0.5 * dim ** -0.5`. No pool is masked.
    """
    rows, batch, heads, _ = q_SBHD.shape
    score_BSP = torch.zeros(batch, rows, pool_key_PBD.shape[0], dtype=dtype, device=q_SBHD.device)
    for b in range(batch):
        keys = pool_key_PBD[:, b].to(dtype)
        for s in range(rows):
            for h in range(heads):
                dots = (keys * q_SBHD[s, b, h].to(dtype)).sum(dim=1)
                score_BSP[b, s] += weights_SBH[s, b, h].to(dtype) * dots.clamp(min=0)
    return score_BSP


def reference_topk(score_P: Tensor, visible_lo: int, visible_hi: int, budget: int) -> list[int]:
    """The `budget` pools of `[visible_lo, visible_hi)` with the greatest score, ids ascending, -1 behind them.

    Equal scores go to the smaller id, `-0.0` equals `0.0`, NaN ranks below everything, `-inf` included.
    """
    scores = score_P.tolist()

    def rank(pool: int) -> tuple[bool, float, int]:
        is_nan = math.isnan(scores[pool])
        return is_nan, 0.0 if is_nan else -scores[pool], pool

    chosen = sorted(sorted(range(visible_lo, visible_hi), key=rank)[:budget])
    return chosen + [-1] * (budget - len(chosen))


def reference_select(
    score_BSP: Tensor, segments: Sequence[SampleSegments], position_S: Tensor, *, pool_size: int, budget: int
) -> Tensor:
    """`selection_BSK` int32 `[b, s, budget]` of rows standing at tokens `position_S`: a `reference_topk` each."""
    selection = [
        [
            reference_topk(row, *reference_visible(sample, position, pool_size), budget)
            for row, position in zip(score_SP, position_S.tolist(), strict=True)
        ]
        for score_SP, sample in zip(score_BSP, segments, strict=True)
    ]
    shape = (len(segments), position_S.shape[0], budget)
    return torch.tensor(selection, dtype=torch.int32, device=score_BSP.device).reshape(shape)


def reference_expand(
    selection_BSK: Tensor,
    segments: Sequence[SampleSegments],
    position_S: Tensor,
    *,
    pool_size: int,
    always_select_tail: bool,
) -> Tensor:
    """`token_BSW` int32: a selected pool's tokens in its slot's columns, the tail behind all slots, -1 elsewhere."""
    batch, rows, budget = selection_BSK.shape
    width = budget * pool_size + (pool_size - 1 if always_select_tail else 0)
    token_BSW = torch.full((batch, rows, width), -1, dtype=torch.int32, device=selection_BSK.device)
    pools = reference_pools(segments, pool_size)
    for b, s in ((b, s) for b in range(batch) for s in range(rows)):
        for slot, pool in enumerate(selection_BSK[b, s].tolist()):
            if pool >= 0:
                for j in range(pool_size):
                    token_BSW[b, s, slot * pool_size + j] = pools[b][pool] + j
        if always_select_tail:
            for j, token in enumerate(reference_tail(segments[b], int(position_S[s]), pool_size)):
                token_BSW[b, s, budget * pool_size + j] = token
    return token_BSW


def reference_attention(
    q_SBHC: Tensor, kv_TBC: Tensor, token_BSW: Tensor, *, softmax_scale: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`softmax(scale * q . kv[tokens]) @ kv[tokens]` in `dtype`, `[s, b, h, c]`; zeros for a row without tokens.

    The tokens of a row are the entries of `token_BSW` that are not -1. Differentiable by autograd.
    """
    out_SBHC = torch.zeros(q_SBHC.shape, dtype=dtype, device=q_SBHC.device)
    for s, b in ((s, b) for s in range(q_SBHC.shape[0]) for b in range(q_SBHC.shape[1])):
        tokens = [token for token in token_BSW[b, s].tolist() if token >= 0]
        if tokens:
            latent = kv_TBC[tokens, b].to(dtype)
            probability = (softmax_scale * (q_SBHC[s, b].to(dtype) @ latent.T)).softmax(dim=-1)
            out_SBHC[s, b] = probability @ latent
    return out_SBHC
