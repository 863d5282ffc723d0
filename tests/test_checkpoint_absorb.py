"""kv_b_proj absorbed into its neighbours, against the products that it replaces."""

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mcore_dsa.checkpoint import absorb_up_projections
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.tp_plan import DsaTpPlan

GLM = DsaGeometry.from_config(Path(__file__).parents[1] / "configs" / "glm-5.3-flash.json")
Q, KV, OUT = "linear_q_up_proj.weight", "linear_kv_up_proj.weight", "linear_proj.weight"
NAMES = {"q_b_proj.weight": Q, "kv_b_proj.weight": KV, "o_proj.weight": OUT}
ABSORBED_Q, ABSORBED_OUT = "absorbed_q_up_proj.weight", "absorbed_proj.weight"


def sized(heads: int, query: int, value: int, latent: int, hidden: int = 10, q_lora: int = 7) -> DsaGeometry:
    return dataclasses.replace(
        GLM,
        num_attention_heads=heads,
        qk_nope_head_dim=query,
        v_head_dim=value,
        kv_lora_rank=latent,
        hidden_size=hidden,
        q_lora_rank=q_lora,
    )


def weights(geometry: DsaGeometry, dtype: torch.dtype, generator: torch.Generator, *, whole: bool) -> dict[str, Tensor]:
    plan = DsaTpPlan(0, 1, geometry)
    drawn = {}
    for name, megatron in NAMES.items():
        shape = plan.get(name).full_shape
        values = torch.randint(-3, 4, shape, generator=generator) if whole else torch.randn(shape, generator=generator)
        drawn[megatron] = values.to(dtype)
    return drawn


def products(
    tensors: dict[str, Tensor], geometry: DsaGeometry, q: Tensor, c: Tensor, p: Tensor
) -> tuple[Tensor, Tensor]:
    """Scores of query latents `q [Q]` with latents `c [T, C]`, and the output of attention `p [H, T]`, as the layer has
    them: every head's keys and values are made."""
    heads = geometry.num_attention_heads
    up = (c @ tensors[KV].double().T).unflatten(-1, (heads, -1))
    keys, values = up.split([geometry.qk_nope_head_dim, geometry.v_head_dim], dim=-1)
    queries = (tensors[Q].double() @ q).unflatten(0, (heads, -1))
    scores = torch.einsum("hd,nhd->hn", queries, keys)
    attended = torch.einsum("hn,nhv->hv", p, values)
    return scores, tensors[OUT].double() @ attended.flatten()


def absorbed_products(
    tensors: dict[str, Tensor], geometry: DsaGeometry, q: Tensor, c: Tensor, p: Tensor
) -> tuple[Tensor, Tensor]:
    """The same on latents alone."""
    queries = (tensors[ABSORBED_Q].double() @ q).unflatten(0, (geometry.num_attention_heads, -1))
    return queries @ c.T, tensors[ABSORBED_OUT].double() @ (p @ c).flatten()


sizes = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(1, 6))


@settings(max_examples=40)
@given(sizes, st.integers(0, 2**31))
def test_absorbed_integers_give_the_very_products(shape: tuple[int, int, int, int], seed: int) -> None:
    """Small integers are exact in BF16 and so are their sums here: there is no rounding to hide a mistake."""
    geometry = sized(*shape)
    generator = torch.Generator().manual_seed(seed)
    tensors = weights(geometry, torch.bfloat16, generator, whole=True)
    absorbed = absorb_up_projections(tensors, geometry)
    assert absorbed.keys() == {ABSORBED_Q, ABSORBED_OUT}
    q, c, p = (
        torch.randint(-5, 6, shape, generator=generator).double()
        for shape in ((7,), (3, geometry.kv_lora_rank), (geometry.num_attention_heads, 3))
    )
    for ours, right in zip(
        absorbed_products(absorbed, geometry, q, c, p), products(tensors, geometry, q, c, p), strict=True
    ):
        assert torch.equal(ours, right)


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**-8), (torch.float32, 2.0**-24)])
def test_the_one_rounding_is_the_only_error(dtype: torch.dtype, unit: float) -> None:
    """An absorbed weight is off by at most half a unit in its last place, `unit` of it, so a product by at most that
    share of the sum of its terms' magnitudes; 1% more, because these are taken from the rounded weights."""
    geometry = sized(4, 32, 24, 16, hidden=40, q_lora=48)
    generator = torch.Generator().manual_seed(0)
    tensors = weights(geometry, dtype, generator, whole=False)
    absorbed = absorb_up_projections(tensors, geometry)
    assert {tensor.dtype for tensor in absorbed.values()} == {dtype}
    q, c = torch.randn(48, generator=generator).double(), torch.randn(9, 16, generator=generator).double()
    p = torch.rand(4, 9, generator=generator).double()
    magnitudes = absorbed_products(
        {name: tensor.abs() for name, tensor in absorbed.items()}, geometry, q.abs(), c.abs(), p
    )
    ours, right = absorbed_products(absorbed, geometry, q, c, p), products(tensors, geometry, q, c, p)
    for got, exact, magnitude in zip(ours, right, magnitudes, strict=True):
        error = (got - exact).abs()
        assert bool((error <= 1.01 * unit * magnitude).all())
        assert bool((error > 0).any())


@settings(max_examples=30)
@given(sizes, st.integers(1, 4), st.integers(0, 2**31))
def test_over_all_heads_then_divided_is_each_rank_s_own(shape: tuple[int, int, int, int], size: int, seed: int) -> None:
    share, *rest = shape
    geometry = sized(share * size, *rest)
    tensors = weights(geometry, torch.bfloat16, torch.Generator().manual_seed(seed), whole=False)
    absorbed = absorb_up_projections(tensors, geometry)
    for rank in range(size):
        plan = DsaTpPlan(rank, size, geometry)
        own = {megatron: tensors[megatron][plan.src_slice(name)] for name, megatron in NAMES.items()}
        ours = absorb_up_projections(own, geometry)
        assert torch.equal(ours[ABSORBED_Q], absorbed[ABSORBED_Q].chunk(size, 0)[rank])
        assert torch.equal(ours[ABSORBED_OUT], absorbed[ABSORBED_OUT].chunk(size, 1)[rank])


def test_other_tensors_stay_and_misfits_are_refused() -> None:
    geometry = sized(2, 3, 4, 5)
    tensors = weights(geometry, torch.bfloat16, torch.Generator(), whole=True)
    norm = torch.ones(7)
    absorbed = absorb_up_projections({**tensors, "q_layernorm.weight": norm}, geometry)
    assert absorbed["q_layernorm.weight"] is norm
    assert absorbed.keys() == {"q_layernorm.weight", ABSORBED_Q, ABSORBED_OUT}
    with pytest.raises(ValueError, match=f"tensors lacks {KV}"):
        absorb_up_projections({Q: tensors[Q], OUT: tensors[OUT]}, geometry)
    for name, misfit in [
        (Q, tensors[Q][:-1]),
        (KV, tensors[KV][:7]),
        (OUT, tensors[OUT].T),
        (Q, tensors[Q][:0]),
    ]:
        with pytest.raises(ValueError, match=r"has shape .*; accepted is .* for \d heads"):
            absorb_up_projections({**tensors, name: misfit}, geometry)
