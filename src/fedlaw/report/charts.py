"""Charts as plain data, which the page and the figures both draw: panels of lines with a spread."""

from __future__ import annotations

import itertools
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedlaw.experiments import reproduce
from fedlaw.report.cells import Found, Place, _norm, as_list, entry, metric, published_values, words
from fedlaw.results import Store

_SERIES = {  # name to SQL, words, and what it is multiplied by
    "test_accuracy": ("test_accuracy", "test accuracy (%)", 100.0),
    "validation_accuracy": ("validation_accuracy", "validation accuracy (%)", 100.0),
    "attack_success": ("attack_success", "attack success (%)", 100.0),
    "epsilon": ("epsilon", "epsilon_k", 1.0),
    "attacker_weight": ("attacker_weight", "weight on attackers", 1.0),
    "malicious_weight": ("attacker_weight", "mean weight of a malicious client", 1.0),
}
_MOST_TRAJECTORIES = 24  # runs whose weights go into a page


@dataclass(frozen=True)
class Line:
    """x, y and half the width of its band (standard deviation over seeds); `role` colours clients."""

    name: str
    x: list[float]
    y: list[float]
    spread: list[float] = field(default_factory=list)
    published: bool = False
    role: str = ""
    runs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Panel:
    """Lines in one frame."""

    title: str
    lines: list[Line]


@dataclass(frozen=True)
class Chart:
    """Panels that share their axes; `columns` of them side by side."""

    title: str
    x: str
    y: str
    panels: list[Panel]
    columns: int
    kind: str = "lines"
    log: bool = False


def chart(found: Found, show: Mapping[str, Any], store: str | os.PathLike[str]) -> Chart | None:
    """The chart of a `show` block; None if nothing of it is there yet."""
    make = {"lines": _against, "curves": _curves, "weights": _weights}[show["kind"]]
    made = make(found, show, store)
    kept = [panel for panel in made.panels if panel.lines]
    return Chart(**{**vars(made), "panels": kept}) if kept else None


def _frames(found: Found, axes: Sequence[str]) -> list[tuple[dict[str, Any], str]]:
    """Labels and title of each panel."""
    combinations = itertools.product(*(found.labels(axis) for axis in axes))
    fixed = [dict(zip(axes, each, strict=True)) for each in combinations]
    return [(each, ", ".join(words(axis, label) for axis, label in each.items())) for each in fixed]


def _at(found: Found, labels: Mapping[str, Any]) -> list[Place]:
    return [p for p in found.places if all(p.labels.get(axis) == label for axis, label in labels.items())]


def _against(found: Found, show: Mapping[str, Any], store: str | os.PathLike[str]) -> Chart:
    """A figure at the end of training against an axis."""
    axis, name, across = str(show["x"]), str(show["value"]), as_list(show.get("panels"))
    look = published_values(show)
    panels = []
    for fixed, title in _frames(found, across):
        lines = []
        for label in found.labels(show["lines"]):
            points = []
            for x in found.labels(axis):
                labels = {**fixed, show["lines"]: label, axis: x}
                each = entry(_at(found, labels), name, look(labels, name))
                if each.mean is not None:
                    points.append((float(x), each))
            if points:
                points.sort(key=lambda point: point[0])
                xs, entries = zip(*points, strict=True)
                means = [each.mean or 0.0 for each in entries]
                spread = [each.std or 0.0 for each in entries]
                runs = [run for each in entries for run in each.runs]
                lines.append(Line(str(label), list(xs), means, spread, runs=runs))
        panels.append(Panel(title, lines))
    columns = len(found.labels(across[-1])) if across else 1
    says = {"malicious": "share of malicious clients"}.get(axis, axis.split(".")[-1])
    return Chart(
        str(show.get("title", "")), says, metric(name).words, panels, columns, log=bool(show.get("log"))
    )


def _curves(found: Found, show: Mapping[str, Any], store: str | os.PathLike[str]) -> Chart:
    """Something of every round, mean and spread over seeds."""
    name, across = str(show["value"]), as_list(show.get("panels"))
    by_exchange = show.get("x") == "communication"
    panels = []
    with Store(store, read_only=True) as opened:
        for fixed, title in _frames(found, across):
            lines = []
            for label in found.labels(show["lines"]):
                places = [p for p in _at(found, {**fixed, show["lines"]: label}) if p.finished]
                series = [_series(opened, place, name, by_exchange, show.get("until")) for place in places]
                if any(series):
                    xs, means, spread = _over_seeds(series)
                    lines.append(Line(str(label), xs, means, spread, runs=[place.run for place in places]))
                lines += _published_line(show, fixed, label)
            panels.append(Panel(title, lines))
    says = "communication round" if by_exchange else "round"
    columns = len(found.labels(across[-1])) if across else 1
    return Chart(str(show.get("title", "")), says, _SERIES[name][1], panels, columns)


def _series(
    opened: Store, place: Place, name: str, by_exchange: bool, until: int | None
) -> dict[float, float]:
    column, _, scale = _SERIES[name]
    if name == "malicious_weight" and place.info is not None:
        who = place.info.description["malicious"]
        scale = 1 / max(1, len(who) if isinstance(who, list) else who)
    query = f"SELECT round, phases, {column} FROM rounds WHERE run = ? ORDER BY round"
    found, exchanges = {}, 0
    for number, phases, value in opened._connection.execute(query, (place.run,)):
        exchanges += phases
        if isinstance(value, int | float) and (until is None or number <= until):
            found[float(exchanges if by_exchange else number)] = float(value) * scale
    return found


def _over_seeds(series: Sequence[Mapping[float, float]]) -> tuple[list[float], list[float], list[float]]:
    xs = sorted(set().union(*series))
    columns = [[each[x] for each in series if x in each] for x in xs]
    spread = [statistics.stdev(c) if len(c) > 1 else 0.0 for c in columns]
    return xs, [statistics.fmean(c) for c in columns], spread


def _published_line(show: Mapping[str, Any], fixed: Mapping[str, Any], label: Any) -> list[Line]:
    given = show.get("published")
    if not given or any(fixed.get(axis) != want for axis, want in given.get("only", {}).items()):
        return []
    column = given["keys"][show["lines"]]
    rows = [row for row in reproduce.published(given["file"]) if _norm(row[column]) == _norm(label)]
    if not rows:
        return []
    numbers = [(float(r[given["x"]]), float(r[given["value"]]), float(r[given["std"]])) for r in rows]
    xs, ys, spread = (list(each) for each in zip(*sorted(numbers), strict=True))
    return [Line(f"{label}, published", xs, ys, spread, published=True)]


def _weights(found: Found, show: Mapping[str, Any], store: str | os.PathLike[str]) -> Chart:
    """The weight of every client by round, of the first seed's run of each panel."""
    across = as_list(show.get("panels"))
    panels: list[Panel] = []
    with Store(store, read_only=True) as opened:
        for fixed, title in _frames(found, across)[:_MOST_TRAJECTORIES]:
            place = next((p for p in _at(found, fixed) if p.finished), None)
            if place is not None:
                panels.append(trajectories(opened, place.run, title))
    columns = len(found.labels(across[-1])) if across else 1
    return Chart(str(show.get("title", "")), "round", "weight", panels, columns, kind="weights")


def trajectories(opened: Store, run: str, title: str) -> Panel:
    """A line a client: its weight in every round that has weights."""
    records = [record for record in opened.records(run) if record.weights is not None]
    malicious = opened.setup(run).get("malicious")
    n = 0 if not records or records[0].weights is None else len(records[0].weights)
    lines = []
    for client in range(n):
        y = [_short(float(record.weights[client])) for record in records if record.weights is not None]
        role = "malicious" if malicious is not None and bool(malicious[client]) else "honest"
        xs = [float(record.round) for record in records]
        lines.append(Line(f"client {client} ({role})", xs, y, role=role, runs=[run]))
    return Panel(title, lines)


def _short(value: float) -> float:
    """Four digits that count: a page need not hold more."""
    if value == 0 or not math.isfinite(value):
        return 0.0
    return round(value, 3 - math.floor(math.log10(abs(value))))
