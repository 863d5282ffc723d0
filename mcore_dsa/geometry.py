"""The shape of one DSA layer, read from a checkpoint's configuration and never defaulted.

A default is how a shape goes wrong without a word: the model class in transformers defaults ``index_kpool`` to 16 where
the published checkpoint says 4, and either one runs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

# transformers renames the checkpoint's own word (the first) when it loads a configuration.
DSA_LAYER_TYPES = ("deepseek_sparse_attention", "indexed_attention")
OTHER_LAYER_TYPES = ("linear_attention",)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_positive_float(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


def _is_size(value: Any) -> bool:
    return _is_int(value) and value > 0


def _is_count(value: Any) -> bool:
    return _is_int(value) and value >= 0


def _is_layer_list(value: object) -> bool:
    if not isinstance(value, tuple) or not value or not all(map(_is_count, value)):
        return False
    return all(left < right for left, right in pairwise(value))


# What a field accepts, and how to say so.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_size": (_is_size, "a positive integer"),
    "num_hidden_layers": (_is_size, "a positive integer"),
    "num_attention_heads": (_is_size, "a positive integer"),
    "q_lora_rank": (_is_size, "a positive integer"),
    "kv_lora_rank": (_is_size, "a positive integer"),
    "qk_nope_head_dim": (_is_size, "a positive integer"),
    "qk_rope_head_dim": (
        lambda value: _is_int(value) and value == 0,
        "0, because these layers are NoPE: no rotary channel exists in any of their tensors",
    ),
    "v_head_dim": (_is_size, "a positive integer"),
    "rms_norm_eps": (_is_positive_float, "a positive float"),
    "index_n_heads": (_is_size, "a positive integer"),
    "index_head_dim": (_is_size, "a positive integer"),
    "index_topk": (_is_size, "a positive integer"),
    "index_kpool": (_is_size, "a positive integer"),
    "index_kpool_always_select_tail": (lambda value: isinstance(value, bool), "a bool"),
    "max_position_embeddings": (_is_size, "a positive integer"),
    "dsa_layers": (_is_layer_list, "a non-empty, ascending tuple of layer numbers"),
    "num_nextn_predict_layers": (_is_count, "an integer of at least 0"),
}


@dataclass(frozen=True, kw_only=True)
class DsaGeometry:
    """Sizes of a DSA layer under the names the checkpoint's configuration gives them.

    Build it with :meth:`from_config`. Direct construction and ``dataclasses.replace`` run the same checks.

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

    Raises:
        ValueError: naming every field that is ill-typed, out of range or at odds with another.
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
            config: a mapping, the path of a ``config.json`` or of the directory that holds it, or a transformers
                configuration object. The fields are looked up in its ``text_config`` if it has one (multimodal
                checkpoints nest them there), else at the top level (text-only checkpoints).

        Every field of the class is required, ``dsa_layers`` coming from ``layer_types``, as is ``indexer_types``. The
        exception is ``num_nextn_predict_layers``: text-only configurations drop it together with the
        multi-token-prediction weights, so absence means that there are none and reads as 0.

        Raises:
            TypeError: ``config`` is none of the above.
            OSError: the path cannot be read.
            ValueError: the file is not a JSON object, or one or more fields are missing, ill-typed or unsupported; all
                of them are named at once.
        """
        source, text = _text_config(config)
        names = [name for name in _RULES if name != "dsa_layers"]
        values = {"num_nextn_predict_layers": 0} | {name: text[name] for name in names if name in text}
        required = (*names, "layer_types", "indexer_types")
        faults = [f"{name} is missing" for name in required if name not in text and name not in values]
        faults += _field_faults(values)
        if "layer_types" in text:
            faults += _layer_type_faults(text["layer_types"], values)
        if "indexer_types" in text:
            faults += _indexer_type_faults(text["indexer_types"], values)
        _raise_faults(source, faults)
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


def _text_config(config: object) -> tuple[str, Mapping[str, Any]]:
    """The name to report ``config`` under, and its text part as a mapping."""
    if isinstance(config, str | os.PathLike):
        path = Path(config)
        path = path / "config.json" if path.is_dir() else path
        source, top = str(path), _read_json_object(path)
    else:
        source, top = "config", _as_mapping("config", config)
    if "text_config" in top:
        return f"text_config of {source}", _as_mapping("text_config", top["text_config"])
    return source, top


def _read_json_object(path: Path) -> Mapping[str, Any]:
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"config: {path} does not hold JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ValueError(f"config: {path} must hold a JSON object, got {type(loaded).__name__}")
    return loaded


def _as_mapping(name: str, value: object) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    to_dict = getattr(value, "to_dict", None)
    if callable(to_dict):
        converted = to_dict()
        if isinstance(converted, Mapping):
            return converted
    accepted = "a mapping or a configuration object with to_dict()" + (", or a path" if name == "config" else "")
    raise TypeError(f"{name} must be {accepted}, got {value!r}")


def _field_faults(values: Mapping[str, Any]) -> list[str]:
    """What is wrong with the fields that ``values`` holds; a field that is absent is not looked at."""
    valid = {name: value for name, value in values.items() if _RULES[name][0](value)}
    faults = [f"{name} must be {_RULES[name][1]}, got {value!r}" for name, value in values.items() if name not in valid]
    if {"index_topk", "index_kpool"} <= valid.keys() and valid["index_topk"] % valid["index_kpool"]:
        faults.append(f"index_topk must be a multiple of index_kpool={valid['index_kpool']}, got {valid['index_topk']}")
    if {"dsa_layers", "num_hidden_layers"} <= valid.keys() and valid["dsa_layers"][-1] >= valid["num_hidden_layers"]:
        layers = valid["num_hidden_layers"]
        faults.append(f"dsa_layers must lie below num_hidden_layers={layers}, got {valid['dsa_layers']!r}")
    return faults


def _is_string_list(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value)


def _layer_type_faults(layer_types: Any, values: Mapping[str, Any]) -> list[str]:
    if not _is_string_list(layer_types):
        return [f"layer_types must be a list of strings, got {layer_types!r}"]
    layers = values.get("num_hidden_layers")
    faults = []
    if _is_size(layers) and len(layer_types) != layers:
        faults.append(f"layer_types must have num_hidden_layers={layers} entries, got {len(layer_types)}")
    known = (*DSA_LAYER_TYPES, *OTHER_LAYER_TYPES)
    faults += [
        f"layer_types[{number}] must be one of {', '.join(known)}, got {kind!r}"
        for number, kind in enumerate(layer_types)
        if kind not in known
    ]
    if not set(DSA_LAYER_TYPES) & set(layer_types):
        faults.append(f"layer_types must name a DSA layer ({' or '.join(DSA_LAYER_TYPES)}), got none")
    return faults


def _indexer_type_faults(indexer_types: Any, values: Mapping[str, Any]) -> list[str]:
    if not _is_string_list(indexer_types):
        return [f"indexer_types must be a list of strings, got {indexer_types!r}"]
    layers, blocks = values.get("num_hidden_layers"), values["num_nextn_predict_layers"]
    faults = []
    if _is_size(layers) and _is_count(blocks) and len(indexer_types) not in (layers, layers + blocks):
        accepted = f"num_hidden_layers={layers} entries, or {layers + blocks} with the multi-token-prediction blocks"
        faults.append(f"indexer_types must have {accepted}, got {len(indexer_types)}")
    faults += [
        f"indexer_types[{number}] must be 'full', because no layer reuses another one's selection, got {kind!r}"
        for number, kind in enumerate(indexer_types)
        if kind != "full"
    ]
    return faults
