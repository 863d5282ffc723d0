"""Pictures of a run, each as the bytes of a PNG file."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter
from torch import Tensor

from mcore_dsa.record import SelectionRecord

INK, PALE, GRID = "#1f2933", "#7b8794", "#e4e7eb"
COLOURS = ("#2563c9", "#e07b39", "#2a9d6f", "#7b5bd6")
# Cells of a map along either side; longer documents are averaged into them.
CELLS = 256
# Layers that are drawn.
PANELS = 4

type Series = Sequence[tuple[int, float]]


def lines(
    series: Mapping[str, Series],
    *,
    unit: str,
    scale: Literal["plain", "prefix", "percent"] = "plain",
    from_zero: bool = False,
    resumed: Sequence[int] = (),
) -> bytes:
    """Numbers over the steps; a series of few points has marks, and a line stands before each step of `resumed`."""
    figure, axes = _figure()
    for colour, (name, points) in zip(COLOURS, series.items(), strict=False):
        steps, values = zip(*points, strict=True)
        # One series has its name in the title; matplotlib leaves a label with "_" out of the legend.
        label, marker = name if len(series) > 1 else "_", "o" if len(points) <= 40 else None
        axes.plot(steps, values, color=colour, linewidth=1.6, label=label, marker=marker, ms=3)
    for number, step in enumerate(resumed):
        axes.axvline(step - 0.5, color=PALE, linewidth=1, linestyle=(0, (2, 3)), label=None if number else "resumed")
    if from_zero:
        axes.set_ylim(bottom=0)
    if scale != "plain":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0) if scale == "percent" else EngFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel=unit)
    if len(series) > 1 or resumed:
        axes.legend(frameon=False, fontsize=9)
    return _png(figure)


def with_prefix(value: float) -> str:
    """A number as the axes of a picture have it: 12.3 G."""
    return EngFormatter(places=1).format_eng(value)


def bars(values: Sequence[float], *, unit: str) -> bytes:
    """A number of each rank, and their mean."""
    figure, axes = _figure()
    axes.bar(range(len(values)), values, color=COLOURS[0], width=0.72)
    mean = sum(values) / len(values)
    axes.axhline(mean, color=COLOURS[1], linewidth=1.4, linestyle=(0, (4, 3)), label="mean of the ranks")
    axes.yaxis.set_major_formatter(EngFormatter())
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="rank", ylabel=unit, xlim=(-0.6, len(values) - 0.4))
    axes.legend(frameon=False, fontsize=9)
    return _png(figure)


def selection_map(record: SelectionRecord) -> bytes:
    """Which pools the rows of the longest document select, a panel for each of some layers, evenly chosen."""
    count = min(PANELS, record.layers)
    layers = [round(panel * (record.layers - 1) / max(count - 1, 1)) for panel in range(count)]
    figure = Figure(figsize=(3.4 * count + 0.6, 3.7), layout="constrained", facecolor="white")
    blues = LinearSegmentedColormap.from_list("selected", ["#edf2fb", "#9dbcf0", COLOURS[0], "#0f2f6b"])
    shades = blues.with_extremes(bad="white")
    length = max(record.lengths)
    panels = figure.subplots(1, count, sharey=True, squeeze=False)[0]
    for axes, layer in zip(panels, layers, strict=True):
        share = selected_share(record, layer).numpy()
        extent = (0, length // record.pool_size, length, 0)
        image = axes.imshow(share, cmap=shades, vmin=0, vmax=1, extent=extent, aspect="auto", interpolation="nearest")
        _plain(axes, grid=False)
        axes.set_title(f"DSA layer {layer + 1} of {record.layers}", fontsize=10, color=INK)
        axes.set_xlabel("pool")
    panels[0].set_ylabel("query (token of the document)")
    bar = figure.colorbar(image, ax=list(panels), fraction=0.02, pad=0.01, format=PercentFormatter(1.0))
    bar.set_label("of the visible pools, selected", fontsize=9, color=INK)
    bar.outline.set_visible(False)
    return _png(figure)


def selected_share(record: SelectionRecord, layer: int) -> Tensor:
    """fp32, of the (row, pool) pairs of a cell in which the row sees the pool, the share that it selects; NaN in cells
    without any. Of the longest document.
    """
    document = max(range(len(record.lengths)), key=record.lengths.__getitem__)
    start, length = record.starts[document], record.lengths[document]
    pools = max(1, length // record.pool_size)
    rows, columns = min(CELLS, length), min(CELLS, pools)
    selected, visible = torch.zeros(2, rows, columns)
    row_of = torch.arange(length) * rows // length
    column_of = torch.arange(pools) * columns // pools
    # Pools in front of each cell's first, and of its last.
    edges = torch.searchsorted(column_of, torch.arange(columns + 1))
    for cell in range(rows):
        token_R = (row_of == cell).nonzero().flatten() + start
        chosen = record.selection_xTK[layer, token_R].flatten().long()
        selected[cell] = torch.bincount(column_of[chosen[chosen >= 0]], minlength=columns)
        seen_RX = record.visible_T[token_R].unsqueeze(1).clamp(max=edges)
        visible[cell] = seen_RX.diff(dim=1).sum(0)
    share: Tensor = selected / visible.masked_fill(visible == 0, torch.nan)
    return share


def _figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6.4, 3.3), layout="constrained", facecolor="white")
    axes = figure.subplots()
    _plain(axes, grid=True)
    return figure, axes


def _plain(axes: Axes, *, grid: bool) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(GRID)
    axes.tick_params(colors=PALE, labelsize=9, length=0)
    axes.xaxis.label.set_color(INK)
    axes.yaxis.label.set_color(INK)
    if grid:
        axes.grid(axis="y", color=GRID, linewidth=0.8)
        axes.set_axisbelow(True)


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()
