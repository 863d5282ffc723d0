"""The core attention that Megatron's `AbsorbedMLASelfAttention` calls: select pools, then attend to their tokens.

Shapes by suffix: S rows of the sequence, L rows of this rank under sequence parallelism, B batch, H attention heads of
this rank, C latent channels, D index channels, K selected pools a row.
"""

from __future__ import annotations

import logging
import time
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mcore_dsa import __version__
from mcore_dsa.attend import sparse_attention
from mcore_dsa.backends import SelectionCounters
from mcore_dsa.backends.torch.select import smallest_score_bytes
from mcore_dsa.collectives import agree, exchange_rows, gather_rows
from mcore_dsa.kpool import PoolLayout, compress_keys, key_fingerprint
from mcore_dsa.megatron.config import KPoolDSATransformerConfig
from mcore_dsa.megatron.indexer import KPoolDSAIndexer
from mcore_dsa.rows import partition_rows
from mcore_dsa.scoring import tile_fingerprint, tile_for
from mcore_dsa.settings import PARTITION_VARIABLE, SCORE_BYTES_VARIABLE, read_settings
from mcore_dsa.sharded import select_pools_sharded

_log = logging.getLogger(__name__)


class KPoolDSAttention(MegatronModule):
    """k-pool DeepSeek Sparse Attention as a Megatron core attention, with the indexer's rows sharded over TP on demand.

    Attributes:
        settings: what the environment asked for when the module was built.
        selections_obtained: selections since it was built; a forward that does not obtain exactly one raises.
        counters: rows and pairs this rank scored.
        indexer_seconds: host seconds spent in projections, exchange and selection.

    Building has no side effects (Megatron builds a core attention twice a layer and drops the first): the first forward
    of a module agrees its settings over the TP group.

    Raises: ValueError for a setting that cannot be read (at TP 1 while building, else in the first forward on every
    rank), for context parallelism, and for a mask that is not causal.
    """

    def __init__(
        self,
        config: KPoolDSATransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str = "self",
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if not isinstance(config, KPoolDSATransformerConfig):
            raise TypeError(f"config is a {type(config).__name__}; accepted is a KPoolDSATransformerConfig")
        if attention_type != "self":
            raise ValueError(f"attention_type is {attention_type!r}; accepted is 'self'")
        groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
        if config.context_parallel_size > 1:
            raise ValueError(f"context_parallel_size is {config.context_parallel_size}; accepted is 1")
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.tp_group = groups.tp
        self.settings = read_settings()
        if self.tp_group.size() == 1:
            self.settings.raise_faults()
        self.indexer = KPoolDSAIndexer(config, self.tp_group)
        self.selections_obtained = 0
        self.counters = SelectionCounters()
        self.indexer_seconds = 0.0
        self._agreed = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: None = None,
        attention_mask: Tensor | None = None,
        *,
        x: Tensor,
        qr: Tensor,
        up_v_weight: Tensor | None = None,
        position_ids: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Attend every row of this rank's heads to the tokens that the indexer selects for it.

        Args:
            query: `[s, b, heads / TP, kv_lora_rank]`, K up-projection absorbed.
            key: `[s, b, 1, kv_lora_rank]`, the latents, also the values.
            attention_mask: not read, as everywhere in Megatron under a causal `attn_mask_type`.
            x: `[s / TP, b, hidden]`, qr: `[s / TP, b, q_lora_rank]`, this rank's own rows.
            up_v_weight: not read; Megatron applies the V up-projection to what is returned.

        Returns: `[s, b, heads / TP * kv_lora_rank]`.
        """
        self._check_call(query, value, attn_mask_type, position_ids, packed_seq_params)
        rows, batch = query.shape[:2]
        layout = PoolLayout.dense(rows, pool_size=self.config.dsa_indexer_kpool, batch=batch, device=query.device)
        position_S = torch.arange(rows, device=query.device)
        obtained = self.selections_obtained
        started = time.perf_counter()
        selection_BSK: Tensor = self._obtain_selection(x, qr, layout, position_S)
        self.indexer_seconds += time.perf_counter() - started
        if self.selections_obtained != obtained + 1:
            raise RuntimeError(
                f"layer {self.layer_number} obtained {self.selections_obtained - obtained} pooled selections in one "
                "forward; exactly one is right"
            )
        assert self.softmax_scale is not None
        context_SBHC: Tensor = sparse_attention(
            query,
            key.squeeze(2),
            selection_BSK,
            layout,
            position_S,
            softmax_scale=self.softmax_scale,
            always_select_tail=self.config.dsa_indexer_kpool_always_select_tail,
            attend_bytes=self.settings.attend_bytes.value,
        )
        return context_SBHC.flatten(2)

    @torch.no_grad()
    def _obtain_selection(self, x_LBC: Tensor, qr_LBL: Tensor, layout: PoolLayout, position_S: Tensor) -> Tensor:
        if not self._agreed:
            self._agree(layout.device)
        group = self.tp_group
        q, weights, key_LBD, gate_LBD = self.indexer(x_LBC.detach(), qr_LBL.detach())
        key_SBD, gate_SBD = gather_rows(torch.cat([key_LBD, gate_LBD], dim=-1), group).chunk(2, dim=-1)
        kind, budget = self.settings.partition.value, self.config.dsa_indexer_pool_budget
        if kind is None:
            partition = None
            q, weights = gather_rows(q, group), gather_rows(weights, group)
        else:
            rows, pool_size = position_S.shape[0], layout.pool_size
            partition = partition_rows(kind, rows, group.size(), [rows], pool_size=pool_size, budget=budget)
            q, weights = exchange_rows([q, weights], partition, group)
        pool_key_PBD = compress_keys(key_SBD, gate_SBD, self.indexer.index_kpool_compress_ape, layout)
        selection_BSK: Tensor = select_pools_sharded(
            q,
            weights,
            pool_key_PBD,
            layout,
            position_S,
            budget=budget,
            query_shard_group=None if kind is None else group,
            partition=partition,
            overlap=self.settings.overlap.value,
            score_bytes=self.settings.score_bytes.value,
            counters=self.counters,
        )
        self.selections_obtained += 1
        return selection_BSK

    def _agree(self, device: torch.device) -> None:
        """Hold the settings, the shape and the arithmetic of the selection against the other ranks', once a module."""
        heads, dim = self.indexer.heads, self.indexer.head_dim
        config, faults = self.config, list(self.settings.faults)
        given = self.settings.score_bytes.value
        least = smallest_score_bytes(device, heads, dim, config.dsa_indexer_pool_budget)
        if given < least:
            faults.append(f"{SCORE_BYTES_VARIABLE} is {given}; accepted for this geometry is {least} or more")
        try:
            bits = f"{tile_fingerprint(device, heads, dim):08x}"
        except RuntimeError as error:
            bits = "unusable"
            faults.append(str(error))
        newly = agree(
            {
                **self.settings.describe(),
                "mcore_dsa": __version__,
                "indexer": f"{heads} x {dim}, top {config.dsa_indexer_topk}, pools of {config.dsa_indexer_kpool}",
                "scores": f"{device.type}, {tile_for(device, heads)}, bits {bits}",
                "pool keys": f"bits {key_fingerprint(device, dim):08x}",
            },
            faults,
            self.tp_group,
        )
        self._agreed = True
        # Every tensor-parallel group agrees; what the first of them says holds for all.
        if newly and torch.distributed.get_rank() == 0:
            self._log_settings()

    def _log_settings(self) -> None:
        size, partition = self.tp_group.size(), self.settings.partition
        ranks = torch.distributed.get_process_group_ranks(self.tp_group)
        if partition.value is None:
            done = "every rank scores every row"
        elif size == 1:
            _log.warning(
                "%s has no effect in a tensor-parallel group of one (%s)", PARTITION_VARIABLE, partition.reason
            )
            done = "the one rank scores every row"
        else:
            done = f"each rank scores its {partition.value} shard of the rows"
        _log.info("k-pool DSA over tensor-parallel ranks %s: %s (%s)", ranks, done, partition.reason)

    def _check_call(
        self,
        query: Tensor,
        value: None,
        attn_mask_type: AttnMaskType | None,
        position_ids: Tensor | None,
        packed: Any,
    ) -> None:
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if mask_type != AttnMaskType.causal:
            raise ValueError(f"attn_mask_type is {mask_type}; accepted is AttnMaskType.causal")
        if position_ids is not None:
            raise ValueError("position_ids is given; accepted is None: rows stand at tokens 0 ... s-1")
        if packed is not None:
            raise ValueError("packed_seq_params is given; accepted is None: packed documents are not supported here")
        if value is not None or query.ndim != 4:
            raise ValueError(
                f"query has shape {tuple(query.shape)} and value is {type(value).__name__}; accepted are "
                "[s, b, heads, kv_lora_rank] and None, as AbsorbedMLASelfAttention passes them"
            )
