"""What a command answers, and how its tables look."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Columns of the answers to people.
WIDTH = 120


@dataclass(frozen=True)
class Outcome:
    """The answer of a command.

    Attributes:
        report: in JSON types.
        text: the same for people, made when it is asked for.
        ok: False where a checkpoint or the installation is faulty.
    """

    report: Mapping[str, Any]
    text: Callable[[], str]
    ok: bool = True


def table(titles: Sequence[str], rows: Sequence[Sequence[object]], *, text_columns: int) -> str:
    """Aligned lines; cells behind the first `text_columns` are aligned to the right, None is a dash."""
    cells = [titles, *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = [
            cell.ljust(width) if column < text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else str(value)
