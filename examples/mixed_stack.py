"""Two layers of plain attention, then two of k-pool DSA, in one `GPTModel` cut into two pipeline stages.

    torchrun --standalone --nproc-per-node 2 examples/mixed_stack.py

The first stage has no DSA layer at all. It runs on CPUs over gloo and prints the loss of each step.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_transformer_layer_with_experimental_attention_variant_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from mcore_dsa import patches
from mcore_dsa.megatron import KPoolDSATransformerConfig, check_wiring, use_kpool_dsa
from mcore_dsa.megatron.backend import default_backend

VOCABULARY, ROWS, BATCH, STEPS = 64, 64, 2, 5


def configuration() -> KPoolDSATransformerConfig:
    return KPoolDSATransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_head_dim=16,
        v_head_dim=16,
        dsa_indexer_n_heads=8,
        dsa_indexer_head_dim=16,
        dsa_indexer_topk=16,
        dsa_indexer_kpool=4,
        dsa_indexer_kpool_always_select_tail=True,
        pipeline_model_parallel_size=2,
        pipeline_dtype=torch.float32,
    )


def build(config: KPoolDSATransformerConfig) -> GPTModel:
    """This rank's stage. Megatron's helpers give the layers of the whole model; they are plugged, and then cut."""
    backend = default_backend(config)
    plain = get_gpt_layer_local_spec(normalization="RMSNorm")
    dsa = get_transformer_layer_with_experimental_attention_variant_spec(config, backend)
    layers = use_kpool_dsa([plain, plain, *dsa[2:]])
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        TransformerBlockSubmodules(
            layer_specs=layers[2 * stage : 2 * stage + 2],
            layer_norm=backend.layer_norm(rms_norm=True),
        ),
        vocab_size=VOCABULARY,
        max_sequence_length=ROWS,
        pre_process=stage == 0,
        post_process=stage == 1,
        position_embedding_type="none",
    )
    check_wiring(model, layers=2 * stage)
    return model.to(torch.cuda.current_device())


def forward(batches: Iterator[Tensor], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    ids = next(batches)

    def loss(losses: Tensor) -> tuple[Tensor, float]:
        return losses.mean(), float(losses.mean())

    return model(ids[:, :-1], None, None, labels=ids[:, 1:]), loss


def train() -> None:
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    config = configuration()
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), build(config))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2), [model])
    config.finalize_model_grads_func = finalize_model_grads
    ids = (torch.rand(BATCH, ROWS + 1, generator=torch.Generator().manual_seed(2)).pow(4) * VOCABULARY).long()
    for step in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([ids.to(torch.cuda.current_device())] * 2),
            model=[model],
            num_microbatches=2,
            seq_length=ROWS,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        optimizer.step()
        if losses:
            print(f"step {step}: loss {sum(losses) / len(losses):.4f}", flush=True)


def main() -> None:
    # Before a model is built; where there are CUDA and Transformer Engine it mends what is wrong on every device.
    patches.apply()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        train()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
