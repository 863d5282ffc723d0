"""Where `KPoolDSAttention` is put, and that no token-level selection of Megatron's stays behind."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import megatron.core.models.gpt.experimental_attention_variant_module_specs as variant_specs
import pytest
import torch
from harness import megatron_ranks
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from models import BATCH, OFF, ON, ROWS, Run, assert_equal, attentions, config, gpt, hybrid, train, under_each

from mcore_dsa.megatron import (
    KPoolDSAttention,
    kpool_dsa_attention_spec,
    kpool_dsa_block_spec,
    kpool_dsa_hybrid_model,
    kpool_dsa_layer_spec,
    spec,
    use_kpool_dsa,
)
from mcore_dsa.megatron.backend import LocalBackend

BACKEND = LocalBackend()


class OwnMLA(AbsorbedMLASelfAttention):
    """What somebody might derive to log or to time their attention."""


@dataclass
class OwnSubmodules:
    block: Any
    label: str = "own"


class PlainHolder:
    """No dataclass, as a host of somebody's own may hold its specifications."""

    def __init__(self, block: Any) -> None:
        self.block = block


def stock_attention() -> ModuleSpec:
    return variant_specs.get_dsa_module_spec_for_backend(config(), BACKEND)


def stock_layers() -> list[ModuleSpec]:
    return variant_specs.get_transformer_layer_with_experimental_attention_variant_spec(config(), BACKEND)


def stock_block() -> TransformerBlockSubmodules:
    return TransformerBlockSubmodules(layer_specs=stock_layers(), layer_norm=BACKEND.layer_norm(rms_norm=True))


def cores(node: Any) -> list[Any]:
    """Every core attention below `node`, by attribute names alone: not by the walk that is under test."""
    if isinstance(node, ModuleSpec) and hasattr(node.submodules, "core_attention"):
        return [node.submodules.core_attention]
    if isinstance(node, list | tuple):
        return [core for child in node for core in cores(child)]
    if isinstance(node, dict):
        return cores(list(node.values()))
    if isinstance(node, partial):
        return cores([*node.args, *node.keywords.values()])
    if hasattr(node, "core_attention"):
        return [node.core_attention]
    if isinstance(node, type | Enum) or not hasattr(node, "__dict__"):
        return []
    return cores(list(vars(node).values()))


def nestings() -> dict[str, Any]:
    layer = stock_layers()[0]
    return {
        "attention": stock_attention(),
        "layer": layer,
        "list": stock_layers(),
        "tuple": tuple(stock_layers()),
        "block": stock_block(),
        "block as a module": ModuleSpec(torch.nn.Module, submodules=stock_block()),
        "hybrid submodules": HybridStackSubmodules(dsa_layer=layer),
        "hybrid stack": ModuleSpec(HybridStack, submodules=HybridStackSubmodules(dsa_layer=layer)),
        "own dataclass": OwnSubmodules(stock_block()),
        "partial": partial(torch.nn.Identity, submodules=[layer]),
        "partial's positional arguments": partial(torch.nn.Identity, 1, layer),
        "partial of the attention": partial(AbsorbedMLASelfAttention, submodules=stock_attention().submodules),
        "dict": {"attention": {1: stock_attention()}},
        "parameters of a module": ModuleSpec(torch.nn.Module, params={"layers": (layer,)}),
        "submodules among parameters": ModuleSpec(OwnMLA, params={"submodules": stock_attention().submodules}),
        "module by name": ModuleSpec(
            (AbsorbedMLASelfAttention.__module__, "AbsorbedMLASelfAttention"), submodules=stock_attention().submodules
        ),
        "own class": PlainHolder([layer]),
        "beside a subclass": [layer, ModuleSpec(OwnMLA, submodules=stock_attention().submodules)],
    }


@pytest.mark.parametrize("name", list(nestings()))
def test_absorbed_mla_is_found_wherever_a_spec_holds_it(name: str) -> None:
    given = nestings()[name]
    modules = [core.module for core in cores(given)]
    assert modules
    assert set(modules) == {DSAttention}
    result = use_kpool_dsa(given)
    assert type(result) is type(given)
    assert cores(result) == [KPoolDSAttention] * len(modules)
    # The input is untouched, and a second pass changes nothing.
    assert [core.module for core in cores(given)] == modules
    assert cores(use_kpool_dsa(result)) == cores(result)


def test_everything_else_in_the_spec_stays() -> None:
    given = stock_attention()
    result = use_kpool_dsa(given)
    assert result.module is AbsorbedMLASelfAttention
    assert (result.params, result.metainfo) == (given.params, given.metainfo)
    theirs, ours = vars(given.submodules), vars(result.submodules)
    assert {name for name in theirs if theirs[name] != ours[name]} == {"core_attention"}
    assert use_kpool_dsa(result) == result


def test_only_what_changes_is_copied_of_megatrons_own_hybrid_stack() -> None:
    """Which cannot be copied as a whole: without Transformer Engine it holds a class made of closures."""
    before = dict(vars(hybrid_stack_spec.submodules))
    result = use_kpool_dsa(hybrid_stack_spec)
    assert vars(hybrid_stack_spec.submodules) == before
    after = vars(result.submodules)
    assert {name for name in before if before[name] is not after[name]} == {"dsa_layer"}
    assert cores(after["dsa_layer"].submodules.self_attention) == [KPoolDSAttention]
    assert [core.module for core in cores(before["dsa_layer"].submodules.self_attention)] == [DSAttention]


def test_shared_specs_stay_shared() -> None:
    layer = stock_layers()[0]
    first, second = use_kpool_dsa([layer, layer])
    assert first is second
    assert cores(first) == [KPoolDSAttention]


def test_attention_of_another_kind_stays_in_a_mixed_block() -> None:
    other = get_gpt_layer_local_spec(normalization="RMSNorm")
    block = TransformerBlockSubmodules(layer_specs=[other, stock_layers()[0]])
    before = cores(other)
    assert cores(use_kpool_dsa(block)) == [*before, KPoolDSAttention]


@pytest.mark.parametrize(
    "given",
    [
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        TransformerBlockSubmodules(layer_specs=[get_gpt_layer_local_spec(normalization="RMSNorm")]),
        [],
        HybridStackSubmodules(),
        ModuleSpec(KPoolDSAttention),
        KPoolDSAttention,
        None,
    ],
    ids=["layer", "block", "list", "hybrid", "core alone", "class", "None"],
)
def test_a_spec_without_absorbed_mla_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=f"spec is a {type(given).__name__} without AbsorbedMLASelfAttention"):
        use_kpool_dsa(given)
    # A stage of a pipeline may be without it.
    result = use_kpool_dsa(given, whole=False)
    assert (type(result), cores(result)) == (type(given), cores(given))


@pytest.mark.parametrize(
    "host", [AbsorbedMLASelfAttention, ModuleSpec(OwnMLA), partial(OwnMLA, layer_number=1)], ids=str
)
def test_absorbed_mla_without_submodules_is_refused(host: Any) -> None:
    with pytest.raises(ValueError, match=r"spec holds .* without submodules; accepted is it with"):
        use_kpool_dsa({"attention": host})


def stock_under_another_host() -> dict[str, Any]:
    hosted = ModuleSpec(MLASelfAttention, submodules=stock_attention().submodules)
    core = stock_attention().submodules.core_attention
    return {
        "dataclass": OwnSubmodules(hosted),
        "dict": {"attention": hosted},
        "parameters": ModuleSpec(torch.nn.Identity, params={"attention": hosted}),
        "positional": partial(torch.nn.Identity, hosted),
        "own class": PlainHolder(hosted),
        "class": OwnSubmodules(DSAttention),
        "partial": {"core": partial(DSAttention, submodules=core.submodules)},
        "name": ModuleSpec((DSAttention.__module__, "DSAttention"), submodules=core.submodules),
    }


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", list(stock_under_another_host()))
def test_stock_selection_under_another_host_is_refused(name: str, whole: bool) -> None:
    with pytest.raises(ValueError, match="with DSAttention outside AbsorbedMLASelfAttention"):
        use_kpool_dsa([stock_layers()[0], stock_under_another_host()[name]], whole=whole)


def test_layer_specs_follow_the_moe_pattern() -> None:
    dense = config(num_layers=3)
    mixed = config(num_layers=3, num_moe_experts=4, moe_layer_freq=[0, 1, 0], moe_ffn_hidden_size=48)
    for number in (1, 2, 3):
        for cfg, is_moe in ((dense, False), (mixed, number == 2)):
            layer = kpool_dsa_layer_spec(cfg, BACKEND, layer_number=number)
            assert cores(layer.submodules.self_attention) == [KPoolDSAttention]
            assert ("MoE" in str(layer.submodules.mlp)) == is_moe
    assert cores(kpool_dsa_block_spec(mixed, BACKEND, pp_rank=0)) == [KPoolDSAttention] * 3
    assert cores(kpool_dsa_attention_spec(mixed)) == [KPoolDSAttention]


VIRTUAL = {"virtual_pipeline_model_parallel_size": 2, "batch_p2p_comm": False}
LAYOUT = {"pipeline_model_parallel_layout": "Et|tttL"}


@pytest.mark.parametrize(
    ("options", "rank", "stage", "layers"),
    [
        ({}, 0, None, [0, 1]),
        ({}, 1, None, [2, 3]),
        (VIRTUAL, 0, 0, [0]),
        (VIRTUAL, 1, 0, [1]),
        (VIRTUAL, 0, 1, [2]),
        (VIRTUAL, 1, 1, [3]),
        (LAYOUT, 0, None, [0]),
        (LAYOUT, 1, None, [1, 2, 3]),
    ],
)
def test_a_stage_gets_its_own_layers(
    options: dict[str, Any], rank: int, stage: int | None, layers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = config(num_layers=4, pipeline_model_parallel_size=2, **options)
    monkeypatch.setattr(spec, "_layer_specs", lambda *_args: [f"layer {number}" for number in range(4)])
    block = kpool_dsa_block_spec(cfg, BACKEND, vp_stage=stage, pp_rank=rank)
    assert block.layer_specs == [f"layer {number}" for number in layers]
    assert block.layer_norm is BACKEND.layer_norm(rms_norm=True)


@pytest.mark.parametrize(
    ("pattern", "options", "fault"),
    [
        ("D-D", {}, "hybrid_layer_pattern is 'D-D', 3 layers; accepted is one of config.num_layers, 2"),
        ("D", {}, "hybrid_layer_pattern is 'D', 1 layers; accepted is one of config.num_layers, 2"),
        ("D|-", {}, "hybrid_layer_pattern is 'D|-', 2 parts; accepted is one of 1,"),
        (
            "D|-|D|-",
            {"num_layers": 4, "pipeline_model_parallel_size": 2},
            "hybrid_layer_pattern is 'D|-|D|-', 4 parts; accepted is one of 2,",
        ),
    ],
)
def test_a_pattern_that_megatron_would_build_a_part_of_is_refused(
    pattern: str, options: dict[str, Any], fault: str
) -> None:
    with pytest.raises(ValueError, match="hybrid_layer_pattern") as refused:
        kpool_dsa_hybrid_model(config(**options), vocab_size=64, max_sequence_length=ROWS, hybrid_layer_pattern=pattern)
    assert str(refused.value).startswith(fault)


@pytest.mark.parametrize("number", [0, 3, -1])
def test_a_layer_number_outside_the_model_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=f"layer_number is {number}; accepted is 1 <= layer_number <= 2"):
        kpool_dsa_layer_spec(config(), BACKEND, layer_number=number)


MOE = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 48,
    "moe_shared_expert_intermediate_size": 24,
    "moe_token_dispatcher_type": "allgather",
}


def train_moe() -> tuple[Run, list[str]]:
    run = train(steps=4, moe_layer_freq=[0, 1], **MOE)
    model = gpt(config(moe_layer_freq=[0, 1], **MOE))
    return run, [type(layer.mlp).__name__ for layer in model.decoder.layers]


def train_hybrid(pattern: str) -> Run:
    options = MOE if "E" in pattern else {}
    return train(partial(hybrid, pattern=pattern), steps=4, num_layers=len(pattern), **options)


def assert_on_equals_off(off: Sequence[Run], on: Sequence[Run]) -> None:
    for left, right in zip(off, on, strict=True):
        assert (left.partition, right.partition) == ("off", "contiguous")
        assert left.losses[-1] < 0.95 * left.losses[0]
        for part in ("selections", "logits", "losses", "gradients", "parameters"):
            assert_equal(getattr(left, part), getattr(right, part), part)


def test_a_dense_and_a_moe_layer_train_together() -> None:
    off, on = zip(*megatron_ranks(under_each, 2, [OFF, ON], train_moe, tp=2), strict=True)
    assert {tuple(kinds) for _, kinds in off} == {("MLP", MoELayer.__name__)}
    assert_on_equals_off([run for run, _ in off], [run for run, _ in on])


@pytest.mark.parametrize("pattern", ["D-D-", "DE"])
def test_a_hybrid_model_trains(pattern: str) -> None:
    off, on = zip(*megatron_ranks(under_each, 2, [OFF, ON], train_hybrid, pattern, tp=2), strict=True)
    assert_on_equals_off(off, on)
    assert len(off[0].selections) == pattern.count("D") * 6


def one_layer_in_a_foreign_host() -> list[float]:
    """A spec of this project inside a plain module, as somebody's own model would use it."""
    cfg = config(num_layers=1)
    layer = build_module(kpool_dsa_layer_spec(cfg), config=cfg, layer_number=1)
    x = torch.randn(ROWS, BATCH, cfg.hidden_size, requires_grad=True)
    output, _ = layer(x, attention_mask=None)
    output.square().mean().backward()
    assert attentions(layer)[0].counters.rows == BATCH * ROWS
    assert x.grad is not None
    return [float(output.square().mean()), float(x.grad.abs().max())]


def test_a_layer_spec_builds_into_a_layer_that_runs() -> None:
    ((loss, grad),) = megatron_ranks(one_layer_in_a_foreign_host, 1)
    assert 0 < loss < 1e3
    assert 0 < grad < 1e3


def pipeline() -> Run:
    return train(steps=3, num_layers=4, microbatches=3)


def test_pipeline_stages_train() -> None:
    off, on = zip(*megatron_ranks(under_each, 4, [OFF, ON], pipeline, tp=2, pp=2), strict=True)
    assert all(run.losses[-1] < 0.95 * run.losses[0] for run in on[2:])
    for left, right in zip(off, on, strict=True):
        assert_equal(left.selections, right.selections)
        assert_equal(left.gradients, right.gradients)
        assert_equal(left.parameters, right.parameters)
        assert len(right.selections) == 2 * 3 * 3
    assert_equal(off[2].losses, on[2].losses)
