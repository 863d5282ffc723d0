"""What an implementation of compression, selection and attention promises: one protocol, whatever it is written in.

Letters of shapes: `mcore_dsa/__init__.py`. Callers check the arguments (`functions.py`, `megatron/`): a backend may
rely on shapes, dtypes and devices. Row bounds come as device tensors, and need not be brought to the host.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mcore_dsa.kpool import PoolLayout, RowBounds


@dataclass
class SelectionCounters:
    """What selections did, summed over calls; plain integers on the host.

    `rows` that came in, `scored_rows` of them that see more pools than the budget, `scored_pairs` the visible pools of
    those, `tile_pairs` the (row, pool) products computed, padding of the tiles included; `verified_rows` of other ranks
    that this one selected again.
    """

    calls: int = 0
    rows: int = 0
    scored_rows: int = 0
    scored_pairs: int = 0
    tile_pairs: int = 0
    verified_rows: int = 0


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What both passes of attention know of their rows beside queries, latents and the selection.

    Attributes:
        layout: the pools of the latents. bounds: where each row stands, and what it sees.
        softmax_scale, always_select_tail: as `mcore_dsa.sparse_attention` takes them.
        attend_bytes: bytes that either pass may take.
    """

    layout: PoolLayout
    bounds: RowBounds
    softmax_scale: float
    always_select_tail: bool
    attend_bytes: int


class Backend(Protocol):
    """Compression, selection and attention, what they take, and what tells their bits apart."""

    @property
    def name(self) -> str:
        """As `MCORE_DSA_KERNELS` calls it."""

    def compress(self, key_TBD: Tensor, gate_TBD: Tensor, ape_JD: Tensor, layout: PoolLayout) -> Tensor:
        """As `mcore_dsa.compress_keys`."""

    def select(
        self,
        q_SBHD: Tensor,
        weights_SBH: Tensor,
        pool_key_PBD: Tensor,
        layout: PoolLayout,
        bounds: RowBounds,
        *,
        budget: int,
        score_bytes: int,
        use_relu: bool,
        counters: SelectionCounters,
    ) -> Tensor:
        """As `mcore_dsa.select_pools`: int32 `[b, s, budget]`."""

    def selection_faults(self, selection_BSK: Tensor, call: AttentionCall) -> Tensor:
        """bool `[2]` on the device: an id that its row cannot see; ids that do not ascend, or stand behind a -1."""

    def attend(
        self, q_SBHC: Tensor, kv_TBC: Tensor, selection_BSK: Tensor, call: AttentionCall, out_SBHC: Tensor
    ) -> tuple[Tensor, ...]:
        """Fill `out_SBHC` as `mcore_dsa.sparse_attention` does, and return what backward needs of it beside the inputs.

        A selection with faults reads nothing outside of the latents. The output of a row and head does not depend on
        the rows beside it nor, on CPUs, on the heads. `selection_BSK` may be strided.

        Raises: ValueError for less than `smallest_attend_bytes`.
        """

    def attend_backward(
        self,
        q_SBHC: Tensor,
        kv_TBC: Tensor,
        selection_BSK: Tensor,
        call: AttentionCall,
        saved: tuple[Tensor, ...],
        out_grad_SBHC: Tensor,
        q_grad_SBHC: Tensor | None,
        sum_XC: Tensor | None,
    ) -> None:
        """Fill `q_grad_SBHC`; add the gradients of latents to `sum_XC`.

        Args:
            saved: what `attend` returned of the same rows.
            sum_XC: fp32, or fp64 if an input is, `[t * b + 1, c]`: row `token * b + sample`; the last one is scratch.
        """

    def fingerprint(self, device: torch.device, heads: int, dim: int) -> str:
        """Digest of the bits of compression and scores; ranks whose bits agree, and only those, give the same.

        Raises: RuntimeError where the device cannot keep the selection contract.
        """

    def numerics(self, device: torch.device) -> Hashable:
        """What may move the fingerprint while the process runs, cheap to ask for."""

    def compress_bytes(self, pools: int, dim: int, pool_size: int) -> int:
        """Scratch of `compress` beside its result."""

    def select_bytes(
        self, device: torch.device, heads: int, dim: int, budget: int, pools: int, score_bytes: int
    ) -> int:
        """Scratch of `select` under `score_bytes`, for rows that see up to `pools` pools."""

    def smallest_score_bytes(self, device: torch.device, heads: int, dim: int, budget: int) -> int:
        """The least `score_bytes` that `select` accepts."""

    def smallest_attend_bytes(self, *, batch: int, heads: int, channels: int, dtype: torch.dtype, slots: int) -> int:
        """The least `attend_bytes` that `attend` accepts for rows of `slots` tokens."""

    def saved_row_bytes(self, *, heads: int, channels: int, elem_bytes: int) -> int:
        """Bytes of what `attend` returns for backward, of a row of one sample."""

    def attend_traffic(self, elem_bytes: int) -> tuple[int, int]:
        """Bytes that forward and backward move in a GPU's memory for a channel of each token that a row attends."""
