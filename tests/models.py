"""Small models, of k-pool DSA and of stock Megatron, and the shortest training loop around them, for tests in ranks.

Heads, rows, vocabulary and FFN width divide by 2, 3 and 4. Rows are six times `index_topk`, so that most rows drop
tokens, and index heads are eight, so that no score is tied by accident.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_layer_with_experimental_attention_variant_spec as stock_layer_specs,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from mcore_dsa.megatron import (
    KPoolDSATransformerConfig,
    KPoolDSAttention,
    kpool_dsa_gpt_model,
    kpool_dsa_hybrid_model,
)
from mcore_dsa.megatron.backend import default_backend
from mcore_dsa.settings import PARTITION_VARIABLE

VOCAB = 96
ROWS = 96
BATCH = 2
POOL = 4
TOPK = 16
ON = {PARTITION_VARIABLE: "1"}
OFF = {PARTITION_VARIABLE: "0"}

SIZES: Mapping[str, Any] = {
    "num_layers": 2,
    "hidden_size": 48,
    "ffn_hidden_size": 96,
    "num_attention_heads": 12,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "v_head_dim": 8,
    "dsa_indexer_n_heads": 8,
    "dsa_indexer_head_dim": 16,
    "dsa_indexer_topk": TOPK,
    "dsa_indexer_kpool": POOL,
    "dsa_indexer_kpool_always_select_tail": True,
}


ON_ANY_DEVICE: Mapping[str, Any] = {
    "use_cpu_initialization": True,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "pipeline_dtype": torch.float32,
}


def config(**overrides: Any) -> KPoolDSATransformerConfig:
    """The model's configuration; inside ranks with the parallel sizes of Megatron's groups."""
    tp = pp = 1
    if parallel_state.model_parallel_is_initialized():
        tp = parallel_state.get_tensor_model_parallel_world_size()
        pp = parallel_state.get_pipeline_model_parallel_world_size()
    sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "sequence_parallel": tp > 1}
    # Wide enough for selections to differ from row to row and to move within ten steps.
    return KPoolDSATransformerConfig(**{**SIZES, **sizes, **ON_ANY_DEVICE, "init_method_std": 0.1, **overrides})


def stock_config(**overrides: Any) -> MLATransformerConfig:
    """A model of these sizes with Megatron's own DSA, which selects tokens."""
    tp, cp = overrides.get("tensor_model_parallel_size", 1), overrides.get("context_parallel_size", 1)
    values: dict[str, Any] = {
        **{name: value for name, value in SIZES.items() if not name.startswith("dsa_indexer_kpool")},
        **ON_ANY_DEVICE,
        "qk_pos_emb_head_dim": 0,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_rotate_activation": False,
        "dsa_indexer_k_norm_epsilon": 1e-6,
        "normalization": "RMSNorm",
        "qk_layernorm": True,
        "rope_type": "rope",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "sequence_parallel": tp > 1,
        "cp_comm_type": "allgather" if cp > 1 else None,
    }
    return MLATransformerConfig(**{**values, **overrides})


def gpt(cfg: KPoolDSATransformerConfig, **arguments: Any) -> Any:
    """On the rank's device, which is the CPU under the patches for machines without CUDA."""
    model = kpool_dsa_gpt_model(cfg, vocab_size=VOCAB, max_sequence_length=ROWS, **_ends(), **arguments)
    return model.to(torch.cuda.current_device())


def hybrid(cfg: KPoolDSATransformerConfig, pattern: str = "D-D-") -> Any:
    """`cfg.num_layers` is the number of letters in the pattern."""
    model = kpool_dsa_hybrid_model(
        cfg, vocab_size=VOCAB, max_sequence_length=ROWS, hybrid_layer_pattern=pattern, **_ends()
    )
    return model.to(torch.cuda.current_device())


def stock_gpt(cfg: MLATransformerConfig) -> GPTModel:
    """This rank's pipeline stage of Megatron's own model, embeddings tied."""
    backend = default_backend(cfg)
    first = get_transformer_layer_offset(cfg)
    specs = stock_layer_specs(cfg, backend=backend)[first : first + get_num_layers_to_build(cfg)]
    block = TransformerBlockSubmodules(layer_specs=specs, layer_norm=backend.layer_norm(rms_norm=True))
    return GPTModel(
        cfg,
        block,
        VOCAB,
        ROWS,
        share_embeddings_and_output_weights=True,
        position_embedding_type="none",
        **_ends(),
    )


def _ends() -> dict[str, bool]:
    return {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }


def attentions(model: torch.nn.Module) -> list[KPoolDSAttention]:
    return [module for module in model.modules() if isinstance(module, KPoolDSAttention)]


def tokens(step: int = 0) -> torch.Tensor:
    """`[BATCH, ROWS + 1]` ids that depend on the step and on the data-parallel rank; some are frequent."""
    generator = torch.Generator().manual_seed(1000 * step + parallel_state.get_data_parallel_rank())
    ids = (torch.rand(BATCH, ROWS + 1, generator=generator).pow(4) * VOCAB).long()
    return ids.to(torch.cuda.current_device())


@contextlib.contextmanager
def taken_selections() -> Iterator[list[torch.Tensor]]:
    """The selections obtained while the context is open, in order."""
    taken: list[torch.Tensor] = []
    original = KPoolDSAttention._select

    def select(*args: Any) -> Any:
        selection, kept = original(*args)
        taken.append(selection)
        return selection, kept

    KPoolDSAttention._select = select
    try:
        yield taken
    finally:
        KPoolDSAttention._select = original


class Trainer:
    """Megatron's DistributedDataParallel, distributed optimizer and schedule around one model."""

    def __init__(self, model: Any, lr: float = 1e-2) -> None:
        self.bare, cfg = model, model.config
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
        module = Float16Module(cfg, model) if cfg.bf16 else model
        self.model = DistributedDataParallel(cfg, ddp, module)
        self.model.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                clip_grad=1.0,
                bf16=cfg.bf16,
                params_dtype=cfg.params_dtype,
                use_distributed_optimizer=True,
                log_num_zeros_in_grad=True,
            ),
            [self.model],
        )
        cfg.finalize_model_grads_func = finalize_model_grads
        cfg.grad_scale_func = self.optimizer.scale_loss

    def backward(self, batches: list[torch.Tensor]) -> float:
        """Finalised gradients of one step over the microbatches; their mean loss, nan before the last stage."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=iter(batches),
            model=[self.model],
            num_microbatches=len(batches),
            seq_length=ROWS,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        return float(torch.stack([loss["loss"] for loss in losses]).mean()) if losses else float("nan")

    def update(self, batches: list[torch.Tensor]) -> tuple[float, float]:
        """One optimizer step; the loss as `backward` gives it, and the norm of the gradients."""
        loss = self.backward(batches)
        succeeded, norm, zeros = self.optimizer.step()
        assert succeeded
        assert zeros is not None
        return loss, float(norm)

    def parameters(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.bare.named_parameters()}

    def gradients(self) -> dict[str, torch.Tensor]:
        """By name; under data parallelism outside this rank's shard of the optimizer its own part of the sum."""
        named = self.model.module.named_parameters()
        return {name: parameter.main_grad.clone() for name, parameter in named if parameter.requires_grad}

    def logits(self, batch: torch.Tensor) -> torch.Tensor:
        """`[b, s, vocabulary of this rank]`."""
        with torch.no_grad():
            return self.model(batch[:, :-1], None, None).detach()

    def save(self, folder: str, sharding: str) -> None:
        dist_checkpointing.save(self._sharded(sharding, is_loading=False), folder)

    def load(self, folder: str, sharding: str) -> None:
        state = dist_checkpointing.load(self._sharded(sharding, is_loading=True), folder)
        self.model.module.load_state_dict(state["model"], strict=True)
        self.optimizer.load_state_dict(state["optimizer"])

    def _sharded(self, sharding: str, *, is_loading: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": sharding,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        model = self.model.module.sharded_state_dict(metadata=metadata)
        optimizer = self.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
        return {"model": model, "optimizer": optimizer}


@dataclass
class Run:
    """What a training run gave on one rank, tensors to compare bit by bit included."""

    losses: list[float] = field(default_factory=list)
    selections: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    partition: str | None = None
    rows: int = 0
    scored_rows: int = 0


def train(
    build: Callable[..., Any] = gpt, *, steps: int = 10, microbatches: int = 1, lr: float = 1e-2, **overrides: Any
) -> Run:
    """Build, train and record on every rank. Logits are those before the first and after the last step."""
    cfg = config(**overrides)
    model = build(cfg)
    trainer, run = Trainer(model, lr), Run()
    whole = parallel_state.get_pipeline_model_parallel_world_size() == 1
    with taken_selections() as run.selections:
        if whole:
            run.logits.append(trainer.logits(tokens()))
        for step in range(steps):
            batches = [tokens(step * microbatches + index) for index in range(microbatches)]
            run.losses.append(trainer.backward(batches))
            run.gradients.append(trainer.gradients())
            assert trainer.optimizer.step()[0]
        if whole:
            run.logits.append(trainer.logits(tokens()))
    layers = attentions(model)
    run.parameters = trainer.parameters()
    run.partition = layers[0].settings.partition.value
    run.rows = sum(layer.counters.rows for layer in layers)
    run.scored_rows = sum(layer.counters.scored_rows for layer in layers)
    return run


def under_each(envs: Sequence[Mapping[str, str]], fn: Callable[..., Any], *args: Any) -> list[Any]:
    """`fn(*args)` under each environment in turn, with the random states of new ranks, whose start it saves."""
    values = []
    for env in envs:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            torch.manual_seed(1234)
            model_parallel_cuda_manual_seed(1234)
            values.append(fn(*args))
    return values


def assert_equal(left: Any, right: Any, where: str = "value") -> None:
    """Equal to the last bit, through lists and mappings."""
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), f"{where}: {int((left != right).sum())} of {left.numel()} elements differ"
    elif isinstance(left, Mapping):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_equal(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, list):
        assert len(left) == len(right), f"{where}: {len(left)} and {len(right)}"
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_equal(*pair, f"{where}[{index}]")
    else:
        assert left == right, f"{where}: {left} and {right}"


def gathered(shard: torch.Tensor, dim: int) -> torch.Tensor:
    """A tensor whose shards over the tensor-parallel group are joined along `dim`."""
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return torch.cat(shards, dim)


def _of_context(ids: torch.Tensor) -> torch.Tensor:
    """The columns of this context-parallel rank: chunks r and `2 * CP - 1 - r`, Megatron's order."""
    cp, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    chunks = ids.chunk(2 * cp, dim=1)
    return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]), dim=1)


def _forward(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
    ids = next(batches)
    return model(_of_context(ids[:, :-1]), None, None, labels=_of_context(ids[:, 1:])), _mean_loss


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = losses.float().mean()
    # A copy: the schedule scales what it backpropagates in place.
    return mean, {"loss": mean.detach().clone()}
