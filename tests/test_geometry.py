import copy
import dataclasses
import json
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextConfig, Glm5NextTextConfig

from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.hf_config import shown

CONFIG_PATH = Path(__file__).parents[1] / "configs" / "glm-5.3-flash.json"
CHECKPOINT = json.loads(CONFIG_PATH.read_text(encoding="utf-8"))

SIZE = "an integer >= 1, below 2**31"
BLOCKS = "an integer >= 0, at most 1000"
SIZES = [
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "v_head_dim",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "index_kpool",
    "max_position_embeddings",
]
REQUIRED = [
    *SIZES,
    "qk_rope_head_dim",
    "rms_norm_eps",
    "index_kpool_always_select_tail",
    "layer_types",
    "indexer_types",
]


def text_config(**changes: Any) -> dict[str, Any]:
    return copy.deepcopy(CHECKPOINT["text_config"]) | changes


def faults_of(config: Any) -> list[str]:
    with pytest.raises(ValueError, match="no usable DSA geometry") as caught:
        DsaGeometry.from_config(config)
    return str(caught.value).split("\n  - ")[1:]


def test_the_published_checkpoint() -> None:
    assert DsaGeometry.from_config(CHECKPOINT) == DsaGeometry(
        hidden_size=4096,
        num_hidden_layers=45,
        num_attention_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=256,
        qk_rope_head_dim=0,
        v_head_dim=256,
        rms_norm_eps=1e-5,
        index_n_heads=32,
        index_head_dim=128,
        index_topk=2048,
        index_kpool=4,
        index_kpool_always_select_tail=True,
        max_position_embeddings=1_048_576,
        dsa_layers=(3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43),
        num_nextn_predict_layers=1,
    )


def test_derived_sizes_of_the_published_checkpoint() -> None:
    geometry = DsaGeometry.from_config(CHECKPOINT)
    assert geometry.qk_head_dim == 256
    assert geometry.kv_cache_dim == 512
    assert geometry.pool_budget == 512
    assert geometry.selection_width == 2051
    assert dataclasses.replace(geometry, index_kpool_always_select_tail=False).selection_width == 2048


def test_every_way_to_hand_over_a_config_gives_the_same_geometry(tmp_path: Path) -> None:
    expected = DsaGeometry.from_config(CHECKPOINT)
    (tmp_path / "config.json").write_text(json.dumps(text_config()), encoding="utf-8")
    for config in (
        text_config(),
        MappingProxyType(text_config()),
        CONFIG_PATH,
        str(CONFIG_PATH),
        tmp_path,
        str(tmp_path),
        tmp_path / "config.json",
    ):
        assert DsaGeometry.from_config(config) == expected


def test_transformers_configurations_give_the_same_geometry() -> None:
    expected = DsaGeometry.from_config(CHECKPOINT)
    nested = Glm5NextConfig.from_dict(CHECKPOINT)
    flat = Glm5NextTextConfig.from_dict(text_config())
    assert flat.layer_types[3] == "indexed_attention"
    for config in (nested, nested.to_dict(), nested.text_config, flat, flat.to_dict()):
        assert DsaGeometry.from_config(config) == expected
    assert DsaGeometry.from_config({"text_config": flat}) == expected


def test_defaults_of_the_transformers_class_are_the_checkpoint_but_for_the_pool_and_the_mtp_block() -> None:
    defaults = DsaGeometry.from_config(Glm5NextTextConfig())
    assert defaults.index_kpool == 16
    assert defaults.num_nextn_predict_layers == 0
    expected = DsaGeometry.from_config(CHECKPOINT)
    assert dataclasses.replace(defaults, index_kpool=4, num_nextn_predict_layers=1) == expected


@given(st.data())
def test_layer_numbers_come_from_the_layer_types(data: st.DataObject) -> None:
    kinds = st.sampled_from(["deepseek_sparse_attention", "indexed_attention", "linear_attention"])
    layer_types = data.draw(
        st.lists(kinds, min_size=1, max_size=12).filter(lambda drawn: set(drawn) != {"linear_attention"})
    )
    config = text_config(
        num_hidden_layers=len(layer_types), layer_types=layer_types, indexer_types=["full"] * len(layer_types)
    )
    dsa_layers = DsaGeometry.from_config(config).dsa_layers
    assert [number in dsa_layers for number in range(len(layer_types))] == [
        kind != "linear_attention" for kind in layer_types
    ]


def test_absent_mtp_count_means_none() -> None:
    config = text_config()
    del config["num_nextn_predict_layers"]
    assert DsaGeometry.from_config(config).num_nextn_predict_layers == 0


def test_indexer_types_may_cover_the_mtp_block() -> None:
    assert DsaGeometry.from_config(text_config(indexer_types=["full"] * 46)) == DsaGeometry.from_config(CHECKPOINT)


@pytest.mark.parametrize("name", REQUIRED)
def test_missing_field_is_named(name: str) -> None:
    config = text_config()
    del config[name]
    for held in (config, {"text_config": config}):
        (fault,) = faults_of(held)
        assert fault.startswith(f"{name} is missing; accepted is ")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -4, True, 4.0, "4", None, [4], 2**31])
def test_ill_typed_or_non_positive_size_is_named(name: str, value: Any) -> None:
    assert f"{name} is {value!r}; accepted is {SIZE}" in faults_of(text_config(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("rms_norm_eps", 0.0, "rms_norm_eps is 0.0; accepted is a finite float > 0"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps is nan; accepted is a finite float > 0"),
        ("rms_norm_eps", float("inf"), "rms_norm_eps is inf; accepted is a finite float > 0"),
        ("rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5'; accepted is a finite float > 0"),
        ("rms_norm_eps", True, "rms_norm_eps is True; accepted is a finite float > 0"),
        ("index_kpool_always_select_tail", 1, "index_kpool_always_select_tail is 1; accepted is a bool"),
        ("index_kpool_always_select_tail", None, "index_kpool_always_select_tail is None; accepted is a bool"),
        *(
            ("num_nextn_predict_layers", value, f"num_nextn_predict_layers is {value}; accepted is {BLOCKS}")
            for value in (-1, None, 1001, 10**12)
        ),
        ("index_topk", 2046, "index_topk is 2046; accepted is a multiple of index_kpool=4"),
        ("layer_types", "full", "layer_types is 'full'; accepted is a list of strings"),
        ("layer_types", [3] * 45, f"layer_types is {shown([3] * 45)}; accepted is a list of strings"),
        ("indexer_types", None, "indexer_types is None; accepted is a list of strings"),
    ],
)
def test_bad_value_is_the_only_fault(name: str, value: Any, fault: str) -> None:
    assert faults_of(text_config(**{name: value})) == [fault]


def test_a_number_that_python_does_not_spell_is_refused() -> None:
    fault = f"hidden_size is an integer of 16610 bits; accepted is {SIZE}"
    assert faults_of(text_config(hidden_size=10**5000)) == [fault]


@pytest.mark.parametrize("value", [64, -1, False, 0.0])
def test_rotary_channels_are_refused_with_the_reason(value: Any) -> None:
    (fault,) = faults_of(text_config(qk_rope_head_dim=value))
    assert fault.startswith(f"qk_rope_head_dim is {value!r}; accepted is 0: these layers are NoPE")


def test_shared_selections_are_refused() -> None:
    indexer_types = ["full"] * 45
    indexer_types[7] = indexer_types[8] = "shared"
    first, second = faults_of(text_config(indexer_types=indexer_types))
    assert first.startswith("indexer_types[7] is 'shared'; accepted is 'full'")
    assert second.startswith("indexer_types[8] is 'shared'; accepted is 'full'")


@pytest.mark.parametrize("length", [44, 46, 0])
def test_layer_type_list_of_another_length(length: int) -> None:
    layer_types = (CHECKPOINT["text_config"]["layer_types"] * 2)[:length]
    expected = f"layer_types has {length} entries; accepted are num_hidden_layers=45"
    assert faults_of(text_config(layer_types=layer_types))[0] == expected


@pytest.mark.parametrize("length", [0, 44, 47])
def test_indexer_type_list_of_another_length(length: int) -> None:
    (fault,) = faults_of(text_config(indexer_types=["full"] * length))
    assert fault.startswith(f"indexer_types has {length} entries; accepted are num_hidden_layers=45, or 46")


def test_no_dsa_layer() -> None:
    (fault,) = faults_of(text_config(layer_types=["linear_attention"] * 45))
    known = "deepseek_sparse_attention or indexed_attention"
    assert fault == f"layer_types has no DSA layer; accepted is a list with {known} in it"


def test_unknown_layer_type() -> None:
    layer_types = text_config()["layer_types"]
    layer_types[5] = "full_attention"
    (fault,) = faults_of(text_config(layer_types=layer_types))
    known = "deepseek_sparse_attention, indexed_attention, linear_attention"
    assert fault == f"layer_types[5] is 'full_attention'; accepted are {known}"


@given(st.sets(st.sampled_from(REQUIRED)), st.sets(st.sampled_from(SIZES)))
def test_all_faults_are_reported_at_once(missing: set[str], wrong: set[str]) -> None:
    wrong -= missing
    if not missing | wrong:
        return
    config = text_config(**dict.fromkeys(wrong, "?"))
    for name in missing:
        del config[name]
    expected = {f"{name} is missing" for name in missing} | {f"{name} is '?'" for name in wrong}
    assert sorted(fault.partition(";")[0] for fault in faults_of(config)) == sorted(expected)


def test_blocks_that_only_the_outer_level_counts_are_counted() -> None:
    text = text_config()
    del text["num_nextn_predict_layers"]
    assert DsaGeometry.from_config({"text_config": text, "num_nextn_predict_layers": 2}).num_nextn_predict_layers == 2
    text["num_nextn_predict_layers"] = 1
    assert DsaGeometry.from_config({"text_config": text, "num_nextn_predict_layers": 2}).num_nextn_predict_layers == 1


@pytest.mark.parametrize("nested", [False, True])
def test_another_model_is_named_first(nested: bool) -> None:
    other = {"model_type": "llama", "hidden_size": 4096}
    first, *rest = faults_of({"model_type": "some_vlm", "text_config": other} if nested else other)
    assert first == "model_type is 'llama'; accepted are 'glm5_next' and, of its text_config, 'glm5_next_text'"
    assert len(rest) == len(REQUIRED) - 1
    if nested:
        del other["model_type"]
        assert faults_of({"model_type": ["?"], "text_config": other})[0].startswith("model_type is ['?']")
    # Where nothing is missing another name is no fault, and this model's own never is one.
    assert DsaGeometry.from_config(text_config(model_type="renamed")) == DsaGeometry.from_config(CHECKPOINT)
    assert faults_of(text_config(hidden_size=0)) == [f"hidden_size is 0; accepted is {SIZE}"]


def test_the_faults_of_a_file_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="hidden_size is missing") as caught:
        DsaGeometry.from_config(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"index_topk": 6}, "index_topk is 6; accepted is a multiple of index_kpool=4"),
        ({"num_attention_heads": 0}, f"num_attention_heads is 0; accepted is {SIZE}"),
        ({"qk_rope_head_dim": 64}, "qk_rope_head_dim is 64; accepted is 0"),
        *(
            ({"dsa_layers": value}, f"dsa_layers is {value}; accepted is a non-empty, ascending tuple")
            for value in ((), [3, 7], (7, 3), (3, 3), (-1, 3))
        ),
        ({"dsa_layers": (3, 45)}, "dsa_layers is (3, 45); accepted are numbers below num_hidden_layers=45"),
    ],
)
def test_direct_construction_runs_the_same_checks(changes: dict[str, Any], fault: str) -> None:
    geometry = DsaGeometry.from_config(CHECKPOINT)
    with pytest.raises(ValueError, match=re.escape(fault)):
        dataclasses.replace(geometry, **changes)


def test_frozen_and_hashable() -> None:
    geometry = DsaGeometry.from_config(CHECKPOINT)
    with pytest.raises(dataclasses.FrozenInstanceError):
        geometry.index_kpool = 16  # type: ignore[misc]
    assert hash(geometry) == hash(DsaGeometry.from_config(text_config()))
