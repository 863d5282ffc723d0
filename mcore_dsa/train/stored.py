"""The checkpoints on a run's disk: which there are, which are whole, and which is the latest.

`<run_dir>/checkpoints/step_N` holds Megatron's files, `job.json` with the run it belongs to, and `SHA256SUMS`, written
last, with the digest of each. `<run_dir>/checkpoints/latest` names the newest. It is replaced in one step after all of
it is on disk, so that a checkpoint cut short is never taken for a complete one.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from mcore_dsa.files import DIGESTS, differing, digest_of, names_in, read_digests, replace_text, sync, write_digests
from mcore_dsa.hf_config import parse_json, shown
from mcore_dsa.train.run_dir import CHECKPOINTS, set_aside
from mcore_dsa.train.together import of_every_rank, told_to_every_rank

_logger = logging.getLogger(__name__)

_LATEST = "latest"
JOB = "job.json"
_NAME = re.compile(r"step_([0-9]{8,18})")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        folder: where it is.
        step: steps done.
        run: what a run has to share with the one that wrote it, by field; see `checkpointing.run_fields`.
        layout: ranks, and how the model was spread over them.
        ran: what wrote it, see `ran.what_runs`; empty where that was not kept.
    """

    folder: Path
    step: int
    run: dict[str, Any]
    layout: dict[str, Any]
    ran: dict[str, Any] = field(default_factory=dict)


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint after `step` steps is, or would be."""
    return run_dir / CHECKPOINTS / f"step_{step:08d}"


def find_start(run_dir: Path, resume: bool | Literal["auto"], resume_from: int | None) -> Checkpoint | None:
    """The checkpoint to continue from, whole to the last byte; every rank has to call this, and reads its share.

    Args:
        run_dir: of the run.
        resume: the field of the configuration; "auto" takes the newest that is whole, and None where there is none.
        resume_from: the field of the configuration.

    Raises: ValueError on every rank with what is wrong with the checkpoint asked for, and the newest older one that is
        whole.
    """
    if not resume and resume_from is None:
        return None
    folder, found = run_dir / CHECKPOINTS, None
    with told_to_every_rank(f"{folder} cannot be read; accepted is a folder that can, or none"):
        asked = _asked(folder, resume_from)
    # Every rank lists, so that all go by what rank 0 sees.
    name, fault, others = of_every_rank(asked)[0]
    if name is not None:
        found, fault = _whole(folder / name)
    if fault is None:
        return found
    for other in others:
        found, _ = _whole(folder / other)
        if found is not None:
            break
    if resume == "auto" and resume_from is None:
        if found is None:
            _refuse_unreadable(folder, others if name is None else [name, *others])
        if dist.get_rank() == 0 and (name is not None or others):
            taken = "the run starts anew" if found is None else f"the run continues from {found.folder.name}"
            _logger.warning("%s; %s", fault, taken)
        return found
    if name is None and not others:
        raise ValueError(fault)
    offer = "no earlier one is whole" if found is None else f"{found.folder.name} is whole: --resume-from {found.step}"
    raise ValueError(f"{fault}; {offer}")


def latest_checkpoint(run_dir: Path) -> Checkpoint:
    """The newest complete checkpoint of a run; every rank has to call this.

    Raises: as `find_start`.
    """
    found = find_start(run_dir, resume=True, resume_from=None)
    assert found is not None
    return found


def seal(folder: Path, job: Mapping[str, Any], digests: Mapping[str, str]) -> None:
    """Complete a checkpoint's folder, to disk: `job.json`, and digests of all files after those that are given.

    Raises: OSError where it cannot be written.
    """
    (folder / JOB).write_text(json.dumps(job, indent=1), encoding="utf-8")
    rest = {name: digest_of(folder / name) for name in names_in(folder) if name not in digests}
    write_digests(folder, {**digests, **rest})


def publish(folder: Path) -> None:
    """Make a sealed checkpoint the latest, once its folder has its name on disk.

    Raises: OSError where that cannot be written.
    """
    sync(folder.parent)
    replace_text(folder.parent / _LATEST, folder.name)


def rewind(start: Checkpoint) -> None:
    """Make the checkpoint that a run continues from its latest: set newer ones aside, remove those cut short.

    Raises: OSError where they cannot be moved.
    """
    for name in _names(start.folder.parent):
        newer = start.folder.with_name(name)
        if _step(name) > start.step:
            if (newer / DIGESTS).exists():
                aside = set_aside(newer)
                _logger.warning("the run continues from step %d: a newer checkpoint is now in %s", start.step, aside)
            else:
                shutil.rmtree(newer)
    publish(start.folder)


def prune(run_dir: Path, keep: int | None, spare: Path | None) -> None:
    """Remove all but the `keep` newest checkpoints, and `spare`; None keeps them all."""
    folder = run_dir / CHECKPOINTS
    for name in _names(folder)[keep:] if keep is not None else []:
        if folder / name == spare:
            continue
        try:
            # Without digests it is not taken for a checkpoint, wherever the removal of the rest is cut short.
            (folder / name / DIGESTS).unlink(missing_ok=True)
            shutil.rmtree(folder / name)
        except OSError as error:
            _logger.warning("%s stays, it cannot be removed: %s", folder / name, error.strerror)


def _names(folder: Path) -> list[str]:
    """Checkpoints by name, whole or not, the newest first."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            told = "a link to nothing, or to a volume that is not mounted"
            raise FileNotFoundError(errno.ENOENT, told, str(folder)) from None
        names = []
    return sorted((name for name in names if _NAME.fullmatch(name)), key=_step, reverse=True)


def _step(name: str) -> int:
    match = _NAME.fullmatch(name)
    assert match is not None, name
    return int(match[1])


def _asked(folder: Path, resume_from: int | None) -> tuple[str | None, str | None, Sequence[str]]:
    """The checkpoint asked for, or why there is none, and those that are older.

    Raises: OSError where the folder cannot be read.
    """
    names = _names(folder)
    if resume_from is None:
        name, fault = _latest(folder, names)
    else:
        name, fault = folder_of(folder.parent, resume_from).name, None
        if name not in names:
            steps = ", ".join(str(_step(other)) for other in reversed(names)) or "none, which null stands for"
            return None, f"resume_from is {resume_from}; accepted are steps of checkpoints in {folder}: {steps}", []
    return name, fault, names if name is None else [other for other in names if _step(other) < _step(name)]


def _latest(folder: Path, names: Sequence[str]) -> tuple[str | None, str | None]:
    pointer = folder / _LATEST
    if not names and not pointer.exists():
        return None, f"resume is true; accepted is false: {folder} holds no complete checkpoint"
    try:
        with pointer.open("rb") as stream:
            said = stream.read(100).decode(errors="replace").strip()
    except FileNotFoundError:
        return None, f"{pointer} is missing; accepted is a file with the name of a checkpoint beside it"
    except OSError as error:
        return None, f"{pointer} cannot be read: {error.strerror}"
    if said in names:
        return said, None
    return None, f"{pointer} says {said!r}; accepted is the name of a checkpoint beside it"


def _refuse_unreadable(folder: Path, names: Sequence[str]) -> None:
    """Make sure that checkpoints of which none is whole could be read, before another run takes their place."""
    with told_to_every_rank(f"{folder} cannot be read; accepted is a folder that can, or none"):
        for file in (path for name in names for path in (folder / name).iterdir() if path.is_file()):
            file.open("rb").close()


def _whole(folder: Path) -> tuple[Checkpoint | None, str | None]:
    """A checkpoint whose every file is what was written, or what is wrong with the first that is not.

    Each rank reads its share of the bytes.
    """
    faults, checkpoint = [], None
    try:
        if folder.is_symlink() or not folder.is_dir():
            raise ValueError(f"{folder} is no folder; accepted is a checkpoint's")
        digests = read_digests(folder)
        present = names_in(folder)
        strange = [name for name in present if name not in digests]
        faults += [f"{folder / name} is not in {DIGESTS}; accepted are its files alone" for name in strange]
        mine = sorted(digests)[dist.get_rank() :: dist.get_world_size()]
        # What is read next, on every rank.
        faults += differing(folder, digests, dict.fromkeys([JOB, *mine]) if JOB in digests else mine)
        checkpoint = _described(folder)
        if folder != folder_of(folder.parent.parent, checkpoint.step):
            faults.append(f"{folder / JOB} is of step {checkpoint.step}; accepted is that of its folder")
    except FileNotFoundError as error:
        faults.append(f"{error.filename} is missing; accepted is a file of a complete checkpoint")
    except OSError as error:
        faults.append(f"{error.filename} cannot be read: {error.strerror}")
    except ValueError as error:
        faults.append(str(error))
    told = [fault for of_rank in of_every_rank(faults) for fault in of_rank]
    return (None, told[0]) if told else (checkpoint, None)


def _described(folder: Path) -> Checkpoint:
    """A checkpoint as its `job.json` says.

    Raises: OSError where it cannot be read, ValueError where it says something else.
    """
    path, kinds = folder / JOB, {"step": int, "run": dict, "layout": dict}
    try:
        job = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}; accepted is what a run writes there") from error
    said: dict[str, Any] = {name: job.get(name) if isinstance(job, dict) else None for name in kinds}
    for name, kind in kinds.items():
        if not isinstance(said[name], kind):
            raise ValueError(f"{path} has {name} {shown(said[name])}; accepted is an object of type {kind.__name__}")
    ran = job.get("ran")
    return Checkpoint(folder=folder, **said, ran=ran if isinstance(ran, dict) else {})
