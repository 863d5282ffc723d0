"""The configuration: its defaults, what it refuses, and how a checkpoint's geometry becomes one."""

import copy
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig
from models import SIZES, config

from mcore_dsa import DsaGeometry
from mcore_dsa.megatron import KPoolDSATransformerConfig

FLASH = Path(__file__).parents[1] / "configs" / "glm-5.3-flash.json"

# What has another default than Megatron's, and Megatron's beside it.
DEFAULTS: dict[str, tuple[Any, Any]] = {
    "experimental_attention_variant": ("dsa", None),
    "qk_layernorm": (True, False),
    "qk_pos_emb_head_dim": (0, 64),
    "rope_type": ("rope", "yarn"),
    "rotary_scaling_factor": (1.0, 40),
    "add_bias_linear": (False, True),
    "attention_dropout": (0.0, 0.1),
    "hidden_dropout": (0.0, 0.1),
    "dsa_indexer_loss_coeff": (0.0, None),
    "dsa_indexer_rotate_activation": (False, True),
    "dsa_indexer_k_norm_epsilon": (1e-6, None),
}
OWN = {"dsa_indexer_kpool", "dsa_indexer_kpool_always_select_tail"}

REFUSED: list[tuple[str, Any, str]] = [
    ("experimental_attention_variant", None, "'dsa'"),
    ("multi_latent_attention", False, "True"),
    ("normalization", "LayerNorm", "'RMSNorm'"),
    ("qk_layernorm", False, "True"),
    ("qk_pos_emb_head_dim", 64, "0: these layers are NoPE"),
    ("rope_type", "yarn", "'rope'"),
    ("rotary_scaling_factor", 40.0, "1.0"),
    ("softmax_scale", 0.5, "None"),
    ("use_mup", True, "False: it sets softmax_scale"),
    ("softmax_type", "off-by-one", "'vanilla'"),
    ("window_size", (8, 0), "None"),
    ("qk_clip", True, "False"),
    ("qk_l2_norm", True, "False"),
    ("log_max_attention_logit", True, "False"),
    ("attention_output_gate", True, "False"),
    ("layernorm_zero_centered_gamma", True, "False"),
    ("fp8", "hybrid", "None"),
    ("fp8", "e4m3", "None"),
    ("fp4", "e2m1", "None"),
    ("quant_recipe", object(), "None"),
    ("use_kitchen", True, "False"),
    ("gtp_weight_remat_size", 2, "1"),
    ("cuda_graph_impl", "local", "'none': a selection synchronises with the host"),
    ("enable_cuda_graph", True, "False: a selection synchronises with the host"),
    ("external_cuda_graph", True, "False: a selection synchronises with the host"),
    ("mtp_num_layers", 1, "None: multi-token prediction"),
    ("add_bias_linear", True, "False"),
    ("attention_dropout", 0.1, "0.0"),
    ("dsa_indexer_topk_freq", 2, "1: index sharing"),
    ("dsa_indexer_skip_topk_offset", 1, "0: index sharing"),
    ("dsa_indexer_use_sparse_loss", True, "False: the indexer is frozen"),
    ("dsa_indexer_rotate_activation", True, "False"),
    ("dsa_indexer_scoring_relu", False, "True"),
    ("dsa_indexer_k_norm_fp32", True, "False"),
    ("dsa_kernel_backend", "tilelang", "'none'"),
    ("dsa_indexer_loss_coeff", 0.1, "0: it is frozen"),
    ("dsa_indexer_k_norm_epsilon", None, "a number > 0"),
    ("dsa_indexer_k_norm_epsilon", 0.0, "a number > 0"),
    ("dsa_indexer_k_norm_epsilon", float("nan"), "a number > 0"),
    ("dsa_indexer_n_heads", None, "an integer >= 1"),
    ("dsa_indexer_head_dim", 0, "an integer >= 1"),
    ("dsa_indexer_topk", 16.0, "an integer >= 1"),
    ("dsa_indexer_topk", 18, "a multiple of dsa_indexer_kpool, 4"),
    ("dsa_indexer_kpool", None, "an integer >= 1"),
    ("dsa_indexer_kpool", True, "an integer >= 1"),
    ("q_lora_rank", None, "an integer >= 1"),
    ("dsa_indexer_kpool_always_select_tail", None, "True and False"),
    ("dsa_indexer_kpool_always_select_tail", 1, "True and False"),
]


def test_defaults_differ_from_megatrons_exactly_where_this_model_does() -> None:
    theirs = {field.name: field.default for field in fields(MLATransformerConfig)}
    ours = {field.name: field.default for field in fields(KPoolDSATransformerConfig)}
    different = {
        name: (value, theirs[name])
        for name, value in ours.items()
        if name not in OWN and (value, type(value)) != (theirs[name], type(theirs[name]))
    }
    assert different == DEFAULTS
    assert {name: ours[name] for name in ours.keys() - theirs.keys()} == dict.fromkeys(OWN)
    built = config()
    assert all(getattr(built, name) == value for name, (value, _) in DEFAULTS.items())
    assert built.dsa_indexer_scoring_relu is True
    assert built.normalization == "RMSNorm"
    assert built.layernorm_epsilon == 1e-5


@pytest.mark.parametrize(("name", "value", "accepted"), REFUSED)
def test_a_field_that_does_not_fit_is_refused_by_name(name: str, value: Any, accepted: str) -> None:
    with pytest.raises(ValueError, match="k-pool DSA configuration") as raised:
        config(**{name: value})
    assert f"{name} is {value!r}; accepted is " in str(raised.value).replace("accepted are", "accepted is")
    assert accepted in str(raised.value)


TP2 = {"tensor_model_parallel_size": 2}
CHUNKS = {"num_layers": 4, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
LAYOUT = {"num_layers": 4, "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|t|t|tL"}
SINGLE = {"overlap_p2p_comm": True, "batch_p2p_comm": False}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        (TP2, "sequence_parallel is False; accepted with tensor_model_parallel_size 2 is True"),
        (CHUNKS, "batch_p2p_comm is True; accepted with 2 pipeline stages of 2 chunks is False"),
        # Megatron derives these while it finishes the configuration.
        (LAYOUT, "batch_p2p_comm is True; accepted with 2 pipeline stages of 2 chunks is False"),
        ({"tensor_parallel_num_weight_shards": 2}, "gtp_weight_remat_size is 2; accepted is 1"),
    ],
)
def test_what_only_does_not_fit_together_is_refused_by_name(fields: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match="k-pool DSA configuration") as raised:
        config(**fields)
    assert fault in str(raised.value)


@pytest.mark.parametrize(
    "fields",
    [
        {**TP2, "sequence_parallel": True},
        {**CHUNKS, **SINGLE},
        {**CHUNKS, "batch_p2p_comm": False},
        {**LAYOUT, **SINGLE},
        {"num_layers": 8, "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
    ],
)
def test_what_fits_together_is_accepted(fields: dict[str, Any]) -> None:
    built = config(**fields)
    assert {name: getattr(built, name) for name in fields if not name.endswith("layout")} == {
        name: value for name, value in fields.items() if not name.endswith("layout")
    }


def test_a_finished_configuration_is_copied_and_accepted_again() -> None:
    built = config()
    for again in (replace(built), copy.deepcopy(built), pickle.loads(pickle.dumps(built))):
        assert again.dsa_indexer_topk_freq == 1
        with pytest.raises(TypeError, match="accepted by Megatron's DSAttention"):
            bool(again.dsa_indexer_topk_freq)


def test_all_faults_are_reported_at_once() -> None:
    faults = {name: value for name, value, _ in REFUSED if (name, value) != ("dsa_indexer_topk", 18)}
    with pytest.raises(ValueError, match="k-pool DSA configuration") as raised:
        config(**faults)
    for name, value in faults.items():
        assert f"{name} is {value!r}" in str(raised.value)


def test_the_indexer_has_no_default_size() -> None:
    with pytest.raises(ValueError, match="k-pool DSA configuration") as raised:
        KPoolDSATransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4)
    for name in SIZES:
        assert (f"{name} is None" in str(raised.value)) == name.startswith("dsa_indexer_")


def test_no_loss_coefficient_is_accepted_as_none_too() -> None:
    assert config(dsa_indexer_loss_coeff=None).dsa_indexer_loss_coeff is None


def test_the_published_geometry_becomes_a_configuration() -> None:
    geometry = DsaGeometry.from_config(FLASH)
    built = KPoolDSATransformerConfig.from_geometry(geometry, num_layers=2)
    expected = {
        "num_layers": 2,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 256,
        "qk_pos_emb_head_dim": 0,
        "v_head_dim": 256,
        "layernorm_epsilon": 1e-5,
        "dsa_indexer_n_heads": 32,
        "dsa_indexer_head_dim": 128,
        "dsa_indexer_topk": 2048,
        "dsa_indexer_kpool": 4,
        "dsa_indexer_kpool_always_select_tail": True,
        "dsa_indexer_pool_budget": 512,
    }
    assert {name: getattr(built, name) for name in expected} == expected
    assert built.dsa_indexer_pool_budget == geometry.pool_budget


def test_a_field_given_beside_the_geometry_wins() -> None:
    geometry = DsaGeometry.from_config(FLASH)
    built = KPoolDSATransformerConfig.from_geometry(geometry, num_layers=1, dsa_indexer_topk=64, hidden_size=128)
    assert (built.dsa_indexer_topk, built.hidden_size, built.dsa_indexer_pool_budget) == (64, 128, 16)
