"""Rotary tables under context parallelism: fails for NoPE on every device, and for any width without CUDA."""

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from mcore_dsa.patches.registry import Patch

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


PATCHES = (
    Patch(
        NAME,
        tuple(f"{holder}:{NAME}" for holder in HOLDERS),
        "qk_pos_emb_head_dim=0 with context parallelism reshapes a table of 0 elements; the index is moved to CUDA",
        _install,
        _skip,
    ),
)
