"""A Hugging Face checkpoint's DSA tensors into this rank's Megatron tensors, and back.

Shapes by suffix: U output and F input features of a weight, H heads, E hidden, Q query-latent and C latent channels, X
bytes of a row.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from mcore_dsa.binding import (
    FP8_BLOCK,
    MEGATRON_NAMES,
    PREFIXES,
    SCALE_SUFFIX,
    CheckpointBinding,
    DsaStorage,
    ExpectedTensor,
    expected_tensors,
)
from mcore_dsa.files import DIGESTS, differing, new_folder, read_digests
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.hf_config import CONFIG_NAME, HfConfig, read_hf_config, shown
from mcore_dsa.safetensors_files import MODEL_INDEX, StoredTensor
from mcore_dsa.tensor_files import DTYPES, copied, mapped, read_tensor, save_tensors
from mcore_dsa.tp_plan import DsaShard, DsaTensorPlan, DsaTpPlan

_APE = "indexer.index_kpool_compress_ape"
# Of an FP8 weight in float64 at a time. Measured on o_proj: 0.58 s with 2**16, 0.85 s with 2**14, 1.7 s with 2**20.
_STRIP_ELEMENTS = 2**16
# A layer, the name of one of its tensors under `self_attn.`, and the whole tensor.
type LayerTensor = tuple[int, str, Tensor]


def changed_files(binding: CheckpointBinding, layers: Sequence[int], *, rank: int = 0, ranks: int = 1) -> list[str]:
    """One line for each file with tensors of `layers` that is not what its digest says, where a checkpoint has digests.

    With several `ranks` each reads its share.

    Raises: OSError or ValueError for digests that cannot be read.
    """
    prefixes = tuple(binding.full_name(layer, "") for layer in layers)
    names = sorted({stored.file.name for full, stored in binding.tensors.items() if full.startswith(prefixes)})
    folder = binding.files[0].parent
    try:
        digests = read_digests(folder)
    except FileNotFoundError:
        return []
    return differing(folder, digests, [name for name in names[rank::ranks] if name in digests])


def load_attention(binding: CheckpointBinding, layer: int, plan: DsaTpPlan) -> dict[str, Tensor]:
    """This rank's tensors of one DSA layer, by their names under Megatron's `self_attention.`.

    Only the slices that the plan names are read, one tensor at a time; beside the result no more is mapped or held than
    one of the layer's tensors. BF16 stays BF16 to the bit, F32 stays F32, FP8 blocks become BF16: the exact product of
    weight and scale, rounded once. `ape` is F32, as the indexer keeps it, whatever the checkpoint holds.

    Raises: ValueError for a `layer` that is none of the binding's, or that one of its faults concerns; for a `plan` of
        another geometry; for a file that is not as it was verified.
    """
    known = (*binding.layers, *binding.mtp_layers)
    if layer not in known:
        raise ValueError(f"layer is {layer!r}; accepted are {known}")
    binding.raise_faults((layer,))
    _check_geometry("plan.geometry", plan.geometry, binding.geometry)
    return {MEGATRON_NAMES[tensor.name]: _load(binding, layer, tensor) for tensor in plan.tensors}


def merge_attention(shards: Sequence[Mapping[str, Tensor]], geometry: DsaGeometry) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of one layer from those of all tensor-parallel ranks, one at a time in checkpoint order.

    `shards` holds the 14 tensors of rank 0, 1, …, named as `load_attention` names them; what comes is named as under
    `self_attn.`, in the dtype that the ranks hold.

    Raises: TypeError for what is no tensor; ValueError where there is no rank, or their number does not divide the
        heads; where a tensor is missing, unknown, ill-shaped or of another dtype than on rank 0; where the ranks hold a
        replicated tensor in different bits.
    """
    if not shards:
        raise ValueError("shards is empty; accepted are the tensors of one rank or more")
    plans = [DsaTpPlan(rank, len(shards), geometry) for rank in range(len(shards))]
    for rank, shard in enumerate(shards):
        _check_tensors(f"shards[{rank}]", shard)
        if shard.keys() != set(MEGATRON_NAMES.values()):
            differing = sorted(shard.keys() ^ set(MEGATRON_NAMES.values()))
            raise ValueError(f"shards[{rank}] lacks or adds {differing}; accepted are the 14 tensors of a layer")
    for position, tensor in enumerate(DsaTpPlan(0, 1, geometry).tensors):
        name = MEGATRON_NAMES[tensor.name]
        parts = [shard[name] for shard in shards]
        for rank, part in enumerate(parts):
            want = plans[rank].tensors[position].local_shape
            if part.shape != want or part.dtype != parts[0].dtype:
                accepted = f"{parts[0].dtype} {list(want)}"
                raise ValueError(f"shards[{rank}][{name!r}] is {part.dtype} {list(part.shape)}; accepted is {accepted}")
        if tensor.kind is DsaShard.Replicated:
            drifted = [rank for rank, part in enumerate(parts) if not torch.equal(_bits(part), _bits(parts[0]))]
            if drifted:
                raise ValueError(
                    f"shards{drifted}[{name!r}] is not as on rank 0; accepted are equal bits: it is replicated"
                )
            yield tensor.name, parts[0]
        else:
            yield tensor.name, torch.cat(parts, dim=0 if tensor.kind is DsaShard.HeadRows else 1)


def export_attention(
    tensors: Iterable[LayerTensor], target: str | os.PathLike[str], *, template: CheckpointBinding
) -> None:
    """A copy of a checkpoint in the new folder `target`, with `tensors` in place of its own.

    Every other byte is the template's: where `template` was read from a folder or an index all files of its folder
    come along (subfolders do not), from a single file that file and the configuration beside it. `tensors` are taken
    one at a time. The folder appears under its name when it is complete and on disk, with digests of its files, or not
    at all.

    Raises: FileExistsError for a `target` that exists and is not an empty folder; ValueError for a template with FP8
        attention, or faults that concern one of the layers; for a layer that is not the template's or lacks some of
        its 14 tensors; for a tensor that is unknown, comes twice, is ill-shaped, or changes when it takes the
        template's dtype.
    """
    if template.storage is DsaStorage.FP8:
        raise ValueError(
            "template is FP8; accepted is attention in BF16 or F32: write_attention makes a new checkpoint"
        )
    places = {
        (layer, name): template.tensors[full]
        for layer in (*template.layers, *template.mtp_layers)
        for name in MEGATRON_NAMES
        if (full := template.full_name(layer, name)) in template.tensors
    }
    with new_folder(Path(target)) as folder, ExitStack() as stack:
        for file in _files_to_copy(template):
            shutil.copyfile(file, folder / file.name)
        files: dict[str, BinaryIO] = {}
        for layer, name, tensor in _placed(_of_sound_layers(tensors, template), places, required=frozenset()):
            place = places[layer, name]
            if place.file.name not in files:
                files[place.file.name] = stack.enter_context((folder / place.file.name).open("r+b"))
            files[place.file.name].seek(place.start)
            files[place.file.name].write(_bits(tensor).flatten().numpy())


def write_attention(
    tensors: Iterable[LayerTensor],
    target: str | os.PathLike[str],
    *,
    config: object,
    storage: DsaStorage = DsaStorage.BF16,
    prefix: str = PREFIXES[0],
    mtp: bool = False,
) -> None:
    """A checkpoint of DSA tensors alone in the new folder `target`: a file a layer, an index, the configuration.

    `tensors` are the layers that `config` (as `DsaGeometry.from_config` takes it) calls DSA, with `mtp` the
    multi-token-prediction blocks too. A layer is held until it is whole. The configuration is written without its
    `quantization_config` and with the `dtype` of `storage`, which is BF16 or F32.

    Raises: as `export_attention`; ValueError for another `storage` or `prefix`, too.
    """
    if storage not in (DsaStorage.BF16, DsaStorage.F32):
        raise ValueError(f"storage is {storage}; accepted are BF16 and F32")
    if prefix not in PREFIXES:
        raise ValueError(f"prefix is {prefix!r}; accepted are {PREFIXES}")
    read = read_hf_config(config)
    geometry = DsaGeometry.from_config(read)
    layers = list(geometry.dsa_layers)
    if mtp:
        layers += range(geometry.num_hidden_layers, geometry.num_hidden_layers + geometry.num_nextn_predict_layers)
    expected = expected_tensors(geometry, storage)
    places = {(layer, name): want for layer in layers for name, want in expected.items()}
    index: dict[str, str] = {}
    total = 0
    held: dict[int, dict[str, Tensor]] = {}
    with new_folder(Path(target)) as folder:
        for layer, name, tensor in _placed(tensors, places, required=frozenset(layers)):
            of_layer = held.setdefault(layer, {})
            of_layer[f"{prefix}layers.{layer}.self_attn.{name}"] = tensor
            if len(of_layer) == len(expected):
                file = f"attention-layer-{layer:05d}.safetensors"
                save_tensors(of_layer, folder / file, {"format": "pt"})
                index |= dict.fromkeys(of_layer, file)
                total += sum(each.nbytes for each in held.pop(layer).values())
        _write_json(folder / MODEL_INDEX, {"metadata": {"total_size": total}, "weight_map": index})
        _write_json(folder / CONFIG_NAME, _config_without_quantization(read, storage))


def absorb_up_projections(tensors: Mapping[str, Tensor], geometry: DsaGeometry) -> dict[str, Tensor]:
    """A rank's tensors with `kv_b_proj` multiplied into its neighbours, for inference on latents.

    `linear_q_up_proj`, `linear_kv_up_proj` and `linear_proj` give way to

    - `absorbed_q_up_proj.weight` `[H * C, Q]`, of head h `kv_b[h, keys].T @ q_b[h]`: what it gives is scored against
      the latents themselves, for `(q_b x) . (kv_b c) = (kv_b.T q_b x) . c`;
    - `absorbed_proj.weight` `[E, H * C]`, of head h `o[:, h] @ kv_b[h, values]`: it takes attended latents.

    H are the rank's heads, or all of them. A head's product has one shape, is taken in float64 and rounded once to the
    dtype of the weights, so its bits do not depend on the heads beside it: absorbing over all heads and then dividing
    the result by head is the same as absorbing the rank's own, to the bit. The rounding is the transform's only error.

    Raises: TypeError for what is no tensor; ValueError where the three weights are missing, or do not hold the same
        number of whole heads of `geometry`.
    """
    _check_tensors("tensors", tensors)
    names = tuple(MEGATRON_NAMES[name] for name in ("q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight"))
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"tensors lacks {', '.join(missing)}; accepted are all of {', '.join(names)}")
    q_UQ, kv_UC, o_EF = (tensors[name] for name in names)
    query, value, latent = geometry.qk_nope_head_dim, geometry.v_head_dim, geometry.kv_lora_rank
    heads = q_UQ.shape[0] // query if q_UQ.ndim else 0
    wanted = (
        (heads * query, geometry.q_lora_rank),
        (heads * (query + value), latent),
        (geometry.hidden_size, heads * value),
    )
    for name, weight, shape in zip(names, (q_UQ, kv_UC, o_EF), wanted, strict=True):
        if weight.shape != shape:
            accepted = f"{list(shape)} for {heads} heads"
            raise ValueError(f"tensors[{name!r}] has shape {list(weight.shape)}; accepted is {accepted}")
    kv_HUC = kv_UC.unflatten(0, (heads, query + value))
    q_HCQ = q_UQ.new_empty(heads, latent, geometry.q_lora_rank)
    o_EHC = o_EF.new_empty(geometry.hidden_size, heads, latent)
    for head in range(heads):
        key_UC, value_FC = kv_HUC[head].double().split([query, value])
        q_of_head_UQ = q_UQ[head * query : (head + 1) * query].double()
        o_of_head_EF = o_EF[:, head * value : (head + 1) * value].double()
        q_HCQ[head] = _round(key_UC.T @ q_of_head_UQ, q_UQ.dtype)
        o_EHC[:, head] = _round(o_of_head_EF @ value_FC, o_EF.dtype)
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    return {**kept, "absorbed_q_up_proj.weight": q_HCQ.flatten(0, 1), "absorbed_proj.weight": o_EHC.flatten(1)}


def _check_tensors(argument: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{argument}[{name!r}] is {shown(tensor)}; accepted is a tensor")


def _check_geometry(argument: str, got: DsaGeometry, accepted: DsaGeometry) -> None:
    differing = [field.name for field in fields(got) if getattr(got, field.name) != getattr(accepted, field.name)]
    if differing:
        said = ", ".join(f"{name}={getattr(got, name)!r}, not {getattr(accepted, name)!r}" for name in differing)
        raise ValueError(f"{argument} is of {said}; accepted is the checkpoint's geometry")


def _load(binding: CheckpointBinding, layer: int, tensor: DsaTensorPlan) -> Tensor:
    full = binding.full_name(layer, tensor.name)
    stored = binding.tensors[full]
    dtype = DTYPES[stored.dtype]
    bytes_UX = mapped(stored)
    part_UX = bytes_UX[
        tensor.src_row_offset : tensor.src_row_offset + tensor.local_rows,
        tensor.src_col_offset * dtype.itemsize : (tensor.src_col_offset + tensor.local_row_elems) * dtype.itemsize,
    ]
    if stored.dtype == "F8_E4M3":
        scale = read_tensor(binding.tensors[full + SCALE_SUFFIX])
        return _dequantised(part_UX.view(dtype), scale, tensor.src_row_offset, tensor.src_col_offset)
    part = copied(part_UX, dtype).view(tensor.local_shape)
    return part.float() if tensor.name == _APE else part


def _dequantised(weight_UF: Tensor, scale: Tensor, row_offset: int, col_offset: int) -> Tensor:
    """Multiply a part of an FP8 weight with the scales of its 128x128 blocks, whatever the part's place in them.

    A few rows with the same scales at a time: in float64 the whole part would be four times the result.
    """
    rows, cols = weight_UF.shape
    result = torch.empty(rows, cols, dtype=torch.bfloat16, device="cpu")
    col_block_F = torch.arange(col_offset, col_offset + cols, device="cpu") // FP8_BLOCK
    most = max(1, _STRIP_ELEMENTS // cols)
    start = 0
    while start < rows:
        block, within = divmod(row_offset + start, FP8_BLOCK)
        stop = min(rows, start + FP8_BLOCK - within, start + most)
        product = weight_UF[start:stop].double() * scale[block, col_block_F].double()
        result[start:stop] = _round(product, torch.bfloat16)
        start = stop
    return result


def _round(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float64 once to nearest, ties to even.

    torch converts float64 to BF16 by way of float32, which rounds twice: of products of FP8 weights and fp32 scales one
    in 65,536 or so lands on a tie that it was not. Rounding to odd on the way keeps what a second rounding must know.
    """
    if dtype is not torch.bfloat16:
        return exact.to(dtype)
    single = exact.float()
    excess = single.double().abs() - exact.abs()
    bits = single.view(torch.int32)
    bits -= (excess > 0).int()
    bits |= (excess.abs() > 0).int()
    return single.bfloat16()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def _files_to_copy(template: CheckpointBinding) -> list[Path]:
    folder = template.files[0].parent
    if template.path.suffix == ".safetensors":
        return [*template.files, *(file for file in (folder / CONFIG_NAME,) if file.exists())]
    return sorted(child for child in folder.iterdir() if child.is_file() and child.name != DIGESTS)


def _of_sound_layers(tensors: Iterable[LayerTensor], template: CheckpointBinding) -> Iterator[LayerTensor]:
    checked: set[int] = set()
    for layer, name, tensor in tensors:
        if layer not in checked:
            template.raise_faults((layer,))
            checked.add(layer)
        yield layer, name, tensor


def _placed(
    tensors: Iterable[LayerTensor],
    places: Mapping[tuple[int, str], ExpectedTensor | StoredTensor],
    *,
    required: frozenset[int],
) -> Iterator[LayerTensor]:
    """Each tensor in the dtype of its place; every layer that comes, and every required one, must come whole."""
    done: set[tuple[int, str]] = set()
    for layer, name, tensor in tensors:
        place = places.get((layer, name))
        if place is None:
            raise ValueError(f"tensors has {name!r} of layer {layer!r}; accepted are the checkpoint's DSA tensors")
        if (layer, name) in done:
            raise ValueError(f"tensors has {name} of layer {layer} twice; accepted is once")
        yield layer, name, _exactly(tensor, place, f"{name} of layer {layer}")
        done.add((layer, name))
    layers = required | {layer for layer, _ in done}
    missing = [f"{name} of layer {layer}" for layer, name in places if layer in layers and (layer, name) not in done]
    if missing:
        raise ValueError(f"tensors lacks {', '.join(missing)}; accepted are whole layers")


def _exactly(tensor: Tensor, place: ExpectedTensor | StoredTensor, name: str) -> Tensor:
    """The tensor in the dtype of its place, if that loses nothing."""
    if tensor.shape != place.shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}; accepted is {list(place.shape)}")
    dtype = DTYPES[place.dtype]
    narrow = tensor.detach().to("cpu", dtype)
    if narrow.dtype != tensor.dtype and not torch.equal(_bits(narrow.to(tensor.dtype)), _bits(tensor.cpu())):
        raise ValueError(f"{name} is {tensor.dtype} that is not exact in {dtype}; accepted is what is: round it first")
    return narrow


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config_without_quantization(config: HfConfig, storage: DsaStorage) -> dict[str, Any]:
    dtype = {DsaStorage.BF16: "bfloat16", DsaStorage.F32: "float32"}[storage]
    parts = [dict(part) for part in (config.top, config.text)]
    for part in parts:
        part.pop("quantization_config", None)
        part.pop("torch_dtype", None)
        part["dtype"] = dtype
    return {**parts[0], "text_config": parts[1]} if "text_config" in parts[0] else parts[0]
