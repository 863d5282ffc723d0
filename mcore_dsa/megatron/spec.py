"""Specifications and thin model builders: the self-attention spec is the unit, the hosts are Megatron's.

`use_kpool_dsa` puts `KPoolDSAttention` into a specification that somebody else built. The builders do the same to
Megatron's own DSA specifications, and make sure afterwards that no token-level selection is left in the model.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any

import megatron.core.models.gpt.experimental_attention_variant_module_specs as variant_specs
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import (
    get_hybrid_total_layer_count,
    get_hybrid_total_pipeline_segment_count,
)
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import nn

from mcore_dsa.megatron.attention import KPoolDSAttention
from mcore_dsa.megatron.backend import default_backend
from mcore_dsa.megatron.config import KPoolDSATransformerConfig


def use_kpool_dsa[Spec](spec: Spec, *, whole: bool = True) -> Spec:
    """`spec`, its absorbed-MLA layers attending through `KPoolDSAttention`: a copy where it changes, shared elsewhere.

    `spec` is a self-attention, layer, block or stack specification, or whatever holds some: lists, mappings, a
    `ModuleSpec`'s parameters, the arguments of a `functools.partial`, attributes of an object. Other attention stays as
    it is. A spec that uses `KPoolDSAttention` already comes back as it is. With `whole=False` it is what one pipeline
    stage builds, which may hold no such layer.

    Raises: ValueError where a whole spec holds no `AbsorbedMLASelfAttention`, or where Megatron's own `DSAttention`
    stays in it because something else hosts it.
    """
    if whole and not _specs_of(spec, AbsorbedMLASelfAttention):
        raise ValueError(
            f"spec is a {type(spec).__name__} without AbsorbedMLASelfAttention; accepted is one with it, as Megatron's "
            "get_dsa_module_spec_for_backend builds it, or with whole=False a pipeline stage without such a layer"
        )
    result: Spec = _plugged(spec, {})
    if _specs_of(result, DSAttention):
        raise ValueError(
            f"spec is a {type(spec).__name__} with DSAttention outside AbsorbedMLASelfAttention, where it would select "
            "tokens; accepted is DSA in absorbed MLA alone"
        )
    return result


def kpool_dsa_attention_spec(
    config: KPoolDSATransformerConfig, backend: BackendSpecProvider | None = None
) -> ModuleSpec:
    """The self-attention specification: absorbed MLA with k-pool DSA, for any host that takes a `ModuleSpec`.

    `backend` names the modules for norms and linear layers; None takes Transformer Engine's where it is installed.
    """
    backend = default_backend(config) if backend is None else backend
    return use_kpool_dsa(variant_specs.get_dsa_module_spec_for_backend(config, backend))


def kpool_dsa_layer_spec(
    config: KPoolDSATransformerConfig, backend: BackendSpecProvider | None = None, *, layer_number: int = 1
) -> ModuleSpec:
    """One transformer layer, its MLP dense or MoE as `config.moe_layer_freq` says for `layer_number` (from 1)."""
    if not 1 <= layer_number <= config.num_layers:
        raise ValueError(f"layer_number is {layer_number}; accepted is 1 <= layer_number <= {config.num_layers}")
    return _layer_specs(config, default_backend(config) if backend is None else backend)[layer_number - 1]


def kpool_dsa_block_spec(
    config: KPoolDSATransformerConfig,
    backend: BackendSpecProvider | None = None,
    *,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """The layers of one pipeline stage and the final norm, for `GPTModel`."""
    backend = default_backend(config) if backend is None else backend
    if config.pipeline_model_parallel_layout is not None:
        local = config.pipeline_model_parallel_layout.get_layer_id_list(
            layer_type=LayerType.decoder, vp_stage=vp_stage, pp_rank=pp_rank
        )
    else:
        first = get_transformer_layer_offset(config, vp_stage=vp_stage, pp_rank=pp_rank)
        local = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=pp_rank))
    specs = _layer_specs(config, backend)
    return TransformerBlockSubmodules(
        layer_specs=[specs[layer] for layer in local],
        layer_norm=backend.layer_norm(rms_norm=True, for_qk=False),
    )


def kpool_dsa_gpt_model(
    config: KPoolDSATransformerConfig,
    *,
    vocab_size: int,
    max_sequence_length: int,
    pre_process: bool = True,
    post_process: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    vp_stage: int | None = None,
    backend: BackendSpecProvider | None = None,
    **model_arguments: Any,
) -> GPTModel:
    """A `GPTModel` (one pipeline stage of it) whose every layer is k-pool DSA; further arguments are `GPTModel`'s."""
    groups = ProcessGroupCollection.use_mpu_process_groups() if pg_collection is None else pg_collection
    model = GPTModel(
        config,
        kpool_dsa_block_spec(config, backend, vp_stage=vp_stage, pp_rank=groups.pp.rank()),
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="none",
        pg_collection=groups,
        vp_stage=vp_stage,
        **model_arguments,
    )
    check_wiring(model, layers=len(model.decoder.layers))
    return model


def kpool_dsa_hybrid_model(
    config: KPoolDSATransformerConfig,
    *,
    vocab_size: int,
    max_sequence_length: int,
    hybrid_layer_pattern: str,
    pre_process: bool = True,
    post_process: bool = True,
    pg_collection: ProcessGroupCollection | None = None,
    vp_stage: int | None = None,
    backend: BackendSpecProvider | None = None,
    **model_arguments: Any,
) -> HybridModel:
    """A `HybridModel` whose `D` layers are k-pool DSA, `-` a dense MLP and `E` MoE, as in `D-DE`.

    `config.num_layers` is the number of letters: Hybrid counts attention and MLP as layers of their own.

    Raises: ValueError where the pattern has another number of letters, or parts between `|` than pipeline stages and
    their chunks: Megatron would build what it comes to, and leave out the rest without an error.
    """
    _check_pattern(config, hybrid_layer_pattern)
    backend = default_backend(config) if backend is None else backend
    model = HybridModel(
        config,
        ModuleSpec(HybridStack, submodules=_hybrid_submodules(config, backend)),
        vocab_size=vocab_size,
        max_sequence_length=max_sequence_length,
        hybrid_layer_pattern=hybrid_layer_pattern,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="none",
        pg_collection=pg_collection,
        vp_stage=vp_stage,
        **model_arguments,
    )
    check_wiring(model)
    return model


def _check_pattern(config: KPoolDSATransformerConfig, pattern: str) -> None:
    letters, parts = get_hybrid_total_layer_count(pattern), get_hybrid_total_pipeline_segment_count(pattern)
    if letters != config.num_layers:
        raise ValueError(
            f"hybrid_layer_pattern is {pattern!r}, {letters} layers; accepted is one of config.num_layers, "
            f"{config.num_layers}"
        )
    chunks = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    if parts not in (1, chunks):
        raise ValueError(
            f"hybrid_layer_pattern is {pattern!r}, {parts} parts; accepted is one of {chunks}, one for each chunk "
            "of each pipeline stage"
        )


def _layer_specs(config: KPoolDSATransformerConfig, backend: BackendSpecProvider) -> list[ModuleSpec]:
    stock = variant_specs.get_transformer_layer_with_experimental_attention_variant_spec(config, backend)
    return use_kpool_dsa(stock)


def _hybrid_submodules(config: KPoolDSATransformerConfig, backend: BackendSpecProvider) -> HybridStackSubmodules:
    norm = backend.layer_norm(rms_norm=True, for_qk=False)
    dense = MLPSubmodules(linear_fc1=backend.column_parallel_linear(), linear_fc2=backend.row_parallel_linear())
    layers: dict[str, Any] = {
        "dsa_layer": ModuleSpec(
            TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=kpool_dsa_attention_spec(config, backend),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        "mlp_layer": ModuleSpec(
            MLPLayer,
            submodules=TransformerLayerSubmodules(
                pre_mlp_layernorm=norm,
                mlp=partial(MLP.as_mlp_submodule, submodules=dense),
                mlp_bda=get_bias_dropout_add,
            ),
        ),
    }
    if config.num_moe_experts is not None:
        experts = get_moe_module_spec_for_backend(
            backend, num_experts=config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm
        )
        layers["moe_layer"] = ModuleSpec(
            MoETransformerLayer,
            submodules=TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=experts, mlp_bda=get_bias_dropout_add),
        )
    return HybridStackSubmodules(**layers)


def _plugged(node: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """`node`, or a copy where something in it changed. `done` keeps both by id, so that what is shared stays so."""
    if id(node) not in done:
        done[id(node)] = node, node
        parts = _parts(node)
        changed = {key: new for key, part in parts.items() if (new := _plugged(part, done)) is not part}
        if _builds(node, AbsorbedMLASelfAttention):
            changed |= _plugged_submodules(node, parts)
        done[id(node)] = node, _with_parts(node, parts | changed) if changed else node
    return done[id(node)][1]


def _plugged_submodules(host: Any, parts: dict[Any, Any]) -> dict[Any, Any]:
    for key, part in parts.items():
        if isinstance(part, Mapping) and key == "params" and hasattr(part.get("submodules"), "core_attention"):
            return {key: {**part, **_plugged_submodules(host, {"submodules": part["submodules"]})}}
        if hasattr(part, "core_attention"):
            if part.core_attention is KPoolDSAttention:
                return {}
            plugged = copy.copy(part)
            plugged.core_attention = KPoolDSAttention
            return {key: plugged}
    raise ValueError(
        f"spec holds {_built_by(host)} without submodules; accepted is it with AbsorbedMLASelfAttentionSubmodules"
    )


def _specs_of(root: object, module: type) -> list[Any]:
    """What builds `module` or a subclass inside `root`, each object once: specifications, partials, bare classes."""
    found = []
    # With the objects, so that no id is given to another one.
    seen: dict[int, object] = {}
    todo = [root]
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if _builds(node, module):
            found.append(node)
        todo += _parts(node).values()
    return found


def _builds(node: object, module: type) -> bool:
    built = _built_by(node)
    return isinstance(built, type) and issubclass(built, module)


def _built_by(node: object) -> object:
    if isinstance(node, partial):
        return node.func
    if isinstance(node, ModuleSpec):
        return get_module(node) if isinstance(node.module, tuple) else node.module
    return node


def _parts(node: Any) -> dict[Any, Any]:
    """What may be or hold a specification inside `node`, by its key, place or name."""
    if isinstance(node, Mapping):
        return dict(node)
    if isinstance(node, list | tuple):
        return dict(enumerate(node))
    if isinstance(node, partial):
        return {**dict(enumerate(node.args)), **node.keywords}
    if isinstance(node, type | FunctionType | MethodType | ModuleType | nn.Module | Enum):
        return {}
    parts = {field.name: getattr(node, field.name) for field in fields(node)} if is_dataclass(node) else {}
    parts |= getattr(node, "__dict__", {})
    return {name: part for name, part in parts.items() if not (isinstance(node, ModuleSpec) and name == "module")}


def _with_parts(node: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(node, partial):
        arguments = [parts[place] for place in range(len(node.args))]
        return partial(node.func, *arguments, **{name: parts[name] for name in node.keywords})
    if isinstance(node, tuple):
        return type(node)._make(parts.values()) if hasattr(node, "_make") else tuple(parts.values())
    result = copy.copy(node)
    for key, part in parts.items():
        if isinstance(node, Mapping | list):
            result[key] = part
        else:
            # A frozen dataclass too.
            object.__setattr__(result, key, part)
    return result


def check_wiring(model: nn.Module, *, layers: int | None = None) -> int:
    """How many attention layers of a built model, or of its part on one pipeline stage, are k-pool DSA.

    `layers` is how many of them are accepted; None accepts at least one, and none on a stage that is not the whole
    pipeline. Call it on a model that somebody else built: what builds a layer out of sight of `use_kpool_dsa`, and has
    another configuration than `KPoolDSATransformerConfig`, trains without a word on Megatron's own tokens.

    Raises: RuntimeError where an absorbed-MLA or DSA layer is not k-pool DSA, or another number of them is.
    """
    absorbed = sum(isinstance(module, AbsorbedMLASelfAttention) for module in model.modules())
    stock = [name for name, module in model.named_modules() if isinstance(module, DSAttention)]
    ours = sum(isinstance(module, KPoolDSAttention) for module in model.modules())
    if stock or ours != absorbed:
        raise RuntimeError(
            f"the number of layers with k-pool DSA is {ours}; accepted is {absorbed}, that of layers with "
            f"absorbed MLA, and no DSAttention, which selects tokens: {stock}"
        )
    if ours != layers if layers is not None else ours == 0 and not _is_pipeline_stage(model):
        accepted = ">= 1 in a model that is not one stage of a pipeline" if layers is None else layers
        raise RuntimeError(f"the number of layers with k-pool DSA is {ours}; accepted is {accepted}")
    return ours


def _is_pipeline_stage(model: nn.Module) -> bool:
    """Whether a model of Megatron's, wrapped or not, is without its embedding or its output layer."""
    ends = [(vars(part).get("pre_process"), vars(part).get("post_process")) for part in model.modules()]
    return any(end is False for pair in ends for end in pair)
