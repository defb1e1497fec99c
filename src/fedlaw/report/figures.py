"""Charts as files, drawn with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlaw.report._panels import HONEST, MALICIOUS, STYLE, headline
from fedlaw.report.charts import Chart, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"),
    *("#8C564B", "#7F7F7F", "#6A3D9A", "#B8860B", "#1B7837", "#E7298A"),
)
_DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)))


def palette(chart: Chart) -> dict[str, int]:
    """A number for every line of a chart: the same name has the same colour in every panel."""
    names = dict.fromkeys(chain.from_iterable((line.name for line in p.lines) for p in chart.panels))
    ours = [name for name in names if not name.endswith(", published")]
    numbers = {name: number for number, name in enumerate(ours)}
    return numbers | {name: numbers.get(name.removesuffix(", published"), 0) for name in names}


def draw(chart: Chart) -> Figure:
    """The chart as a figure in the paper's layout: a frame a panel, one legend."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = max(1, min(chart.columns, len(chart.panels), 5))
    rows = math.ceil(len(chart.panels) / columns)
    with matplotlib.rc_context({**STYLE, "font.size": 9, "axes.titlesize": 9.5}):
        size = (max(5.5, 3.1 * columns + 0.6), 2.5 * rows + 1.3)
        made = Figure(figsize=size, dpi=150, layout="constrained")
        headline(made, chart.title)
        axes = made.subplots(rows, columns, sharex=chart.kind == "lines", sharey=True, squeeze=False)
        numbers = palette(chart)
        flat = list(axes.flat)
        for place, panel in zip(flat, chart.panels, strict=False):
            for line in panel.lines:
                _line(place, line, chart, numbers)
            place.set_title(panel.title)
            if chart.log:
                place.set_xscale("log")
        for place in flat[len(chart.panels) :]:
            place.set_visible(False)
        for place in axes[-1]:
            place.set_xlabel(chart.x)
        for place in axes[:, 0]:
            place.set_ylabel(chart.y)
        _legend(made, flat[: len(chart.panels)], chart)
    return made


def _line(axes: Axes, line: Line, chart: Chart, numbers: dict[str, int]) -> None:
    if chart.kind == "weights":
        colour = MALICIOUS if line.role == "malicious" else HONEST
        axes.plot(line.x, line.y, color=colour, linewidth=1.0, alpha=0.75, label=line.role)
        return
    number = numbers[line.name]
    colour, dash = COLOURS[number % len(COLOURS)], _DASHES[number // len(COLOURS) % len(_DASHES)]
    marker = "o" if len(line.x) < 14 else ""
    if line.published:
        axes.errorbar(line.x, line.y, line.spread, color=colour, fmt="x", markersize=4, label=line.name)
        return
    axes.plot(
        line.x,
        line.y,
        color=colour,
        linestyle=dash,
        linewidth=1.5,
        marker=marker,
        markersize=3,
        label=line.name,
    )
    if any(line.spread):
        bounds = (0.0, 100.0) if chart.y.endswith("(%)") else (-math.inf, math.inf)
        low = [max(bounds[0], y - s) for y, s in zip(line.y, line.spread, strict=True)]
        high = [min(bounds[1], y + s) for y, s in zip(line.y, line.spread, strict=True)]
        axes.fill_between(line.x, low, high, color=colour, alpha=0.13, linewidth=0)


def _legend(made: Figure, axes: Sequence[Axes], chart: Chart) -> None:
    handles: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    columns = min(len(handles), max(2, round(made.get_figwidth() / 1.7)))
    made.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=8.5,
    )


def save(chart: Chart, folder: Path, name: str) -> list[Path]:
    """The chart as PNG and PDF files."""
    made = draw(chart)
    paths = [folder / f"{name}.{kind}" for kind in ("png", "pdf")]
    for path in paths:
        made.savefig(path)
    return paths
