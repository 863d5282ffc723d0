import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.tp_plan import DsaShard, DsaTensorPlan, DsaTpPlan

GLM = DsaGeometry.from_config(Path(__file__).parents[1] / "configs" / "glm-5.3-flash.json")
REPLICATED, ROWS, COLS = DsaShard.Replicated, DsaShard.HeadRows, DsaShard.HeadCols

# Name, kind, full shape, and bytes on a rank at TP = 1, 2, 4, 8 and 64: worked out by hand from the published shapes.
TP_SIZES = (1, 2, 4, 8, 64)
GLM_TABLE = [
    ("q_a_proj.weight", REPLICATED, (1536, 4096), (12_582_912,) * 5),
    ("q_a_layernorm.weight", REPLICATED, (1536,), (3_072,) * 5),
    ("q_b_proj.weight", ROWS, (16384, 1536), (50_331_648, 25_165_824, 12_582_912, 6_291_456, 786_432)),
    ("kv_a_proj_with_mqa.weight", REPLICATED, (512, 4096), (4_194_304,) * 5),
    ("kv_a_layernorm.weight", REPLICATED, (512,), (1_024,) * 5),
    ("kv_b_proj.weight", ROWS, (32768, 512), (33_554_432, 16_777_216, 8_388_608, 4_194_304, 524_288)),
    ("o_proj.weight", COLS, (4096, 16384), (134_217_728, 67_108_864, 33_554_432, 16_777_216, 2_097_152)),
    ("indexer.wq_b.weight", REPLICATED, (4096, 1536), (12_582_912,) * 5),
    ("indexer.wk.weight", REPLICATED, (128, 4096), (1_048_576,) * 5),
    ("indexer.k_norm.weight", REPLICATED, (128,), (256,) * 5),
    ("indexer.k_norm.bias", REPLICATED, (128,), (256,) * 5),
    ("indexer.weights_proj.weight", REPLICATED, (32, 4096), (262_144,) * 5),
    ("indexer.index_kpool_compress_gate", REPLICATED, (128, 4096), (1_048_576,) * 5),
    ("indexer.index_kpool_compress_ape", REPLICATED, (4, 128), (1_024,) * 5),
]
GLM_LOCAL_BYTES = (249_828_864, 140_776_960, 86_251_008, 58_988_032, 35_132_928)
GLM_REPLICATED_BYTES = 31_725_056


@pytest.mark.parametrize(("column", "tp_size"), list(enumerate(TP_SIZES)))
def test_bytes_of_the_published_model(column: int, tp_size: int) -> None:
    for rank in {0, tp_size // 2, tp_size - 1}:
        plan = DsaTpPlan(rank, tp_size, GLM)
        assert [(tensor.name, tensor.kind, tensor.full_shape, tensor.local_bytes) for tensor in plan.tensors] == [
            (name, kind, shape, local[column]) for name, kind, shape, local in GLM_TABLE
        ]
        assert [tensor.full_bytes for tensor in plan.tensors] == [local[0] for *_, local in GLM_TABLE]
        assert {tensor.elem_bytes for tensor in plan.tensors} == {2}
        assert plan.local_bytes == GLM_LOCAL_BYTES[column]
        assert plan.full_bytes == 249_828_864
        assert plan.full_bytes * len(GLM.dsa_layers) == 2_748_117_504
        assert plan.replicated_bytes == GLM_REPLICATED_BYTES
        assert plan.ape_widening_bytes == 1024
        assert plan.needs_output_all_reduce == (tp_size > 1)


def test_the_numbers_that_the_docstring_argues_with() -> None:
    plan = DsaTpPlan(0, 1, GLM)
    assert sum(tensor.full_bytes for tensor in plan.tensors if tensor.kind is not REPLICATED) == 218_103_808
    assert sum(tensor.full_bytes for tensor in plan.tensors if tensor.name.startswith("indexer.")) == 14_943_744
    assert GLM.pool_budget * 4 == 2 * 1024
    assert 262_144 // GLM.index_kpool * 4 == 256 * 1024


def test_size_1_is_inert() -> None:
    for tensor in DsaTpPlan(0, 1, GLM).tensors:
        assert tensor.local_shape == tensor.full_shape
        assert tensor.local_bytes == tensor.full_bytes
        assert (tensor.src_row_offset, tensor.src_col_offset) == (0, 0)


def test_a_rank_of_the_published_model() -> None:
    plan = DsaTpPlan(3, 8, GLM)  # heads 24 to 31
    assert plan.src_slice("q_b_proj.weight") == (slice(6144, 8192), slice(0, 1536))
    assert plan.src_slice("kv_b_proj.weight") == (slice(12288, 16384), slice(0, 512))
    assert plan.src_slice("o_proj.weight") == (slice(0, 4096), slice(6144, 8192))
    assert plan.src_slice("indexer.wq_b.weight") == (slice(0, 4096), slice(0, 1536))
    assert plan.src_slice("indexer.k_norm.bias") == (slice(0, 128),)


small = st.integers(1, 6)


@st.composite
def plans_of_a_group(draw: st.DrawFn) -> list[DsaTpPlan]:
    """The plans of all ranks of a random group over a random geometry."""
    tp_size = draw(st.integers(1, 7))
    pool_size = draw(small)
    geometry = dataclasses.replace(
        GLM,
        num_attention_heads=tp_size * draw(small),
        index_kpool=pool_size,
        index_topk=pool_size * draw(small),
        **{
            name: draw(small)
            for name in (
                "hidden_size",
                "q_lora_rank",
                "kv_lora_rank",
                "qk_nope_head_dim",
                "v_head_dim",
                "index_n_heads",
                "index_head_dim",
            )
        },
    )
    return [DsaTpPlan(rank, tp_size, geometry) for rank in range(tp_size)]


@settings(max_examples=60)
@given(plans_of_a_group())
def test_the_slices_of_all_ranks_tile_every_sharded_tensor_exactly_once(plans: list[DsaTpPlan]) -> None:
    for tensor in plans[0].tensors:
        covered = torch.zeros(tensor.full_shape, dtype=torch.int64)
        full = torch.arange(covered.numel()).view(covered.shape)
        parts = []
        for plan in plans:
            covered[plan.src_slice(tensor.name)] += 1
            parts.append(full[plan.src_slice(tensor.name)])
            assert tuple(parts[-1].shape) == plan.get(tensor.name).local_shape
            assert parts[-1].numel() * 2 == plan.get(tensor.name).local_bytes
        if tensor.kind is REPLICATED:
            assert torch.all(covered == len(plans))
            assert all(torch.equal(part, full) for part in parts)
        else:
            assert torch.all(covered == 1)
            assert torch.equal(torch.cat(parts, dim=0 if tensor.kind is ROWS else 1), full)


@settings(max_examples=60)
@given(plans_of_a_group())
def test_a_rank_holds_the_same_heads_of_the_three_sharded_tensors(plans: list[DsaTpPlan]) -> None:
    geometry = plans[0].geometry
    heads = torch.arange(geometry.num_attention_heads)
    for plan in plans:
        share = len(heads) // plan.tp_size
        mine = heads[plan.tp_rank * share : (plan.tp_rank + 1) * share]
        q_rows = heads.repeat_interleave(geometry.qk_nope_head_dim)
        kv_rows = heads.repeat_interleave(geometry.qk_nope_head_dim + geometry.v_head_dim)
        o_cols = heads.repeat_interleave(geometry.v_head_dim)
        rows, _ = plan.src_slice("q_b_proj.weight")
        assert torch.equal(q_rows[rows], mine.repeat_interleave(geometry.qk_nope_head_dim))
        rows, _ = plan.src_slice("kv_b_proj.weight")
        assert torch.equal(kv_rows[rows], mine.repeat_interleave(geometry.qk_nope_head_dim + geometry.v_head_dim))
        _, cols = plan.src_slice("o_proj.weight")
        assert torch.equal(o_cols[cols], mine.repeat_interleave(geometry.v_head_dim))


@settings(max_examples=60)
@given(plans_of_a_group())
def test_bytes_add_up_over_the_group(plans: list[DsaTpPlan]) -> None:
    sharded = plans[0].full_bytes - plans[0].replicated_bytes
    assert sum(plan.local_bytes for plan in plans) == sharded + len(plans) * plans[0].replicated_bytes
    geometry = plans[0].geometry
    assert plans[0].ape_widening_bytes == 2 * geometry.index_kpool * geometry.index_head_dim


@pytest.mark.parametrize(
    ("rank", "size", "numbers"),
    [
        (2, 2, ("tp_rank is 2", "tp_size=2")),
        (-1, 4, ("tp_rank is -1", "tp_size=4")),
        (0, 0, ("tp_size is 0", ">= 1")),
        (0, 3, ("tp_size is 3", "num_attention_heads=64")),
        (0, 128, ("tp_size is 128", "num_attention_heads=64")),
    ],
)
def test_a_group_that_does_not_fit_is_refused_with_both_numbers(rank: int, size: int, numbers: Any) -> None:
    with pytest.raises(ValueError, match="tp_") as caught:
        DsaTpPlan(rank, size, GLM)
    for number in numbers:
        assert number in str(caught.value)


@pytest.mark.parametrize(("rank", "size", "geometry"), [("0", 2, GLM), (0, 2.0, GLM), (True, 2, GLM), (0, 1, {})])
def test_a_wrong_type_is_refused(rank: Any, size: Any, geometry: Any) -> None:
    with pytest.raises(TypeError, match="; accepted is a"):
        DsaTpPlan(rank, size, geometry)


def test_an_unknown_name_lists_the_known() -> None:
    plan = DsaTpPlan(0, 2, GLM)
    for lookup in (plan.get, plan.src_slice):
        with pytest.raises(ValueError, match=r"'wq_b\.weight'") as caught:
            lookup("wq_b.weight")
        for tensor in plan.tensors:
            assert tensor.name in str(caught.value)


def test_plans_are_values() -> None:
    assert DsaTpPlan(1, 2, GLM) == DsaTpPlan(1, 2, GLM)
    assert DsaTpPlan(1, 2, GLM) != DsaTpPlan(0, 2, GLM)
    assert isinstance(DsaTpPlan(1, 2, GLM).get("o_proj.weight"), DsaTensorPlan)
