"""A run from its command line to its summary, on every rank."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import math
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from megatron.core import parallel_state

from mcore_dsa import patches
from mcore_dsa.binding import CheckpointBinding
from mcore_dsa.settings import PARTITION_VARIABLE, read_settings, unknown_variables
from mcore_dsa.train.attendance import Attendance
from mcore_dsa.train.board import VARIABLES
from mcore_dsa.train.checkpointing import load_checkpoint, resume_changes, resume_faults, save_checkpoint
from mcore_dsa.train.comparison import Comparison, losses_of, partition_off, store, stored
from mcore_dsa.train.config import JobConfig
from mcore_dsa.train.data import Corpus, read_corpus
from mcore_dsa.train.ending import Status, Stopped
from mcore_dsa.train.faults import faults_of
from mcore_dsa.train.finite import refuse_not_finite
from mcore_dsa.train.loop import StepReport, Trainer
from mcore_dsa.train.model import transformer_config
from mcore_dsa.train.pretrained import find_pretrained
from mcore_dsa.train.probes import Probes, rewind_records
from mcore_dsa.train.ran import note_start
from mcore_dsa.train.report import RunLog, Summary
from mcore_dsa.train.run_dir import METRICS, RunDir, owned, refuse_something_else
from mcore_dsa.train.samples import Packs, Windows, samples_of
from mcore_dsa.train.stored import Checkpoint, find_start, rewind
from mcore_dsa.train.together import refuse_differences, told_to_every_rank

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A run that has been checked and can start.

    Attributes:
        config: the run.
        corpus: its text.
        samples: what it reads of it.
        evaluation, evaluated: what it is evaluated on, and the text of that, both None for nothing.
        pretrained: the Hugging Face checkpoint whose weights a fresh run starts from, None for random ones.
    """

    config: JobConfig
    corpus: Corpus
    samples: Windows | Packs
    evaluation: Windows | Packs | None
    evaluated: Corpus | None
    pretrained: CheckpointBinding | None

    @property
    def run_dir(self) -> Path:
        """Where everything goes."""
        return Path(self.config.run_dir)


def prepare(config: JobConfig, world_size: int) -> Job:
    """Check a run on `world_size` ranks and read its text, without a message to another rank.

    Raises: ValueError listing values that cannot run, all those found, each with its field and what is accepted.
    """
    settings = read_settings()
    faults = [*faults_of(config, world_size), *settings.faults]
    if config.compare_unsharded and settings.partition.value == "off" and not settings.partition.fault:
        faults.append(f"compare_unsharded is true; accepted with {PARTITION_VARIABLE} off is false: nothing is sharded")
    if faults:
        raise ValueError("\n".join(faults))
    transformer_config(config)
    pretrained = None if config.load_hf is None else find_pretrained(config)
    corpus, samples = _read("data", config, config.data)
    evaluated, evaluation = None, None
    if config.evaluation.data is not None:
        evaluated, evaluation = _read("evaluation.data", config, [config.evaluation.data])
        needed = config.evaluation.batches * config.training.global_batch_size
        if needed > len(evaluation):
            raise ValueError(
                f"evaluation.batches is {config.evaluation.batches}, {needed} samples; accepted are at most the "
                f"{len(evaluation)} samples of evaluation.data"
            )
    refuse_something_else(Path(config.run_dir))
    return Job(
        config=config,
        corpus=corpus,
        samples=samples,
        evaluation=evaluation,
        evaluated=evaluated,
        pretrained=pretrained,
    )


def _read(field: str, config: JobConfig, paths: list[str]) -> tuple[Corpus, Windows | Packs]:
    """What a run reads of some paths.

    Raises: ValueError, of a token that the model has no embedding for as well.
    """
    try:
        corpus = read_corpus(paths, max_bytes=config.max_data_bytes, tokenizer=config.tokenizer)
        samples = samples_of(config, corpus)
    except ValueError as error:
        raise ValueError(f"{field}: {error}" if field != "data" else str(error)) from error
    greatest = int(corpus.tokens.max())
    if greatest >= config.model.vocab_size:
        raise ValueError(
            f"model.vocab_size is {config.model.vocab_size}; accepted is an integer > {greatest}, the greatest token "
            f"of {field}"
        )
    return corpus, samples


def train(job: Job, attendance: Attendance | None = None) -> Summary:
    """Run a job; every rank of the default process group has to call this, and gets the same losses.

    A fresh run in the folder of an earlier one sets that one aside under a numbered name, after its own first step:
    whatever is refused leaves the earlier run in its place.

    Args:
        attendance: what says whether this rank has been asked to stop: the step in which one has is the last on every
            rank; and is told what begins.

    Raises: ValueError where the ranks do not agree on the run, another job owns its folder, or the checkpoint to resume
        is not whole or of another run; RuntimeError where a gradient, or a weight to be stored, is not finite;
        `Stopped` once the step is done and saved in which a rank was asked to stop.
    """
    attendance = attendance or Attendance()
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
        evaluated = None if job.evaluated is None else job.evaluated.digest
        digests = {"digest of data": job.corpus.digest, "digest of evaluation.data": evaluated}
        # Replicas may run with other settings, but for when all of them compare their weights.
        drift_every = read_settings().drift_every
        refuse_differences({**asdict(job.config), **digests, drift_every.name: drift_every.value})
        with owned(job.run_dir) as run_dir:
            start = _start_of(job)
            if start is not None and start.step >= job.config.training.steps:
                return _nothing_left(job, attendance)
            result = _run_steps(job, start, attendance, title="train", run_dir=run_dir)
            identical = None
            if job.config.compare_unsharded:
                comparison = Comparison(done=0 if start is None else start.step, steps=job.config.training.steps)
                identical = _compare(job, start, comparison, result.losses, attendance)
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
    """Train in a process that torchrun started, or another launcher that sets `VARIABLES`.

    The summary is the last line of rank 0's stdout.

    Returns: what to end with.

    Raises: as `prepare` and `train`, and ValueError where the variables are not there.
    """
    applied = patches.apply()
    _logger.info(
        "megatron-core %s with %d of its functions replaced, see patches/README.md",
        applied.megatron_version,
        len(applied.replaced),
    )
    if os.environ.get("RANK", "0") == "0" and (unknown := unknown_variables()):
        _logger.warning("%s: set, and no settings; mcore-dsa doctor lists those", ", ".join(unknown))
    if not all(name in os.environ for name in VARIABLES):
        raise ValueError(
            "the launcher is not torchrun; accepted is torchrun --nproc-per-node N -m mcore_dsa.train ..., or one that "
            f"sets {', '.join(VARIABLES)}"
        )
    job = prepare(config, int(os.environ["WORLD_SIZE"]))
    with _process_group(config):
        first = dist.get_rank() == 0
        try:
            ended: Summary | Stopped = train(job, attendance)
        except Stopped as stopped:
            ended = stopped
        attendance.close()
    if isinstance(ended, Stopped):
        if first:
            print(f"mcore_dsa.train: {ended}, with a checkpoint in {config.run_dir}", file=sys.stderr)
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


def _start_of(job: Job) -> Checkpoint | None:
    """The checkpoint that the run continues from, None for a fresh one; every rank has to call this."""
    config = job.config
    start = find_start(job.run_dir, config.resume, config.resume_from)
    if start is not None:
        done = config.resume == "auto" and start.step >= config.training.steps
        faults = resume_faults(start, config, job.corpus.digest, finished=done)
        if faults:
            raise ValueError("\n".join(faults))
        if dist.get_rank() == 0 and not done and (changes := resume_changes(start, config)):
            _logger.warning("the run continues from %s, where now %s", start.folder, changes)
    return start


def _run_steps(
    job: Job, start: Checkpoint | None, attendance: Attendance, *, title: str, run_dir: RunDir | None = None
) -> _Result:
    """The steps that are left, with the settings of the moment; what they write goes to `run_dir`, None for nowhere."""
    attendance.at(f"the start of {title}")
    config, first = job.config, dist.get_rank() == 0
    partition = read_settings().partition.value
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    pretrained = job.pretrained if start is None else None
    trainer = Trainer(config, job.samples, device, pretrained=pretrained, stop=attendance.stop)
    if start is not None:
        load_checkpoint(trainer, start)
    elif job.pretrained is not None:
        refuse_not_finite(trainer, f"weights of {config.load_hf}")
    done, save_every = trainer.step, config.checkpoint.save_every
    # A run that is there to be compared looks at nothing by itself.
    probe = Probes(config, trainer, job.samples, job.evaluation) if run_dir is not None else None
    train_step = trainer.train_step if probe is None else probe.train_step
    reports: list[StepReport] = []
    with contextlib.ExitStack() as stack:
        log = None
        while trainer.step < config.training.steps:
            attendance.at(f"step {trainer.step + 1}")
            report = train_step()
            if trainer.step == done + 1:
                attendance.under_way()
                # No sooner: what only a forward can find leaves an earlier run in its place.
                if run_dir is not None:
                    _open_run_dir(job, start, run_dir)
                if first:
                    log = stack.enter_context(RunLog(config, done=done, title=title, write=run_dir is not None))
            reports.append(report if probe is None else probe(report))
            if log is not None:
                log(reports[-1])
            last = trainer.step == config.training.steps
            stopped = report.stop and not last
            if run_dir is not None and (last or stopped or (save_every and trainer.step % save_every == 0)):
                attendance.at(f"the checkpoint of step {trainer.step}")
                run_dir.check()
                spare = start.folder if start is not None and config.compare_unsharded else None
                save_checkpoint(trainer, run_dir.path, job.corpus.digest, spare=spare)
            if stopped:
                done_last = f"step {trainer.step}"
                raise Stopped(done_last if run_dir is not None else f"{done_last} of the comparison")
    return _Result(
        losses=[report.loss for report in reports],
        seconds=sum(report.seconds for report in reports),
        indexer_seconds=sum(report.indexer_seconds for report in reports),
        flag=partition,
    )


def _open_run_dir(job: Job, start: Checkpoint | None, run_dir: RunDir) -> None:
    """Give the run its folder: an earlier one is set aside, one that continues goes back to where it does."""
    if start is None:
        run_dir.begin_anew()
    with told_to_every_rank(f"run_dir is {job.config.run_dir!r}; accepted is a folder that can be written to"):
        if dist.get_rank() == 0:
            if start is not None:
                rewind(start)
                rewind_records(run_dir.path, start.step)
            (run_dir.path / METRICS).touch()
            # Through JSON, which makes plain numbers of jsonargparse's subclasses of int and float.
            fields = json.loads(json.dumps(asdict(job.config)))
            (run_dir.path / "config.yaml").write_text(yaml.safe_dump(fields, sort_keys=False), encoding="utf-8")
            note_start(job.config, run_dir.path, 0 if start is None else start.step)
            _tell_data(job)


def _tell_data(job: Job) -> None:
    _logger.info(
        "%d tokens of text from %d documents, %d samples an epoch",
        len(job.corpus.tokens),
        job.corpus.files,
        len(job.samples),
    )
    for field, corpus in (("data", job.corpus), ("evaluation.data", job.evaluated)):
        if corpus is not None and corpus.cut:
            limit = job.config.max_data_bytes
            _logger.warning("%s is cut by max_data_bytes, %d, in %s: the rest is not read", field, limit, corpus.cut)
        if corpus is not None and corpus.left_out:
            some = ", ".join(corpus.left_out[:8])
            _logger.warning("%d entries of %s were left out, among them %s", len(corpus.left_out), field, some)


def _compare(
    job: Job, start: Checkpoint | None, comparison: Comparison, losses: list[float], attendance: Attendance
) -> bool:
    """Whether the steps from `start` on have these losses with the indexer unsharded too."""
    store(job.run_dir, comparison)
    # The first model, in reference cycles, would stay beside the second.
    gc.collect()
    with partition_off():
        # A loss that is not a number has ended the run, so equal floats have equal bits.
        identical = _run_steps(job, start, attendance, title="unsharded").losses == losses
    store(job.run_dir, replace(comparison, identical=identical))
    return identical


def _compare_again(job: Job, attendance: Attendance) -> bool:
    """What came of the comparison of a finished run; it is made where the process that began it was cut short."""
    comparison = stored(job.run_dir, job.config.training.steps)
    if comparison.identical is not None:
        return comparison.identical
    losses = losses_of(job.run_dir, comparison)
    start = find_start(job.run_dir, True, comparison.done) if comparison.done else None
    return _compare(job, start, comparison, losses, attendance)


def _nothing_left(job: Job, attendance: Attendance) -> Summary:
    """Of a run that an automatic restart finds finished, but for the comparison perhaps."""
    config, partition = job.config, read_settings().partition.value
    return Summary(
        steps=config.training.steps,
        first_step=None,
        first_loss=None,
        last_loss=None,
        tokens_per_s=None,
        indexer_share=None,
        flag=partition,
        group_size=config.parallel.tensor if partition != "off" else 1,
        unsharded_losses_bit_identical=_compare_again(job, attendance) if config.compare_unsharded else None,
        run_dir=config.run_dir,
    )


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
