"""`fused_qk_topk_kpool`: the k-pool selection under the signature that Megatron's callers use, to be swapped in.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from mcore_dsa.agreement import header
from mcore_dsa.checks import (
    FLOATING,
    check_bool,
    check_device,
    check_floating,
    check_integer,
    check_positive,
    form_of,
    kind_of,
)
from mcore_dsa.collectives import Group, group_rank, group_size
from mcore_dsa.eager import uncompiled
from mcore_dsa.functions import compress_keys
from mcore_dsa.kpool import PoolLayout, expand_selection
from mcore_dsa.rows import RowPartition
from mcore_dsa.sharded import select_pools_sharded

# Rows of a mask that are looked at together.
_MASK_ROWS = 256


@uncompiled
@torch.no_grad()
def fused_qk_topk_kpool(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    pool_size: int,
    gate_score: Tensor,
    ape: Tensor,
    mask: Tensor | None = None,
    varlen_starts: Tensor | None = None,
    varlen_ends: Tensor | None = None,
    key_positions: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    use_relu: bool = True,
    always_select_tail: bool = True,
    fp8_indexer: bool = False,
    query_shard_group: Group = None,
    agreed: bool = False,
) -> tuple[None, Tensor]:
    """k-pool selection under the signature that Megatron's token-level `fused_qk_topk` callers use.

    Without bounds the call is dense and *causal* (Megatron's token-level function is unmasked there): `s` must equal
    `s_k`, and pools begin at token 0, or at every document of `cu_seqlens_kv`. With `varlen_starts` and `varlen_ends`
    row i sees tokens `[starts[i], ends[i])`, the same in every sample; rows of equal start are a segment, and its
    pools begin there. Left padding that differs by sample cannot be said here: use `select_pools` with a layout.

    Args:
        q: floating `[s, b, heads, dim]`, all rows, on every rank.
        k, gate_score: floating `[s_k, b, dim]`, normalised index keys and their compression gates; ape:
            `[pool_size, dim]`.
        weights: floating `[s, b, heads]`, already times `heads**-0.5 * dim**-0.5`.
        index_topk: tokens to select, a multiple of `pool_size`.
        mask: None, or in a call without bounds the causal one, `[s, s_k]`, `[b, s, s_k]` or `[b, 1, s, s_k]`: bool, as
            Megatron's True where a row does not see, or floating, 0 and -inf. fp8_indexer: False.
        varlen_starts, varlen_ends: integer `[s]`, both or none. cu_seqlens_kv: integer `[documents + 1]`; rows whose
            bounds begin behind the last document select nothing.
        key_positions: None or 0 ... s_k-1.
        query_shard_group: ranks that share the rows, each scoring its contiguous shard; None: every row here.
        agreed: as for `select_pools_sharded`.

    Returns: `(None, token_ids)`, int32 `[b, s, index_topk + pool_size - 1]` (`index_topk` wide without the tail):
    tokens of the selected pools, ascending, from column 0, the tail from column `index_topk`, -1 elsewhere; no scores.

    Raises: TypeError, ValueError naming what is refused, bounds that move inside a document among it, and on every rank
    where calls differ or another refuses its own.
    """
    ranks, rank = group_size(query_shard_group), group_rank(query_shard_group)
    with header("fused_qk_topk_kpool", query_shard_group, agreed=agreed) as compared:
        check_bool(use_relu=use_relu, always_select_tail=always_select_tail, fp8_indexer=fp8_indexer)
        _check_fused(q, k, weights, index_topk, pool_size, gate_score, ape, key_positions, cu_seqlens_kv, fp8_indexer)
        _check_mask(mask, k, bounded=not (varlen_starts is varlen_ends is cu_seqlens_kv is None))
        layout, position = _layout_of_bounds(varlen_starts, varlen_ends, cu_seqlens_kv, q.shape[0], k, pool_size)
        pool_key = compress_keys(k, gate_score, ape, layout)
        compared |= {"ape": form_of(ape), "always_select_tail": always_select_tail}
    select = partial(select_pools_sharded, budget=index_topk // pool_size, use_relu=use_relu, agreed=agreed)
    (part,) = RowPartition.contiguous(q.shape[0], ranks).slices(rank)
    own = slice(part.start, part.stop)
    selection = select(q[own], weights[own], pool_key, layout, position, query_shard_group=query_shard_group)
    return None, expand_selection(selection, layout, position, always_select_tail=always_select_tail)


def _layout_of_bounds(
    starts: Tensor | None, ends: Tensor | None, cu_seqlens: Tensor | None, rows: int, key_TBD: Tensor, pool_size: int
) -> tuple[PoolLayout, Tensor]:
    """The segments that the bounds of a call describe, and the token each row stands at, -1 for one that sees none."""
    (tokens, batch, _), device = key_TBD.shape, key_TBD.device
    if (starts is None) != (ends is None):
        missing = "varlen_starts" if starts is None else "varlen_ends"
        raise ValueError(f"{missing} is None beside the other bound; accepted are both or none")
    if cu_seqlens is not None:
        layout = PoolLayout.from_cu_seqlens(cu_seqlens, num_tokens=tokens, pool_size=pool_size, batch=batch)
    elif starts is None or ends is None:
        layout = PoolLayout.dense(tokens, pool_size=pool_size, batch=batch, device=device)
    if starts is None or ends is None:
        if rows != tokens:
            raise ValueError(f"q has {rows} rows and k {tokens}; accepted without varlen bounds are equal numbers")
        return layout, torch.arange(rows, device=device)
    for name, bound in (("varlen_starts", starts), ("varlen_ends", ends)):
        check_integer(name, bound, ndim=1)
        check_device(device, **{name: bound})
        if bound.shape[0] != rows:
            raise ValueError(f"{name} has {bound.shape[0]} values; accepted is one a row, {rows}")
    starts, ends = starts.long(), ends.long()
    inside = (starts >= 0) & (ends >= starts) & (ends <= tokens)
    _check_rows(inside, starts, ends, f"accepted are 0 <= start <= end <= {tokens}")
    seeing = ends > starts
    if cu_seqlens is None:
        segment_start, segment_of = starts[seeing].unique(return_inverse=True)
        segment_end = torch.zeros_like(segment_start).scatter_reduce_(0, segment_of, ends[seeing], "amax")
        moved = segment_start[1:][segment_end[:-1] > segment_start[1:]]
        if len(moved):
            raise ValueError(
                f"varlen_starts is {int(moved[0])} inside a document that begins before it; accepted is one start for "
                "all rows of a document"
            )
        if segment_start.numel() == 0:
            segment_start = segment_end = torch.zeros(1, dtype=torch.int64, device=device)
        bounds = (segment_start.expand(batch, -1), segment_end.expand(batch, -1))
        layout = PoolLayout.from_segments(*bounds, num_tokens=tokens, pool_size=pool_size)
    if cu_seqlens is not None:
        seeing &= starts < cu_seqlens[-1]
        document = torch.searchsorted(cu_seqlens.long(), starts, right=True) - 1
        fits = (cu_seqlens[document] == starts) & (ends <= cu_seqlens[(document + 1).clamp(max=len(cu_seqlens) - 1)])
        _check_rows(
            fits | ~seeing, starts, ends, "accepted are rows inside a document of cu_seqlens_kv, from its start"
        )
    return layout, torch.where(seeing, ends - 1, -1)


def _check_mask(mask: object, key_TBD: Tensor, *, bounded: bool) -> None:
    """Refuse every mask but the causal one; compared `_MASK_ROWS` rows at a time."""
    if mask is None:
        return
    accepted = "accepted are None and in a call without bounds the causal one"
    if bounded or not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, *FLOATING):
        raise ValueError(f"mask is {kind_of(mask)}{' beside bounds' * bounded}; {accepted}, bool or floating")
    tokens, batch, _ = key_TBD.shape
    shapes = [(tokens, tokens), *((samples, tokens, tokens) for samples in (1, batch))]
    shapes += [(samples, 1, tokens, tokens) for samples in (1, batch)]
    if tuple(mask.shape) not in shapes:
        raise ValueError(f"mask has shape {tuple(mask.shape)}; {accepted}, of {tokens} rows and keys, {batch} samples")
    check_device(key_TBD.device, mask=mask)
    key_T = torch.arange(tokens, device=mask.device)
    for start in range(0, tokens, _MASK_ROWS):
        rows = mask[..., start : start + _MASK_ROWS, :]
        hidden = key_T > key_T[start : start + _MASK_ROWS].unsqueeze(1)
        causal = hidden if mask.dtype == torch.bool else torch.zeros_like(rows).masked_fill_(hidden, -torch.inf)
        if not bool((rows == causal).all()):
            raise ValueError(f"mask is not causal in rows {start} ... {start + rows.shape[-2] - 1}; {accepted}")


def _check_rows(good: Tensor, starts: Tensor, ends: Tensor, accepted: str) -> None:
    if not bool(good.all()):
        row = int(good.logical_not().nonzero()[0])
        raise ValueError(
            f"varlen_starts is {int(starts[row])} and varlen_ends {int(ends[row])} in row {row}; {accepted}"
        )


def _check_fused(
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    index_topk: int,
    pool_size: int,
    gate_score: Tensor,
    ape: Tensor,
    key_positions: Tensor | None,
    cu_seqlens_kv: Tensor | None,
    fp8_indexer: bool,
) -> None:
    if fp8_indexer:
        raise ValueError("fp8_indexer is True; accepted is False: scores are fp32")
    check_positive("pool_size", pool_size)
    check_positive("index_topk", index_topk)
    if index_topk % pool_size:
        raise ValueError(f"index_topk is {index_topk}; accepted is a positive multiple of pool_size, {pool_size}")
    check_floating("q", q, (None, None, None, None))
    check_floating("k", k, (None, q.shape[1], q.shape[3]))
    check_floating("weights", weights, tuple(q.shape[:3]))
    check_floating("gate_score", gate_score, tuple(k.shape))
    check_floating("ape", ape, (pool_size, k.shape[2]))
    check_device(k.device, q=q, weights=weights, gate_score=gate_score, ape=ape)
    for name, optional in (("key_positions", key_positions), ("cu_seqlens_kv", cu_seqlens_kv)):
        if optional is not None:
            check_integer(name, optional, ndim=1)
            check_device(k.device, **{name: optional})
    if cu_seqlens_kv is not None:
        ascends = cu_seqlens_kv.numel() > 1 and bool(cu_seqlens_kv[0] == 0) and bool((cu_seqlens_kv.diff() >= 0).all())
        if not ascends or int(cu_seqlens_kv[-1]) > k.shape[0]:
            raise ValueError(
                f"cu_seqlens_kv is {cu_seqlens_kv.tolist()}; accepted are two or more ascending lengths from 0 to at "
                f"most {k.shape[0]}"
            )
    if key_positions is not None and not torch.equal(key_positions.long(), torch.arange(k.shape[0], device=k.device)):
        raise ValueError(f"key_positions is not 0 ... {k.shape[0] - 1}; accepted are None and exactly that")
