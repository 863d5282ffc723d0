"""Specifications and thin model builders: the self-attention spec is the unit, the hosts are Megatron's.

`use_kpool_dsa` puts `KPoolDSAttention` into a specification that somebody else built. The builders do the same to
Megatron's own DSA specifications, and make sure afterwards that no token-level selection is left in the model.
"""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import megatron.core.models.gpt.experimental_attention_variant_module_specs as variant_specs
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.experimental_attention_variant.absorbed_mla import AbsorbedMLASelfAttention
from megatron.core.transformer.experimental_attention_variant.dsa import DSAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
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


def use_kpool_dsa[Spec](spec: Spec) -> Spec:
    """A copy of `spec` whose absorbed-MLA layers attend through `KPoolDSAttention`.

    `spec` is a self-attention, layer, block or stack specification, or a list of them: whatever holds `ModuleSpec`s in
    dataclass fields, lists or the keywords of a `functools.partial`. Other attention stays as it is. A spec that uses
    `KPoolDSAttention` already comes back equal.

    Raises: ValueError where there is no `AbsorbedMLASelfAttention` in it, or where Megatron's own `DSAttention` stays
    in it because something else hosts it.
    """
    result = copy.deepcopy(spec)
    absorbed = _specs_of(result, AbsorbedMLASelfAttention)
    if not absorbed:
        raise ValueError(
            f"the {type(spec).__name__} holds no AbsorbedMLASelfAttention; accepted is a specification with at least "
            "one, as Megatron's get_dsa_module_spec_for_backend builds it"
        )
    for attention in absorbed:
        attention.submodules.core_attention = KPoolDSAttention
    if _specs_of(result, DSAttention):
        raise ValueError(
            f"the {type(spec).__name__} holds a DSAttention outside AbsorbedMLASelfAttention, which would select "
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
    if model.decoder.layers:
        check_wiring(model)
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
    """
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
    if any(isinstance(module, AbsorbedMLASelfAttention) for module in model.modules()):
        check_wiring(model)
    return model


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


def _specs_of(node: object, module: type) -> list[ModuleSpec]:
    """The specifications of `module` or a subclass inside `node`, one that is shared as often as it is reached."""
    children: list[Any] = []
    if isinstance(node, partial):
        children = list(node.keywords.values())
    elif isinstance(node, list | tuple):
        children = list(node)
    elif is_dataclass(node) and not isinstance(node, type):
        children = [getattr(node, field.name) for field in fields(node)]
    found = [spec for child in children for spec in _specs_of(child, module)]
    if isinstance(node, ModuleSpec) and isinstance(node.module, type) and issubclass(node.module, module):
        found.append(node)
    return found


def check_wiring(model: nn.Module) -> int:
    """How many attention layers of a built model are k-pool DSA.

    Call it on a model that somebody else built: a specification that nobody gave to `use_kpool_dsa` trains without a
    word, with Megatron's own `DSAttention`, which selects tokens.

    Raises: RuntimeError where an absorbed-MLA or DSA layer is not k-pool DSA, or none is.
    """
    stock = [name for name, module in model.named_modules() if isinstance(module, DSAttention)]
    absorbed = sum(isinstance(module, AbsorbedMLASelfAttention) for module in model.modules())
    ours = sum(isinstance(module, KPoolDSAttention) for module in model.modules())
    if stock or ours != absorbed or ours == 0:
        raise RuntimeError(f"{ours} of {absorbed} attention layers are k-pool DSA, and these select tokens: {stock}")
    return ours
