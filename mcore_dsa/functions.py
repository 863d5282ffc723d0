"""The public functions over one device: arguments are checked here, the work is a backend's.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from mcore_dsa.attend import attend
from mcore_dsa.backends import AttentionCall, SelectionCounters, Target, resolve
from mcore_dsa.checks import (
    check_bool,
    check_device,
    check_floating,
    check_integer,
    check_kind,
    check_positive,
    check_savable,
    kind_of,
)
from mcore_dsa.eager import uncompiled
from mcore_dsa.hf_config import shown
from mcore_dsa.kpool import PoolLayout, check_layout, check_selection
from mcore_dsa.precision import full_precision
from mcore_dsa.workspace import bytes_allowed

MASKED_ATTENTION_KEYS = 12_288

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@uncompiled
@torch.no_grad()
def compress_keys(key_TBD: Tensor, gate_TBD: Tensor, ape_JD: Tensor, layout: PoolLayout) -> Tensor:
    """Compressed key of every pool: softmax over the pool's tokens, per channel, of `gate + ape`, times the keys.

    Args:
        key_TBD, gate_TBD: floating `[t, b, d]`, the normalised index keys and their compression gates.
        ape_JD: floating `[pool_size, d]`, learned offset of each place in a pool.

    Returns: `pool_key_PBD` `[num_pools, b, d]` in the dtype of the keys, accumulated in fp32; zeros in slots that hold
    no pool. Each value depends on its pool's own keys and gates and on `ape` alone, bit for bit on every device:
    only operations that IEEE 754 rounds exactly are used, `exp` included, in one written order.

    Source: transformers' `Glm5NextTextIndexer.get_pooled_states`.
    """
    check_layout(layout)
    check_floating("key_TBD", key_TBD, (layout.num_tokens, layout.batch, None))
    check_floating("gate_TBD", gate_TBD, tuple(key_TBD.shape))
    check_floating("ape_JD", ape_JD, (layout.pool_size, key_TBD.shape[-1]))
    check_device(layout.device, key_TBD=key_TBD, gate_TBD=gate_TBD, ape_JD=ape_JD)
    return resolve("auto", Target.of(layout.device, key_TBD.dtype, pool_size=layout.pool_size)).compress(
        key_TBD, gate_TBD, ape_JD, layout
    )


@uncompiled
@torch.no_grad()
def select_pools(
    q_SBHD: Tensor,
    weights_SBH: Tensor,
    pool_key_PBD: Tensor,
    layout: PoolLayout,
    position_S: Tensor | None = None,
    *,
    budget: int,
    score_bytes: int | None = None,
    use_relu: bool = True,
    counters: SelectionCounters | None = None,
) -> Tensor:
    """For every row the `budget` visible complete pools of its own segment with the greatest score.

    `score = sum_h weights_h * relu(q_h . pool_key)` in fp32. Equal scores go to the smaller pool id, -0.0 equals 0.0,
    NaN ranks below everything.

    Args:
        q_SBHD: floating `[s, b, heads, dim]`, index queries of any set of rows.
        weights_SBH: floating `[s, b, heads]`, signed head weights, already times `heads**-0.5 * dim**-0.5`.
        pool_key_PBD: floating `[layout.num_pools, b, dim]`, from `compress_keys`.
        position_S: integer `[s]`, the token each row stands at; None: rows are the tokens 0 ... s-1.
        budget: pools a row may select, `index_topk // index_kpool`.
        score_bytes: bytes of scores and scratch in flight at most, by default 256 MiB and on a GPU up to a sixteenth of
            its memory; 56 bytes a row say where rows stand beside them.
        counters: where to add up what was done.

    Returns: `selection_BSK` int32 `[b, s, budget]`, ids ascending, -1 in unused slots, every slot written.

    Raises: TypeError, ValueError for what does not fit; ValueError for a `score_bytes` below the smallest that works;
        RuntimeError where the device's matrix product cannot keep the contract.

    Source of the score: transformers' `Glm5NextTextIndexer.forward`.
    """
    check_layout(layout)
    if position_S is None:
        position_S = torch.arange(layout.num_tokens, device=layout.device)
    check_integer("position_S", position_S, ndim=1)
    check_scoring(q_SBHD, weights_SBH, pool_key_PBD, layout)
    if len(position_S) != len(q_SBHD):
        raise ValueError(f"position_S has {len(position_S)} values; accepted is one a row of q_SBHD, {len(q_SBHD)}")
    check_positive("budget", budget)
    check_kind(SelectionCounters, counters=counters)
    score_bytes = bytes_allowed("score_bytes", score_bytes, layout.device)
    check_bool(use_relu=use_relu)
    return resolve("auto", Target.of_scores(q_SBHD, pool_key_PBD)).select(
        q_SBHD,
        weights_SBH,
        pool_key_PBD,
        layout,
        layout.bounds(position_S),
        budget=budget,
        score_bytes=score_bytes,
        use_relu=use_relu,
        counters=SelectionCounters() if counters is None else counters,
    )


@uncompiled
def sparse_attention(
    q_SBHC: Tensor,
    kv_TBC: Tensor,
    selection_BSK: Tensor,
    layout: PoolLayout,
    position_S: Tensor,
    *,
    softmax_scale: float,
    always_select_tail: bool,
    attend_bytes: int | None = None,
) -> Tensor:
    """`softmax(scale * q . kv[tokens]) @ kv[tokens]` over the tokens of each row's selected pools and of its tail.

    Args:
        q_SBHC: floating `[s, b, heads, c]`, queries with the K up-projection absorbed.
        kv_TBC: floating `[t, b, c]`, the latent that all heads share as key and as value.
        selection_BSK: int32 `[b, s, budget]`, pool ids, ascending, -1 behind them.
        layout: the pools of `kv_TBC`.
        position_S: integer `[s]`, the token each row stands at.
        softmax_scale: factor of the logits.
        always_select_tail: whether a row attends its own incomplete pool too.
        attend_bytes: bytes, by default as for `select_pools`, that either pass may hold beyond inputs, outputs, one
            fp32 accumulator of the shape of kv, and what is known of the rows (`layout.bounds`, and which of them have
            equally many slots).

    Returns: `[s, b, heads, c]` in the dtype of the queries, differentiable once in q and kv. A row without tokens gives
    zeros and zero gradients. Products, softmax and sums run in fp32, or fp64 if an input is: a product of bf16 matrices
    on a CPU rounds its result, here the logits, to bf16. The gradient of a key adds what its rows contribute in row
    order, if rows of a document come in token order; else those that see fewer pools, in steps of powers of two, come
    first. A row takes slots for the pools that it sees, not for the whole budget. A kv that is not contiguous is copied
    once, outside the budget, and on a GPU so are queries and output gradients.

    Raises: TypeError or ValueError for an argument of another kind, a budget too small for one row of every sample, ids
    that are not ascending, an id that is not a visible complete pool of its row, and, where gradients are needed, an
    argument made in inference mode.
    """
    check_selection(selection_BSK, layout, position_S)
    check_attention(q_SBHC, kv_TBC, layout, position_S, softmax_scale, always_select_tail)
    attend_bytes = bytes_allowed("attend_bytes", attend_bytes, layout.device)
    if torch.is_grad_enabled() and (q_SBHC.requires_grad or kv_TBC.requires_grad):
        check_savable(
            q_SBHC=q_SBHC,
            kv_TBC=kv_TBC,
            selection_BSK=selection_BSK,
            layout=layout.pool_token_BP,
            position_S=position_S,
        )
    call = AttentionCall(layout, layout.bounds(position_S), float(softmax_scale), always_select_tail, attend_bytes)
    backend = resolve("auto", Target.of_attention(q_SBHC, kv_TBC, layout.pool_size))
    return attend(q_SBHC, kv_TBC.contiguous(), selection_BSK, call, backend=backend)


def masked_attention(q_SBHC: Tensor, kv_TBC: Tensor, token_BSW: Tensor, *, softmax_scale: float) -> Tensor:
    """The oracle of `sparse_attention`: dense logits under a mask, differentiated by autograd. For tests.

    Args:
        q_SBHC, kv_TBC, softmax_scale: as in `sparse_attention`.
        token_BSW: int32 or int64 `[b, s, width]`, token ids of each row in any order, -1 in unused slots.

    Returns: as `sparse_attention`.

    Raises: TypeError or ValueError for an argument of another kind, and ValueError above 12,288 keys.
    """
    dtype = _check_latents(q_SBHC, kv_TBC)
    _check_scale(softmax_scale)
    rows, (tokens, batch) = q_SBHC.shape[0], kv_TBC.shape[:2]
    if tokens > MASKED_ATTENTION_KEYS:
        raise ValueError(
            f"kv_TBC has {tokens} keys; accepted are at most {MASKED_ATTENTION_KEYS}: masked_attention is an oracle "
            "that holds rows x keys; sparse_attention has no such limit"
        )
    if not isinstance(token_BSW, Tensor) or token_BSW.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"token_BSW is {kind_of(token_BSW)}; accepted is a torch.int32 or torch.int64 tensor")
    if token_BSW.ndim != 3 or token_BSW.shape[:2] != (batch, rows) or q_SBHC.shape[1] != batch:
        raise ValueError(
            f"q_SBHC has shape {tuple(q_SBHC.shape)}, kv_TBC {tuple(kv_TBC.shape)} and token_BSW "
            f"{tuple(token_BSW.shape)}; accepted are [s, b, heads, c], [t, b, c] and [b, s, width]"
        )
    check_device(q_SBHC.device, kv_TBC=kv_TBC, token_BSW=token_BSW)
    if bool(((token_BSW < -1) | (token_BSW >= tokens)).any()):
        raise ValueError(f"token_BSW holds ids outside [-1, {tokens}); accepted are token ids and -1")
    # Column `tokens` is where unused slots go.
    seen_BST = torch.zeros(batch, rows, tokens + 1, dtype=torch.bool, device=q_SBHC.device)
    seen_BST.scatter_(2, torch.where(token_BSW < 0, tokens, token_BSW).long(), True)
    hidden_B1ST = ~seen_BST[..., :tokens].unsqueeze(1)
    with full_precision(q_SBHC.device.type):
        q_BHSC = q_SBHC.to(dtype).permute(1, 2, 0, 3)
        kv_B1TC = kv_TBC.to(dtype).transpose(0, 1).unsqueeze(1)
        # The lowest finite number: -inf in all of a row would make its softmax and its gradients NaN.
        logits_BHST = (float(softmax_scale) * (q_BHSC @ kv_B1TC.mT)).masked_fill(hidden_B1ST, torch.finfo(dtype).min)
        out_BHSC = logits_BHST.softmax(-1).masked_fill(hidden_B1ST, 0.0) @ kv_B1TC
    return out_BHSC.permute(2, 0, 1, 3).to(q_SBHC.dtype)


def check_scoring(
    q: Tensor,
    weights: Tensor,
    pool_key: Tensor,
    layout: PoolLayout,
    *,
    rows: int | None = None,
    names: tuple[str, str, str] = ("q_SBHD", "weights_SBH", "pool_key_PBD"),
) -> None:
    """Refuse queries, head weights and pool keys that do not fit the layout and each other, by their `names`."""
    q_name, weights_name, key_name = names
    check_floating(q_name, q, (rows, layout.batch, None, None))
    if 0 in q.shape[2:]:
        raise ValueError(f"{q_name} has shape {tuple(q.shape)}; accepted are at least one head and one channel")
    check_floating(weights_name, weights, tuple(q.shape[:3]))
    check_floating(key_name, pool_key, (layout.num_pools, layout.batch, q.shape[3]))
    check_device(layout.device, **{q_name: q, weights_name: weights, key_name: pool_key})


def _check_latents(q_SBHC: Tensor, kv_TBC: Tensor) -> torch.dtype:
    """Refuse anything but queries and latents that fit; return the dtype in which they are to be multiplied."""
    for name, tensor, ndim in (("q_SBHC", q_SBHC, 4), ("kv_TBC", kv_TBC, 3)):
        if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} is {kind_of(tensor)}; accepted is a tensor of {', '.join(map(str, _DTYPES))}")
        if tensor.ndim != ndim:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; accepted are {ndim} dimensions")
    if q_SBHC.shape[3] != kv_TBC.shape[2] or 0 in (q_SBHC.shape[2], q_SBHC.shape[3]):
        raise ValueError(
            f"q_SBHC has shape {tuple(q_SBHC.shape)} and kv_TBC {tuple(kv_TBC.shape)}; accepted are equal last "
            "dimensions, at least one channel and one head"
        )
    return torch.promote_types(torch.promote_types(q_SBHC.dtype, kv_TBC.dtype), torch.float32)


def check_attention(
    q_SBHC: Tensor,
    kv_TBC: Tensor,
    layout: PoolLayout,
    position_S: Tensor,
    softmax_scale: float,
    always_select_tail: bool,
) -> None:
    """Refuse what does not fit rows at `position_S`, a selection apart."""
    _check_latents(q_SBHC, kv_TBC)
    _check_scale(softmax_scale)
    check_bool(always_select_tail=always_select_tail)
    check_device(layout.device, q_SBHC=q_SBHC, kv_TBC=kv_TBC)
    rows, batch, tokens = position_S.shape[0], layout.batch, layout.num_tokens
    if q_SBHC.shape[:2] != (rows, batch):
        raise ValueError(f"q_SBHC has shape {tuple(q_SBHC.shape)}; accepted is [{rows}, {batch}, heads, channels]")
    if kv_TBC.shape[:2] != (tokens, batch):
        raise ValueError(f"kv_TBC has shape {tuple(kv_TBC.shape)}; accepted is [{tokens}, {batch}, channels]")


def _check_scale(softmax_scale: float) -> None:
    is_number = isinstance(softmax_scale, float | int) and not isinstance(softmax_scale, bool)
    # An integer may be too great for a float.
    if not is_number or not abs(softmax_scale) <= sys.float_info.max:
        raise ValueError(f"softmax_scale is {shown(softmax_scale)}; accepted is a finite number")
