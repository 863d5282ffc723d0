"""The Megatron layer against transformers' `Glm5NextTextAttention` with the same weights, output and gradients.

How far two fp32 runs of one formula may lie apart is measured: the Hugging Face module runs in float64 too, with the
selection of its fp32 run, and its own fp32 error sets the scale for ours.
"""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from harness import megatron_ranks
from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import build_module
from models import BATCH, ON, POOL, ROWS, SIZES, TOPK, config, gathered, taken_selections
from torch import Tensor, nn
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextAttention

from mcore_dsa.kpool import PoolLayout, expand_selection
from mcore_dsa.megatron import kpool_dsa_attention_spec

# Ours against float64 in units of Hugging Face's own fp32 error, each the greatest over the elements of a tensor.
# Absorption sums in another order (heads of 8 channels become latents of 16), so ours is another sample of the same
# error: 0.5 to 1.3 of it in every tensor, at TP 1 to 4 (M).
ERROR_RATIO = 3.0

# Megatron's name of each tensor, and the dimension along which a head-parallel rank holds its slice.
NAMES: dict[str, tuple[str, int | None]] = {
    "q_a_proj.weight": ("linear_q_down_proj.weight", None),
    "q_a_layernorm.weight": ("q_layernorm.weight", None),
    "q_b_proj.weight": ("linear_q_up_proj.weight", 0),
    "kv_a_proj_with_mqa.weight": ("linear_kv_down_proj.weight", None),
    "kv_a_layernorm.weight": ("kv_layernorm.weight", None),
    "kv_b_proj.weight": ("linear_kv_up_proj.weight", 0),
    "o_proj.weight": ("linear_proj.weight", 1),
    "indexer.wq_b.weight": ("core_attention.indexer.linear_wq_b.weight", None),
    "indexer.wk.weight": ("core_attention.indexer.linear_wk.weight", None),
    "indexer.k_norm.weight": ("core_attention.indexer.k_norm.weight", None),
    "indexer.k_norm.bias": ("core_attention.indexer.k_norm.bias", None),
    "indexer.weights_proj.weight": ("core_attention.indexer.linear_weights_proj.weight", None),
    "indexer.index_kpool_compress_gate": ("core_attention.indexer.index_kpool_compress_gate", None),
    "indexer.index_kpool_compress_ape": ("core_attention.indexer.index_kpool_compress_ape", None),
}
TRAINED = [name for name in NAMES if not name.startswith("indexer.")]


@dataclass
class Pass:
    """One forward and backward: the output, the gradients of the weights and of the input, the tokens of each row."""

    output_SBC: Tensor
    gradients: dict[str, Tensor]
    token_BSW: Tensor


@dataclass
class Reference:
    weights: dict[str, Tensor]
    x_SBC: Tensor
    probe_SBC: Tensor
    single: Pass
    double: Pass


class _WideNorm(nn.Module):
    """`Glm5NextTextRMSNorm` without its cast to fp32, which would put fp32 errors into the float64 run."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def hugging_face(*, tail: bool) -> Glm5NextTextAttention:
    cfg = Glm5NextTextConfig(
        hidden_size=SIZES["hidden_size"],
        num_hidden_layers=1,
        num_attention_heads=SIZES["num_attention_heads"],
        num_key_value_heads=SIZES["num_attention_heads"],
        q_lora_rank=SIZES["q_lora_rank"],
        kv_lora_rank=SIZES["kv_lora_rank"],
        qk_nope_head_dim=SIZES["qk_head_dim"],
        qk_rope_head_dim=0,
        v_head_dim=SIZES["v_head_dim"],
        index_n_heads=SIZES["dsa_indexer_n_heads"],
        index_head_dim=SIZES["dsa_indexer_head_dim"],
        index_topk=TOPK,
        index_kpool=POOL,
        index_kpool_always_select_tail=tail,
        layer_types=["indexed_attention"],
        indexer_types=["full"],
        mlp_layer_types=["dense"],
    )
    cfg._attn_implementation = "sdpa"
    module = Glm5NextTextAttention(cfg, 0)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in module.named_parameters():
        spread = 0.5 if parameter.ndim == 2 and "compress" not in name else 1.0
        parameter.data = spread * torch.randn(parameter.shape, generator=generator)
        if name.endswith("layernorm.weight"):
            parameter.data += 2.0
    return module


def run_reference(module: Glm5NextTextAttention, x_SBC: Tensor, probe_SBC: Tensor) -> Pass:
    tokens: list[Tensor] = []
    hook = module.indexer.register_forward_hook(lambda _module, _args, chosen: tokens.append(chosen))
    x = x_SBC.clone().requires_grad_()
    mask = torch.ones(BATCH, ROWS, dtype=torch.bool)
    output_BSC = module(x.transpose(0, 1), mask)[0]
    output_SBC = output_BSC.transpose(0, 1)
    (output_SBC * probe_SBC).sum().backward()
    hook.remove()
    gradients = {name: module.get_parameter(name).grad for name in TRAINED}
    assert x.grad is not None
    return Pass(output_SBC.detach(), {**gradients, "x": x.grad}, tokens[0])


def reference(*, tail: bool) -> Reference:
    module = hugging_face(tail=tail)
    generator = torch.Generator().manual_seed(6)
    x, probe = (torch.randn(ROWS, BATCH, SIZES["hidden_size"], generator=generator) for _ in range(2))
    wide = copy.deepcopy(module).double()
    single = run_reference(module, x, probe)
    wide.q_a_layernorm, wide.kv_a_layernorm = _WideNorm(wide.q_a_layernorm), _WideNorm(wide.kv_a_layernorm)
    wide.indexer.forward = lambda **_arguments: single.token_BSW
    weights = {name: value.detach() for name, value in module.state_dict().items()}
    assert weights.keys() == NAMES.keys()
    return Reference(weights, x, probe, single, run_reference(wide, x.double(), probe.double()))


def load(layer: nn.Module, weights: dict[str, Tensor]) -> None:
    """Identity copies; the slice of this rank where heads are split."""
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    state = {}
    for theirs, (ours, dim) in NAMES.items():
        state[ours] = weights[theirs] if dim is None else weights[theirs].chunk(size, dim)[rank]
    layer.load_state_dict(state, strict=True)


def whole_gradient(parameter: nn.Parameter, dim: int | None) -> Tensor:
    """The gradient over the group, put together by the marks that Megatron's `finalize_model_grads` goes by."""
    assert parameter.grad is not None
    assert not getattr(parameter, "average_gradients_across_tp_domain", False)
    if dim is not None:
        return gathered(parameter.grad, dim)
    grad = parameter.grad.clone()
    if getattr(parameter, "sequence_parallel", False):
        torch.distributed.all_reduce(grad, group=parallel_state.get_tensor_model_parallel_group())
    return grad


def run_layer(weights: dict[str, Tensor], x_SBC: Tensor, probe_SBC: Tensor, tail: bool) -> Pass:
    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    cfg = config(num_layers=1, layernorm_epsilon=1e-5, dsa_indexer_kpool_always_select_tail=tail)
    layer = build_module(kpool_dsa_attention_spec(cfg), config=cfg, layer_number=1)
    load(layer, weights)
    x = x_SBC.chunk(size)[rank].clone().requires_grad_()
    with taken_selections() as taken:
        output, bias = layer(x, None)
    assert bias is None
    (output * probe_SBC.chunk(size)[rank]).sum().backward()
    gradients = {theirs: whole_gradient(layer.get_parameter(NAMES[theirs][0]), NAMES[theirs][1]) for theirs in TRAINED}
    assert all(value.grad is None for value in layer.core_attention.parameters())
    assert x.grad is not None
    layout = PoolLayout.dense(ROWS, pool_size=POOL, batch=BATCH)
    token_BSW = expand_selection(taken[0], layout, torch.arange(ROWS), always_select_tail=tail)
    return Pass(gathered(output.detach(), 0), {**gradients, "x": gathered(x.grad, 0)}, token_BSW)


@pytest.mark.parametrize(("tp", "tail"), [(1, True), (2, True), (4, True), (2, False)])
def test_layer_equals_the_hugging_face_module(tp: int, tail: bool) -> None:
    right = reference(tail=tail)
    visible_pools = (torch.arange(ROWS) + 1) // POOL
    assert int((visible_pools > TOPK // POOL).sum()) > ROWS // 2
    for ours in megatron_ranks(run_layer, tp, right.weights, right.x_SBC, right.probe_SBC, tail, tp=tp, env=ON):
        theirs_BSW, ours_BSW = (each.sort(-1).values for each in (right.single.token_BSW, ours.token_BSW))
        assert torch.equal(ours_BSW, theirs_BSW)
        values = {"output": (ours.output_SBC, right.single.output_SBC, right.double.output_SBC)}
        for name, grad in ours.gradients.items():
            values[f"gradient of {name}"] = (grad, right.single.gradients[name], right.double.gradients[name])
        assert len(values) == len(TRAINED) + 2
        for name, (got, single, double) in values.items():
            own_error, error = ((each - double).abs().max() for each in (single, got))
            assert 0 < own_error < 1e-4 * double.abs().max(), name
            assert error <= ERROR_RATIO * own_error, f"{name}: {float(error / own_error):.1f} times its error"
