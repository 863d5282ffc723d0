"""The core attention that Megatron's `AbsorbedMLASelfAttention` calls: select pools, then attend to their tokens.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mcore_dsa.backends import Kept, SelectionCounters, resolve
from mcore_dsa.collectives import gather_selection
from mcore_dsa.megatron.agreement import Agreement
from mcore_dsa.megatron.config import KPoolDSATransformerConfig
from mcore_dsa.megatron.indexer import KPoolDSAIndexer
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.settings import read_settings
from mcore_dsa.sharded import gather_of
from mcore_dsa.source import Scored, SelectionRequest, SelectionSource


@functools.lru_cache(maxsize=4)
def _dense_plan(rows: int, **sizes: Any) -> SelectionPlan:
    """A function of sizes alone, for which every layer of a micro-batch asks; one of 524,288 rows holds 25 MB.

    Training, evaluation and a ragged last batch of each find theirs again. Built outside inference mode: its tensors
    could else not be saved for the backward pass of a training step that comes after.
    """
    with torch.inference_mode(False):
        return SelectionPlan.dense(rows, **sizes)


class KPoolDSAttention(MegatronModule):
    """k-pool DeepSeek Sparse Attention as a Megatron core attention, with the indexer's rows sharded over TP on demand.

    Attributes:
        settings: what the environment asked for when the module was built.
        source: where the selections of this rank's rows come from.
        counters: rows and pairs this rank scored.
        indexer_seconds: host seconds spent in projections, exchange and selection.

    Building has no side effects (Megatron builds a core attention twice a layer and drops the first): the first forward
    of a module agrees its contract over the TP group, and so does a later one if on any rank something in it changed.

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
        self.backend = resolve(self.settings.kernels.value)
        self.indexer = KPoolDSAIndexer(config, self.tp_group)
        self.counters = SelectionCounters()
        self.source: SelectionSource = Scored(
            backend=self.backend,
            group=self.tp_group,
            score_bytes=self.settings.score_bytes.value,
            use_relu=config.dsa_indexer_scoring_relu,
            counters=self.counters,
        )
        self.indexer_seconds = 0.0
        self._agreement = Agreement(config, self.settings, self.backend, self.indexer, softmax_scale, self.tp_group)

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
        self._check_call(query, key, value, attn_mask_type, position_ids, packed_seq_params)
        self._agreement.hold(query)
        plan = _dense_plan(
            query.shape[0],
            batch=query.shape[1],
            pool_size=self.config.dsa_indexer_kpool,
            budget=self.config.dsa_indexer_pool_budget,
            partition=self.settings.partition.value,
            tp_rank=self.tp_group.rank(),
            tp_size=self.tp_group.size(),
            device=query.device,
        )
        started = time.perf_counter()
        selection_BSK, kept = self._select(x, qr, plan)
        self.indexer_seconds += time.perf_counter() - started
        assert self.softmax_scale is not None
        context_SBHC = self.backend.attend(
            query,
            key.squeeze(2).contiguous(),
            selection_BSK,
            plan.layout,
            plan.bounds,
            softmax_scale=self.softmax_scale,
            always_select_tail=self.config.dsa_indexer_kpool_always_select_tail,
            attend_bytes=self.settings.attend_bytes.value,
            kept=kept,
        )
        return context_SBHC.flatten(2)

    @torch.no_grad()
    def _select(self, x_LBE: Tensor, qr_LBQ: Tensor, plan: SelectionPlan) -> tuple[Tensor, Kept]:
        """int32 `[b, s, budget]`, the selection of every row, and what backward keeps of it."""
        group, budget = self.tp_group, self.config.dsa_indexer_pool_budget
        gather = gather_of(plan, group, budget=budget, overlap=self.settings.overlap.value)
        selection_BOK = self.source.own_rows(
            SelectionRequest(
                self.layer_number, plan, budget, lambda: self.indexer(x_LBE.detach(), qr_LBQ.detach()), gather
            )
        )
        kept = Kept(selection_BOK, lambda own_BOK: gather_selection(own_BOK, plan.partition, group))
        return gather.finish(selection_BOK), kept

    def _check_call(
        self,
        query: Tensor,
        key: Tensor,
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
        if key.shape != (*query.shape[:2], 1, query.shape[3]):
            raise ValueError(
                f"key has shape {tuple(key.shape)}; accepted is {[*query.shape[:2], 1, query.shape[3]]}, one latent "
                "for each row of query"
            )
