"""Whether a run has the losses of one whose indexer is not sharded, answered although a process is cut short.

`<run_dir>/comparison.json` says which steps are compared, and what came of it once they have been.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from mcore_dsa.files import replace_text
from mcore_dsa.settings import PARTITION_VARIABLE
from mcore_dsa.train.run_dir import METRICS
from mcore_dsa.train.together import of_every_rank, told_to_every_rank

_FILE = "comparison.json"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Steps of a run that are done again with the indexer unsharded.

    Attributes:
        done: steps before the first of them.
        steps: the last of them, that of the run.
        identical: whether every loss is the same to the last bit, None where that is not known yet.
    """

    done: int
    steps: int
    identical: bool | None = None


def store(run_dir: Path, comparison: Comparison) -> None:
    """Write it to the run's folder; every rank has to call this.

    Raises: ValueError on every rank where it cannot be written.
    """
    with told_to_every_rank(f"{run_dir / _FILE} cannot be written"):
        if dist.get_rank() == 0:
            replace_text(run_dir / _FILE, json.dumps(asdict(comparison)))


def stored(run_dir: Path, steps: int) -> Comparison:
    """That of a run of `steps` steps; where none is stored, all of them are to be compared.

    Every rank has to call this.
    """
    return of_every_rank(_read(run_dir / _FILE, steps))[0]


def losses_of(run_dir: Path, comparison: Comparison) -> list[float]:
    """The losses of the compared steps as the run has logged them; every rank has to call this.

    Raises: ValueError on every rank where the log lacks one.
    """
    path, steps = run_dir / METRICS, range(comparison.done + 1, comparison.steps + 1)
    with told_to_every_rank(f"{path} cannot be read"):
        logged = _logged(path) if dist.get_rank() == 0 else {}
        if dist.get_rank() == 0 and (lost := [step for step in steps if step not in logged]):
            raise ValueError(
                f"{path} lacks the loss of step {lost[0]}; accepted to compare are those of steps {steps[0]} ... "
                f"{steps[-1]}"
            )
    return of_every_rank([logged.get(step, 0.0) for step in steps])[0]


@contextlib.contextmanager
def partition_off() -> Iterator[None]:
    """The flag off in this process's environment."""
    before = os.environ.get(PARTITION_VARIABLE)
    os.environ[PARTITION_VARIABLE] = "off"
    try:
        yield
    finally:
        if before is None:
            del os.environ[PARTITION_VARIABLE]
        else:
            os.environ[PARTITION_VARIABLE] = before


def _read(path: Path, steps: int) -> Comparison:
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        found = Comparison(**json.loads(path.read_bytes()))
        if found.steps == steps and found.done in range(steps) and found.identical in (None, False, True):
            return found
    return Comparison(done=0, steps=steps)


def _logged(path: Path) -> dict[int, float]:
    """Losses by step, of the lines that say both."""
    logged = {}
    for line in path.read_bytes().split(b"\n"):
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):
            values = json.loads(line)
            logged[int(values["step"])] = float(values["loss"])
    return logged
