"""Rotary tables under context parallelism, for packs and of width 0.

Fails for NoPE under context parallelism on every device, and for any width without CUDA; costs a NoPE pack a host
synchronisation or more a document and layer; ends a pack without `max_seqlen` in a TypeError about None.
"""

import functools
import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import torch
from mcore_dsa.patches.registry import Patch

ABSORBED_MLA = "megatron.core.transformer.experimental_attention_variant.absorbed_mla"
EMBEDDINGS = "megatron.core.models.common.embeddings"
NAME = "get_pos_emb_on_this_cp_rank"
# Every module that holds the function under its own name.
HOLDERS = tuple(f"{EMBEDDINGS}.{m}" for m in ("rope_utils", "rotary_pos_embedding", "yarn_rotary_pos_embedding"))


def rows_of_cp_rank(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """The rows of a position table that this context-parallel rank owns: chunks r and `2 * cp - 1 - r` of `2 * cp`.

    Same values as Megatron's function; the chunk length is computed and not left to `view(-1)`, which has no answer
    for an empty table, and the index goes through no pinned memory.
    """
    if cp_group is None:
        raise ValueError(
            "cp_group is None; accepted is a context-parallel process group, to choose the rows of its rank"
        )
    chunks = 2 * cp_group.size()
    rows = pos_emb.shape[seq_dim]
    if rows % chunks:
        raise ValueError(
            f"the length of pos_emb on dim {seq_dim} is {rows}; accepted is a multiple of 2 * cp, {chunks}"
        )
    chunk = rows // chunks
    first = cp_group.rank() * chunk
    mirrored = rows - first - chunk
    return torch.cat((pos_emb.narrow(seq_dim, first, chunk), pos_emb.narrow(seq_dim, mirrored, chunk)), dim=seq_dim)


def _skip() -> str | None:
    current = getattr(importlib.import_module(HOLDERS[0]), NAME)
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    try:
        device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
        for width in (0, 2):
            table = torch.arange(8 * width, device=device).view(8, 1, 1, width)
            if not torch.equal(current(table, 0, group), table[[0, 1, 6, 7]]):
                return None
    except (AssertionError, RuntimeError):  # torch's refusal of CUDA, and of a view of no elements
        return None
    return "mended upstream: cuts tables of width 0 and 2 right on this device"


def _install() -> None:
    for holder in HOLDERS:
        setattr(importlib.import_module(holder), NAME, rows_of_cp_rank)


def _install_early_return() -> None:
    absorbed_mla = importlib.import_module(ABSORBED_MLA)
    apply = absorbed_mla.apply_rotary_pos_emb

    @functools.wraps(apply)
    def apply_rotary_pos_emb(t: torch.Tensor, *arguments: Any, **keywords: Any) -> torch.Tensor:
        rotated: torch.Tensor = apply(t, *arguments, **keywords) if t.shape[-1] else t
        return rotated

    vars(absorbed_mla).update(apply_rotary_pos_emb=apply_rotary_pos_emb)


def _install_refusal() -> None:
    rotary = importlib.import_module(HOLDERS[1]).RotaryEmbedding
    of_length = rotary.get_rotary_seq_len

    @functools.wraps(of_length)
    def get_rotary_seq_len(*arguments: Any, **keywords: Any) -> int:
        packed = inspect.signature(of_length).bind(*arguments, **keywords).arguments.get("packed_seq_params")
        for name in ("max_seqlen_q", "max_seqlen_kv") if packed is not None else ():
            if getattr(packed, name) is None:
                raise ValueError(f"packed_seq_params.{name} is None; accepted is the longest document's length")
        length: int = of_length(*arguments, **keywords)
        return length

    rotary.get_rotary_seq_len = get_rotary_seq_len


PATCHES = (
    Patch(
        "absorbed_mla.apply_rotary_pos_emb",
        (f"{ABSORBED_MLA}:apply_rotary_pos_emb",),
        "splits the rows of a pack by its lengths, which it brings to the host, to rotate no channel",
        _install_early_return,
    ),
    Patch(
        "RotaryEmbedding.get_rotary_seq_len",
        (f"{HOLDERS[1]}:RotaryEmbedding.get_rotary_seq_len",),
        "compares the max_seqlen of a pack, and where there is none None",
        _install_refusal,
    ),
    Patch(
        NAME,
        tuple(f"{holder}:{NAME}" for holder in HOLDERS),
        "qk_pos_emb_head_dim=0 with context parallelism reshapes a table of 0 elements; the index is moved to CUDA",
        _install,
        _skip,
    ),
)
