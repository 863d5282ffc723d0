"""``mcore-dsa convert``: between a Hugging Face checkpoint and a folder with one file for each tensor-parallel rank.

A rank's file is a safetensors file of its tensors under ``layers.N.self_attention.*``, N being the checkpoint's number
of the layer. Its metadata say which rank of how many it is, how attention is stored, and the checkpoint's prefix.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from mcore_dsa.binding import CheckpointBinding, DsaStorage
from mcore_dsa.binding import verify as verify_checkpoint
from mcore_dsa.checkpoint import (
    LayerTensor,
    export_attention,
    load_attention,
    merge_attention,
    new_folder,
    write_attention,
)
from mcore_dsa.cli.outcome import Outcome
from mcore_dsa.cli.verify import outcome_of
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.safetensors_files import Fault, read_header
from mcore_dsa.tp_plan import DsaTpPlan

_CONFIG = "config.json"
_NAME = re.compile(r"layers\.(?P<layer>0|[1-9][0-9]*)\.self_attention\.(?P<name>.+)")


def hf2mcore(source: str, target: str, tp: int, layers: str | None, config: str | None) -> Outcome:
    """Write the files of all ranks; see the command's help for the arguments.

    One rank's tensors are held at a time.

    Raises:
        OSError, ValueError: a file cannot be read or written, or what it holds, or an option, does not fit.
    """
    from safetensors.torch import save_file

    binding = verify_checkpoint(source, config)
    if binding.faults:
        return outcome_of(binding)
    chosen = _chosen_layers(binding, layers)
    plans = [DsaTpPlan(rank, tp, binding.geometry) for rank in range(tp)]
    storage = DsaStorage.F32 if binding.storage is DsaStorage.F32 else DsaStorage.BF16
    same = {"format": "pt", "tp_size": str(tp), "storage": storage.value, "prefix": str(binding.prefix)}
    files = []
    with new_folder(Path(target)) as folder:
        shutil.copyfile(_config_file(source, config), folder / _CONFIG)
        for plan in plans:
            tensors = {
                f"layers.{layer}.self_attention.{name}": tensor
                for layer in chosen
                for name, tensor in load_attention(binding, layer, plan).items()
            }
            files.append(f"tp-{plan.tp_rank:05d}-of-{tp:05d}.safetensors")
            save_file(tensors, folder / files[-1], metadata={**same, "tp_rank": str(plan.tp_rank)})
    return _written(target, chosen, tp, files)


def mcore2hf(source: str, target: str, template: str | None, config: str | None) -> Outcome:
    """Put the files of all ranks together; see the command's help for the arguments.

    One layer's tensors are held at a time.

    Raises:
        OSError, ValueError: a file cannot be read or written, or what it holds, or an option, does not fit.
    """
    try:
        files, common = _read_ranks(Path(source))
        if template is not None:
            binding = verify_checkpoint(template, config)
            if binding.faults:
                return outcome_of(binding)
            export_attention(_merged(files, common.layers, binding.geometry), target, template=binding)
        else:
            _write_alone(files, common, target, str(Path(source) / _CONFIG) if config is None else config)
    except _FaultyRanksError as error:
        faults = error.args
        return Outcome({"path": source, "ok": False, "faults": faults}, lambda: "\n".join(faults), ok=False)
    written = sorted(path.name for path in Path(target).iterdir())
    return _written(target, common.layers, common.size, written)


def _write_alone(files: Sequence[Path], common: _Common, target: str, config: str) -> None:
    geometry = DsaGeometry.from_config(config)
    absent = sorted(set(geometry.dsa_layers) - set(common.layers))
    if absent:
        raise ValueError(f"--template must be given where DSA layers are missing, as are {absent}")
    write_attention(
        _merged(files, common.layers, geometry),
        target,
        config=config,
        storage=common.storage,
        prefix=common.prefix,
        mtp=max(common.layers) >= geometry.num_hidden_layers,
    )


class _FaultyRanksError(Exception):
    """What is wrong with the files of the ranks, a line for each argument."""


class _Common(NamedTuple):
    """What the files of all ranks have in common."""

    size: int
    storage: DsaStorage
    prefix: str
    layers: tuple[int, ...]


def _written(target: str, layers: tuple[int, ...], tp: int, files: list[str]) -> Outcome:
    size = sum((Path(target) / file).stat().st_size for file in files)
    report = {"ok": True, "target": target, "tp": tp, "layers": layers, "files": files, "bytes": size}
    numbers = ", ".join(map(str, layers))
    return Outcome(report, lambda: f"{target}: layers {numbers} at TP {tp}, {len(files)} files, {size:,} bytes")


def _chosen_layers(binding: CheckpointBinding, wanted: str | None) -> tuple[int, ...]:
    known = (*binding.layers, *binding.mtp_layers)
    if wanted is None:
        return known
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", wanted)
    chosen: tuple[int, ...] = ()
    if match is not None:
        first, last = int(match[1]), int(match[2] or match[1])
        chosen = tuple(layer for layer in known if first <= layer <= last)
    if not chosen:
        raise ValueError(f"--layers must be FIRST-LAST around some of the layers {known}, got {wanted!r}")
    return chosen


def _config_file(source: str, config: str | None) -> Path:
    path = Path(source if config is None else config)
    if path.is_dir():
        return path / _CONFIG
    return path.parent / _CONFIG if config is None else path


def _read_ranks(folder: Path) -> tuple[list[Path], _Common]:
    """The files in the order of ranks, by their headers and metadata."""
    paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not paths:
        raise ValueError(f"source must be a folder with a .safetensors file for each rank, got {folder}")
    files: dict[int, Path] = {}
    common: _Common | None = None
    for path in paths:
        layers = _layers(path)
        rank, own = _said_of_rank(path, layers)
        if rank in files:
            raise _FaultyRanksError(f"{path.name}: rank {rank}, and so is {files[rank].name}")
        if common not in (None, own):
            raise _FaultyRanksError(f"{path.name}: expected {common}, found {own}")
        files[rank], common = path, own
    assert common is not None
    if sorted(files) != list(range(common.size)):
        raise _FaultyRanksError(f"{folder}: expected ranks 0 to {common.size - 1}, found {sorted(files)}")
    return [files[rank] for rank in range(common.size)], common


def _layers(file: Path) -> tuple[int, ...]:
    """The layers that a sound file's header names."""
    faults: list[Fault] = []
    matches = {name: _NAME.fullmatch(name) for name in read_header(file, faults)}
    told = [f"{fault.kind} {fault.tensor}: expected {fault.expected}, found {fault.found}" for fault in faults]
    told += [f"unexpected {name}" for name, match in matches.items() if match is None]
    if told:
        raise _FaultyRanksError(*(f"{file.name}: {fault}" for fault in told))
    return tuple(sorted({int(match["layer"]) for match in matches.values() if match}))


def _said_of_rank(file: Path, layers: tuple[int, ...]) -> tuple[int, _Common]:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        said = opened.metadata() or {}
    try:
        return int(said["tp_rank"]), _Common(int(said["tp_size"]), DsaStorage(said["storage"]), said["prefix"], layers)
    except (KeyError, ValueError) as error:
        raise _FaultyRanksError(f"{file.name}: its metadata describe no rank: {said}") from error


def _merged(files: Sequence[Path], layers: Sequence[int], geometry: DsaGeometry) -> Iterator[LayerTensor]:
    for layer in layers:
        shards = [_layer_of(file, layer) for file in files]
        try:
            yield from ((layer, name, tensor) for name, tensor in merge_attention(shards, geometry))
        except ValueError as error:
            raise _FaultyRanksError(f"layer {layer}: {error}") from error


def _layer_of(file: Path, layer: int) -> dict[str, Tensor]:
    from safetensors import safe_open

    stem = f"layers.{layer}.self_attention."
    with safe_open(file, framework="pt") as opened:
        return {
            name.removeprefix(stem): opened.get_tensor(name).clone()
            for name in opened.keys()  # noqa: SIM118
            if name.startswith(stem)
        }
