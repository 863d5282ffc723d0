"""What can be read of a run's folder, also of a run that crashed: steps, starts, selections; and what could not be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_dsa.hf_config import parse_json
from mcore_dsa.record import SelectionRecord

type Line = dict[str, Any]

_PAIRS = "scored_pairs_of_ranks"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """A run as far as it can be read.

    Attributes:
        path: its folder.
        steps: what each step logged, at least one.
        starts: what each start of the job ran with, the first step that it did with it; none of an older run.
        record, record_name: the newest selections that are whole, if there are any.
        left_out: lines about what could not be read.
    """

    path: Path
    steps: Sequence[Line]
    starts: Sequence[Line]
    record: SelectionRecord | None
    record_name: str
    left_out: Sequence[str]

    @classmethod
    def read(cls, path: Path) -> RunFolder:
        """Read it.

        Raises: ValueError for a folder that holds no run, or none that has done a step.
        """
        metrics = path / "metrics.jsonl"
        if not metrics.is_file():
            raise ValueError(f"run is {str(path)!r}; accepted is the folder of a run, with metrics.jsonl")
        left_out: list[str] = []
        steps = _lines(metrics, _is_step, left_out)
        if not steps:
            raise ValueError(f"{metrics} holds no step; accepted is the log of a run that has done one")
        starts = _lines(path / "starts.jsonl", _is_start, left_out)
        record, name = _newest(path / "selections", left_out)
        return cls(path=path, steps=steps, starts=starts, record=record, record_name=name, left_out=left_out)

    @property
    def ran(self) -> dict[str, str]:
        """What the last start ran with."""
        return self.starts[-1]["ran"] if self.starts else {}

    @property
    def resumed(self) -> list[int]:
        """The first steps of later starts, as far as they were reached."""
        return sorted({start["first_step"] for start in self.starts} & {step["step"] for step in self.steps[1:]})

    def series(self, name: str, over: str | None = None) -> list[tuple[int, float]]:
        """A number of the steps that have it, by itself or as a share of another."""
        return [
            (step["step"], step[name] / (1 if over is None else step[over]))
            for step in self.steps
            if name in step and (over is None or step.get(over))
        ]

    def pairs(self) -> list[float]:
        """Scored pairs of each rank in a step, on average; of the last steps' ranks, a resumed run may have others."""
        of_ranks = [step[_PAIRS] for step in self.steps if step.get(_PAIRS)]
        alike = [pairs for pairs in of_ranks if len(pairs) == len(of_ranks[-1])]
        return [sum(pairs) / len(alike) for pairs in zip(*alike, strict=True)]


def _lines(file: Path, accepted: Callable[[Any], bool], left_out: list[str]) -> list[Line]:
    """The lines of a log that are what it holds."""
    if not file.is_file():
        return []
    found, lost = [], 0
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = parse_json(line.encode())
        except ValueError:
            value = None
        if accepted(value):
            found.append(value)
        else:
            lost += 1
    if lost:
        what = "no steps" if file.name == "metrics.jsonl" else "no starts"
        left_out.append(f"{lost} lines of {file.name} are {what} and were left out")
    return found


def _is_step(value: Any) -> bool:
    """Every number of a step is one, but the list of the ranks' pairs."""
    if not isinstance(value, dict) or "loss" not in value or not _is_count(value.get("step")):
        return False
    pairs = value.get(_PAIRS, [])
    numbers = [number for name, number in value.items() if name != _PAIRS]
    return isinstance(pairs, list) and all(map(_is_number, [*numbers, *pairs]))


def _is_start(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("ran"), dict):
        return False
    said = [*value["ran"].values(), value.get("time")]
    return all(_is_count(value.get(name)) for name in ("first_step", "steps", "ranks")) and all(
        isinstance(text, str) for text in said
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_number(value)


def _is_number(value: object) -> bool:
    """A finite one that can be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _newest(folder: Path, left_out: list[str]) -> tuple[SelectionRecord | None, str]:
    for file in sorted(folder.glob("step_*.safetensors"), reverse=True):
        try:
            record = SelectionRecord.load(file)
        except (OSError, ValueError) as error:
            left_out.append(f"{file.name} was left out: {error}")
            continue
        if any(record.lengths):
            return record, file.name
        left_out.append(f"{file.name} was left out: it has no token")
    return None, ""
