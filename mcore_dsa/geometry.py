"""The shape of one DSA layer, read from a checkpoint's configuration and never defaulted.

A default is how a shape goes wrong without a word: the model class in transformers defaults `index_kpool` to 16 where
the published checkpoint says 4, and either one runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, Self

from mcore_dsa.hf_config import HfConfig, read_hf_config, shown

# Of a whole configuration, and of its text_config.
MODEL_TYPES = ("glm5_next", "glm5_next_text")

# transformers renames the checkpoint's own word (the first) when it loads a configuration.
DSA_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")
OTHER_LAYER_TYPES = ("linear_attention",)

# Ids of tokens and pools are int32.
_SIZE_LIMIT = 2**31
# Each is a layer to look for. The published model has one.
_MOST_BLOCKS = 1000


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive_float(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


def _is_size(value: Any) -> bool:
    return _is_int(value) and 0 < value < _SIZE_LIMIT


def _is_count(value: Any) -> bool:
    return _is_int(value) and 0 <= value <= _MOST_BLOCKS


def _is_layer_list(value: object) -> bool:
    if not isinstance(value, tuple) or not value or not all(_is_int(layer) and layer >= 0 for layer in value):
        return False
    return all(left < right for left, right in pairwise(value))


_SIZE = "an integer >= 1, below 2**31"
# What a field accepts, and how to say so.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_size": (_is_size, _SIZE),
    "num_hidden_layers": (_is_size, _SIZE),
    "num_attention_heads": (_is_size, _SIZE),
    "q_lora_rank": (_is_size, _SIZE),
    "kv_lora_rank": (_is_size, _SIZE),
    "qk_nope_head_dim": (_is_size, _SIZE),
    "qk_rope_head_dim": (
        lambda value: _is_int(value) and value == 0,
        "0: these layers are NoPE, and no rotary channel exists in any of their tensors",
    ),
    "v_head_dim": (_is_size, _SIZE),
    "rms_norm_eps": (_is_positive_float, "a finite float > 0"),
    "index_n_heads": (_is_size, _SIZE),
    "index_head_dim": (_is_size, _SIZE),
    "index_topk": (_is_size, _SIZE),
    "index_kpool": (_is_size, _SIZE),
    "index_kpool_always_select_tail": (lambda value: isinstance(value, bool), "a bool"),
    "max_position_embeddings": (_is_size, _SIZE),
    "dsa_layers": (_is_layer_list, "a non-empty, ascending tuple of layer numbers"),
    "num_nextn_predict_layers": (_is_count, f"an integer >= 0, at most {_MOST_BLOCKS}"),
}


@dataclass(frozen=True, kw_only=True)
class DsaGeometry:
    """Sizes of a DSA layer under the names the checkpoint's configuration gives them.

    Build it with `from_config`. Direct construction and `dataclasses.replace` run the same checks.

    Attributes:
        hidden_size: channels of a hidden row.
        num_hidden_layers: layers of the text model, the multi-token-prediction block not counted.
        num_attention_heads: attention heads of the whole layer, over all tensor-parallel ranks.
        q_lora_rank: channels of the compressed query.
        kv_lora_rank: channels of the latent that keys and values share.
        qk_nope_head_dim: channels of a query or key head.
        qk_rope_head_dim: rotary channels of a head; always 0.
        v_head_dim: channels of a value head.
        rms_norm_eps: epsilon of every RMSNorm; the indexer's key norm is a LayerNorm with an epsilon of its own.
        index_n_heads: heads of the indexer.
        index_head_dim: channels of an indexer head.
        index_topk: tokens a row selects, its tail not counted.
        index_kpool: tokens in a pool.
        index_kpool_always_select_tail: whether a row also attends to its own incomplete pool.
        max_position_embeddings: tokens in the longest sequence the model was made for.
        dsa_layers: zero-based numbers of the DSA layers, ascending.
        num_nextn_predict_layers: multi-token-prediction blocks behind the last layer, each with a DSA layer.

    Raises: ValueError naming every field that is ill-typed, out of range or at odds with another.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rms_norm_eps: float
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    index_kpool: int
    index_kpool_always_select_tail: bool
    max_position_embeddings: int
    dsa_layers: tuple[int, ...]
    num_nextn_predict_layers: int

    def __post_init__(self) -> None:
        _raise_faults("DsaGeometry", _field_faults({field.name: getattr(self, field.name) for field in fields(self)}))

    @classmethod
    def from_config(cls, config: object) -> Self:
        """Read the geometry from a model configuration.

        Args:
            config: a mapping, the path of a `config.json` or of the folder that holds it, or a transformers
                configuration object. The fields are looked up in its `text_config` if it has one (multimodal
                checkpoints nest them there), else at the top level (text-only checkpoints).

        Every field of the class is required, `dsa_layers` coming from `layer_types`, as is `indexer_types`. The
        exception is `num_nextn_predict_layers`: some configurations count these blocks outside of `text_config`, and
        text-only ones drop them with their weights. Where neither level counts them there are none.

        Raises: TypeError for a `config` that is none of the above; OSError for a path that cannot be read; ValueError
            for a file that is not a JSON object, and for fields that are missing, ill-typed or unsupported, all of
            them named at once.
        """
        read = read_hf_config(config)
        text = {"num_nextn_predict_layers": read.top.get("num_nextn_predict_layers", 0), **read.text}
        values = {name: text[name] for name in _RULES if name != "dsa_layers" and name in text}
        faults = _missing_faults(text)
        faults += _field_faults(values)
        if "layer_types" in text:
            faults += _layer_type_faults(text["layer_types"], values)
        if "indexer_types" in text:
            faults += _indexer_type_faults(text["indexer_types"], values)
        _raise_faults(read.source, [*_model_type_faults(read), *faults] if faults else [])
        dsa_layers = tuple(number for number, kind in enumerate(text["layer_types"]) if kind in DSA_LAYER_TYPES)
        return cls(**values, dsa_layers=dsa_layers)

    @property
    def qk_head_dim(self) -> int:
        """Channels of a query or key head, rotary ones included."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_cache_dim(self) -> int:
        """Channels kept for a token to attend to: the shared latent and the rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def pool_budget(self) -> int:
        """Pools a row may select."""
        return self.index_topk // self.index_kpool

    @property
    def selection_width(self) -> int:
        """Tokens a row attends to at most: the selected pools and, where the model has it, an incomplete pool."""
        return self.index_topk + (self.index_kpool - 1 if self.index_kpool_always_select_tail else 0)


def _raise_faults(source: str, faults: Sequence[str]) -> None:
    if faults:
        raise ValueError(f"{source} is no usable DSA geometry:" + "".join(f"\n  - {fault}" for fault in faults))


def _model_type_faults(read: HfConfig) -> list[str]:
    """What another model's configuration is; asked only where something else is wrong, for names may be changed."""
    name = next((part["model_type"] for part in (read.text, read.top) if part.get("model_type") is not None), None)
    if name is None or name in MODEL_TYPES:
        return []
    whole, nested = MODEL_TYPES
    return [f"model_type is {shown(name)}; accepted are {whole!r} and, of its text_config, {nested!r}"]


def _missing_faults(text: Mapping[str, Any]) -> list[str]:
    accepted = {name: rule[1] for name, rule in _RULES.items() if name != "dsa_layers"}
    accepted |= dict.fromkeys(("layer_types", "indexer_types"), "a list of strings")
    return [f"{name} is missing; accepted is {what}" for name, what in accepted.items() if name not in text]


def _field_faults(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the fields that `values` holds; a field that is absent is not looked at."""
    valid = {name: value for name, value in values.items() if _RULES[name][0](value)}
    faults = [
        f"{name} is {shown(value)}; accepted is {_RULES[name][1]}"
        for name, value in values.items()
        if name not in valid
    ]
    if {"index_topk", "index_kpool"} <= valid.keys() and valid["index_topk"] % valid["index_kpool"]:
        faults.append(
            f"index_topk is {valid['index_topk']}; accepted is a multiple of index_kpool={valid['index_kpool']}"
        )
    if {"dsa_layers", "num_hidden_layers"} <= valid.keys() and valid["dsa_layers"][-1] >= valid["num_hidden_layers"]:
        layers = valid["num_hidden_layers"]
        faults.append(
            f"dsa_layers is {shown(valid['dsa_layers'])}; accepted are numbers below num_hidden_layers={layers}"
        )
    return faults


def _is_string_list(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)


def _layer_type_faults(layer_types: Any, values: Mapping[str, Any]) -> list[str]:
    if not _is_string_list(layer_types):
        return [f"layer_types is {shown(layer_types)}; accepted is a list of strings"]
    layers = values.get("num_hidden_layers")
    faults = []
    if _is_size(layers) and len(layer_types) != layers:
        faults.append(f"layer_types has {len(layer_types)} entries; accepted are num_hidden_layers={layers}")
    known = (*DSA_LAYER_TYPES, *OTHER_LAYER_TYPES)
    faults += [
        f"layer_types[{number}] is {shown(kind)}; accepted are {', '.join(known)}"
        for number, kind in enumerate(layer_types)
        if kind not in known
    ]
    if not set(DSA_LAYER_TYPES) & set(layer_types):
        faults.append(f"layer_types has no DSA layer; accepted is a list with {' or '.join(DSA_LAYER_TYPES)} in it")
    return faults


def _indexer_type_faults(indexer_types: Any, values: Mapping[str, Any]) -> list[str]:
    if not _is_string_list(indexer_types):
        return [f"indexer_types is {shown(indexer_types)}; accepted is a list of strings"]
    layers, blocks = values.get("num_hidden_layers"), values["num_nextn_predict_layers"]
    faults = []
    if _is_size(layers) and _is_count(blocks) and len(indexer_types) not in (layers, layers + blocks):
        accepted = f"num_hidden_layers={layers}, or {layers + blocks} with the multi-token-prediction blocks"
        faults.append(f"indexer_types has {len(indexer_types)} entries; accepted are {accepted}")
    faults += [
        f"indexer_types[{number}] is {shown(kind)}; accepted is 'full': no layer reuses another one's selection"
        for number, kind in enumerate(indexer_types)
        if kind != "full"
    ]
    return faults
