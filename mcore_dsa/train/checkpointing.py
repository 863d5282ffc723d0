"""Checkpoints of a run: Megatron's distributed checkpoints, published one by one.

`<run_dir>/checkpoints/step_N` holds weights, optimizer, schedule and random states, and `job.json` the run it
belongs to. `<run_dir>/checkpoints/latest` names the newest complete one. It is replaced in one step after everything
else is written, so that a checkpoint cut short is never taken for a complete one.

Weights and optimizer state are stored by their place in the whole model: a run can continue under another tensor-,
pipeline-, context- or data-parallel size. It is then no longer the same to the last bit, and random states start anew.
"""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from mcore_dsa.train.config import JobConfig
from mcore_dsa.train.files import replace_text
from mcore_dsa.train.loop import Trainer

_logger = logging.getLogger(__name__)

_FOLDER = "checkpoints"
_LATEST = "latest"
_JOB = "job.json"
# The one format of the distributed optimizer that does not depend on how the model is spread.
_SHARDING = "fully_reshardable"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk.

    Attributes:
        folder: where it is.
        step: steps done.
        run: what a run has to share with the one that wrote it, by field; see `run_fields`.
        layout: ranks, and how the model was spread over them.
    """

    folder: Path
    step: int
    run: dict[str, Any]
    layout: dict[str, Any]


def run_fields(config: JobConfig, corpus_digest: str) -> dict[str, Any]:
    """The fields on which weights, losses and the order of the data depend."""
    fields = {f"model.{name}": value for name, value in asdict(config.model).items()}
    fields |= {f"training.{name}": value for name, value in asdict(config.training).items() if name != "steps"}
    # Null follows training.steps, and a longer run would have another schedule.
    fields |= {"training.decay_steps": config.training.lr_decay_steps, "digest of data": corpus_digest}
    fields["pack"] = config.pack
    return fields | ({"document_multiple": config.document_multiple} if config.pack else {})


def latest_checkpoint(run_dir: Path) -> Checkpoint:
    """The newest complete checkpoint of a run.

    Raises: ValueError where there is none.
    """
    folder = run_dir / _FOLDER
    pointer = folder / _LATEST
    if not pointer.is_file():
        raise ValueError(f"resume is true; accepted is false: {folder} holds no complete checkpoint")
    folder /= pointer.read_text(encoding="utf-8").strip()
    job = json.loads((folder / _JOB).read_text(encoding="utf-8"))
    return Checkpoint(folder=folder, step=job["step"], run=job["run"], layout=job["layout"])


def resume_faults(checkpoint: Checkpoint, config: JobConfig, corpus_digest: str) -> list[str]:
    """One line for each reason why this run cannot continue from `checkpoint`."""
    run = run_fields(config, corpus_digest)
    faults = [
        f"{name} is {run.get(name)!r}; accepted to resume {checkpoint.folder} is {checkpoint.run.get(name)!r}"
        for name in sorted(run.keys() | checkpoint.run.keys())
        if run.get(name) != checkpoint.run.get(name)
    ]
    expert = checkpoint.layout["expert"]
    if config.parallel.expert != expert:
        faults.append(
            f"parallel.expert is {config.parallel.expert}; accepted to resume {checkpoint.folder} is {expert}: "
            "Megatron stores the optimizer's state of experts by their ranks"
        )
    if config.training.steps <= checkpoint.step:
        faults.append(
            f"training.steps is {config.training.steps}; accepted to resume {checkpoint.folder} is an integer > "
            f"{checkpoint.step}, the steps it has done"
        )
    return faults


def save_checkpoint(trainer: Trainer, run_dir: Path, corpus_digest: str) -> None:
    """Write a checkpoint of the run as it stands and publish it; every rank has to call this."""
    folder = run_dir / _FOLDER / f"step_{trainer.step:08d}"
    if dist.get_rank() == 0:
        if folder.exists():
            # Cut short by a crash: a published one is never behind the step that its run has reached.
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
    dist.barrier()
    state = _sharded_state(trainer, loading=False) | {"rng": _random_states_sharded()}
    dist_checkpointing.save(state, str(folder))
    if dist.get_rank() == 0:
        job = {
            "step": trainer.step,
            "run": run_fields(trainer.config, corpus_digest),
            "layout": _layout(trainer.config),
        }
        (folder / _JOB).write_text(json.dumps(job, indent=1), encoding="utf-8")
        replace_text(folder.parent / _LATEST, folder.name)
    dist.barrier()


def load_checkpoint(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put a fresh trainer where the checkpoint's was; every rank has to call this."""
    state = _sharded_state(trainer, loading=True)
    same_layout = checkpoint.layout == _layout(trainer.config)
    if same_layout:
        state["rng"] = _random_states_sharded()
    loaded = dist_checkpointing.load(state, str(checkpoint.folder))
    for name, chunk in _named_chunks(trainer):
        chunk.load_state_dict(loaded[name])
    trainer.optimizer.load_state_dict(loaded["optimizer"])
    trainer.scheduler.load_state_dict(loaded["scheduler"])
    trainer.step = checkpoint.step
    if same_layout:
        _set_random_states(loaded["rng"])
    else:
        _logger.warning(
            "%s was written under %s: weights and optimizer continue, random states start anew, and losses are not "
            "those of an uninterrupted run to the last bit",
            checkpoint.folder,
            checkpoint.layout,
        )


def _layout(config: JobConfig) -> dict[str, Any]:
    return {"ranks": dist.get_world_size(), **asdict(config.parallel)}


def _named_chunks(trainer: Trainer) -> list[tuple[str, Any]]:
    if len(trainer.chunks) == 1:
        return [("model", trainer.chunks[0].module)]
    return [(f"model{index}", chunk.module) for index, chunk in enumerate(trainer.chunks)]


def _sharded_state(trainer: Trainer, *, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": _SHARDING,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in _named_chunks(trainer)}
    optimizer = trainer.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    return {**state, "optimizer": optimizer, "scheduler": trainer.scheduler.state_dict()}


def _random_states_sharded() -> ShardedObject:
    states = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),))


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
