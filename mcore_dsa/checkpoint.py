"""A Hugging Face checkpoint's DSA tensors into this rank's Megatron tensors, and back.

Needs the extra ``hf`` (safetensors). Shapes by suffix: R rows and C columns of a weight, H attention heads, D query or
key channels of a head, V its value channels, L query latent channels, K key-value latent channels, E hidden channels.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
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
    expected_tensors,
    read_config,
)
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.safetensors_files import INDEX_SUFFIX, StoredTensor, header_bytes
from mcore_dsa.tp_plan import DsaShard, DsaTensorPlan, DsaTpPlan

_APE = "indexer.index_kpool_compress_ape"
_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32}
# Of an FP8 weight in float64 at a time. Measured on o_proj: 0.58 s with 2**16, 0.85 s with 2**14, 1.7 s with 2**20.
_STRIP_ELEMENTS = 2**16
# A layer, the name of one of its tensors under ``self_attn.``, and the whole tensor.
type LayerTensor = tuple[int, str, Tensor]


def load_attention(binding: CheckpointBinding, layer: int, plan: DsaTpPlan) -> dict[str, Tensor]:
    """This rank's tensors of one DSA layer, by their names under Megatron's ``self_attention.``.

    Only the slices that the plan names are read, one tensor at a time; beside the result no more is mapped or held than
    one of the layer's tensors. BF16 stays BF16 to the bit, F32 stays F32, FP8 blocks become BF16: the exact product of
    weight and scale, rounded once. ``ape`` is F32, as the indexer keeps it, whatever the checkpoint holds.

    Raises:
        ValueError: the binding has faults, ``layer`` is none of its layers, ``plan`` is another geometry's, or a file
            has become unreadable since.
    """
    binding.raise_faults()
    if layer not in (*binding.layers, *binding.mtp_layers):
        raise ValueError(f"layer must be one of {(*binding.layers, *binding.mtp_layers)}, got {layer!r}")
    _check_geometry("plan.geometry", plan.geometry, binding.geometry)
    return {MEGATRON_NAMES[tensor.name]: _load(binding, layer, tensor) for tensor in plan.tensors}


def merge_attention(shards: Sequence[Mapping[str, Tensor]], geometry: DsaGeometry) -> Iterator[tuple[str, Tensor]]:
    """The whole tensors of one layer from those of all tensor-parallel ranks, one at a time in checkpoint order.

    ``shards`` holds the 14 tensors of rank 0, 1, …, named as :func:`load_attention` names them; what comes is named as
    under ``self_attn.``, in the dtype that the ranks hold.

    Raises:
        ValueError: there is no rank, or their number does not divide the heads; a tensor is missing, unknown,
            ill-shaped or of another dtype than on rank 0; the ranks hold a replicated tensor in different bits.
    """
    if not shards:
        raise ValueError("shards must hold at least one rank's tensors, got none")
    plans = [DsaTpPlan(rank, len(shards), geometry) for rank in range(len(shards))]
    for rank, shard in enumerate(shards):
        if shard.keys() != set(MEGATRON_NAMES.values()):
            differing = sorted(shard.keys() ^ set(MEGATRON_NAMES.values()))
            raise ValueError(f"shards[{rank}] must hold the 14 tensors of a layer; missing or unknown: {differing}")
    for position, tensor in enumerate(DsaTpPlan(0, 1, geometry).tensors):
        name = MEGATRON_NAMES[tensor.name]
        parts = [shard[name] for shard in shards]
        for rank, part in enumerate(parts):
            want = plans[rank].tensors[position].local_shape
            if part.shape != want or part.dtype != parts[0].dtype:
                accepted = f"{parts[0].dtype} {list(want)}"
                raise ValueError(f"shards[{rank}][{name!r}] must be {accepted}, got {part.dtype} {list(part.shape)}")
        if tensor.kind is DsaShard.Replicated:
            drifted = [rank for rank, part in enumerate(parts) if not torch.equal(_bits(part), _bits(parts[0]))]
            if drifted:
                raise ValueError(f"shards: ranks {drifted} hold {name} otherwise than rank 0; it is replicated")
            yield tensor.name, parts[0]
        else:
            yield tensor.name, torch.cat(parts, dim=0 if tensor.kind is DsaShard.HeadRows else 1)


def export_attention(
    tensors: Iterable[LayerTensor], target: str | os.PathLike[str], *, template: CheckpointBinding
) -> None:
    """A copy of a checkpoint in the new folder ``target``, with ``tensors`` in place of its own.

    Every other byte is the template's: where ``template`` was read from a folder or an index all files of its folder
    come along (subfolders do not), from a single file that file and the configuration beside it. ``tensors`` are taken
    one at a time. The folder appears under its name when it is complete and on disk, or not at all.

    Raises:
        FileExistsError: ``target`` exists and is not an empty folder.
        ValueError: the template has faults or FP8 attention; a layer is not the template's or lacks some of its 14
            tensors; a tensor is unknown, comes twice, is ill-shaped, or changes when it takes the template's dtype.
    """
    template.raise_faults()
    if template.storage is DsaStorage.FP8:
        raise ValueError("template must hold attention in BF16 or F32, got FP8; write_attention makes a new checkpoint")
    with new_folder(Path(target)) as folder:
        for file in _files_to_copy(template):
            shutil.copyfile(file, folder / file.name)
        places = {
            (layer, name): template.tensors[template.full_name(layer, name)]
            for layer in (*template.layers, *template.mtp_layers)
            for name in MEGATRON_NAMES
        }
        _fill(folder, tensors, places, required=frozenset())


def write_attention(
    tensors: Iterable[LayerTensor],
    target: str | os.PathLike[str],
    *,
    config: object,
    storage: DsaStorage = DsaStorage.BF16,
    prefix: str = PREFIXES[0],
    mtp: bool = False,
) -> None:
    """A checkpoint of DSA tensors alone in the new folder ``target``: a file a layer, an index, the configuration.

    ``tensors`` are the layers that ``config`` (as :meth:`DsaGeometry.from_config` takes it) calls DSA, with ``mtp`` the
    multi-token-prediction blocks too, taken one at a time. The configuration is written without its
    ``quantization_config`` and with the ``dtype`` of ``storage``, which is BF16 or F32.

    Raises: as :func:`export_attention`; ValueError for another ``storage`` or ``prefix``, too.
    """
    if storage not in (DsaStorage.BF16, DsaStorage.F32):
        raise ValueError(f"storage must be BF16 or F32, got {storage}")
    if prefix not in PREFIXES:
        raise ValueError(f"prefix must be one of {PREFIXES}, got {prefix!r}")
    geometry = DsaGeometry.from_config(config)
    layers = list(geometry.dsa_layers)
    if mtp:
        layers += range(geometry.num_hidden_layers, geometry.num_hidden_layers + geometry.num_nextn_predict_layers)
    expected = expected_tensors(geometry, storage)
    places: dict[tuple[int, str], StoredTensor] = {}
    index: dict[str, str] = {}
    with new_folder(Path(target)) as folder:
        for layer in layers:
            file = Path(f"attention-layer-{layer:05d}.safetensors")
            full = {name: f"{prefix}layers.{layer}.self_attn.{name}" for name in expected}
            header, ranges = header_bytes({full[name]: want for name, want in expected.items()})
            (folder / file).write_bytes(header)
            size = max(stop for _, stop in ranges.values())
            for name, (dtype, shape) in expected.items():
                places[layer, name] = StoredTensor(file, dtype, shape, *ranges[full[name]], size)
                index[full[name]] = file.name
        _fill(folder, tensors, places, required=frozenset(layers))
        total = sum(place.stop - place.start for place in places.values())
        _write_json(folder / f"model{INDEX_SUFFIX}", {"metadata": {"total_size": total}, "weight_map": index})
        _write_json(folder / "config.json", _config_without_quantization(config, storage))


def absorb_up_projections(tensors: Mapping[str, Tensor], geometry: DsaGeometry) -> dict[str, Tensor]:
    """A rank's tensors with ``kv_b_proj`` multiplied into its neighbours, for inference on latents.

    ``linear_q_up_proj``, ``linear_kv_up_proj`` and ``linear_proj`` give way to

    - ``absorbed_q_up_proj.weight`` ``[H * K, L]``, of head h ``kv_b[h, keys].T @ q_b[h]``: what it gives is scored
      against the latents themselves, for ``(q_b x) . (kv_b c) = (kv_b.T q_b x) . c``;
    - ``absorbed_proj.weight`` ``[E, H * K]``, of head h ``o[:, h] @ kv_b[h, values]``: it takes attended latents.

    H are the rank's heads, or all of them. A head's product has one shape, is taken in float64 and rounded once to the
    dtype of the weights, so its bits do not depend on the heads beside it: absorbing over all heads and then dividing
    the result by head is the same as absorbing the rank's own, to the bit. The rounding is the transform's only error.

    Raises:
        ValueError: the three weights are missing, or do not hold the same number of whole heads of ``geometry``.
    """
    names = tuple(MEGATRON_NAMES[name] for name in ("q_b_proj.weight", "kv_b_proj.weight", "o_proj.weight"))
    missing = [name for name in names if name not in tensors]
    if missing:
        raise ValueError(f"tensors must hold {', '.join(names)}; missing: {', '.join(missing)}")
    q_RL, kv_RK, o_EC = (tensors[name] for name in names)
    query, value, latent = geometry.qk_nope_head_dim, geometry.v_head_dim, geometry.kv_lora_rank
    heads = q_RL.shape[0] // query
    wanted = (
        (heads * query, geometry.q_lora_rank),
        (heads * (query + value), latent),
        (geometry.hidden_size, heads * value),
    )
    for name, weight, shape in zip(names, (q_RL, kv_RK, o_EC), wanted, strict=True):
        if weight.shape != shape:
            raise ValueError(f"tensors[{name!r}] must be {list(shape)} for {heads} heads, got {list(weight.shape)}")
    kv_HRK = kv_RK.unflatten(0, (heads, query + value))
    q_HKL = q_RL.new_empty(heads, latent, geometry.q_lora_rank)
    o_EHK = o_EC.new_empty(geometry.hidden_size, heads, latent)
    for head in range(heads):
        key_DK, value_VK = kv_HRK[head].double().split([query, value])
        q_DL = q_RL[head * query : (head + 1) * query].double()
        o_EV = o_EC[:, head * value : (head + 1) * value].double()
        q_HKL[head] = _round(key_DK.T @ q_DL, q_RL.dtype)
        o_EHK[:, head] = _round(o_EV @ value_VK, o_EC.dtype)
    kept = {name: tensor for name, tensor in tensors.items() if name not in names}
    return {**kept, "absorbed_q_up_proj.weight": q_HKL.flatten(0, 1), "absorbed_proj.weight": o_EHK.flatten(1)}


def _check_geometry(argument: str, got: DsaGeometry, accepted: DsaGeometry) -> None:
    differing = [field.name for field in fields(got) if getattr(got, field.name) != getattr(accepted, field.name)]
    if differing:
        said = ", ".join(f"{name}={getattr(got, name)!r}, not {getattr(accepted, name)!r}" for name in differing)
        raise ValueError(f"{argument} must be the checkpoint's geometry, got {said}")


def _load(binding: CheckpointBinding, layer: int, tensor: DsaTensorPlan) -> Tensor:
    full = binding.full_name(layer, tensor.name)
    stored = binding.tensors[full]
    with _opened(stored.file) as file:
        part = file.get_slice(full)[tensor.src_slice]
        if stored.dtype == "F8_E4M3":
            scale_file = binding.tensors[full + SCALE_SUFFIX].file
            with _opened(scale_file) as scales:
                scale = scales.get_tensor(full + SCALE_SUFFIX)
                return _dequantised(part, scale, tensor.src_row_offset, tensor.src_col_offset)
        dtype = torch.float32 if tensor.name == _APE else _DTYPES[stored.dtype]
        # The part is a view of the mapped file, a strided one where columns are cut.
        return torch.empty(part.shape, dtype=dtype).copy_(part)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    """Opened for one tensor at a time: pages of the mapping count as memory until it is closed."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} cannot be read any more: {error}") from error


def _dequantised(weight_RC: Tensor, scale: Tensor, row_offset: int, col_offset: int) -> Tensor:
    """Multiply a part of an FP8 weight with the scales of its 128x128 blocks, whatever the part's place in them.

    A few rows with the same scales at a time: in float64 the whole part would be four times the result.
    """
    rows, cols = weight_RC.shape
    result = torch.empty(rows, cols, dtype=torch.bfloat16)
    col_block_C = torch.arange(col_offset, col_offset + cols) // FP8_BLOCK
    most = max(1, _STRIP_ELEMENTS // cols)
    start = 0
    while start < rows:
        block, within = divmod(row_offset + start, FP8_BLOCK)
        stop = min(rows, start + FP8_BLOCK - within, start + most)
        product = weight_RC[start:stop].double() * scale[block, col_block_C].double()
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
        return [*template.files, *(file for file in (folder / "config.json",) if file.exists())]
    return sorted(child for child in folder.iterdir() if child.is_file())


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` to write into, which takes its name once all of it is on disk."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"target must not exist or be an empty folder, got {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{secrets.token_hex(4)}.partial")
    partial.mkdir()
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            _sync(path)
        os.replace(partial, target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fill(
    folder: Path,
    tensors: Iterable[LayerTensor],
    places: Mapping[tuple[int, str], StoredTensor],
    *,
    required: frozenset[int],
) -> None:
    """Write each tensor where it belongs; every layer that comes, and every required one, must come whole."""
    written: set[tuple[int, str]] = set()
    with ExitStack() as stack:
        files: dict[str, BinaryIO] = {}
        for layer, name, tensor in tensors:
            place = places.get((layer, name))
            if place is None:
                raise ValueError(f"tensors: {name!r} of layer {layer!r} is none of the checkpoint's DSA tensors")
            if (layer, name) in written:
                raise ValueError(f"tensors: {name} of layer {layer} comes twice")
            if place.file.name not in files:
                files[place.file.name] = stack.enter_context((folder / place.file.name).open("r+b"))
            data = _exactly(tensor, place, f"{name} of layer {layer}")
            files[place.file.name].seek(place.start)
            files[place.file.name].write(_bits(data).flatten().numpy())
            written.add((layer, name))
    layers = required | {layer for layer, _ in written}
    missing = [f"{name} of layer {layer}" for layer, name in places if layer in layers and (layer, name) not in written]
    if missing:
        raise ValueError(f"tensors: these are missing: {', '.join(missing)}")


def _exactly(tensor: Tensor, place: StoredTensor, name: str) -> Tensor:
    """The tensor in the dtype of its place, if that loses nothing."""
    if tensor.shape != place.shape:
        raise ValueError(f"tensors: {name} must be {list(place.shape)}, got {list(tensor.shape)}")
    dtype = _DTYPES[place.dtype]
    narrow = tensor.detach().to("cpu", dtype)
    if narrow.dtype != tensor.dtype and not torch.equal(_bits(narrow.to(tensor.dtype)), _bits(tensor.cpu())):
        raise ValueError(f"tensors: {name} must be exact in {dtype}, got {tensor.dtype} that is not; round it first")
    return narrow


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _config_without_quantization(config: object, storage: DsaStorage) -> dict[str, Any]:
    dtype = {DsaStorage.BF16: "bfloat16", DsaStorage.F32: "float32"}[storage]
    top, text = read_config(config)
    parts = [dict(part) for part in (top, text)]
    for part in parts:
        part.pop("quantization_config", None)
        part.pop("torch_dtype", None)
        part["dtype"] = dtype
    return {**parts[0], "text_config": parts[1]} if "text_config" in parts[0] else parts[0]
