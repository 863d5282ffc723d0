"""`mcore-dsa convert`: between a Hugging Face checkpoint and a folder with one file for each tensor-parallel rank.

A rank's file is a safetensors file of its tensors under `layers.N.self_attention.*`, N being the checkpoint's number
of the layer. Its metadata say which rank of how many it is, how attention is stored, and the checkpoint's prefix.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mcore_dsa.binding import CheckpointBinding, DsaStorage
from mcore_dsa.binding import verify as verify_checkpoint
from mcore_dsa.checkpoint import (
    LayerTensor,
    changed_files,
    export_attention,
    load_attention,
    merge_attention,
    write_attention,
)
from mcore_dsa.cli.outcome import Outcome
from mcore_dsa.cli.verify import fault_lines, outcome_of
from mcore_dsa.files import DIGESTS, differing, new_folder, read_digests
from mcore_dsa.geometry import DsaGeometry
from mcore_dsa.hf_config import CONFIG_NAME, shown
from mcore_dsa.safetensors_files import Fault, StoredTensor, read_header
from mcore_dsa.tensor_files import read_tensor, save_tensors
from mcore_dsa.tp_plan import DsaTpPlan

# The tensors of a rank by layer and by Megatron's name.
type _Rank = Mapping[int, Mapping[str, StoredTensor]]
_NAME = re.compile(r"layers\.(?P<layer>0|[1-9][0-9]{0,8})\.self_attention\.(?P<name>.+)")


def hf2mcore(source: str, target: str, tp: int, layers: str | None, config: str | None) -> Outcome:
    """Write the files of all ranks; see the command's help for the arguments.

    One rank's tensors are held at a time.

    Raises: OSError or ValueError for a file that cannot be read or written, or an option or content that does not fit.
    """
    binding = verify_checkpoint(source, config)
    chosen = _chosen_layers(binding, layers)
    if binding.faults_of(chosen) or (binding.faults and layers is None):
        return outcome_of(binding)
    if changed := changed_files(binding, chosen):
        return _faulty(source, changed)
    plans = [DsaTpPlan(rank, tp, binding.geometry) for rank in range(tp)]
    storage = DsaStorage.F32 if binding.storage is DsaStorage.F32 else DsaStorage.BF16
    same = {"format": "pt", "tp_size": str(tp), "storage": storage.value, "prefix": str(binding.prefix)}
    files = []
    with new_folder(Path(target)) as folder:
        shutil.copyfile(_config_file(source, config), folder / CONFIG_NAME)
        for plan in plans:
            tensors = {
                f"layers.{layer}.self_attention.{name}": tensor
                for layer in chosen
                for name, tensor in load_attention(binding, layer, plan).items()
            }
            files.append(f"tp-{plan.tp_rank:05d}-of-{tp:05d}.safetensors")
            save_tensors(tensors, folder / files[-1], {**same, "tp_rank": str(plan.tp_rank)})
    return _written(target, chosen, tp, files, binding.faults)


def mcore2hf(source: str, target: str, template: str | None, config: str | None) -> Outcome:
    """Put the files of all ranks together; see the command's help for the arguments.

    One layer's tensors are held at a time.

    Raises: OSError or ValueError for a file that cannot be read or written, or an option or content that does not fit.
    """
    faults: tuple[Fault, ...] = ()
    try:
        ranks, common = _read_ranks(Path(source))
        _check_digests(Path(source))
        if template is not None:
            binding = verify_checkpoint(template, config)
            if binding.faults_of(common.layers):
                return outcome_of(binding)
            if changed := changed_files(binding, common.layers):
                return _faulty(template, changed)
            faults = binding.faults
            export_attention(_merged(ranks, common.layers, binding.geometry), target, template=binding)
        else:
            _write_alone(ranks, common, target, str(Path(source) / CONFIG_NAME) if config is None else config)
    except _FaultyRanksError as error:
        return _faulty(source, error.args)
    written = sorted(path.name for path in Path(target).iterdir())
    return _written(target, common.layers, common.size, written, faults)


def _write_alone(ranks: Sequence[_Rank], common: _Common, target: str, config: str) -> None:
    geometry = DsaGeometry.from_config(config)
    absent = sorted(set(geometry.dsa_layers) - set(common.layers))
    if absent:
        raise ValueError(
            f"--template is absent; accepted is a checkpoint to copy, where source lacks DSA layers: {absent}"
        )
    write_attention(
        _merged(ranks, common.layers, geometry),
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


def _written(target: str, layers: tuple[int, ...], tp: int, files: list[str], faults: Sequence[Fault] = ()) -> Outcome:
    """`faults` are those of other layers than were asked for."""
    size = sum((Path(target) / file).stat().st_size for file in files)
    report = {"ok": True, "target": target, "tp": tp, "layers": layers, "files": files, "bytes": size}
    report["other_faults"] = [fault._asdict() for fault in faults]
    lines = [f"{target}: layers {', '.join(map(str, layers))} at TP {tp}, {len(files)} files, {size:,} bytes"]
    if faults:
        lines += ["Faults elsewhere in the checkpoint, which none of these layers needs", *fault_lines(faults)]
    return Outcome(report, lambda: "\n".join(lines))


def _faulty(path: str, lines: Sequence[str]) -> Outcome:
    return Outcome({"path": path, "ok": False, "faults": lines}, lambda: "\n".join(lines), ok=False)


def _check_digests(folder: Path) -> None:
    try:
        digests = read_digests(folder)
    except FileNotFoundError as error:
        accepted = f"hf2mcore's, or that of: sha256sum * > {DIGESTS}"
        raise _FaultyRanksError(f"{folder / DIGESTS} is missing; accepted is {accepted}") from error
    strangers = [file.name for file in folder.glob("*.safetensors") if file.name not in digests]
    if strangers:
        raise _FaultyRanksError(*(f"{name}: {DIGESTS} does not name it" for name in sorted(strangers)))
    if changed := differing(folder, digests, sorted(digests)):
        raise _FaultyRanksError(*changed)


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
        raise ValueError(f"--layers is {wanted!r}; accepted is FIRST-LAST around some of the layers {known}")
    return chosen


def _config_file(source: str, config: str | None) -> Path:
    path = Path(source if config is None else config)
    if path.is_dir():
        return path / CONFIG_NAME
    return path.parent / CONFIG_NAME if config is None else path


def _read_ranks(folder: Path) -> tuple[list[_Rank], _Common]:
    """The ranks in their order, by headers and metadata of the files."""
    paths = sorted(folder.glob("*.safetensors")) if folder.is_dir() else []
    if not paths:
        raise ValueError(f"source is {folder}; accepted is a folder with a .safetensors file for each rank")
    ranks: dict[int, _Rank] = {}
    names: dict[int, str] = {}
    common: _Common | None = None
    for path in paths:
        number, tensors, own = _read_rank(path)
        if number in ranks:
            raise _FaultyRanksError(f"{path.name}: rank {number}, and so is {names[number]}")
        if common not in (None, own):
            raise _FaultyRanksError(f"{path.name}: expected {common}, found {own}")
        ranks[number], names[number], common = tensors, path.name, own
    assert common is not None
    if len(ranks) != common.size or set(ranks) != set(range(len(ranks))):
        raise _FaultyRanksError(f"{folder}: expected ranks 0 to {common.size - 1}, found {sorted(ranks)}")
    return [ranks[number] for number in range(common.size)], common


def _read_rank(file: Path) -> tuple[int, _Rank, _Common]:
    """Its number, its tensors, and what it has in common with the others, by a sound file's header."""
    faults: list[Fault] = []
    header = read_header(file, faults)
    told = [f"{fault.kind} {fault.tensor}: expected {fault.expected}, found {fault.found}" for fault in faults]
    tensors: dict[int, dict[str, StoredTensor]] = {}
    for full, stored in header.tensors.items():
        match = _NAME.fullmatch(full)
        if match is None:
            told.append(f"unexpected {full}")
        else:
            tensors.setdefault(int(match["layer"]), {})[match["name"]] = stored
    if told:
        raise _FaultyRanksError(*(f"{file.name}: {fault}" for fault in told))
    said, layers = header.metadata, tuple(sorted(tensors))
    try:
        common = _Common(int(said["tp_size"]), DsaStorage(said["storage"]), said["prefix"], layers)
        return int(said["tp_rank"]), tensors, common
    except (KeyError, ValueError) as error:
        raise _FaultyRanksError(f"{file.name}: its metadata describe no rank: {shown(said)}") from error


def _merged(ranks: Sequence[_Rank], layers: Sequence[int], geometry: DsaGeometry) -> Iterator[LayerTensor]:
    for layer in layers:
        try:
            shards = [{name: read_tensor(stored) for name, stored in rank[layer].items()} for rank in ranks]
            yield from ((layer, name, tensor) for name, tensor in merge_attention(shards, geometry))
        except ValueError as error:
            raise _FaultyRanksError(f"layer {layer}: {error}") from error
