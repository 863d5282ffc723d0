"""What a run looks at between its steps, without changing a bit of them: an evaluation set, and what rows select."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from mcore_dsa.megatron import ModelSelections
from mcore_dsa.record import SelectionRecord
from mcore_dsa.train.config import JobConfig
from mcore_dsa.train.loop import StepReport, Trainer
from mcore_dsa.train.run_dir import set_aside
from mcore_dsa.train.samples import Packs, Windows

SELECTIONS = "selections"

_logger = logging.getLogger(__name__)


class Probes:
    """Looks of one run; every rank has to take its steps by `train_step`, and call this after each of them.

    What is seen is written by the call, so that a run's first step moves nothing on disk.

    Args:
        config: the run.
        trainer: its trainer.
        samples: what it trains on; the first of them are recorded.
        evaluation: what it is evaluated on, None for nothing.
    """

    def __init__(
        self, config: JobConfig, trainer: Trainer, samples: Windows | Packs, evaluation: Windows | Packs | None
    ) -> None:
        self._config, self._trainer, self._samples, self._evaluation = config, trainer, samples, evaluation
        self._selections: ModelSelections | None = None
        self._last: SelectionRecord | None = None
        self._profiled_step = min(trainer.step + 2, config.training.steps) if config.profile else None
        self._profile: torch.profiler.profile | None = None

    def train_step(self) -> StepReport:
        """A step of the trainer, traced where it is the one that `profile` asks for."""
        if self._trainer.step + 1 != self._profiled_step:
            return self._trainer.train_step()
        with _profiler() as self._profile:
            return self._trainer.train_step()

    def __call__(self, report: StepReport) -> StepReport:
        """The report of a step, with what was seen after it."""
        evaluation, every = self._config.evaluation, self._config.logging.selections_every
        self._write_trace()
        if self._evaluation is not None and report.step % evaluation.every == 0:
            count = evaluation.batches * self._config.micro_batches(dist.get_world_size())
            report = replace(report, evaluation_loss=self._trainer.evaluate(self._evaluation, count))
        if every and report.step % every == 0:
            report = replace(report, selection_agreement=self._record(report.step))
        return report

    def _record(self, step: int) -> float | None:
        """Record the first micro batch and compare it with the record before; None for the first one."""
        if self._selections is None:
            self._selections = ModelSelections(self._trainer.chunks)
        # The interleaved schedule takes micro batches in groups of the pipeline's stages.
        count = self._config.parallel.pipeline if self._config.parallel.virtual_pipeline else 1
        with self._selections.recording() as recorder:
            self._trainer.evaluate(self._samples, count)
        record, *_ = recorder.finish()
        file = Path(self._config.run_dir) / SELECTIONS / f"step_{step:08d}.safetensors"
        agreement = self._agreement(record, file)
        self._last = record
        if dist.get_rank() == 0:
            try:
                file.parent.mkdir(exist_ok=True)
                record.save(file)
            except OSError as error:
                _logger.warning("the selections of step %d are not kept: %s", step, error)
        return agreement

    def _agreement(self, record: SelectionRecord, file: Path) -> float | None:
        """With the record before; of a run that was resumed, with the newest that it left."""
        try:
            if self._last is None:
                older = [name for name in records_in(file.parent) if name < file]
                self._last = SelectionRecord.load(older[-1]) if older else None
            layers = [] if self._last is None else self._last.agreement(record)
        except (OSError, ValueError) as error:
            if dist.get_rank() == 0:
                _logger.warning("the selections in %s are compared with none: %s", file.name, error)
            return None
        return sum(layer.share for layer in layers) / len(layers) if layers else None

    def _write_trace(self) -> None:
        if self._profile is None:
            return
        trace = Path(self._config.run_dir) / "profile" / f"rank_{dist.get_rank()}.json.gz"
        try:
            trace.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(trace))
        # As of a sink: a training does not end because what watches it does.
        except Exception as error:
            _logger.warning("a trace of one step is not kept in %s: %s", trace, str(error) or type(error).__name__)
        else:
            _logger.info("a trace of one step is in %s", trace)
        self._profile = None


def records_in(folder: Path) -> list[Path]:
    """The selections that a run has kept, the oldest first."""
    return sorted(folder.glob("step_*.safetensors"))


def rewind_records(run_dir: Path, step: int) -> None:
    """Set aside what was recorded after `step`, from which the run goes on.

    Raises: OSError where it cannot be moved.
    """
    for file in records_in(run_dir / SELECTIONS):
        if file.stem > f"step_{step:08d}":
            _logger.warning("the run continues from step %d: newer selections are now in %s", step, set_aside(file))


def _profiler() -> torch.profiler.profile:
    """Of what is done inside a trace for Perfetto, with this package's ranges in it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)
