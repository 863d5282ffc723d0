"""A small stock-Megatron model and the shortest training loop around it, for tests that run inside ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

VOCAB = 64
ROWS = 32
BATCH = 2


def config(**overrides: Any) -> Any:
    """A two-layer MLA model with Megatron's own DSA; it selects half of the rows, so that tokens are dropped."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    tp = overrides.get("tensor_model_parallel_size", 1)
    cp = overrides.get("context_parallel_size", 1)
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 96,
        "num_attention_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 0,
        "v_head_dim": 16,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 8,
        "dsa_indexer_head_dim": 16,
        "dsa_indexer_topk": ROWS // 2,
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "rope_type": "rope",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "use_cpu_initialization": True,
        "sequence_parallel": tp > 1,
        "pipeline_dtype": torch.float32,
        "cp_comm_type": "allgather" if cp > 1 else None,
    }
    return MLATransformerConfig(**{**values, **overrides})


def gpt(cfg: Any) -> Any:
    """A GPTModel with tied embeddings, this rank's pipeline stage of it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_layer_with_experimental_attention_variant_spec as layer_specs,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from mcore_dsa.megatron.backend import default_backend

    backend = default_backend(cfg)
    first = get_transformer_layer_offset(cfg)
    specs = layer_specs(cfg, backend=backend)[first : first + get_num_layers_to_build(cfg)]
    return GPTModel(
        cfg,
        TransformerBlockSubmodules(layer_specs=specs, layer_norm=backend.layer_norm(rms_norm=True)),
        VOCAB,
        ROWS,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="none",
    )


def tokens(step: int) -> torch.Tensor:
    """``[BATCH, ROWS + 1]`` token ids that depend on the step and the data-parallel rank."""
    from megatron.core import parallel_state

    generator = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
    # Squared, so that some tokens are frequent and a few steps of training lower the loss.
    uniform = torch.rand(BATCH, ROWS + 1, generator=generator)
    return (uniform.pow(4) * VOCAB).long()


class Trainer:
    """Megatron's DistributedDataParallel, distributed optimizer and schedules around one model."""

    def __init__(self, model: Any) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        self.config = model.config
        self.model = DistributedDataParallel(
            self.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
        )
        self.model.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=1e-2, clip_grad=1.0, use_distributed_optimizer=True, log_num_zeros_in_grad=True
            ),
            [self.model],
        )
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss

    def step(self, step: int) -> tuple[float, float]:
        """One optimizer step on ``tokens(step)``; the loss (nan before the last pipeline stage) and gradient norm."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter([tokens(step)]),
            model=[self.model],
            num_microbatches=1,
            seq_length=ROWS,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        succeeded, norm, zeros = self.optimizer.step()
        assert succeeded
        assert zeros is not None
        return (float(losses[0]["loss"]) if losses else float("nan")), float(norm)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}

    def save(self, folder: str, sharding: str) -> None:
        from megatron.core import dist_checkpointing

        dist_checkpointing.save(self._sharded(sharding, is_loading=False), folder)

    def load(self, folder: str, sharding: str) -> None:
        from megatron.core import dist_checkpointing

        state = dist_checkpointing.load(self._sharded(sharding, is_loading=True), folder)
        self.model.module.load_state_dict(state["model"], strict=True)
        self.optimizer.load_state_dict(state["optimizer"])

    def _sharded(self, sharding: str, *, is_loading: bool) -> dict[str, Any]:
        from megatron.core import parallel_state

        metadata = {
            "distrib_optim_sharding_type": sharding,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = self.model.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}


def own_rows(ids: torch.Tensor) -> torch.Tensor:
    """The columns of this context-parallel rank: chunks r and ``2 * cp - 1 - r``, Megatron's order."""
    from megatron.core import parallel_state

    cp = parallel_state.get_context_parallel_world_size()
    if cp == 1:
        return ids
    chunks = ids.chunk(2 * cp, dim=1)
    rank = parallel_state.get_context_parallel_rank()
    return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]), dim=1)


def _forward(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    ids = next(batches).to(next(model.parameters()).device)
    return model(own_rows(ids[:, :-1]), None, None, labels=own_rows(ids[:, 1:])), _mean_loss


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = losses.float().mean()
    # A copy: the schedule scales what it backpropagates in place.
    return mean, {"loss": mean.detach().clone()}
