"""The indexer's projections: what they compute, in which precision, and that training leaves them alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import megatron_ranks
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import build_module
from models import POOL, SIZES, Trainer, attentions, config, gathered, gpt, tokens
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextIndexer

from mcore_dsa.megatron import KPoolDSAIndexer, indexer, kpool_dsa_attention_spec

HIDDEN, RANK = SIZES["hidden_size"], SIZES["q_lora_rank"]
HEADS, DIM = SIZES["dsa_indexer_n_heads"], SIZES["dsa_indexer_head_dim"]
SHAPES = {
    "linear_wq_b.weight": (HEADS * DIM, RANK),
    "linear_wk.weight": (DIM, HIDDEN),
    "k_norm.weight": (DIM,),
    "k_norm.bias": (DIM,),
    "linear_weights_proj.weight": (HEADS, HIDDEN),
    "index_kpool_compress_gate": (DIM, HIDDEN),
    "index_kpool_compress_ape": (POOL, DIM),
}
# bf16 and fp16 both round it to 1.
FINE = 1 + 2**-12


class _Group:
    """A process group of one, as far as a module that is only projected through looks at it."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def build(**overrides: Any) -> KPoolDSAIndexer:
    return KPoolDSAIndexer(config(**overrides), _Group())


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def randomise(module: nn.Module, seed: int) -> None:
    for index, parameter in enumerate(module.parameters()):
        parameter.data = draw(seed + index, *parameter.shape).to(parameter.dtype)


def hugging_face(module: KPoolDSAIndexer) -> Glm5NextTextIndexer:
    cfg = Glm5NextTextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        q_lora_rank=RANK,
        index_n_heads=HEADS,
        index_head_dim=DIM,
        index_kpool=POOL,
        layer_types=["indexed_attention"],
        indexer_types=["full"],
        mlp_layer_types=["dense"],
    )
    theirs = Glm5NextTextIndexer(cfg, 0)
    theirs.load_state_dict({name.removeprefix("linear_"): value for name, value in module.state_dict().items()})
    return theirs


@given(
    rows=st.integers(1, 70),
    batch=st.integers(1, 3),
    scale=st.sampled_from([1e-4, 1.0, 1e3]),
    seed=st.integers(0, 2**31),
    block=st.sampled_from([1, 7, 1024]),
)
@hypothesis_settings(max_examples=25)
def test_projections_are_those_of_the_reference(rows: int, batch: int, scale: float, seed: int, block: int) -> None:
    ours = build()
    randomise(ours, seed)
    theirs = hugging_face(ours)
    x, qr = scale * draw(seed + 20, rows, batch, HIDDEN), draw(seed + 21, rows, batch, RANK)
    vars(indexer).update(_GATE_ROWS=block)
    try:
        out = ours(x, qr)
    finally:
        vars(indexer).update(_GATE_ROWS=1024)
    assert torch.equal(out.q_LBHD, theirs.wq_b(qr).unflatten(-1, (HEADS, DIM)))
    # At 1e-4 the variance of the keys is that of the epsilon: another one, or an RMSNorm, is far off.
    assert torch.equal(out.key_LBD, theirs.k_norm(theirs.wk(x)))
    assert torch.equal(out.gate_LBD, F.linear(x, theirs.index_kpool_compress_gate))
    weights = theirs.weights_proj(x).float() * (HEADS**-0.5 * DIM**-0.5)
    # A product over a block of rows rounds otherwise than over all of them: both sums have a rounding for each term.
    terms = F.linear(x.abs(), theirs.weights_proj.weight.abs()) * (HEADS**-0.5 * DIM**-0.5)
    assert ((out.weights_LBH - weights).abs() <= 2 * (HIDDEN + 2) * 2.0**-24 * terms).all()
    assert [tuple(part.shape) for part in out] == [
        (rows, batch, HEADS, DIM),
        (rows, batch, HEADS),
        (rows, batch, DIM),
        (rows, batch, DIM),
        (POOL, DIM),
    ]
    assert out.ape_JD is ours.index_kpool_compress_ape
    assert all(part.dtype is torch.float32 and not part.requires_grad for part in out)


def test_the_key_norm_is_a_layer_norm_whose_epsilon_matters() -> None:
    module = build()
    randomise(module, 3)
    x = 1e-4 * draw(4, 9, 2, HIDDEN)
    key = module.linear_wk(x)
    assert key.var(-1).max() < 1e-5
    out = module(x, draw(5, 9, 2, RANK)).key_LBD
    weight, bias = module.k_norm.weight, module.k_norm.bias
    assert torch.equal(out, F.layer_norm(key, (DIM,), weight, bias, eps=1e-6))
    assert (out - F.layer_norm(key, (DIM,), weight, bias, eps=1e-5)).abs().max() > 0.1
    assert (out - F.rms_norm(key, (DIM,), weight, eps=1e-6)).abs().max() > 0.1
    other = build(dsa_indexer_k_norm_epsilon=1e-3)
    assert other.k_norm.eps == 1e-3


def test_the_head_gate_is_an_fp32_product_in_a_bf16_model() -> None:
    module = build(params_dtype=torch.bfloat16, bf16=True, pipeline_dtype=torch.bfloat16)
    randomise(module, 7)
    x, qr = draw(8, 33, 2, HIDDEN).bfloat16(), draw(9, 33, 2, RANK).bfloat16()
    out = module(x, qr)
    wide = F.linear(x.float(), module.linear_weights_proj.weight.float())
    assert out.weights_LBH.dtype is torch.float32
    assert torch.equal(out.weights_LBH, wide * (HEADS**-0.5 * DIM**-0.5))
    narrow = F.linear(x, module.linear_weights_proj.weight).float()
    assert (wide != narrow).float().mean() > 0.9
    assert {part.dtype for part in (out.q_LBHD, out.key_LBD, out.gate_LBD)} == {torch.bfloat16}
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16):
            lowered = module(x, qr)
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(lowered.weights_LBH, out.weights_LBH)


@pytest.mark.parametrize("cast", [nn.Module.bfloat16, nn.Module.half, nn.Module.double, nn.Module.float])
def test_ape_keeps_its_bits_through_every_cast(cast: Any) -> None:
    module = build()
    module.index_kpool_compress_ape.data.fill_(FINE)
    cast(nn.Sequential(module))
    ape = module.index_kpool_compress_ape
    assert ape.dtype is torch.float32
    assert torch.equal(ape, torch.full((POOL, DIM), FINE))
    dtype = {nn.Module.bfloat16: torch.bfloat16, nn.Module.half: torch.float16, nn.Module.double: torch.float64}
    assert module.linear_wk.weight.dtype is dtype.get(cast, torch.float32)
    cast(module).float()
    assert torch.equal(module.index_kpool_compress_ape, ape)
    assert not ape.requires_grad


def test_ape_survives_the_meta_device_and_widens_a_bf16_checkpoint() -> None:
    module = build().to("meta").bfloat16()
    assert module.index_kpool_compress_ape.dtype is torch.float32
    module.to_empty(device="cpu")
    assert module.index_kpool_compress_ape.dtype is torch.float32
    state = {name: draw(3, *shape).bfloat16() for name, shape in SHAPES.items()}
    module.load_state_dict(state)
    assert torch.equal(module.index_kpool_compress_ape, state["index_kpool_compress_ape"].float())


def test_parameters_are_named_and_shaped_as_the_checkpoint_expects_and_frozen() -> None:
    module = build()
    assert {name: tuple(value.shape) for name, value in module.named_parameters()} == SHAPES
    assert not any(value.requires_grad for value in module.parameters())
    assert all(value.std() > 0 for name, value in module.named_parameters() if value.ndim == 2)
    assert torch.equal(module.k_norm.weight, torch.ones(DIM))
    assert torch.equal(module.k_norm.bias, torch.zeros(DIM))
    assert list(build(perform_initialization=False).state_dict()) == list(module.state_dict())


def trained(bf16: bool) -> dict[str, Any]:
    dtype = torch.bfloat16 if bf16 else torch.float32
    cfg = config(bf16=bf16, params_dtype=dtype, pipeline_dtype=dtype)
    model = gpt(cfg)
    frozen = {name: value for name, value in model.named_parameters() if ".indexer." in name}
    for name, value in frozen.items():
        if name.endswith("ape"):
            value.data.fill_(FINE)
    trainer = Trainer(model)
    before = {name: value.detach().clone() for name, value in frozen.items()}
    for step in range(2):
        trainer.backward([tokens(step)])
        assert trainer.optimizer.step()[0]
    optimized = {id(p) for part in trainer.optimizer.chained_optimizers for p in part.model_param_gbuf_map}
    trainable = {name: value for name, value in model.named_parameters() if name not in frozen}
    buffered = {id(p) for buffer in trainer.model.buffers for p in buffer.params}
    assert optimized == {id(value) for value in trainable.values()} == buffered
    return {
        "names": list(frozen),
        "dtypes": {name: value.dtype for name, value in frozen.items()},
        "without gradient": all(v.grad is None and not hasattr(v, "main_grad") for v in frozen.values()),
        "unmoved": all(torch.equal(value, before[name]) for name, value in frozen.items()),
        "moved": all(bool((value.main_grad != 0).any()) for value in trainable.values()),
        "ape": frozen["decoder.layers.1.self_attention.core_attention.indexer.index_kpool_compress_ape"].detach(),
        "weights": {name: value.detach() for name, value in frozen.items()},
    }


@pytest.mark.parametrize("bf16", [False, True])
def test_training_leaves_the_indexer_alone(bf16: bool) -> None:
    ranks = megatron_ranks(trained, 2, bf16, tp=2)
    for rank in ranks:
        prefixes = [f"decoder.layers.{layer}.self_attention.core_attention.indexer." for layer in (0, 1)]
        assert sorted(rank["names"]) == sorted(prefix + name for prefix in prefixes for name in SHAPES)
        for name, dtype in rank["dtypes"].items():
            assert dtype is (torch.bfloat16 if bf16 and not name.endswith("ape") else torch.float32), name
        assert rank["without gradient"]
        assert rank["unmoved"]
        assert rank["moved"]
        assert torch.equal(rank["ape"], torch.full((POOL, DIM), FINE))
        for name, value in rank["weights"].items():
            assert torch.equal(value, ranks[0]["weights"][name]), name


def built_apart() -> dict[str, Tensor]:
    """Weights drawn from Megatron's tracker, after the ranks' default generators have gone apart."""
    torch.rand(1 + parallel_state.get_tensor_model_parallel_rank())
    model = gpt(config(use_cpu_initialization=False))
    return {name: value.detach() for name, value in attentions(model)[0].indexer.named_parameters()}


def test_weights_are_equal_on_all_ranks_whatever_their_default_generators() -> None:
    first, *others = megatron_ranks(built_apart, 2, tp=2)
    assert all(value.std() > 0 for value in first.values() if value.ndim == 2)
    for other in others:
        assert all(torch.equal(value, other[name]) for name, value in first.items())


def attention_layer(seed: int, bf16: bool) -> nn.Module:
    """A self-attention layer with random weights that do not depend on the sharding, ape not fit for bf16."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    cfg = config(num_layers=1, bf16=bf16, params_dtype=dtype, pipeline_dtype=dtype)
    layer = build_module(kpool_dsa_attention_spec(cfg), config=cfg, layer_number=1)
    rank = parallel_state.get_tensor_model_parallel_rank()
    for index, (name, parameter) in enumerate(layer.named_parameters()):
        sharded = getattr(parameter, "tensor_model_parallel", False)
        own = seed + 1000 * index + (rank if sharded else 0)
        parameter.data = draw(own, *parameter.shape).to(parameter.dtype)
        assert sharded or ".indexer." in name or "layernorm" in name or "down_proj" in name
    return Float16Module(cfg, layer).module if bf16 else layer


def whole_state(layer: nn.Module) -> dict[str, Tensor]:
    state = {}
    for name, parameter in layer.named_parameters():
        is_sharded = getattr(parameter, "tensor_model_parallel", False)
        value = parameter.detach().clone()
        state[name] = gathered(value, parameter.partition_dim) if is_sharded else value
    return state


def sharded_state(layer: nn.Module) -> dict[str, Any]:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return layer.sharded_state_dict(prefix="attention.", metadata={"dp_cp_group": group})


def save(folder: str, bf16: bool) -> tuple[dict[str, Tensor], dict[str, Any]]:
    layer = attention_layer(1, bf16)
    sharded = sharded_state(layer)
    dist_checkpointing.save(sharded, folder)
    prefix = "attention.core_attention.indexer."
    bare = {name: sharded[prefix + name] for name in SHAPES}
    seen = {name: (part.global_shape, part.local_shape, part.replica_id) for name, part in bare.items()}
    return whole_state(layer), seen


def load(folder: str, bf16: bool) -> tuple[dict[str, Tensor], bool]:
    layer = attention_layer(2, bf16)
    before = whole_state(layer)
    state = dist_checkpointing.load(sharded_state(layer), folder)
    own = {name.removeprefix("attention."): value for name, value in state.items()}
    layer.load_state_dict(own, strict=True)
    after = whole_state(layer)
    return after, all(not torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize(("bf16", "sizes"), [(False, (1, 4)), (True, (1,))])
def test_a_checkpoint_of_two_ranks_loads_into_any_number(tmp_path: Path, bf16: bool, sizes: tuple[int, ...]) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    saved = megatron_ranks(save, 2, str(folder), bf16, tp=2)
    weights, seen = saved[0]
    for name, (whole, local, _) in seen.items():
        assert whole == local == SHAPES[name]
    # Of the two ranks one writes.
    assert all(seen[name][2] != saved[1][1][name][2] for name in SHAPES)
    for size in sizes:
        for loaded, was_other in megatron_ranks(load, size, str(folder), bf16, tp=size):
            assert was_other
            assert loaded.keys() == weights.keys()
            for name, value in weights.items():
                assert loaded[name].dtype is value.dtype, name
                assert torch.equal(loaded[name], value), name
