"""The local backend: its norms and its replicated linear layer, and which backend is chosen."""

from typing import Any

import pytest
import torch
from harness import megatron_ranks
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.extensions import transformer_engine
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from models import stock_config

from mcore_dsa.megatron import backend
from mcore_dsa.megatron.backend import DuplicatedLinear, LayerNorm, LocalBackend, RMSNorm, default_backend

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(
    leading=st.lists(st.integers(0, 3), max_size=3),
    width=st.integers(1, 65),
    dtype=DTYPES,
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    seed=st.integers(0, 2**31),
)
def test_rms_norm_equals_the_reference_bit_for_bit(
    leading: list[int], width: int, dtype: torch.dtype, scale: float, seed: int
) -> None:
    # Not at the top: every rank of this file would import it.
    from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextRMSNorm

    cfg = stock_config(params_dtype=dtype, layernorm_epsilon=1e-5)
    ours = RMSNorm(cfg, width)
    theirs = Glm5NextTextRMSNorm(width, eps=1e-5).to(dtype)
    ours.weight.data = theirs.weight.data = draw(seed, width).to(dtype)
    x = (scale * draw(seed + 1, *leading, width)).to(dtype)
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = ours(x_ours)
    assert out.dtype is dtype
    assert torch.equal(out.nan_to_num(), theirs(x_theirs).nan_to_num())
    ours(x_ours).float().sum().backward()
    theirs(x_theirs).float().sum().backward()
    assert x_ours.grad is not None
    assert x_theirs.grad is not None
    assert torch.equal(x_ours.grad.nan_to_num(), x_theirs.grad.nan_to_num())


def test_norms_take_epsilon_dtype_and_marks_from_the_config() -> None:
    x = draw(0, 3, 8) * 1e-3
    for sequence_parallel in (False, True):
        cfg = stock_config(layernorm_epsilon=1e-2, tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
        rms = RMSNorm(config=cfg, hidden_size=8)
        assert torch.equal(rms(x), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-2))
        assert not torch.equal(RMSNorm(config=cfg, hidden_size=8, eps=1e-6)(x), rms(x))
        cfg.normalization = "LayerNorm"
        layer = LayerNorm(config=cfg, hidden_size=8, eps=1e-6)
        assert torch.equal(layer(x), torch.nn.functional.layer_norm(x, (8,), layer.weight, layer.bias, 1e-6))
        assert LayerNorm(cfg, 8).eps == 1e-2
        for parameter in (rms.weight, layer.weight, layer.bias):
            assert parameter.sequence_parallel is sequence_parallel
            assert parameter.tensor_model_parallel is False
    half = stock_config(params_dtype=torch.bfloat16)
    assert RMSNorm(half, 8).weight.dtype is torch.bfloat16


@pytest.mark.parametrize(("norm", "other"), [(RMSNorm, "LayerNorm"), (LayerNorm, "RMSNorm")])
def test_norms_refuse_another_normalization_and_zero_centred_weights(norm: Any, other: str) -> None:
    cfg = stock_config()
    cfg.normalization = other
    with pytest.raises(ValueError, match=rf"config.normalization is '{other}'"):
        norm(cfg, 8)
    cfg.normalization = norm.__name__
    cfg.layernorm_zero_centered_gamma = True
    with pytest.raises(ValueError, match="layernorm_zero_centered_gamma is True"):
        norm(cfg, 8)


def linear(cfg: Any, **overrides: Any) -> DuplicatedLinear:
    """Built with every argument that absorbed MLA and the indexer pass, in 0.19 and after."""
    arguments: dict[str, Any] = {
        "config": cfg,
        "init_method": cfg.init_method,
        "bias": False,
        "skip_bias_add": False,
        "is_expert": False,
        "tp_comm_buffer_name": "q_down_proj",
        "skip_weight_param_allocation": False,
        "parallel_mode": "duplicated",
        "tp_group": None,
        "pg_collection": None,
        "name": "linear_q_down_proj",
    }
    return DuplicatedLinear(12, 5, **{**arguments, **overrides})


def test_duplicated_linear_is_a_plain_product_without_bias() -> None:
    layer = linear(stock_config())
    x = draw(0, 7, 2, 12)
    out, bias = layer(x)
    assert bias is None
    assert torch.equal(out, torch.nn.functional.linear(x, layer.weight))
    assert [name for name, _ in layer.named_parameters()] == ["weight"]
    assert layer.weight.tensor_model_parallel is False
    assert layer.weight.sequence_parallel is False
    assert linear(stock_config(tensor_model_parallel_size=2)).weight.sequence_parallel is True


def test_duplicated_linear_is_initialised_as_the_config_says() -> None:
    calls = []

    def fill(weight: torch.Tensor) -> None:
        calls.append(weight.dtype)
        weight.fill_(1 + 2**-9)

    layer = linear(stock_config(params_dtype=torch.bfloat16), init_method=fill)
    assert calls == [torch.float32]
    assert layer.weight.dtype is torch.bfloat16
    assert torch.equal(layer.weight, torch.full((5, 12), 1 + 2**-9).bfloat16())
    linear(stock_config(perform_initialization=False), init_method=fill)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("argument", "value"),
    [("bias", True), ("is_expert", True), ("skip_weight_param_allocation", True), ("parallel_mode", "column")],
)
def test_duplicated_linear_refuses_what_it_cannot_do(argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{argument} is {value!r}; accepted"):
        linear(stock_config(), **{argument: value})


def replicas(on_cpu: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    torch.rand(parallel_state.get_tensor_model_parallel_rank())
    if on_cpu:
        torch.manual_seed(3)
    before = torch.get_rng_state()
    layer = linear(stock_config(tensor_model_parallel_size=2, use_cpu_initialization=on_cpu))
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    sharded = layer.sharded_state_dict("layer.", ((0, 1, 3),), {"dp_cp_group": group})["layer.weight"]
    return {
        "weight": layer.weight.detach(),
        "draws": not torch.equal(before, torch.get_rng_state()),
        "shape": sharded.global_shape,
        "offset": sharded.global_offset,
        "replica": sharded.replica_id,
        "key": sharded.key,
    }


@pytest.mark.parametrize("on_cpu", [True, False])
def test_duplicated_linear_is_equal_on_all_ranks_and_saved_once(on_cpu: bool) -> None:
    """Also where the ranks' default generators differ, as long as Megatron's tracker is the source."""
    ranks = megatron_ranks(replicas, 4, on_cpu, tp=2)
    for rank in ranks:
        assert torch.equal(rank["weight"], ranks[0]["weight"])
        assert rank["weight"].std() > 0
        assert rank["draws"] is on_cpu
        assert rank["key"] == "layer.weight"
        assert rank["shape"] == (3, 5, 12)
        assert rank["offset"] == (1, 0, 0)
    assert len({rank["replica"] for rank in ranks}) == 4


def test_local_backend_names_its_modules() -> None:
    local = LocalBackend()
    assert local.linear() is DuplicatedLinear
    assert local.layer_norm(rms_norm=True, for_qk=True) is RMSNorm
    assert local.layer_norm(rms_norm=False, for_qk=True) is LayerNorm
    assert local.column_parallel_linear() is ColumnParallelLinear
    assert local.row_parallel_linear() is RowParallelLinear
    assert not local.fuse_layernorm_and_linear()
    assert get_mlp_module_spec_for_backend(local).keywords["submodules"].linear_fc1 is ColumnParallelLinear
    with pytest.raises(ValueError, match="has_residual is True"):
        local.layer_norm(rms_norm=True, has_residual=True)
    with pytest.raises(NotImplementedError, match="no core attention"):
        local.core_attention()


def test_transformer_engine_is_chosen_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "HAVE_TE", False)
    for implementation in ("transformer_engine", "local"):
        assert type(default_backend(stock_config(transformer_impl=implementation))) is LocalBackend
    monkeypatch.setattr(backend, "HAVE_TE", True)
    chosen = default_backend(stock_config())
    assert type(chosen).__name__ == "TESpecProvider"
    assert chosen.linear() is transformer_engine.TELinear
    with pytest.raises(ValueError, match="takes TELinear only"):
        default_backend(stock_config(transformer_impl="local"))
    with pytest.raises(ValueError, match="inference_optimized"):
        default_backend(stock_config(transformer_impl="inference_optimized"))
