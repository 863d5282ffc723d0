"""k-pool DSA built from Transformer Engine's modules, which need CUDA: what is in the model, and that it trains."""

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from harness import megatron_ranks
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from models import OFF, ON, Run, gpt, train
from test_megatron_equality import LAYERS, assert_same_training, assert_worth_comparing, train_ten
from test_megatron_one_device import BF16, ON_CUDA, PRECISIONS, TIMEOUT_S

from mcore_dsa.binding import MEGATRON_NAMES

DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.skipif(DEVICES < 1, reason="needs a CUDA device"),
    pytest.mark.skipif(find_spec("transformer_engine") is None, reason="needs Transformer Engine, the extra `te`"),
]
NCCL: dict[str, Any] = {"backend": "nccl", "device": "cuda", "timeout": TIMEOUT_S}
INDEXER = "core_attention.indexer."


def build_and_train(options: dict[str, Any]) -> Run:
    """Three steps of a model whose projections and norms are Transformer Engine's."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TELinear, TERowParallelLinear

    models: list[Any] = []

    def build(cfg: Any) -> Any:
        models.append(gpt(cfg))
        return models[-1]

    run = train(build, steps=3, **options)
    (model,) = models
    assert not any(isinstance(module, DSAttention) for module in model.modules())
    for layer in model.decoder.layers:
        attention = layer.self_attention
        assert type(attention.linear_q_down_proj) is type(attention.linear_kv_down_proj) is TELinear
        assert type(attention.linear_q_up_proj) is type(attention.linear_kv_up_proj) is TEColumnParallelLinear
        assert type(attention.linear_proj) is TERowParallelLinear
        norms = attention.q_layernorm, attention.kv_layernorm, layer.input_layernorm
        assert all(type(norm).__module__.startswith("transformer_engine") for norm in norms)
    return run


@PRECISIONS
def test_a_model_of_its_modules_trains(precision: dict[str, Any]) -> None:
    (run,) = megatron_ranks(build_and_train, 1, ON_CUDA | precision, env=OFF, **NCCL)
    assert run.losses[-1] < run.losses[0]
    dtype = precision.get("params_dtype", torch.float32)
    for layer in range(LAYERS):
        prefix = f"decoder.layers.{layer}.self_attention."
        own = {name.removeprefix(prefix): x.dtype for name, x in run.parameters.items() if name.startswith(prefix)}
        assert own.keys() == set(MEGATRON_NAMES.values())
        assert own.pop(INDEXER + "index_kpool_compress_ape") is torch.float32
        assert set(own.values()) == {dtype}
        # Frozen: no gradient reaches the indexer, and all else has one in every step.
        grads = [{name.partition(prefix)[2] for name in step if prefix in name} for step in run.gradients]
        assert grads == [{name for name in MEGATRON_NAMES.values() if not name.startswith(INDEXER)}] * 3


@pytest.mark.skipif(DEVICES < 2, reason=f"needs two CUDA devices, there are {DEVICES}")
@pytest.mark.parametrize("precision", [{}, BF16], ids=["fp32", "bf16"])
def test_flag_on_trains_bit_identically_to_flag_off(precision: dict[str, Any]) -> None:
    off, on = (megatron_ranks(train_ten, 2, ON_CUDA | precision, tp=2, env=env, **NCCL) for env in (OFF, ON))
    assert_worth_comparing(off, 2)
    assert_same_training(off, on, "contiguous")
