"""What a checkpoint must hold for a DSA layer, and a verifier that reports everything that is wrong at once.

Headers are all that is read. So what leaves names, shapes and dtypes as they are **cannot be seen here**, only in what
the model computes:

- the key and value rows of `kv_b_proj` exchanged, or its heads in another order (as in `q_b_proj` and `o_proj`);
- two tensors of one shape exchanged: `indexer.wk.weight` with `indexer.index_kpool_compress_gate`,
  `indexer.k_norm.weight` with its bias, and, only where the geometry makes their shapes equal, `q_b_proj` with
  `kv_b_proj` and the like (in GLM-5.3-Flash they differ);
- `o_proj` transposed where it is square (GLM-5.3-Flash's is [4096, 16384]).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.hf_config import HfConfig, read_hf_config, shown
from mcore_dsa.safetensors_files import Fault, FaultKind, Listing, StoredTensor, list_tensors
from mcore_dsa.tp_plan import DsaTpPlan

# What stands before "layers.N.self_attn.": as published, then as transformers' save_pretrained leaves it for the model
# without a head, for a text-only checkpoint, and for the text model alone.
PREFIXES = ("model.language_model.", "language_model.", "model.", "")

# Names under `self_attn.` and under Megatron's `self_attention.`, in the checkpoint's order.
MEGATRON_NAMES: Mapping[str, str] = {
    "q_a_proj.weight": "linear_q_down_proj.weight",
    "q_a_layernorm.weight": "q_layernorm.weight",
    "q_b_proj.weight": "linear_q_up_proj.weight",
    "kv_a_proj_with_mqa.weight": "linear_kv_down_proj.weight",
    "kv_a_layernorm.weight": "kv_layernorm.weight",
    "kv_b_proj.weight": "linear_kv_up_proj.weight",
    "o_proj.weight": "linear_proj.weight",
    "indexer.wq_b.weight": "core_attention.indexer.linear_wq_b.weight",
    "indexer.wk.weight": "core_attention.indexer.linear_wk.weight",
    "indexer.k_norm.weight": "core_attention.indexer.k_norm.weight",
    "indexer.k_norm.bias": "core_attention.indexer.k_norm.bias",
    "indexer.weights_proj.weight": "core_attention.indexer.linear_weights_proj.weight",
    "indexer.index_kpool_compress_gate": "core_attention.indexer.index_kpool_compress_gate",
    "indexer.index_kpool_compress_ape": "core_attention.indexer.index_kpool_compress_ape",
}
FP8_BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
_FP8_NAMES = ("q_a_proj.weight", "q_b_proj.weight", "kv_a_proj_with_mqa.weight", "o_proj.weight")
# Linear-attention layers have an o_proj too; every other name marks a DSA layer.
_TELLING = MEGATRON_NAMES.keys() - {"o_proj.weight"}

# What is wrong with a file rather than with the tensor that shows it.
_OF_A_FILE = (FaultKind.TRUNCATED, FaultKind.UNREADABLE, FaultKind.MISSING_FILE)
# Quantisers whose configuration may say NVFP4, and the fields that say it. None is ModelOpt's before it named itself.
_NVFP4_METHODS = (None, "modelopt", "modelopt_fp4", "modelopt_mixed", "compressed-tensors")
_NVFP4_FIELDS = ("quant_algo", "quantized_layers", "format", "config_groups")

_NAME = re.compile(r"(?P<prefix>(?:.+\.)?)layers\.(?P<layer>0|[1-9][0-9]{0,8})\.self_attn\.(?P<name>.+)")


class DsaStorage(StrEnum):
    """How attention is stored: all BF16, all F32, four weights in FP8 blocks, or all BF16 beside NVFP4 experts."""

    BF16 = "BF16"
    F32 = "F32"
    FP8 = "FP8"
    NVFP4 = "NVFP4"


class ExpectedTensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


def expected_tensors(geometry: DsaGeometry, storage: DsaStorage) -> dict[str, ExpectedTensor]:
    """The tensors of one DSA layer by their names under `self_attn.`: 14, and 4 block scales beside FP8 weights."""
    plain = "F32" if storage is DsaStorage.F32 else "BF16"
    expected = {}
    for tensor in DsaTpPlan(0, 1, geometry).tensors:
        quantised = storage is DsaStorage.FP8 and tensor.name in _FP8_NAMES
        expected[tensor.name] = ExpectedTensor("F8_E4M3" if quantised else plain, tensor.full_shape)
        if quantised:
            blocks = tuple(math.ceil(size / FP8_BLOCK) for size in tensor.full_shape)
            expected[tensor.name + SCALE_SUFFIX] = ExpectedTensor("F32", blocks)
    return expected


@dataclass(frozen=True, kw_only=True)
class CheckpointBinding:
    """A checkpoint's DSA tensors, and everything that is wrong with them.

    Attributes:
        path: the file, folder or index that was read.
        geometry: what its configuration asks for.
        storage: how its configuration says that attention is stored.
        prefix: what stands before `layers.N`; None where no DSA tensor was found.
        layers: numbers of the DSA layers.
        mtp_layers: numbers of the multi-token-prediction blocks that are there. transformers drops them when it saves
            and leaves their count in the configuration, so none at all is no fault.
        files: the safetensors files.
        tensors: by full name, where each expected tensor lies.
        faults: empty for a checkpoint that can be loaded.
    """

    path: Path
    geometry: DsaGeometry
    storage: DsaStorage
    prefix: str | None
    layers: tuple[int, ...]
    mtp_layers: tuple[int, ...]
    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]
    faults: tuple[Fault, ...]

    def full_name(self, layer: int | Literal["*"], name: str) -> str:
        """The checkpoint's name of a tensor called `name` under `self_attn.`, "*" standing for any layer."""
        return f"{self.prefix}layers.{layer}.self_attn.{name}"

    def faults_of(self, layers: Collection[int]) -> tuple[Fault, ...]:
        """The faults that keep these layers from being loaded: their own, and those of files that hold them."""
        if self.prefix is None:
            return self.faults
        stems = tuple(self.full_name(layer, "") for layer in layers)
        held = {stored.file.name for name, stored in self.tensors.items() if name.startswith(stems)}
        held |= {fault.file for fault in self.faults if fault.tensor.startswith(stems)}
        others = {file.name for file in self.files} - held

        def concerns(fault: Fault) -> bool:
            if fault.tensor.startswith((*stems, self.full_name("*", ""))):
                return True
            if not fault.tensor or fault.kind in _OF_A_FILE:
                return fault.file not in others
            match = _NAME.fullmatch(fault.tensor)
            return match is not None and int(match["layer"]) in layers

        return tuple(filter(concerns, self.faults))

    def raise_faults(self, layers: Collection[int] | None = None) -> None:
        """Raises: ValueError holding the report, where there is a fault, or one that concerns these layers."""
        faults = self.faults if layers is None else self.faults_of(layers)
        if faults:
            raise ValueError(str(replace(self, faults=faults)))

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {
            "path": str(self.path),
            "ok": not self.faults,
            "storage": self.storage.value,
            "prefix": self.prefix,
            "layers": list(self.layers),
            "mtp_layers": list(self.mtp_layers),
            "tensors": len(self.tensors),
            "faults": [fault._asdict() for fault in self.faults],
        }

    def __str__(self) -> str:
        """A line on what was read, and a table of the faults."""
        count = f"{len(self.faults)} fault{'s' if len(self.faults) != 1 else ''}" if self.faults else "no fault"
        summary = (
            f"{self.path}: {count}; {self.storage} attention, prefix {self.prefix!r}, {len(self.layers)} DSA layers, "
            f"{len(self.mtp_layers)} of {self.geometry.num_nextn_predict_layers} multi-token-prediction blocks, "
            f"{len(self.tensors)} tensors"
        )
        if not self.faults:
            return summary
        rows = [Fault._fields, *self.faults]
        widths = [max(len(row[column]) for row in rows) for column in range(len(Fault._fields))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([summary, *(line.rstrip() for line in lines)])


def verify(
    path: str | os.PathLike[str], config: object = None, *, storage: DsaStorage | None = None
) -> CheckpointBinding:
    """Compare the headers of a checkpoint with what its configuration asks for.

    Args:
        path: a `.safetensors` file, an index (`*.safetensors.index.json`), or a folder with either.
        config: as `DsaGeometry.from_config` takes it; by default the `config.json` beside the files.
        storage: by default what the configuration says: its `quantization_config`, else its `dtype`, else BF16.

    Raises: OSError where `path` or the configuration does not exist or cannot be read; ValueError for an unusable
        configuration, and for a `path` that is none of the above. What is wrong with the checkpoint itself is in the
        report.
    """
    path = Path(path)
    listing = list_tensors(path)
    read = read_hf_config((path if path.is_dir() else path.parent) if config is None else config)
    geometry = DsaGeometry.from_config(read)
    storage = _storage(read) if storage is None else storage
    if storage not in tuple(DsaStorage):
        raise ValueError(f"storage is {shown(storage)}; accepted are {', '.join(DsaStorage)}")
    storage = DsaStorage(storage)
    names, prefix, faults = _attention_names(listing)
    end = geometry.num_hidden_layers + geometry.num_nextn_predict_layers
    mtp_layers = tuple(layer for layer in range(geometry.num_hidden_layers, end) if layer in names)
    wanted = (*geometry.dsa_layers, *mtp_layers) if prefix is not None else ()
    expected = expected_tensors(geometry, storage)
    tensors: dict[str, StoredTensor] = {}
    for layer in wanted:
        stem = f"{prefix}layers.{layer}.self_attn."
        bound = {stem + name: listing.tensors[stem + name] for name in expected if stem + name in listing.tensors}
        tensors |= bound
        faults += _layer_faults(stem, names.get(layer, set()), expected, listing)
    faults = _with_scales_joined(faults, prefix, {layer: names.get(layer, set()) for layer in wanted}, expected)
    for layer in sorted(names.keys() - set(wanted)):
        why = "linear attention" if layer < geometry.num_hidden_layers else f"{end} layers"
        faults += [
            Fault(FaultKind.NOT_DSA, f"{prefix}layers.{layer}.self_attn.{name}", why, "a DSA tensor", "")
            for name in sorted(names[layer] & _TELLING)
        ]
    return CheckpointBinding(
        path=path,
        geometry=geometry,
        storage=storage,
        prefix=prefix,
        layers=geometry.dsa_layers,
        mtp_layers=mtp_layers,
        files=listing.files,
        tensors=tensors,
        faults=(*listing.faults, *faults),
    )


def _storage(config: HfConfig) -> DsaStorage:
    """How a configuration says that attention is stored; the text part's word counts before the whole's."""

    def said(*names: str) -> object:
        words = (part.get(name) for part in (config.text, config.top) for name in names)
        return next((word for word in words if word is not None), None)

    quantization = said("quantization_config")
    if quantization is not None:
        return _quantized_storage(quantization)
    dtype = str(said("dtype", "torch_dtype") or "bfloat16").removeprefix("torch.")
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"config.dtype is {shown(dtype)}; accepted are 'bfloat16' and 'float32'")
    return DsaStorage.BF16 if dtype == "bfloat16" else DsaStorage.F32


def _quantized_storage(said: object) -> DsaStorage:
    """By the method first: a producer, a data set or a list of exceptions may bear the name of another one."""
    told = said if isinstance(said, Mapping) else {}
    method = told.get("quant_method")
    if method == "fp8" and told.get("weight_block_size") in ([FP8_BLOCK] * 2, (FP8_BLOCK,) * 2):
        return DsaStorage.FP8
    inner = told.get("quantization")
    fields = inner if isinstance(inner, Mapping) else told
    if method in _NVFP4_METHODS and "nvfp4" in str([fields.get(name) for name in _NVFP4_FIELDS]).lower():
        return DsaStorage.NVFP4
    fp8 = f"quant_method 'fp8' with weight_block_size {[FP8_BLOCK] * 2}"
    nvfp4 = f"NVFP4 of quant_method {', '.join(repr(name) for name in _NVFP4_METHODS if name)}"
    raise ValueError(f"config.quantization_config is {shown(said)}; accepted are {fp8}, and {nvfp4}")


def _attention_names(listing: Listing) -> tuple[dict[int, set[str]], str | None, list[Fault]]:
    """Names under `self_attn.` by layer, of the files or the index, and the one prefix that DSA tensors have."""
    found: dict[str, dict[int, set[str]]] = {}
    for full in listing.tensors.keys() | listing.index.keys():
        match = _NAME.fullmatch(full)
        if match:
            found.setdefault(match["prefix"], {}).setdefault(int(match["layer"]), set()).add(match["name"])
    telling = {
        prefix: sum(len(names & _TELLING) for names in layers.values())
        for prefix, layers in found.items()
        if any(names & _TELLING for names in layers.values())
    }
    accepted = f"one of {', '.join(map(repr, PREFIXES))}"
    known = [prefix for prefix in PREFIXES if prefix in telling]
    if not known and not telling:
        return {}, None, [Fault(FaultKind.PREFIX, "", accepted, "no DSA tensor", "")]
    prefix = max(known, key=telling.__getitem__, default=None)
    expected = accepted if prefix is None else repr(prefix)
    faults = [
        Fault(FaultKind.PREFIX, f"{other}layers.{layer}.self_attn.{name}", expected, repr(other), "")
        for other in sorted(telling.keys() - {prefix})
        for layer, names in sorted(found[other].items())
        for name in sorted(names & _TELLING)
    ]
    return found.get(prefix, {}) if prefix is not None else {}, prefix, faults


def _layer_faults(
    stem: str, names: set[str], expected: Mapping[str, ExpectedTensor], listing: Listing
) -> Iterator[Fault]:
    """`names` are those under `stem`, one layer's `….self_attn.`, in the files or the index."""
    if not names:
        yield Fault(FaultKind.MISSING, f"{stem}*", f"{len(expected)} tensors", "none", "")
        return
    for name in sorted(names - expected.keys()):
        stored = listing.tensors.get(stem + name)
        found = "named by the index" if stored is None else _described(stored.dtype, stored.shape)
        yield Fault(FaultKind.UNEXPECTED, stem + name, "no such tensor", found, stored.file.name if stored else "")
    for name, want in expected.items():
        stored = listing.tensors.get(stem + name)
        listed = listing.index.get(stem + name)
        if stored is None:
            kind = FaultKind.SCALE_MISSING if name.endswith(SCALE_SUFFIX) else FaultKind.MISSING
            found = "none"
            if name == "indexer.k_norm.bias" and "indexer.k_norm.weight" in names:
                found = "a weight without bias, as of an RMSNorm; the indexer's key norm is a LayerNorm"
            yield Fault(kind, stem + name, _described(*want), found, listed or "")
            continue
        yield from _tensor_faults(stem + name, stored, want, expected)
        if listing.index and listed != stored.file.name:
            yield Fault(FaultKind.INDEX, stem + name, stored.file.name, listed or "not in the index", stored.file.name)


def _with_scales_joined(
    faults: list[Fault], prefix: str | None, names: Mapping[int, set[str]], expected: Iterable[str]
) -> list[Fault]:
    """One fault for scales that bear another quantiser's name, in place of two for each.

    Args:
        names: those under `self_attn.` of each layer that was looked for.
    """
    scales = [name for name in expected if name.endswith(SCALE_SUFFIX)]
    misnamed = {
        f"{prefix}layers.{layer}.self_attn.": [
            name for name in scales if name not in found and _other_name(name) in found
        ]
        for layer, found in names.items()
    }
    count = sum(map(len, misnamed.values()))
    if count == 0:
        return faults
    gone = {stem + name for stem, those in misnamed.items() for name in those}
    gone |= {_other_name(name) for name in gone}
    stems = [stem for stem, those in misnamed.items() if those]
    if len(stems) == len(names):
        stems = [f"{prefix}layers.*.self_attn."]
    found = f"{_other_name(SCALE_SUFFIX)} in the names of {count}, as other quantisers have it; rename them"
    joined = [Fault(FaultKind.SCALE_MISSING, f"{stem}*{SCALE_SUFFIX}", "block scales", found, "") for stem in stems]
    return [*joined, *(fault for fault in faults if fault.tensor not in gone)]


def _other_name(scale: str) -> str:
    return scale.removesuffix("_inv")


def _tensor_faults(
    full: str, stored: StoredTensor, want: ExpectedTensor, expected: Mapping[str, ExpectedTensor]
) -> Iterator[Fault]:
    file = stored.file.name
    if stored.dtype != want.dtype:
        yield Fault(FaultKind.DTYPE, full, want.dtype, stored.dtype, file)
    if stored.shape != want.shape:
        kind = FaultKind.SCALE_SHAPE if full.endswith(SCALE_SUFFIX) else FaultKind.SHAPE
        found = str(list(stored.shape))
        likely = [name for name, other in expected.items() if other.shape == stored.shape]
        if stored.shape == want.shape[::-1]:
            found += ", the transpose"
        elif likely:
            found += f", the shape of {' and '.join(likely)}"
        yield Fault(kind, full, str(list(want.shape)), found, file)
    if stored.stop > stored.size:
        there = max(0, stored.size - stored.start)
        yield Fault(FaultKind.TRUNCATED, full, f"{stored.stop - stored.start} bytes", f"{there} bytes", file)


def _described(dtype: str, shape: Iterable[int]) -> str:
    return f"{dtype} {list(shape)}"
