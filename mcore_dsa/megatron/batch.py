"""What Megatron calls a core attention with, dense or packed, in one shape; and the plan of its micro-batch.

Letters of shapes: `mcore_dsa/__init__.py`. Rows are those of this context-parallel rank.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from mcore_dsa.checks import check_integer
from mcore_dsa.plan import SelectionPlan

# The attribute of a PackedSeqParams under which its plan lives: as long as it, and found again by every recompute.
_PLAN = "mcore_dsa_plan"
_DOCUMENTS = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")


class Batch(NamedTuple):
    """A call's tensors with their batch dimension.

    Attributes:
        query_SBHC: absorbed queries of this rank's heads, every row of the context-parallel rank.
        latent_SBC: latents of the same rows.
        x_LBE: hidden rows of this rank, qr_LBQ: their normalised query residual.
    """

    query_SBHC: Tensor
    latent_SBC: Tensor
    x_LBE: Tensor
    qr_LBQ: Tensor

    @classmethod
    def of(cls, query: Tensor, key: Tensor, x: Tensor, qr: Tensor, *, packed: bool, tp_size: int) -> Batch:
        """From `[s, b, heads, c]`, `[s, b, 1, c]` and 3-D rows, packed from `[t, heads, c]`, `[t, 1, c]` and 2-D `qr`.

        Raises: ValueError for other shapes.
        """
        form = "[t, heads, kv_lora_rank]" if packed else "[s, b, heads, kv_lora_rank]"
        if query.ndim != (3 if packed else 4):
            raise ValueError(
                f"query has shape {tuple(query.shape)}; accepted is {form}, as AbsorbedMLASelfAttention passes it"
            )
        wanted = [*query.shape[:-2], 1, query.shape[-1]]
        if list(key.shape) != wanted:
            raise ValueError(f"key has shape {tuple(key.shape)}; accepted is {wanted}, one latent for each query row")
        if packed:
            query, qr = query.unsqueeze(1), qr.unsqueeze(1)
        else:
            key = key.squeeze(2)
        rows, batch = query.shape[:2]
        for name, of_rows in (("x", x), ("qr", qr)):
            if of_rows.shape[0] * tp_size != rows or of_rows.shape[1] != batch:
                raise ValueError(
                    f"{name} has {of_rows.shape[0]} rows of {of_rows.shape[1]} samples; accepted are this rank's of "
                    f"{rows} rows over {tp_size} tensor-parallel ranks, of {batch} samples"
                )
        return cls(query, key.contiguous(), x, qr)


@functools.lru_cache(maxsize=4)
def _dense_plan(rows: int, **sizes: Any) -> SelectionPlan:
    """A function of sizes alone, for which every layer of a micro-batch asks; one of 524,288 rows holds 25 MB.

    Training, evaluation and a ragged last batch of each find theirs again. Built outside inference mode: its tensors
    could else not be saved for the backward pass of a training step that comes after.
    """
    with torch.inference_mode(False):
        return SelectionPlan.dense(rows, **sizes)


def plan_of(query_SBHC: Tensor, packed: PackedSeqParams | None, **sizes: Any) -> SelectionPlan:
    """The plan of a micro-batch, built once for all of its layers and recomputes.

    Args:
        packed: the documents; None for one of `s * cp_size` tokens in each sample.
        sizes: as `SelectionPlan.packed` takes them.

    Raises: TypeError, ValueError for documents that are none or do not fit the rows, and what `SelectionPlan` refuses.
    """
    rows, batch = query_SBHC.shape[:2]
    if packed is None:
        return _dense_plan(rows, batch=batch, device=query_SBHC.device, **sizes)
    documents = (packed.cu_seqlens_q, packed.cu_seqlens_kv, packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded)
    for name, lengths in zip(_DOCUMENTS, documents, strict=True):
        if lengths is not None:
            check_integer(f"packed_seq_params.{name}", lengths, ndim=1)
    key = tuple(sizes.items()), rows, tuple(map(_version, documents))
    kept = vars(packed).get(_PLAN)
    # With the tensors themselves: others may come to stand at their addresses.
    if kept is not None and kept[0] == key and all(old is new for old, new in zip(kept[1], documents, strict=True)):
        plan: SelectionPlan = kept[2]
        return plan
    with torch.inference_mode(False):
        plan = _packed_plan(packed, rows, **sizes)
    vars(packed)[_PLAN] = key, documents, plan
    return plan


def _packed_plan(packed: PackedSeqParams, rows: int, **sizes: Any) -> SelectionPlan:
    if packed.qkv_format != "thd":
        raise ValueError(f"packed_seq_params.qkv_format is {packed.qkv_format!r}; accepted is 'thd'")
    if packed.local_cp_size is not None:
        raise ValueError(f"packed_seq_params.local_cp_size is {packed.local_cp_size}; accepted is None")
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        if getattr(packed, name) is None:
            raise ValueError(f"packed_seq_params.{name} is None; accepted is the longest document's length")
    lengths = _documents(packed, "cu_seqlens")
    if lengths is None:
        raise ValueError("packed_seq_params.cu_seqlens_q is None; accepted are cumulative lengths of the documents")
    padded = _documents(packed, "cu_seqlens", "_padded")
    places, tokens = lengths if padded is None else padded, rows * sizes["cp_size"]
    # Before a plan is made of so many.
    if len(places) and (last := int(places[-1])) != tokens:
        raise ValueError(
            f"the last padded cumulative length is {last}; accepted is the number of tokens, {tokens}: padding behind "
            "the last document belongs to its padded length"
        )
    return SelectionPlan.packed(lengths, padded, **sizes)


def _documents(packed: PackedSeqParams, name: str, suffix: str = "") -> Tensor | None:
    """The lengths of queries, which those of keys may not differ from, without what a loader fills up with -1."""
    of_query, of_key = (getattr(packed, f"{name}_{kind}{suffix}") for kind in ("q", "kv"))
    if of_query is None and of_key is None:
        return None
    if of_query is None or of_key is None or not torch.equal(of_query, of_key):
        raise ValueError(f"packed_seq_params.{name}_q{suffix} and {name}_kv{suffix} differ; accepted are equal ones")
    lengths: Tensor = of_query.detach()
    sentinels = int((lengths == -1).flip(0).cumprod(0).sum())
    return lengths[: len(lengths) - sentinels]


def _version(tensor: Tensor | None) -> Hashable:
    """What tells that a tensor was written to: on the host its values, for no version sees a write through NumPy."""
    if tensor is None or tensor.is_cpu:
        return None if tensor is None else tuple(tensor.flatten().tolist())
    return None if tensor.is_inference() else tensor._version
