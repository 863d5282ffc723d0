"""Megatron's model around this project's attention, as the configuration of a run describes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.module import Float16Module
from torch import nn

from mcore_dsa.megatron import (
    KPoolDSATransformerConfig,
    KPoolDSAttention,
    kpool_dsa_gpt_model,
    kpool_dsa_hybrid_model,
)
from mcore_dsa.train.config import JobConfig, ModelConfig


def transformer_config(config: JobConfig) -> KPoolDSATransformerConfig:
    """Megatron's configuration of the model.

    Raises: ValueError for sizes that the attention or Megatron refuses.
    """
    model, parallel, training = config.model, config.parallel, config.training
    dtype = torch.bfloat16 if training.dtype == "bf16" else torch.float32
    recompute: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    }
    return KPoolDSATransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_head_dim=model.qk_head_dim,
        v_head_dim=model.v_head_dim,
        dsa_indexer_n_heads=model.dsa_indexer_n_heads,
        dsa_indexer_head_dim=model.dsa_indexer_head_dim,
        dsa_indexer_topk=model.dsa_indexer_topk,
        dsa_indexer_kpool=model.dsa_indexer_kpool,
        dsa_indexer_kpool_always_select_tail=model.dsa_indexer_kpool_always_select_tail,
        layernorm_epsilon=model.layernorm_epsilon,
        init_method_std=model.init_method_std,
        hidden_dropout=model.hidden_dropout,
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        cp_comm_type="allgather" if parallel.context > 1 else None,
        expert_model_parallel_size=parallel.expert,
        # Sums over tokens, divided once by the tokens of all ranks; see `loop._loss`.
        calculate_per_token_loss=True,
        # Of two stages the one before and the one after are one peer, whose messages a batch pairs wrong.
        overlap_p2p_comm=parallel.virtual_pipeline is not None,
        batch_p2p_comm=parallel.virtual_pipeline is None,
        sequence_parallel=parallel.tensor > 1,
        params_dtype=dtype,
        # Two equal runs must be equal to the last bit: the embedding's gradient has a path with atomics.
        deterministic_mode=True,
        pipeline_dtype=dtype,
        bf16=training.dtype == "bf16",
        **recompute[training.recompute],
        **_experts(model),
    )


def _experts(model: ModelConfig) -> dict[str, Any]:
    if model.num_moe_experts is None:
        return {}
    return {
        "num_moe_experts": model.num_moe_experts,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_router_topk": model.moe_router_topk,
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        # The other one wants CUDA.
        "moe_token_dispatcher_type": "allgather",
    }


def build_chunks(config: JobConfig) -> list[DistributedDataParallel]:
    """This rank's model chunks, one without a virtual pipeline, ready for Megatron's schedules and optimizer.

    Megatron's groups have to exist and its random states to be seeded.
    """
    transformer = transformer_config(config)
    virtual = config.parallel.virtual_pipeline
    stages: Sequence[int | None] = [None] if virtual is None else range(virtual)
    data_parallel = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, check_for_nan_in_grad=True
    )
    chunks = []
    for stage in stages:
        module = _build_chunk(config, transformer, stage)
        if transformer.bf16:
            module = Float16Module(transformer, module)
        chunks.append(DistributedDataParallel(transformer, data_parallel, module))
    return chunks


def _build_chunk(config: JobConfig, transformer: KPoolDSATransformerConfig, stage: int | None) -> nn.Module:
    options = {
        "vocab_size": config.padded_vocab_size,
        "max_sequence_length": config.training.sequence_length,
        "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        "vp_stage": stage,
    }
    device = torch.cuda.current_device()
    if config.model.host == "gpt":
        module: nn.Module = kpool_dsa_gpt_model(transformer, **options)
    else:
        pattern = config.model.hybrid_layer_pattern
        assert pattern is not None
        module = kpool_dsa_hybrid_model(transformer, hybrid_layer_pattern=pattern, **options)
    return module.to(device)


def attentions(chunks: Sequence[nn.Module]) -> list[KPoolDSAttention]:
    """This project's attention modules on this rank."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(module, KPoolDSAttention)]
