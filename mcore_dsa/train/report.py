"""What a run leaves and shows: metrics.jsonl, its sinks, a progress bar, and the summary at the end."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from tqdm import tqdm

from mcore_dsa.files import replace_text
from mcore_dsa.train.config import JobConfig
from mcore_dsa.train.counts import busiest_over_mean, peak_flops
from mcore_dsa.train.ending import Stopped
from mcore_dsa.train.loop import StepReport
from mcore_dsa.train.run_dir import METRICS, set_aside
from mcore_dsa.train.sinks import Sinks

_logger = logging.getLogger(__name__)

# Between two lines of progress where there is no terminal.
_LINE_EVERY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The last line of a run.

    Attributes:
        steps: steps done in the whole run.
        first_step: the first of them done by this process: 1, or the one after the checkpoint it resumed from. None,
            as what is measured below, where an automatic restart found that none is left to do.
        first_loss: loss of that step.
        last_loss: loss of the last step.
        tokens_per_s: tokens of all ranks in a second, padding of packs with them, over the steps of this process,
            checkpoints not counted.
        indexer_share: share of the time of these steps that rank 0 spent in its indexers.
        flag: how the indexer's query rows were cut over the tensor-parallel group, or "off".
        group_size: ranks of the tensor-parallel group that they were cut over, 1 with the flag off.
        unsharded_losses_bit_identical: whether the same steps with the flag off had the same losses to the last bit,
            None if they were not run.
        run_dir: where everything is.
    """

    steps: int
    first_step: int | None
    first_loss: float | None
    last_loss: float | None
    tokens_per_s: float | None
    indexer_share: float | None
    flag: str
    group_size: int
    unsharded_losses_bit_identical: bool | None
    run_dir: str

    def as_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


class RunLog:
    """Writes each step of a run to metrics.jsonl and its sinks and shows it; for rank 0.

    Args:
        config: the run.
        done: steps done before; what a resumed run finds in its files beyond them belongs to steps it will do again.
        title: of the progress bar.
        write: whether to write files, or to draw the bar only.
    """

    def __init__(self, config: JobConfig, *, done: int, title: str, write: bool = True) -> None:
        training = config.training
        self._peak = peak_flops(config)
        self._tokens = training.global_batch_size * training.sequence_length
        self._bar = tqdm(
            total=training.steps,
            initial=done,
            desc=title,
            unit="step",
            disable=not config.logging.progress,
            # A file gets a line now and then.
            file=None if sys.stderr.isatty() else _Lines(sys.stderr),
            mininterval=0.5 if sys.stderr.isatty() else _LINE_EVERY_S,
            # With more, a thread of tqdm's draws every ten seconds where steps are slow.
            miniters=1,
        )
        self._metrics = None
        self._sinks: Sinks | None = None
        if not write:
            return
        run_dir = Path(config.run_dir)
        _drop_steps_after(run_dir / METRICS, done)
        # Line buffered, so that what is on disk ends with a whole step.
        self._metrics = (run_dir / METRICS).open("a", encoding="utf-8", buffering=1)
        self._sinks = Sinks(config, done)

    def __call__(self, report: StepReport) -> None:
        """Write and show one step."""
        values = self._values(report)
        self._bar.set_postfix_str(
            f"loss {report.loss:.3f}, {values['tokens_per_s']:,.0f} tokens/s, indexer {values['indexer_ms']:.0f} ms",
            refresh=False,
        )
        self._bar.update()
        if self._metrics is not None:
            of_ranks = {"scored_pairs_of_ranks": [rank.scored_pairs for rank in report.counts]}
            self._metrics.write(json.dumps({"step": report.step, **values, **of_ranks}) + "\n")
        if self._sinks is not None:
            self._sinks.write(report.step, values)

    def _values(self, report: StepReport) -> dict[str, float]:
        """The numbers of a step; times and bytes are those of this rank, pairs and rows of all."""
        own, flops_per_s = report.counts[0], report.flops / report.seconds
        ranks = len(report.counts)
        values = {
            "loss": report.loss,
            "evaluation_loss": report.evaluation_loss,
            "learning_rate": report.learning_rate,
            "gradient_norm": report.gradient_norm,
            "step_ms": 1e3 * report.seconds,
            "tokens_per_s": self._tokens / report.seconds,
            "indexer_ms": 1e3 * report.indexer_seconds,
            "exchange_ms": 1e-3 * own.exchange_us,
            "exchange_bytes": own.exchange_bytes,
            "busiest_over_mean": busiest_over_mean(report.counts),
            "verified_rows": sum(rank.verified_rows for rank in report.counts),
            "selection_agreement": report.selection_agreement,
            "model_flops_per_s": flops_per_s,
            "utilisation": None if self._peak is None else flops_per_s / (ranks * self._peak),
        }
        return {name: value for name, value in values.items() if value is not None}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._sinks is not None:
            self._sinks.close(failed=kind is not None and not issubclass(kind, Stopped))


class _Lines:
    """A stream on which a progress bar is a line each time that it is drawn."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what there is between carriage returns, each on a line of its own."""
        for line in text.split("\r"):
            if line.strip():
                self._stream.write(f"{line.strip()}\n")
        return len(text)

    def flush(self) -> None:
        """As the stream."""
        self._stream.flush()


def _drop_steps_after(metrics: Path, step: int) -> None:
    """Leave the steps up to `step` in a log; one with damaged lines is set aside, and what can be read of it stays."""
    try:
        # What comes after the last line's end was cut short.
        *whole, _ = metrics.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        _logger.warning("%s cannot be read (%s); it is now in %s", metrics, error.strerror, set_aside(metrics))
        return
    steps = [_step_of(line) for line in whole]
    if None in steps:
        aside = set_aside(metrics)
        _logger.warning("%s had %d lines that are no steps; it is now in %s", metrics, steps.count(None), aside)
    kept = [line for line, at in zip(whole, steps, strict=True) if at is not None and at <= step]
    replace_text(metrics, "".join(f"{line.decode()}\n" for line in kept))


def _step_of(line: bytes) -> int | None:
    try:
        step = json.loads(line.decode())["step"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int) else None
