"""The k-pool lightning indexer's projections: what a rank's own rows contribute to the selection.

Letters of shapes: `mcore_dsa/__init__.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn
from torch.nn import functional as F

from mcore_dsa.megatron.backend import parameter_device, replicated_rng
from mcore_dsa.megatron.config import KPoolDSATransformerConfig
from mcore_dsa.precision import full_precision
from mcore_dsa.ranges import ranged
from mcore_dsa.source import Projections

# Rows widened to fp32 at a time for the head gates, 16 MiB at 4,096 channels.
_GATE_ROWS = 1024


class KPoolDSAIndexer(MegatronModule):
    """Projections of GLM-5.3-Flash's indexer, replicated over tensor parallelism and frozen.

    Replicated, because it emits a selection and not a partial sum: a rank with some of the heads would hold partial
    scores and pick other tokens, without any error. Frozen: no parameter takes a gradient or enters an optimizer.

    Source: transformers' `Glm5NextTextIndexer`. Parameters carry its names behind Megatron's `linear_` prefix.
    """

    def __init__(self, config: KPoolDSATransformerConfig, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        sizes = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim, config.dsa_indexer_kpool
        self.heads, self.head_dim, pool_size = (cast(int, size) for size in sizes)
        hidden, device = config.hidden_size, parameter_device(config)

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=config.params_dtype)

        with replicated_rng(config):
            self.linear_wq_b = linear(config.q_lora_rank, self.heads * self.head_dim)
            self.linear_wk = linear(hidden, self.head_dim)
            self.k_norm = nn.LayerNorm(
                self.head_dim,
                eps=cast(float, config.dsa_indexer_k_norm_epsilon),
                device=device,
                dtype=config.params_dtype,
            )
            self.linear_weights_proj = linear(hidden, self.heads)
            gate_DE = torch.empty(self.head_dim, hidden, device=device, dtype=config.params_dtype)
            self.index_kpool_compress_gate = nn.Parameter(gate_DE)
            ape_JD = torch.empty(pool_size, self.head_dim, device=device, dtype=torch.float32)
            self.index_kpool_compress_ape = nn.Parameter(ape_JD)
            if config.perform_initialization:
                for parameter in self.parameters():
                    if parameter.ndim == 2:
                        config.init_method(parameter)
        self.requires_grad_(False)

    @torch.no_grad()
    @ranged("projections")
    def forward(self, x_LBE: Tensor, qr_LBQ: Tensor) -> Projections:
        """Project rows of this rank; `qr_LBQ` is the *normalised* query residual, `q_layernorm(linear_q_down_proj(x))`.

        Returns: queries, keys and gates in the model's dtype; head weights from an fp32 product, times
        `heads**-0.5 * head_dim**-0.5`.
        """
        q_LBHD = self.linear_wq_b(qr_LBQ).unflatten(-1, (self.heads, self.head_dim))
        key_LBD = self.k_norm(self.linear_wk(x_LBE))
        gate_LBD = F.linear(x_LBE, self.index_kpool_compress_gate)
        weight_HE = self.linear_weights_proj.weight.float()
        with full_precision(x_LBE.device.type):
            weights_LBH = torch.cat([F.linear(rows.float(), weight_HE) for rows in x_LBE.split(_GATE_ROWS)])
        weights_LBH = weights_LBH * (self.heads**-0.5 * self.head_dim**-0.5)
        return Projections(q_LBHD, weights_LBH, key_LBD, gate_LBD, self.index_kpool_compress_ape)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> KPoolDSAIndexer:
        # Float16Module of megatron-core 0.19 casts every parameter; ape is added to fp32 logits and stays fp32.
        kept = self.index_kpool_compress_ape.data
        super()._apply(fn, recurse)
        moved = self.index_kpool_compress_ape.data
        if moved.dtype != torch.float32:
            fresh = torch.empty_like(moved, dtype=torch.float32)
            self.index_kpool_compress_ape.data = fresh if kept.is_meta else fresh.copy_(kept)
        return self
