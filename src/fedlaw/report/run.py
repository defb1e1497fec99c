"""Figures of one run, and of a few side by side.

Nothing here has global state: figures are made without pyplot, and the caller saves them.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedlaw import aggregators, attacks
from fedlaw.report._panels import (
    DASHES,
    FAINT,
    LINES,
    STYLE,
    Series,
    accuracy_axis,
    accuracy_panel,
    confusion_panel,
    headline,
    line,
    weights_panel,
)
from fedlaw.results.store import DEFAULT, Store

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Series", "comparison", "figure", "label", "plot", "save"]

FORMATS = ("png", "pdf", "svg")


def label(spec: Any) -> str:
    """A rule or an attack in a few words: its name, and the settings that are not the usual ones.

    >>> label({"name": "krum", "f": 8, "neighbors": None, "unit": "gradient", "minimum_replies": 1})
    'krum(f=8)'
    >>> label({"name": "chain", "stages": [{"name": "bucketing", "size": 3}, {"name": "median"}]})
    'bucketing(size=3) + median'
    """
    if not isinstance(spec, Mapping):
        return str(spec)
    name = str(spec["name"])
    if name == "chain":
        return " + ".join(label(stage) for stage in spec["stages"])
    if name in ("fedlaw", "bsum"):
        return f"{name} ({spec['preset']})" if "preset" in spec else name
    usual = {"name": name, "unit": "gradient", "minimum_replies": 1, **_usual(name)}
    shown = []
    for key, value in spec.items():
        if isinstance(value, Mapping):
            shown.append(label(value))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            shown += [label(each) for each in value]
        elif value is not None and value != usual.get(key):
            shown.append(f"{key}={value}")
    return f"{name}({', '.join(shown)})" if shown else name


def _usual(name: str) -> dict[str, Any]:
    """Defaults of the rule or attack of this name; none if it is not known here."""
    for registry in (aggregators.registry, attacks.registry):
        if name in registry.names():
            parameters = inspect.signature(registry.factory(name)).parameters
            return {key: parameter.default for key, parameter in parameters.items()}
    return {}


def figure(series: Series, *, title: str = "") -> Figure:
    """Four panels: accuracy by round and by communication round, every client's weight, who was told apart.

    >>> from fedlaw.results import RoundRecord
    >>> records = [RoundRecord(round=k, phases=2, test_accuracy=0.1 * k) for k in (1, 2, 3)]
    >>> len(figure(Series("mean", records)).axes)
    4
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(11, 7.6), dpi=130, layout="constrained")
        axes = made.subplot_mosaic(
            [["round", "communication"], ["weights", "confusion"]], width_ratios=(1.25, 1)
        )
        headline(made, title)
        rounds = [r.round for r in series.records]
        exchanges = np.cumsum([r.phases for r in series.records]).tolist()
        accuracy_panel(axes["round"], series.records, rounds, "round (model updates)")
        axes["round"].set_title("Accuracy")
        accuracy_panel(axes["communication"], series.records, exchanges, "communication round (exchanges)")
        axes["communication"].set_title("Accuracy for what it costs")
        weights_panel(axes["weights"], series)
        axes["weights"].set_title("Weight of every client")
        confusion_panel(axes["confusion"], series.records)
    return made


def comparison(
    runs: Sequence[Series], *, weights_of: int = -1, title: str = "", chance: float | None = None
) -> Figure:
    """Accuracy of several runs side by side, and every client's weight in one of them (`weights_of`).

    >>> from fedlaw.results import RoundRecord
    >>> records = [RoundRecord(round=k, phases=2, test_accuracy=0.1 * k) for k in (1, 2, 3)]
    >>> len(comparison([Series("a", records), Series("b", records)]).axes)
    2
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        made = Figure(figsize=(12, 4.7), dpi=130, layout="constrained")
        left, right = made.subplots(1, 2)
        headline(made, title)
        chosen = runs[weights_of]
        for place, series in enumerate([chosen, *(run for run in runs if run is not chosen)]):
            measured = [(r.round, r.test_accuracy) for r in series.records if r.test_accuracy is not None]
            if measured:
                x, y = zip(*measured, strict=True)
                words = f"{series.label}, at the end {y[-1]:.1%}"
                line(left, x, y, words, LINES[place % len(LINES)], DASHES[place % len(DASHES)])
        if chance is not None:
            left.axhline(chance, color=FAINT, linewidth=0.9, linestyle=":", label="guessing")
        accuracy_axis(left, "round (model updates)")
        left.set_title("Test accuracy under attack")
        left.legend(loc="best", handlelength=3.2)
        weights_panel(right, chosen)
        right.set_title(f"Weight of every client, {chosen.label}")
    return made


def save(made: Figure, output: str | os.PathLike[str]) -> Path:
    """Write a figure to a file, its kind by the ending (png, pdf, svg); a ValueError if it cannot be."""
    path = Path(output)
    if path.suffix.lstrip(".").lower() not in FORMATS:
        raise ValueError(f"--output {path}: the name must end in .png, .pdf or .svg")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path)
    except OSError as error:
        raise ValueError(
            f"--output {path}: cannot be written ({error.strerror or error}); name another file"
        ) from None
    return path


def plot(
    run: str, *, store: str | os.PathLike[str] = DEFAULT, output: str | os.PathLike[str] | None = None
) -> Path:
    """Draw a run of the store (an id, its beginning, or "last") into a file; `output` None: RUN.png."""
    with Store(store, read_only=True) as opened:
        info = opened.resolve(run)
        records, setup = opened.records(info.id), opened.setup(info.id)
    if not records:
        raise ValueError(f"run {info.id[:8]} has no rounds yet: there is nothing to draw")
    what = info.description
    title = f"{label(what['rule'])} on {what['dataset']}, {what['clients']} clients"
    if who := what["malicious"]:
        title += f", {len(who) if isinstance(who, list) else who} malicious: {label(what['attack'])}"
    series = Series(label(what["rule"]), records, setup.get("malicious"))
    return save(figure(series, title=title), output or f"{info.id[:8]}.png")
