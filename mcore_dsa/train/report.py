"""What a run leaves and shows: metrics.jsonl, TensorBoard, a progress bar, and the summary at the end."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from tqdm import tqdm

from mcore_dsa.train.config import JobConfig
from mcore_dsa.train.files import replace_text
from mcore_dsa.train.loop import StepReport

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

METRICS = "metrics.jsonl"

_logger = logging.getLogger(__name__)

# Between two lines of progress where there is no terminal.
_LINE_EVERY_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The last line of a run.

    Attributes:
        steps: steps done in the whole run.
        first_step: the first of them done by this process: 1, or the one after the checkpoint it resumed from.
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
    first_step: int
    first_loss: float
    last_loss: float
    tokens_per_s: float
    indexer_share: float
    flag: str
    group_size: int
    unsharded_losses_bit_identical: bool | None
    run_dir: str

    def as_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


class RunLog:
    """Writes each step of a run to metrics.jsonl and TensorBoard and shows it; for rank 0.

    Args:
        config: the run.
        done: steps done before; what a resumed run finds in its files beyond them belongs to steps it will do again.
        title: of the progress bar.
        write: whether to write files, or to draw the bar only.
    """

    def __init__(self, config: JobConfig, *, done: int, title: str, write: bool = True) -> None:
        training = config.training
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
        )
        self._metrics = None
        self._board: SummaryWriter | None = None
        if not write:
            return
        run_dir = Path(config.run_dir)
        _drop_steps_after(run_dir / METRICS, done)
        # Line buffered, so that what is on disk ends with a whole step.
        self._metrics = (run_dir / METRICS).open("a", encoding="utf-8", buffering=1)
        if config.logging.tensorboard:
            self._board = _open_board(run_dir / "tensorboard", done)

    def __call__(self, report: StepReport) -> None:
        """Write and show one step."""
        tokens_per_s = self._tokens / report.seconds
        indexer_ms = 1e3 * report.indexer_seconds
        self._bar.set_postfix_str(
            f"loss {report.loss:.3f}, {tokens_per_s:,.0f} tokens/s, indexer {indexer_ms:.0f} ms", refresh=False
        )
        self._bar.update()
        values = {
            "loss": report.loss,
            "learning_rate": report.learning_rate,
            "gradient_norm": report.gradient_norm,
            "step_ms": 1e3 * report.seconds,
            "tokens_per_s": tokens_per_s,
            "indexer_ms": indexer_ms,
        }
        if self._metrics is not None:
            self._metrics.write(json.dumps({"step": report.step, **values}) + "\n")

        def add(board: SummaryWriter) -> None:
            for name, value in values.items():
                board.add_scalar(name, value, report.step)

        self._on_board(add)

    def _on_board(self, write: Callable[[SummaryWriter], object]) -> None:
        """Pictures are worth no run: TensorBoard's first fault is its last."""
        if self._board is not None:
            try:
                write(self._board)
            except Exception as error:
                _logger.warning("TensorBoard has failed, and the run goes on without: %s", error)
                self._board = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._metrics is not None:
            self._metrics.close()
        self._on_board(lambda board: board.close())


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


def _open_board(folder: Path, done: int) -> SummaryWriter | None:
    try:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(folder), purge_step=done + 1)
    except Exception as error:
        _logger.warning("TensorBoard cannot write to %s, and the run goes on without: %s", folder, error)
        return None


def _drop_steps_after(metrics: Path, step: int) -> None:
    if not metrics.is_file():
        return
    # A line without its end was cut short.
    lines = [line for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    replace_text(metrics, "".join(line for line in lines if json.loads(line)["step"] <= step))
