"""What an implementation of compression, selection and attention promises: one protocol, whatever it is written in.

Letters of shapes: `mcore_dsa/__init__.py`. Callers check the arguments (`functions.py`, `megatron/`): a backend may
rely on shapes, dtypes and devices. Row bounds come as device tensors, and need not be brought to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mcore_dsa.kpool import PoolLayout, RowBounds


@dataclass
class SelectionCounters:
    """What selections did, summed over calls; plain integers on the host.

    `rows` that came in, `scored_rows` of them that see more pools than the budget, `scored_pairs` the visible pools of
    those, `tile_pairs` the (row, pool) products computed, padding of the tiles included.
    """

    calls: int = 0
    rows: int = 0
    scored_rows: int = 0
    scored_pairs: int = 0
    tile_pairs: int = 0


@dataclass(frozen=True, eq=False)
class Kept:
    """What backward keeps of a selection, and how it gets the whole back.

    Attributes:
        selection_BOK: int32, this rank's own rows.
        restore: from them the selection of every row, bit for bit; all ranks of the group enter it together.
    """

    selection_BOK: Tensor
    restore: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class LatentShards:
    """Latents of which each rank holds some: backward keeps this rank's own, and gets the others anew.

    Attributes:
        gather: from the own latents `[l, b, c]` those of all tokens `[t, b, c]`, bit for bit each time.
        reduce: from this rank's part of the gradient of all, `[t, b, c]`, the sum over ranks for its own latents.

    All ranks of the group enter both together.
    """

    gather: Callable[[Tensor], Tensor]
    reduce: Callable[[Tensor], Tensor]


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

    def attend(
        self,
        q_SBHC: Tensor,
        kv_TBC: Tensor,
        selection_BSK: Tensor,
        layout: PoolLayout,
        bounds: RowBounds,
        *,
        softmax_scale: float,
        always_select_tail: bool,
        attend_bytes: int,
        kept: Kept | None = None,
        shards: LatentShards | None = None,
    ) -> Tensor:
        """As `mcore_dsa.sparse_attention`; with `kept`, backward holds that in place of `selection_BSK`.

        With `shards`, `kv_TBC` are this rank's own latents; those of all tokens are held while a pass runs, beyond
        `attend_bytes`.
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
