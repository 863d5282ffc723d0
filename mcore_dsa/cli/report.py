"""`mcore-dsa report`: one page about a run of the training job, with its pictures in it."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from mcore_dsa.cli import pictures
from mcore_dsa.cli.outcome import Outcome
from mcore_dsa.cli.run_folder import RunFolder
from mcore_dsa.settings import PARTITION_VARIABLE

# The busiest rank over the mean from which the page says so.
_UNEVEN = 1.2

_STYLE = """
body { margin: 0; background: #f5f7fa; color: #1f2933; font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 36px 24px 60px; }
h1 { font-size: 26px; margin: 0 0 2px; overflow-wrap: anywhere; }
.sub { color: #616e7c; margin: 0 0 24px; }
.sub p { margin: 0; overflow-wrap: anywhere; }
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
    found = RunFolder.read(Path(run))
    cards = [*_cards_of_steps(found), *_cards_of_selections(found)]
    page = Path(out) if out is not None else found.path / "report.html"
    page.write_text(_page(found, cards), encoding="utf-8")
    answer = {
        "page": str(page),
        "steps": len(found.steps),
        "left_out": found.left_out,
        "pictures": [card.title for card in cards],
    }
    lines = [f"{page}: {len(found.steps)} steps, {len(cards)} pictures", *found.left_out]
    return Outcome(answer, lambda: "\n".join(lines))


def _cards_of_steps(run: RunFolder) -> list[_Card]:
    """A picture of each number that was logged; of how selections stay from two comparisons on."""
    series = run.series
    shares: dict[str, pictures.Series] = {
        "indexer, its exchange included": series("indexer_ms", "step_ms"),
        "exchange of indexer and attention": series("exchange_ms", "step_ms"),
    }
    stay = series("selection_agreement")
    numbers: list[tuple[str, str, dict[str, pictures.Series], str, dict[str, Any]]] = [
        (
            "Loss",
            "Mean over the counted tokens of a global batch.",
            {"training": series("loss"), "evaluation": series("evaluation_loss")},
            "loss",
            {},
        ),
        ("Gradient norm", "Before clipping.", {"norm": series("gradient_norm")}, "norm", {"from_zero": True}),
        ("Learning rate", "Of each step's update.", {"rate": series("learning_rate")}, "rate", {"from_zero": True}),
        (
            "Tokens a second",
            "Of all ranks, padding of packs included; evaluation and checkpoints not counted.",
            {"tokens": series("tokens_per_s")},
            "tokens/s",
            {"scale": "prefix", "from_zero": True},
        ),
        (
            "What selecting takes",
            "Share of a step's time on rank 0; on CUDA the time of the host.",
            shares,
            "of the step",
            {"scale": "percent", "from_zero": True},
        ),
        (
            "Model FLOPs a second",
            "All ranks together. Counted are scored pairs and selected tokens, never dense attention.",
            {"FLOP": series("model_flops_per_s")},
            "FLOP/s",
            {"scale": "prefix", "from_zero": True},
        ),
        (
            "Selections that stay",
            "Share of the pools recorded before that the same rows select still.",
            {"agreement": stay if len(stay) > 1 else []},
            "of the pools",
            {"scale": "percent"},
        ),
    ]
    cards = []
    for title, text, lines, unit, options in numbers:
        drawn = {name: points for name, points in lines.items() if points}
        if drawn:
            png = pictures.lines(drawn, unit=unit, resumed=run.resumed, **options)
            cards.append(_Card(title=title, text=text, png=png))
    return [*cards, *_cards_of_ranks(run)]


def _cards_of_ranks(run: RunFolder) -> list[_Card]:
    pairs = run.pairs()
    if not pairs:
        return []
    text = "(row, pool) pairs that each rank scores in a step, on average."
    uneven = max(pairs) * len(pairs) / (sum(pairs) or 1)
    if uneven > _UNEVEN and run.ran.get(PARTITION_VARIABLE) == "contiguous":
        text += (
            f" The busiest does {uneven:.2f} times the mean: {PARTITION_VARIABLE}=zigzag evens it, see mcore-dsa plan."
        )
    return [_Card(title="Work of each rank", text=text, png=pictures.bars(pairs, unit="scored pairs a step"))]


def _cards_of_selections(run: RunFolder) -> list[_Card]:
    record = run.record
    if record is None:
        return []
    text = (
        f"{run.record_name}: the longest document, {max(record.lengths):,} tokens in pools of {record.pool_size}, of "
        f"which a row selects up to {record.budget}. White is what a row cannot see."
    )
    png = pictures.selection_map(record)
    return [_Card(title="Which pools the queries select", text=text, png=png, shape="wide")]


def _tiles(run: RunFolder) -> list[tuple[str, str]]:
    def middle(name: str, over: str | None = None) -> float | None:
        values = [value for _, value in run.series(name, over)]
        return median(values) if values else None

    def last(name: str) -> float | None:
        return next((value for _, value in reversed(run.series(name))), None)

    tokens, share, flops = middle("tokens_per_s"), middle("indexer_ms", "step_ms"), middle("model_flops_per_s")
    uneven, used = middle("busiest_over_mean"), middle("utilisation")
    evaluated, stay = last("evaluation_loss"), last("selection_agreement")
    tiles = [
        ("steps", f"{run.steps[-1]['step']:,}"),
        ("last loss", f"{run.steps[-1]['loss']:.4f}"),
        ("last evaluation loss", None if evaluated is None else f"{evaluated:.4f}"),
        ("tokens/s, median", None if tokens is None else f"{tokens:,.0f}"),
        ("of a step in the indexer", None if share is None else f"{share:.1%}"),
        ("busiest rank over mean", None if uneven is None else f"{uneven:.3f}"),
        ("model FLOP/s, median", None if flops is None else pictures.with_prefix(flops)),
        ("of the devices' peak", None if used is None else f"{used:.1%}"),
        ("of the recorded pools stay", None if stay is None else f"{stay:.1%}"),
    ]
    return [(name, value) for name, value in tiles if value is not None]


def _heading(run: RunFolder) -> list[str]:
    """What the run is, in lines for its head."""
    first, last = run.steps[0]["step"], run.steps[-1]["step"]
    if not run.starts:
        return [f"Steps {first:,} to {last:,} of {run.path}", *run.left_out]
    start, ran = run.starts[-1], run.ran
    said = [
        f"Steps {first:,} to {last:,} of {start['steps']:,} planned",
        f"{start['ranks']} ranks",
        f"flag {ran.get(PARTITION_VARIABLE, 'unknown')}",
        f"{ran.get('kernels', 'unknown')} kernels on {ran.get('device', 'an unknown device')}",
    ]
    resumed = f"resumed before step {', '.join(f'{step:,}' for step in run.resumed)}" if run.resumed else ""
    return [str(run.path), " \u00b7 ".join(filter(None, [*said, resumed])), *run.left_out]


def _details(run: RunFolder) -> Iterator[tuple[str, str]]:
    """What stands folded under the pictures."""
    if run.starts:
        yield (
            "What ran",
            "\n\n".join(
                "\n".join(
                    [
                        f"from step {start['first_step']} on, {start['ranks']} ranks, {start['time']}",
                        *(f"    {name:{max(map(len, start['ran']))}}  {value}" for name, value in start["ran"].items()),
                    ]
                )
                for start in run.starts
            ),
        )
    config = run.path / "config.yaml"
    if config.is_file():
        yield config.name, config.read_text(encoding="utf-8", errors="replace")


def _page(run: RunFolder, cards: Sequence[_Card]) -> str:
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>' for name, value in _tiles(run)
    )
    figures = "".join(
        f'<figure class="{card.shape}"><h2>{escape(card.title)}</h2>'
        f'<img alt="{escape(card.title)}" src="data:image/png;base64,{base64.b64encode(card.png).decode()}">'
        f"<figcaption>{escape(card.text)}</figcaption></figure>"
        for card in cards
    )
    name = escape(run.path.resolve().name)
    details = "".join(
        f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
        for title, text in _details(run)
    )
    heading = "".join(f"<p>{escape(line)}</p>" for line in _heading(run))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body><main><h1>{name}</h1>'
        f'<div class="sub">{heading}</div>'
        f'<div class="tiles">{tiles}</div><div class="cards">{figures}</div>{details}</main></body></html>\n'
    )
