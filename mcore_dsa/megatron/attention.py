"""The core attention that Megatron's `AbsorbedMLASelfAttention` calls: select pools, then attend to their tokens.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

import time
from typing import Any, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from mcore_dsa.attend import Kept, LatentShards, RowCut, attend
from mcore_dsa.backends import AttentionCall, SelectionCounters, Target, choose
from mcore_dsa.collectives import gather_rows, reduce_rows
from mcore_dsa.eager import uncompiled
from mcore_dsa.megatron import recompute
from mcore_dsa.megatron.agreement import Agreement
from mcore_dsa.megatron.backend import compute_device
from mcore_dsa.megatron.batch import Batch, plan_of
from mcore_dsa.megatron.config import KPoolDSATransformerConfig
from mcore_dsa.megatron.indexer import KPoolDSAIndexer
from mcore_dsa.plan import SelectionPlan
from mcore_dsa.selection_gather import SelectionGather
from mcore_dsa.settings import read_settings
from mcore_dsa.sharded import gather_of
from mcore_dsa.source import Scored, SelectionRequest, SelectionSource
from mcore_dsa.verified import Verified
from mcore_dsa.watch import Digests, Watch
from mcore_dsa.workspace import device_bytes


class KPoolDSAttention(MegatronModule):
    """k-pool DeepSeek Sparse Attention as a Megatron core attention, with the indexer's rows sharded over TP on demand.

    Attributes:
        settings: what the environment asked for when the module was built.
        source: where the selections of this rank's rows come from.
        counters: rows and pairs this rank scored, and rows of other ranks it verified.
        watch: compares what the ranks hold every so many forwards.
        recomputed: recomputations that found their first pass's selection, and those that selected again.
        indexer_seconds: host seconds spent in projections, exchange and selection.

    Building has no side effects (Megatron builds a core attention twice a layer and drops the first): the first forward
    of a module agrees its contract over the TP group, and so does a later one if on any rank something in it changed.

    Raises: ValueError for a setting that cannot be read (in one rank alone while building, else in the first forward on
    every rank), and for a mask that is not causal.
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
        self.layer_number = layer_number
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.tp_group = groups.tp
        self.cp_group = groups.cp if config.context_parallel_size > 1 else None
        device = compute_device()
        self.settings = read_settings(device_bytes=device_bytes(device))
        self.indexer = KPoolDSAIndexer(config, self.tp_group)
        target = Target.of(
            device,
            config.params_dtype,
            heads=self.indexer.heads,
            dim=self.indexer.head_dim,
            channels=config.kv_lora_rank,
            pool_size=config.dsa_indexer_kpool,
        )
        kernels = choose(self.settings.kernels.value, target)
        if self.tp_group.size() == 1 and self.cp_group is None:
            self.settings.raise_faults()
            if kernels.fault:
                raise ValueError(kernels.fault)
        self.backend = kernels.backend
        self.counters = SelectionCounters()
        scored = Scored(
            backend=self.backend,
            group=self.tp_group,
            context_group=self.cp_group,
            score_bytes=self.settings.score_bytes.value,
            use_relu=config.dsa_indexer_scoring_relu,
            counters=self.counters,
        )
        verify = self.settings.verify.value
        self.source: SelectionSource = Verified(scored, verify) if verify else scored
        self.watch = Watch(self.settings.drift_every.value, self.tp_group, self.cp_group)
        self.recomputed = {"found": 0, "selected again": 0}
        self.indexer_seconds = 0.0
        self._agreement = Agreement(config, self.settings, kernels, self.tp_group, self.cp_group)

    @uncompiled
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
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend every row of this rank's heads to the tokens that the indexer selects for it.

        Rows are those of this context-parallel rank: halves c and `2 * CP - 1 - c` of every document.

        Args:
            query: `[s, b, heads / TP, kv_lora_rank]`, packed `[t, heads / TP, kv_lora_rank]`, K up-projection absorbed.
            key: `[s, b, 1, kv_lora_rank]`, packed `[t, 1, kv_lora_rank]`, the latents, also the values.
            attention_mask: not read, as everywhere in Megatron under a causal `attn_mask_type`.
            x: `[s / TP, b, hidden]`, packed with b = 1; qr: `[s / TP, b, q_lora_rank]`, packed `[t / TP, q_lora_rank]`:
                this rank's own rows.
            up_v_weight: not read; Megatron applies the V up-projection to what is returned.
            packed_seq_params: documents of a packed sample, of whose rows beyond their own lengths nothing is read.

        Returns: `[s, b, heads / TP * kv_lora_rank]`, packed with b = 1.

        Raises: ValueError for what is called otherwise, and for documents that do not fit the rows.
        """
        try:
            self._check_call(value, attn_mask_type, position_ids, packed_seq_params)
            batch = Batch.of(query, key, x, qr, packed=packed_seq_params is not None, tp_size=self.tp_group.size())
            plan = plan_of(batch.query_SBHC, packed_seq_params, **self._plan_sizes())
        except (TypeError, ValueError) as error:
            self._agreement.refuse(error, query.device)
            raise
        started = time.perf_counter()
        selection_BSK, kept = self._select(batch, plan)
        self.indexer_seconds += time.perf_counter() - started
        return self._attend(batch, plan, selection_BSK, kept).flatten(2)

    def _attend(self, batch: Batch, plan: SelectionPlan, selection_BSK: Tensor, kept: Kept | None) -> Tensor:
        """`[s, b, heads / TP, kv_lora_rank]`, of a selection as `_select` gives it."""
        attend_bytes = self.settings.attend_bytes.value
        cut = RowCut.of(plan, batch.query_SBHC, self.tp_group, attend_bytes) if self._cuts_rows else None
        call = AttentionCall(
            plan.layout,
            plan.bounds if cut is None else plan.attended_own,
            softmax_scale=cast(float, self.softmax_scale),
            always_select_tail=cast(bool, self.config.dsa_indexer_kpool_always_select_tail),
            attend_bytes=attend_bytes,
        )
        return attend(
            batch.query_SBHC,
            batch.latent_SBC,
            selection_BSK,
            call,
            backend=self.backend,
            kept=kept,
            cut=cut,
            shards=self._latent_shards(plan),
        )

    @torch.no_grad()
    def _select(self, batch: Batch, plan: SelectionPlan) -> tuple[Tensor, Kept | None]:
        """int32 `[b, s, budget]`, of every row, and what backward keeps in its place; cut by rows, of own rows."""
        gather = None if self._cuts_rows else self._gather(plan)
        own_BOK, digests = self._own_selection(batch, plan, gather)
        whole_BSK = None if gather is None else gather.finish(own_BOK)
        if digests is not None:
            digests.compare(whole_BSK)
        if whole_BSK is None:
            return own_BOK, None
        return whole_BSK, Kept(own_BOK, lambda own_BOK: self._gather(plan).finish(own_BOK))

    def _own_selection(
        self, batch: Batch, plan: SelectionPlan, gather: SelectionGather | None
    ) -> tuple[Tensor, Digests | None]:
        """int32 `[b, o, budget]`, of the rows that this rank selects for; without a gather of those it attends.

        In a forward that the watch compares, with the digests so far.
        """
        budget = self.config.dsa_indexer_pool_budget
        rows = plan.own.rows if gather is not None else plan.attended_own.rows
        carrier = recompute.current()
        here = None if carrier is None else carrier.place(self)
        source = self.source if here is None else here.source(self.source)
        place = here if self._stores(plan) else None
        kept_BOK = None if place is None else place.take((plan.layout.batch, rows, budget))
        # Of all ranks, for in what follows they meet: one that has nothing kept needs the keys of the others.
        select = self._agreement.hold(
            batch.query_SBHC,
            self.indexer,
            self.softmax_scale,
            source=source.identity,
            documents=plan.documents,
            rows=batch.described,
            lacks=kept_BOK is None,
        )
        if place is not None and place.carrier.again:
            self.recomputed["selected again" if select else "found"] += 1
        digests = None
        if select:
            digests = self.watch.begin(self.layer_number, self.indexer.named_parameters())
            kept_BOK = source.own_rows(
                SelectionRequest(
                    self.layer_number,
                    plan,
                    budget,
                    lambda: self.indexer(batch.x_LBE.detach(), batch.qr_LBQ.detach()),
                    gather,
                    digests,
                )
            )
            if gather is None and plan.partition.is_replicated:
                (part,) = plan.attended.slices(plan.rank)
                kept_BOK = kept_BOK[:, part.start : part.stop].clone()
            if place is not None and not place.carrier.again:
                place.keep(kept_BOK)
        assert kept_BOK is not None
        return kept_BOK, digests

    def _gather(self, plan: SelectionPlan) -> SelectionGather:
        budget, overlap = self.config.dsa_indexer_pool_budget, self.settings.overlap.value
        return gather_of(plan, self.tp_group, budget=budget, overlap=overlap)

    @property
    def _cuts_rows(self) -> bool:
        return self.settings.attend_shard.value == "rows" and self.tp_group.size() > 1

    def _stores(self, plan: SelectionPlan) -> bool:
        """Whether selections are kept for recomputes: not where they could take too much."""
        config = self.config
        kept = plan.attended if self._cuts_rows else plan.partition
        rows = plan.layout.batch * kept.rows_per_rank
        most = recompute.held_bytes(
            rows * config.dsa_indexer_pool_budget * torch.int32.itemsize,
            layers=config.num_layers,
            stages=config.pipeline_model_parallel_size,
            chunks=config.virtual_pipeline_model_parallel_size or 1,
        )
        return self.settings.store.value and most <= self.settings.store_bytes.value

    def _plan_sizes(self) -> dict[str, Any]:
        return {
            "pool_size": self.config.dsa_indexer_kpool,
            "budget": self.config.dsa_indexer_pool_budget,
            "partition": self.settings.partition.value,
            "tp_rank": self.tp_group.rank(),
            "tp_size": self.tp_group.size(),
            "cp_rank": 0 if self.cp_group is None else self.cp_group.rank(),
            "cp_size": 1 if self.cp_group is None else self.cp_group.size(),
        }

    def _latent_shards(self, plan: SelectionPlan) -> LatentShards | None:
        """Latents come gathered over tensor parallelism, and cut over context parallelism."""
        group, order_T = self.cp_group, plan.key_order_T
        if order_T is None:
            return None
        return LatentShards(
            lambda latent_LBC: gather_rows(latent_LBC, group, agreed=True).index_select(0, order_T),
            lambda grad_TBC: reduce_rows(grad_TBC.index_select(0, plan.key_token_T), group, agreed=True),
        )

    def _check_call(
        self,
        value: None,
        attn_mask_type: AttnMaskType | None,
        position_ids: Tensor | None,
        packed: PackedSeqParams | None,
    ) -> None:
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        # Of a pack it says no more than the documents do; of a dense batch it would need a mask.
        causal = mask_type == AttnMaskType.causal or (packed and mask_type == AttnMaskType.padding_causal)
        if not causal:
            raise ValueError(
                f"attn_mask_type is {mask_type}; accepted are AttnMaskType.causal and of a pack padding_causal"
            )
        if position_ids is not None:
            raise ValueError("position_ids is given; accepted is None: rows stand where their documents say")
        if value is not None:
            raise ValueError(f"value is {type(value).__name__}; accepted is None: the latents are the values")
