"""The panels that figures are made of, and how they look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedlaw.results.record import RoundRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart
HONEST, MALICIOUS = "#0072B2", "#D55E00"
LINES = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
DASHES = ("-", (0, (6, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
INK, FAINT = "#222222", "#666666"
STYLE: dict[Any, Any] = {
    "font.size": 10.5,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.framealpha": 0.85,
    "legend.edgecolor": "none",
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.08,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Series:
    """A run as figures need it.

    Attributes:
        label: what to call it.
        records: its rounds.
        malicious: (n,) bool, who attacks; None: not known.
    """

    label: str
    records: Sequence[RoundRecord]
    malicious: NDArray[np.bool_] | None = None


def headline(made: Figure, title: str) -> None:
    if title:
        made.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")


def line(
    axes: Axes, x: Sequence[float], y: Sequence[float], name: str, colour: str, style: Any = "-"
) -> None:
    marker = "o" if len(x) == 1 else ""
    axes.plot(x, y, color=colour, linestyle=style, linewidth=2, label=name, marker=marker)


def accuracy_axis(axes: Axes, xlabel: str) -> None:
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    axes.set_xlabel(xlabel)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)


def accuracy_panel(axes: Axes, records: Sequence[RoundRecord], x: Sequence[int], xlabel: str) -> None:
    kinds = (
        ("test_accuracy", "test", LINES[0], "-"),
        ("validation_accuracy", "validation", LINES[3], DASHES[1]),
        ("attack_success", "attack success", MALICIOUS, DASHES[2]),
    )
    for name, shown, colour, style in kinds:
        pairs = [
            (at, getattr(r, name)) for at, r in zip(x, records, strict=True) if getattr(r, name) is not None
        ]
        if pairs:
            xs, ys = zip(*pairs, strict=True)
            line(axes, xs, ys, f"{shown}, at the end {ys[-1]:.1%}", colour, style)
    accuracy_axis(axes, xlabel)
    if axes.lines:
        axes.legend(loc="best", handlelength=3.2)
    else:
        _say(axes, "nothing was evaluated yet")


def weights_panel(axes: Axes, series: Series) -> None:
    """A thin line a client, by role, and the mean of each role on top."""
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    judged = [r for r in series.records if r.weights is not None]
    axes.set_xlabel("round (model updates)")
    axes.set_ylabel("weight")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not judged:
        _say(axes, "this rule works coordinate by coordinate:\nno client has one weight")
        return
    x = [r.round for r in judged]
    weights = np.array([r.weights for r in judged], np.float64)
    n = weights.shape[1]
    malicious = np.zeros(n, bool) if series.malicious is None else np.asarray(series.malicious, bool)
    faint = float(np.clip(9 / n, 0.12, 0.5))
    handles = []
    for mask, colour, role in ((~malicious, HONEST, "honest"), (malicious, MALICIOUS, "malicious")):
        if mask.any():
            axes.plot(x, weights[:, mask], color=colour, linewidth=0.9, alpha=faint)
            axes.plot(x, weights[:, mask].mean(1), color="white", linewidth=4.2, alpha=0.9)
            axes.plot(x, weights[:, mask].mean(1), color=colour, linewidth=2.2)
            handles.append(
                Line2D([], [], color=colour, linewidth=2.2, label=f"{role} ({mask.sum()}), mean bold")
            )
    frozen = _freeze(series.records)
    if frozen is not None:
        axes.axvline(frozen + 0.5, color=FAINT, linewidth=1, linestyle=(0, (4, 3)))
        handles.append(
            Line2D([], [], color=FAINT, linewidth=1, linestyle=(0, (4, 3)), label="weights frozen")
        )
    top = float(np.nanmax(weights)) or 1.0
    axes.set_ylim(-0.03 * top, top * (1.22 + 0.09 * len(handles)))  # room for the legend above the lines
    axes.margins(x=0.02)
    axes.legend(handles=handles, loc="upper right")


def _freeze(records: Sequence[RoundRecord]) -> int | None:
    """The last round of the first stretch with two phases, if rounds with one follow."""
    for before, after in pairwise(records):
        if before.phases == 2 and after.phases == 1 and after.skipped is None:
            return before.round
    return None


def confusion_panel(axes: Axes, records: Sequence[RoundRecord]) -> None:
    """Real role against what the rule made of it, at the end."""
    axes.set_title("Told apart at the end")
    axes.grid(False)
    last = next((r for r in reversed(records) if r.true_positives is not None), None)
    if last is None:
        _say(axes, "nobody was judged")
        return
    kept = (last.true_negatives or 0, last.false_negatives or 0)
    out = (last.false_positives or 0, last.true_positives or 0)
    counts = np.array([[kept[0], out[0]], [kept[1], out[1]]])
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    for row, colours in enumerate(
        ((HONEST, MALICIOUS), (MALICIOUS, HONEST))
    ):  # right in blue, wrong in orange
        for column in range(2):
            value = share[row, column]
            shade = (*_rgb(colours[column]), 0.08 + 0.72 * value)
            axes.add_patch(_square(column, row, shade))
            ink = "white" if value > 0.55 else INK
            axes.text(column, row - 0.06, str(counts[row, column]), ha="center", va="center", fontsize=20,
                      fontweight="bold", color=ink)  # fmt: skip
            axes.text(column, row + 0.22, f"{value:.0%}", ha="center", va="center", fontsize=10.5, color=ink)
    axes.set_xlim(-0.5, 1.5)
    axes.set_ylim(1.5, -0.5)
    axes.set_xticks([0, 1], ["kept", "excluded"])
    axes.set_yticks([0, 1], ["honest", "malicious"])
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xlabel(f"what the rule did (round {last.round})")


def _rgb(colour: str) -> tuple[float, float, float]:
    return tuple(int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))  # type: ignore[return-value]


def _square(column: int, row: int, colour: tuple[float, float, float, float]) -> Any:
    from matplotlib.patches import FancyBboxPatch

    return FancyBboxPatch(
        (column - 0.46, row - 0.46), 0.92, 0.92, boxstyle="round,pad=0,rounding_size=0.05", facecolor=colour,
        edgecolor="none",
    )  # fmt: skip


def _say(axes: Axes, words: str) -> None:
    """Words in place of a panel that has nothing to show."""
    axes.set_xlabel("")
    axes.set_ylabel("")
    for side in axes.spines.values():
        side.set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=FAINT)
