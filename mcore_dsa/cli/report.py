"""`mcore-dsa report`: one page about a run of the training job, with its pictures in it."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from mcore_dsa.cli import pictures
from mcore_dsa.cli.outcome import Outcome
from mcore_dsa.hf_config import parse_json
from mcore_dsa.record import SelectionRecord

type Step = dict[str, Any]

_STYLE = """
body { margin: 0; background: #f5f7fa; color: #1f2933; font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 60px; }
h1 { font-size: 26px; margin: 0 0 2px; overflow-wrap: anywhere; }
.sub { color: #616e7c; margin: 0 0 24px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; margin-bottom: 18px; }
.tile, figure, details { background: white; border: 1px solid #e4e7eb; border-radius: 10px; }
.tile { padding: 12px 16px; }
.tile b { display: block; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span, figcaption { color: #616e7c; font-size: 13px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); gap: 18px; }
figure { margin: 0; padding: 16px 18px 14px; }
figure.wide { grid-column: 1 / -1; }
figure h2 { font-size: 16px; margin: 0 0 6px; }
figure img { width: 100%; height: auto; display: block; }
figcaption { margin-top: 6px; }
details { margin-top: 18px; padding: 12px 18px; }
pre { overflow-x: auto; font-size: 12px; }
"""


@dataclass(frozen=True, kw_only=True)
class _Card:
    """One picture and what it says."""

    title: str
    text: str
    png: bytes
    shape: str = "half"


def report(run: str, out: str | None) -> Outcome:
    """Draw the page; see the command's help for the arguments.

    Raises: OSError or ValueError for a folder that holds no run, or a page that cannot be written.
    """
    folder = Path(run)
    steps, lost = _steps(folder)
    record_file = max((folder / "selections").glob("step_*.safetensors"), default=None)
    record = None if record_file is None else SelectionRecord.load(record_file)
    cards = [*_cards_of_steps(steps), *([] if record is None else [_card_of_selections(record, str(record_file))])]
    page = Path(out) if out is not None else folder / "report.html"
    page.write_text(_page(folder, steps, lost, cards), encoding="utf-8")
    answer = {
        "page": str(page),
        "steps": len(steps),
        "lines_left_out": lost,
        "pictures": [card.title for card in cards],
    }
    left_out = f"\n{lost} lines of metrics.jsonl are no steps and were left out" if lost else ""
    return Outcome(answer, lambda: f"{page}: {len(steps)} steps, {len(cards)} pictures{left_out}")


def _steps(folder: Path) -> tuple[list[Step], int]:
    """The steps that the run has logged, and how many lines are none: the log of a run that crashed is shown too."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise ValueError(f"run is {str(folder)!r}; accepted is the folder of a run, with metrics.jsonl")
    steps, lost = [], 0
    for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            step = parse_json(line.encode())
            float(step["loss"]), int(step["step"])
            steps.append(step)
        except (ValueError, TypeError, KeyError, OverflowError):
            lost += 1
    if not steps:
        raise ValueError(f"{metrics} holds no step; accepted is the log of a run that has done one")
    return steps, lost


def _series(steps: Sequence[Step], name: str, over: str | None = None) -> list[tuple[int, float]]:
    """A number of the steps that have it, by itself or as a share of another."""
    names = [name] if over is None else [name, over]
    return [
        (step["step"], step[name] / (1 if over is None else step[over]))
        for step in steps
        if all(isinstance(step.get(each), int | float) for each in names) and (over is None or step[over])
    ]


def _cards_of_steps(steps: Sequence[Step]) -> list[_Card]:
    losses = {"training": _series(steps, "loss"), "evaluation": _series(steps, "evaluation_loss")}
    shares = {
        "indexer, its exchange included": _series(steps, "indexer_ms", "step_ms"),
        "exchange of indexer and attention": _series(steps, "exchange_ms", "step_ms"),
    }
    numbers = [
        ("Loss", "Mean over the counted tokens of a global batch.", losses, "loss", {}),
        (
            "Tokens a second",
            "Of all ranks, padding of packs included; evaluation and checkpoints not counted.",
            {"tokens": _series(steps, "tokens_per_s")},
            "tokens/s",
            {"from_zero": True},
        ),
        (
            "What selecting takes",
            "Share of a step's time on rank 0; on CUDA the time of the host.",
            shares,
            "of the step",
            {"percent": True, "from_zero": True},
        ),
        (
            "Model FLOPs a second",
            "All ranks together. Counted are scored pairs and selected tokens, never dense attention.",
            {"FLOP": _series(steps, "model_flops_per_s")},
            "FLOP/s",
            {"from_zero": True},
        ),
        (
            "Selections that stay",
            "Share of the pools recorded before that the same rows select still.",
            {"agreement": _series(steps, "selection_agreement")},
            "of the pools",
            {"percent": True},
        ),
    ]
    cards = []
    for title, text, series, unit, options in numbers:
        drawn = {name: points for name, points in series.items() if points}
        if drawn:
            cards.append(_Card(title=title, text=text, png=pictures.lines(drawn, unit=unit, **options)))
    of_ranks = [step["scored_pairs_of_ranks"] for step in steps if step.get("scored_pairs_of_ranks")]
    if of_ranks:
        # Of the last run's ranks: a resumed one may have others.
        alike = [pairs for pairs in of_ranks if len(pairs) == len(of_ranks[-1])]
        mean = [sum(pairs) / len(alike) for pairs in zip(*alike, strict=True)]
        png = pictures.bars(mean, unit="scored pairs a step")
        text = "(row, pool) pairs that each rank scores in a step, on average."
        cards.insert(3, _Card(title="Work of each rank", text=text, png=png))
    return cards


def _card_of_selections(record: SelectionRecord, name: str) -> _Card:
    text = (
        f"{Path(name).name}: the longest document, {max(record.lengths):,} tokens in pools of {record.pool_size}, of "
        f"which a row selects up to {record.budget}. White is what a row cannot see."
    )
    return _Card(title="Which pools the queries select", text=text, png=pictures.selection_map(record), shape="wide")


def _tiles(steps: Sequence[Step]) -> list[tuple[str, str]]:
    def middle(name: str, over: str | None = None) -> float | None:
        values = [value for _, value in _series(steps, name, over)]
        return median(values) if values else None

    tokens, share, flops = middle("tokens_per_s"), middle("indexer_ms", "step_ms"), middle("model_flops_per_s")
    uneven, used = middle("busiest_over_mean"), middle("utilisation")
    evaluated = [value for _, value in _series(steps, "evaluation_loss")]
    tiles = [
        ("steps", f"{steps[-1]['step']:,}"),
        ("last loss", f"{steps[-1]['loss']:.4f}"),
        ("last evaluation loss", f"{evaluated[-1]:.4f}" if evaluated else None),
        ("tokens/s, median", None if tokens is None else f"{tokens:,.0f}"),
        ("of a step in the indexer", None if share is None else f"{share:.1%}"),
        ("busiest rank over mean", None if uneven is None else f"{uneven:.3f}"),
        ("model TFLOP/s, median", None if flops is None else f"{flops / 1e12:,.3g}"),
        ("of the devices' peak", None if used is None else f"{used:.1%}"),
    ]
    return [(name, value) for name, value in tiles if value is not None]


def _page(folder: Path, steps: Sequence[Step], lost: int, cards: Sequence[_Card]) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in _tiles(steps)
    )
    figures = "".join(
        f'<figure class="{card.shape}"><h2>{escape(card.title)}</h2>'
        f'<img alt="{escape(card.title)}" src="data:image/png;base64,{base64.b64encode(card.png).decode()}">'
        f"<figcaption>{escape(card.text)}</figcaption></figure>"
        for card in cards
    )
    name = escape(folder.resolve().name)
    config = folder / "config.yaml"
    stated = config.read_text(encoding="utf-8", errors="replace") if config.is_file() else ""
    details = f"<details><summary>config.yaml</summary><pre>{escape(stated)}</pre></details>" if stated else ""
    left_out = f"; {lost} lines of its log are no steps and were left out" if lost else ""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><main><h1>{name}</h1>'
        f'<p class="sub">Steps {steps[0]["step"]:,} to {steps[-1]["step"]:,} of {escape(str(folder))}{left_out}</p>'
        f'<div class="tiles">{tiles}</div><div class="cards">{figures}</div>{details}</main></body></html>\n'
    )
