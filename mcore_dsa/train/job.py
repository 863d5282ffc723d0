"""A run from its command line to its summary, on every rank."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from megatron.core import parallel_state

from mcore_dsa import patches
from mcore_dsa.binding import CheckpointBinding
from mcore_dsa.settings import PARTITION_VARIABLE, read_settings
from mcore_dsa.train.attendance import Attendance
from mcore_dsa.train.checkpointing import (
    Checkpoint,
    latest_checkpoint,
    load_checkpoint,
    resume_faults,
    save_checkpoint,
)
from mcore_dsa.train.config import JobConfig
from mcore_dsa.train.data import Corpus, read_corpus
from mcore_dsa.train.ending import Status, Stopped
from mcore_dsa.train.faults import faults_of
from mcore_dsa.train.loop import StepReport, Trainer
from mcore_dsa.train.model import transformer_config
from mcore_dsa.train.pretrained import find_pretrained
from mcore_dsa.train.report import METRICS, RunLog, Summary
from mcore_dsa.train.samples import Packs, Windows, samples_of

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A run that has been checked and can start.

    Attributes:
        config: the run.
        corpus: its text.
        samples: what it reads of it.
        start: the checkpoint to continue from, None for a fresh run.
        pretrained: the Hugging Face checkpoint to start from, None for random weights or where `start` has them.
    """

    config: JobConfig
    corpus: Corpus
    samples: Windows | Packs
    start: Checkpoint | None
    pretrained: CheckpointBinding | None

    @property
    def run_dir(self) -> Path:
        """Where everything goes."""
        return Path(self.config.run_dir)


def prepare(config: JobConfig, world_size: int) -> Job:
    """Check a run on `world_size` ranks and read its text, without a message to another rank.

    Raises: ValueError listing values that cannot run, all those found, each with its field and what is accepted.
    """
    faults = faults_of(config, world_size)
    if config.compare_unsharded and read_settings().partition.value == "off":
        faults.append(f"compare_unsharded is true; accepted with {PARTITION_VARIABLE} off is false: nothing is sharded")
    if faults:
        raise ValueError("\n".join(faults))
    transformer_config(config)
    pretrained = None if config.load_hf is None else find_pretrained(config)
    corpus = read_corpus(config.data, max_bytes=config.max_data_bytes)
    samples = samples_of(config, corpus)
    run_dir = Path(config.run_dir)
    start = None
    if config.resume:
        start = latest_checkpoint(run_dir)
        faults = resume_faults(start, config, corpus.digest)
        if faults:
            raise ValueError("\n".join(faults))
    elif run_dir.exists() and not (run_dir.is_dir() and (_is_run(run_dir) or not any(run_dir.iterdir()))):
        raise ValueError(
            f"run_dir is {config.run_dir!r}, which holds something else; accepted is a new or empty folder, or a run's"
        )
    return Job(config=config, corpus=corpus, samples=samples, start=start, pretrained=pretrained)


def train(
    job: Job, *, stop: Callable[[], bool] = lambda: False, at: Callable[[str], None] = lambda doing: None
) -> Summary:
    """Run a job; every rank of the default process group has to call this, and gets the same losses.

    A fresh run in the folder of an earlier one sets that one aside under a numbered name.

    Args:
        stop: whether this rank has been asked to stop; the step in which it says so is the last one on every rank.
        at: told what begins.

    Raises: ValueError where the ranks do not agree on the run, RuntimeError where a gradient is not finite, `Stopped`
    when a checkpoint of the last step stands.
    """
    parallel = job.config.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        distributed_timeout_minutes=math.ceil(_timeout(job.config) / timedelta(minutes=1)),
    )
    try:
        _check_agreement(job)
        if dist.get_rank() == 0:
            _open_run_dir(job)
        dist.barrier()
        result = _run_steps(job, title="train", record=True, stop=stop, at=at)
        identical = None
        if job.config.compare_unsharded:
            # The first model, in reference cycles, would stay beside the second.
            gc.collect()
            with _partition_off():
                # A loss that is not a number has ended the run, so equal floats have equal bits.
                again = _run_steps(job, title="unsharded", record=False, stop=stop, at=at)
                identical = again.losses == result.losses
    finally:
        parallel_state.destroy_model_parallel()
    training = job.config.training
    first_step = training.steps - len(result.losses) + 1
    tokens = len(result.losses) * training.global_batch_size * training.sequence_length
    return Summary(
        steps=training.steps,
        first_step=first_step,
        first_loss=result.losses[0],
        last_loss=result.losses[-1],
        tokens_per_s=tokens / result.seconds,
        indexer_share=result.indexer_seconds / result.seconds,
        flag=result.flag,
        group_size=parallel.tensor if result.flag != "off" else 1,
        unsharded_losses_bit_identical=identical,
        run_dir=job.config.run_dir,
    )


def run(config: JobConfig, attendance: Attendance) -> Status:
    """Train in a process that torchrun started, and print the summary as the last line of rank 0's stdout.

    Returns: what to end with.

    Raises: as `prepare` and `train`, and ValueError where torchrun did not start the process.
    """
    applied = patches.apply()
    _logger.info(
        "megatron-core %s with %d of its functions replaced, see patches/README.md",
        applied.megatron_version,
        len(applied.replaced),
    )
    if not dist.is_torchelastic_launched():
        raise ValueError("the launcher is not torchrun; accepted is torchrun --nproc-per-node N -m mcore_dsa.train ...")
    job = prepare(config, int(os.environ["WORLD_SIZE"]))
    with _process_group(config):
        first = dist.get_rank() == 0
        try:
            ended: Summary | Stopped = train(job, stop=attendance.stop, at=attendance.at)
        except Stopped as stopped:
            ended = stopped
        attendance.close()
    if isinstance(ended, Stopped):
        if first:
            print(f"mcore_dsa.train: {ended}, with a checkpoint of it in {config.run_dir}", file=sys.stderr)
        return Status.STOPPED
    if first:
        print(ended.as_json(), flush=True)
    return Status.FAILED if ended.unsharded_losses_bit_identical is False else Status.DONE


@dataclass(kw_only=True, eq=False)
class _Result:
    """Steps done in this process, with the loss of each and times of this rank."""

    losses: list[float]
    seconds: float
    indexer_seconds: float
    flag: str


def _run_steps(job: Job, *, title: str, record: bool, stop: Callable[[], bool], at: Callable[[str], None]) -> _Result:
    """The steps that are left, with the settings of the moment; `record` writes files and checkpoints."""
    at(f"the start of {title}")
    config, first = job.config, dist.get_rank() == 0
    partition = read_settings().partition.value
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    trainer = Trainer(config, job.samples, device, pretrained=job.pretrained, stop=stop)
    if job.start is not None:
        load_checkpoint(trainer, job.start)
    reports: list[StepReport] = []
    save_every = config.checkpoint.save_every
    with RunLog(config, done=trainer.step, title=title, write=record) if first else nullcontext() as log:
        while trainer.step < config.training.steps:
            at(f"step {trainer.step + 1}")
            reports.append(trainer.train_step())
            if log is not None:
                log(reports[-1])
            last = trainer.step == config.training.steps
            stopped = reports[-1].stop and not last
            if record and (last or stopped or (save_every and trainer.step % save_every == 0)):
                at(f"the checkpoint of step {trainer.step}")
                save_checkpoint(trainer, job.run_dir, job.corpus.digest)
            if stopped:
                raise Stopped(trainer.step)
    return _Result(
        losses=[report.loss for report in reports],
        seconds=sum(report.seconds for report in reports),
        indexer_seconds=sum(report.indexer_seconds for report in reports),
        flag=partition,
    )


def _check_agreement(job: Job) -> None:
    own = {
        "configuration": asdict(job.config),
        "digest of data": job.corpus.digest,
        "checkpoint to resume from": None if job.start is None else str(job.start.folder),
    }
    of_ranks: list[dict[str, object]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(of_ranks, own)
    faults = [
        f"{name} is {values[name]} on rank {rank}; accepted is rank 0's: {of_ranks[0][name]}"
        for rank, values in enumerate(of_ranks)
        for name in own
        if values[name] != of_ranks[0][name]
    ]
    if faults:
        raise ValueError("\n".join(faults))


def _is_run(run_dir: Path) -> bool:
    return (run_dir / METRICS).is_file()


def _open_run_dir(job: Job) -> None:
    run_dir = job.run_dir
    if job.start is None and _is_run(run_dir):
        number = 1
        while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
            number += 1
        run_dir.rename(aside)
        _logger.info("an earlier run is now in %s", aside)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / METRICS).touch()
    # Through JSON, which makes plain numbers of jsonargparse's subclasses of int and float.
    fields = json.loads(json.dumps(asdict(job.config)))
    (run_dir / "config.yaml").write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")
    _logger.info(
        "%d bytes of text from %d files, %d samples an epoch",
        len(job.corpus.tokens),
        job.corpus.files,
        len(job.samples),
    )
    if left_out := job.corpus.left_out:
        _logger.warning("%d entries of data were left out, among them %s", len(left_out), ", ".join(left_out[:8]))


@contextlib.contextmanager
def _partition_off() -> Iterator[None]:
    before = os.environ.get(PARTITION_VARIABLE)
    os.environ[PARTITION_VARIABLE] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARTITION_VARIABLE]
        else:
            os.environ[PARTITION_VARIABLE] = before


@contextlib.contextmanager
def _process_group(config: JobConfig) -> Iterator[None]:
    """The default process group of a process that torchrun started: NCCL where there is CUDA, gloo elsewhere.

    After an error it is left as it is: it is the error that the other ranks are to hear of.
    """
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=_timeout(config))
    yield
    # A process that ends with its group alive aborted in 10 of 40 runs over gloo.
    dist.destroy_process_group()


def _timeout(config: JobConfig) -> timedelta:
    """Of collectives: only where whoever waits is not ended, with the reason, before."""
    return timedelta(seconds=config.waiting.end_after_s) + timedelta(minutes=1)
