"""Checkpoints of a run: Megatron's distributed checkpoints, sealed with digests and published one by one.

They hold weights, optimizer, schedule and random states; `stored.py` says how they lie on disk.

Weights and optimizer state are stored by their place in the whole model: a run can continue under another tensor-,
pipeline-, context- or data-parallel size. It is then no longer the same to the last bit, and random states start anew.
"""

from __future__ import annotations

import itertools
import logging
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.api import CheckpointException

from mcore_dsa.train.config import JobConfig
from mcore_dsa.train.digesting import DigestingSave
from mcore_dsa.train.finite import refuse_not_finite
from mcore_dsa.train.loop import Trainer
from mcore_dsa.train.ran import differences, what_runs
from mcore_dsa.train.stored import JOB, Checkpoint, folder_of, prune, publish, seal
from mcore_dsa.train.together import of_every_rank, told_to_every_rank

_logger = logging.getLogger(__name__)

# The one format of the distributed optimizer that does not depend on how the model is spread.
_SHARDING = "fully_reshardable"


# Fields that change no sample of a step: a run may go on under others, its sums and dropout then being others.
_FREE = ("training.micro_batch_size", "training.recompute")


def run_fields(config: JobConfig, corpus_digest: str) -> dict[str, Any]:
    """The fields on which weights, losses and the order of the data depend."""
    fields = {f"model.{name}": value for name, value in asdict(config.model).items()}
    if config.model.hybrid_layer_pattern is not None:
        # Where the pipeline cuts it is layout.
        fields["model.hybrid_layer_pattern"] = config.model.hybrid_layer_pattern.replace("|", "")
    fields |= {f"training.{name}": value for name, value in asdict(config.training).items() if name != "steps"}
    # Null follows training.steps, and a longer run would have another schedule.
    fields |= {"training.decay_steps": config.training.lr_decay_steps, "digest of data": corpus_digest}
    fields["pack"] = config.pack
    return fields | ({"document_multiple": config.document_multiple} if config.pack else {})


def resume_faults(
    checkpoint: Checkpoint, config: JobConfig, corpus_digest: str, *, finished: bool = False
) -> list[str]:
    """One line for each reason why this run cannot continue from `checkpoint`; `finished` if it need not."""
    run = run_fields(config, corpus_digest)
    faults = [
        f"{name} is {run.get(name)!r}; accepted to resume {checkpoint.folder} is {checkpoint.run.get(name)!r}"
        + (": null is training.steps" if name == "training.decay_steps" and config.training.decay_steps is None else "")
        for name in sorted(run.keys() | checkpoint.run.keys())
        if run.get(name) != checkpoint.run.get(name) and name not in _FREE
    ]
    expert = checkpoint.layout.get("expert")
    if config.parallel.expert != expert:
        faults.append(
            f"parallel.expert is {config.parallel.expert}; accepted to resume {checkpoint.folder} is {expert}: "
            "Megatron stores the optimizer's state of experts by their ranks"
        )
    if config.training.steps <= checkpoint.step and not finished:
        faults.append(
            f"training.steps is {config.training.steps}; accepted to resume {checkpoint.folder} is an integer > "
            f"{checkpoint.step}, the steps it has done"
        )
    return faults


def resume_changes(checkpoint: Checkpoint, config: JobConfig) -> str:
    """What a run that continues from `checkpoint` may have otherwise, and has, for the log; empty where nothing."""
    run = run_fields(config, "")
    now, before = ({name: fields[name] for name in _FREE} for fields in (run, checkpoint.run))
    return differences({**now, **what_runs(config)}, {**before, **checkpoint.ran})


def save_checkpoint(trainer: Trainer, run_dir: Path, corpus_digest: str, *, spare: Path | None = None) -> None:
    """Write a checkpoint of the run as it stands and publish it; every rank has to call this.

    Nothing is written of weights that are not finite, whose next loss or gradient is not, or of ranks that came apart.
    Older checkpoints than `checkpoint.keep` are removed, but for `spare`.

    Raises: RuntimeError for such weights, ValueError for such ranks and for files that cannot be written, on every
        rank; the latest checkpoint stays what it was.
    """
    _refuse_wrecked(trainer)
    folder = folder_of(run_dir, trainer.step)
    with told_to_every_rank(f"the checkpoint in {folder} cannot be written"):
        if dist.get_rank() == 0:
            if folder.exists():
                # Cut short: a published one is never behind the step that its run has reached.
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
    state = _sharded_state(trainer, loading=False) | {"rng": _random_states_sharded()}
    writer = DigestingSave(f"the checkpoint in {folder} cannot be written")
    try:
        dist_checkpointing.save(state, str(folder), writer)
    # Raised on every rank for what any could not write, in words on rank 0 alone; no subclass of Exception.
    except CheckpointException as error:
        causes = [str(cause[0]) for cause in error.failures.values()]
        told, free = of_every_rank((causes, shutil.disk_usage(run_dir).free))[0]
        if dist.get_rank() == 0:
            # It may be what fills the disk.
            shutil.rmtree(folder, ignore_errors=True)
        raise ValueError(
            f"the checkpoint in {folder} cannot be written, {free:,} bytes are free there: {'; '.join(told)}"
        ) from error
    except ValueError:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    digests = dict(itertools.chain.from_iterable(of_rank.items() for of_rank in of_every_rank(writer.digests)))
    job = {
        "step": trainer.step,
        "run": run_fields(trainer.config, corpus_digest),
        "layout": _layout(trainer.config),
        "ran": what_runs(trainer.config),
    }
    with told_to_every_rank(f"the checkpoint in {folder} cannot be published"):
        if dist.get_rank() == 0:
            seal(folder, job, digests)
            publish(folder)
            prune(run_dir, trainer.config.checkpoint.keep, spare)


def load_checkpoint(trainer: Trainer, checkpoint: Checkpoint) -> None:
    """Put a fresh trainer where the checkpoint's was; every rank has to call this.

    Raises: ValueError for files that are what their digests say and cannot be taken for this model all the same, or are
        of another step, on the rank that finds it, and on every rank where replicas of weights differ; RuntimeError on
        every rank for weights that are not finite.
    """
    state = _sharded_state(trainer, loading=True)
    same_layout = checkpoint.layout == _layout(trainer.config)
    if same_layout:
        state["rng"] = _random_states_sharded()
    try:
        loaded = dist_checkpointing.load(state, str(checkpoint.folder))
        for name, chunk in trainer.named_chunks():
            chunk.load_state_dict(loaded[name])
        trainer.optimizer.load_state_dict(loaded["optimizer"])
        trainer.scheduler.load_state_dict(loaded["scheduler"])
        if same_layout:
            _set_random_states(loaded["rng"])
    # Of torch, of Megatron, and of whatever unpickles: of any kind. The first is no subclass of Exception.
    except (Exception, CheckpointException) as error:
        told = [f"rank {rank}: {cause[0]}" for rank, cause in getattr(error, "failures", {}).items()]
        raise ValueError(
            f"{checkpoint.folder} cannot be loaded, {'; '.join(told) or f'{type(error).__name__}: {error}'}; accepted "
            "is a checkpoint of this model that a run wrote"
        ) from error
    trainer.step = checkpoint.step
    if trainer.scheduler.num_steps != trainer.step:
        raise ValueError(
            f"{checkpoint.folder / JOB} is of step {trainer.step}; accepted is that of the schedule beside it, "
            f"{trainer.scheduler.num_steps}"
        )
    refuse_not_finite(trainer, f"weights in {checkpoint.folder}")
    trainer.check_replicas()
    if not same_layout:
        _logger.warning(
            "%s was written under %s: weights and optimizer continue, random states start anew, and losses are not "
            "those of an uninterrupted run to the last bit",
            checkpoint.folder,
            checkpoint.layout,
        )


def _refuse_wrecked(trainer: Trainer) -> None:
    """Weights may be finite and past use: after a step at a learning rate of 1e9 the next gradient is not."""
    refuse_not_finite(trainer, f"weights after step {trainer.step}")
    trainer.check_replicas()
    states = _random_states()
    loss = trainer.next_loss()
    _set_random_states(states)
    if not math.isfinite(loss):
        raise RuntimeError(
            f"the loss after step {trainer.step} is {loss}; accepted to write a checkpoint is a finite one"
        )


def _layout(config: JobConfig) -> dict[str, Any]:
    return {"ranks": dist.get_world_size(), **asdict(config.parallel)}


def _sharded_state(trainer: Trainer, *, loading: bool) -> dict[str, Any]:
    metadata = {
        "distrib_optim_sharding_type": _SHARDING,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = {name: chunk.sharded_state_dict(metadata=metadata) for name, chunk in trainer.named_chunks()}
    optimizer = trainer.optimizer.sharded_state_dict(state, is_loading=loading, metadata=metadata)
    return {**state, "optimizer": optimizer, "scheduler": trainer.scheduler.state_dict()}


def _random_states() -> dict[str, Any]:
    states = {"cpu": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _random_states_sharded() -> ShardedObject:
    return ShardedObject("rng", _random_states(), (dist.get_world_size(),), (dist.get_rank(),))


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["cpu"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
