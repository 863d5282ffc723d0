"""Where the numbers of a step go beside metrics.jsonl: TensorBoard and Weights & Biases, each through its own library.

A training does not end because what watches it does: a sink that fails is said once, and left.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from mcore_dsa.train.config import JobConfig

_WANDB_RUN = "wandb_run.txt"

_logger = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the numbers of one step after the other."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class TensorBoard:
    """Event files in <run_dir>/tensorboard; what they hold beyond `done` steps is hidden."""

    def __init__(self, run_dir: Path, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=done + 1)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        self._board.close()


class WeightsAndBiases:
    """A run of Weights & Biases, named as the run's folder, which remembers it: a resumed run goes on in it."""

    def __init__(self, config: JobConfig, done: int) -> None:
        import wandb

        run_dir = Path(config.run_dir)
        remembered = run_dir / _WANDB_RUN
        known = remembered.read_text(encoding="utf-8").strip() if done and remembered.is_file() else None
        self._run: Any = wandb.init(
            project=config.logging.wandb,
            name=run_dir.name,
            dir=str(run_dir),
            config=asdict(config),
            id=known,
            resume="allow",
        )
        # It drops what comes under a step of its own that it has passed, and a run may go back to an older checkpoint.
        self._run.define_metric("*", step_metric="step")
        remembered.write_text(self._run.id, encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class Sinks:
    """All that a run asks for, none of which can end it."""

    def __init__(self, config: JobConfig, done: int) -> None:
        self._open: dict[str, Sink] = {}
        if config.logging.tensorboard:
            with self._survived("TensorBoard"):
                self._open["TensorBoard"] = TensorBoard(Path(config.run_dir), done)
        if config.logging.wandb is not None:
            with self._survived("Weights & Biases"):
                self._open["Weights & Biases"] = WeightsAndBiases(config, done)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Give every sink that still works the numbers of a step."""
        for name, sink in list(self._open.items()):
            with self._survived(name):
                sink.write(step, values)

    def close(self, *, failed: bool) -> None:
        """Let every sink finish, told whether an error ended the run."""
        for name, sink in list(self._open.items()):
            with self._survived(name):
                sink.close(failed=failed)

    @contextmanager
    def _survived(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            _logger.warning("%s is left, the run goes on without it: %s", name, str(error) or type(error).__name__)
            self._open.pop(name, None)
