"""What a report is made of: the runs of each sweep in a results file, by their labels, and figures of them."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlaw.experiments import reproduce
from fedlaw.experiments.sweep import Sweep
from fedlaw.report.run import label as part_label
from fedlaw.results import RunInfo, Store, notes

Lookup = Callable[[Mapping[str, Any], str], "tuple[float, float | None] | None"]


@dataclass(frozen=True)
class Place:
    """One run that a sweep asked for: its labels, its id, and what is known of it (None: it is missing)."""

    labels: dict[str, Any]
    run: str
    info: RunInfo | None

    @property
    def finished(self) -> bool:
        """Whether its figures are final."""
        return self.info is not None and self.info.status == "finished"


@dataclass(frozen=True)
class Found:
    """A sweep in a results file: its description, all places, and the choices that were made for it."""

    sweep: Sweep
    places: list[Place]
    choices: list[dict[str, Any]] = field(default_factory=list)

    @property
    def missing(self) -> list[Place]:
        """Places without a finished run."""
        return [place for place in self.places if not place.finished]

    @property
    def shows(self) -> list[Mapping[str, Any]]:
        """What the sweep wants shown; without a word of it, a table and the curves of test accuracy."""
        if self.sweep.show:
            return list(self.sweep.show)
        axes = list(self.sweep.axes)
        rows = next((axis for axis in ("method", "rule") if axis in axes), axes[-1] if axes else None)
        split = next((axis for axis in ("attack", "dataset") if axis in axes and axis != rows), None)
        columns = [axis for axis in axes if axis not in (rows, split)]
        shown: list[Mapping[str, Any]] = [
            {
                "kind": "table",
                "title": "Test accuracy (%)",
                "split": split,
                "rows": rows,
                "columns": columns,
                "value": "test_accuracy",
                "worst": "attack" if split == "attack" else None,
            }
        ]
        if rows is not None:
            panels = [axis for axis in axes if axis != rows]
            curves = {
                "kind": "curves",
                "title": "Test accuracy by round",
                "value": "test_accuracy",
                "x": "round",
            }
            shown.append({**curves, "lines": rows, "panels": panels})
        return shown

    def labels(self, axis: str) -> list[Any]:
        """Labels of an axis that have a place, in the order of the sweep."""
        there = [place.labels[axis] for place in self.places if axis in place.labels]
        order = list(self.sweep.axes.get(axis, []))
        known = [each for each in order if each in there]
        return known + [each for each in dict.fromkeys(there) if each not in known]


@dataclass(frozen=True)
class Entry:
    """A figure over seeds.

    Attributes:
        mean, std: over the finished runs (standard deviation of the sample; 0 for one run); None: no run.
        runs: ids of all runs it stands for. values: id to value of those finished.
        published, published_std: what the paper says; None: nothing.
    """

    mean: float | None
    std: float | None
    runs: tuple[str, ...]
    values: dict[str, float]
    published: float | None = None
    published_std: float | None = None

    @property
    def difference(self) -> float | None:
        """Ours minus the published."""
        return None if self.mean is None or self.published is None else self.mean - self.published


@dataclass(frozen=True)
class Metric:
    """How a figure is read from a finished run's description and summary, and how it is shown."""

    words: str
    read: Callable[[Mapping[str, Any], Mapping[str, Any]], float | None]
    digits: int = 2
    best: Callable[[Iterable[float]], float] | None = max


def _percent(name: str) -> Callable[[Mapping[str, Any], Mapping[str, Any]], float | None]:
    return lambda what, end: None if end.get(name) is None else 100 * float(end[name])


def _plain(name: str, scale: float = 1.0) -> Callable[[Mapping[str, Any], Mapping[str, Any]], float | None]:
    return lambda what, end: None if end.get(name) is None else float(end[name]) * scale


def _f1(what: Mapping[str, Any], end: Mapping[str, Any]) -> float | None:
    precision, recall = end.get("precision"), end.get("recall")
    if precision is None or recall is None:
        return None
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _told_right(what: Mapping[str, Any], end: Mapping[str, Any]) -> float | None:
    who, n = what["malicious"], what["clients"]
    attackers = len(who) if isinstance(who, list) else who
    recall, lost = end.get("recall"), end.get("honest_excluded")
    if lost is None or (recall is None and attackers):
        return None
    return float(((recall or 0.0) * attackers + (1 - lost) * (n - attackers)) / n)


METRICS: dict[str, Metric] = {
    "test_accuracy": Metric("test accuracy (%)", _percent("test_accuracy")),
    "validation_accuracy": Metric("validation accuracy (%)", _percent("validation_accuracy")),
    "attack_success": Metric("attack success (%)", _percent("attack_success"), best=min),
    "precision": Metric("precision", _plain("precision"), 3),
    "recall": Metric("recall", _plain("recall"), 3),
    "f1": Metric("F1", _f1, 3),
    "detection_accuracy": Metric("accuracy", _told_right, 3),
    "honest_excluded": Metric("honest excluded (%)", _percent("honest_excluded"), best=min),
    "model_rounds": Metric("rounds for the model", lambda what, end: float(what["rounds"]), 0, None),
    "weight_rounds": Metric(
        "rounds for the weights",
        lambda what, end: float(end["communication_rounds"] - what["rounds"]),
        0,
        None,
    ),
    "communication_rounds": Metric("communication rounds", _plain("communication_rounds"), 0, None),
    "megabytes_up": Metric("sent by clients (MB)", _plain("bytes_up", 1e-6), 1, None),
    "epsilon_mean": Metric("mean", _plain("epsilon_mean"), 4, None),
    "epsilon_median": Metric("median", _plain("epsilon_median"), 4, None),
    "epsilon_max": Metric("largest", _plain("epsilon_max"), 4, None),
}


def metric(name: str) -> Metric:
    """The metric of this name; a ValueError that lists them if there is none."""
    if name not in METRICS:
        raise ValueError(f"there is no figure {name!r} to show; there are: {', '.join(METRICS)}")
    return METRICS[name]


# ------------------------------------------------------------------------------------------ reading
def collect(store: str | os.PathLike[str]) -> list[Found]:
    """Every sweep of a results file, and last the runs that belong to none."""
    with Store(store, read_only=True) as opened:
        infos = {info.id: info for info in opened.runs()}
        noted = notes.every(opened._connection)
        epsilon = _epsilons(opened) if any("epsilon" in json.dumps(v) for v in noted.values()) else {}
    for run, values in epsilon.items():
        infos[run].summary.update(values)
    found = []
    for (kind, name), value in noted.items():
        if kind != notes.SWEEP:
            continue
        places = [Place(json.loads(labels), run, infos.get(run)) for labels, run in value["runs"].items()]
        choices = [v for (k, _), v in noted.items() if k == notes.CHOICE and v["sweep"] == name]
        if places:
            found.append(Found(Sweep.parse(value["sweep"]), places, choices))
    claimed = {place.run for each in found for place in each.places}
    searched = {
        run for (k, _), v in noted.items() if k == notes.CHOICE for c in v["candidates"] for run in c["runs"]
    }
    if others := [info for info in infos.values() if info.id not in claimed | searched]:
        found.append(_single_runs(others))
    return found


def _single_runs(infos: Sequence[RunInfo]) -> Found:
    """Runs of no sweep, as one with what they differ in for axes."""
    places = []
    for info in infos:
        what = info.description
        who = what["malicious"]
        share = (len(who) if isinstance(who, list) else who) / what["clients"]
        labels = {
            "dataset": what["dataset"],
            "attack": f"{part_label(what['attack'])}, {share:.0%}" if share else "no attack",
            "rule": part_label(what["rule"]),
            "seed": what["seed"],
        }
        places.append(Place(labels, info.id, info))
    show = {"kind": "table", "title": "Test accuracy (%)", "split": "dataset", "rows": "rule",
            "columns": ["attack"], "value": "test_accuracy"}  # fmt: skip
    return Found(Sweep(name="single runs", title="Runs that belong to no sweep", show=(show,)), places)


def _epsilons(store: Store) -> dict[str, dict[str, float]]:
    values: dict[str, list[float]] = {}
    query = "SELECT run, epsilon FROM rounds WHERE typeof(epsilon) = 'real'"
    for run, epsilon in store._connection.execute(query):
        values.setdefault(run, []).append(epsilon)
    return {
        run: {
            "epsilon_mean": math.fsum(x) / len(x),
            "epsilon_median": statistics.median(x),
            "epsilon_max": max(x),
        }
        for run, x in values.items()
    }


# ------------------------------------------------------------------------------------------ figures
def entry(places: Sequence[Place], name: str, published: tuple[float, float | None] | None = None) -> Entry:
    """The figure `name` over these places, which differ in their seed only."""
    read = metric(name).read
    values = {}
    for place in places:
        if place.finished and place.info is not None:
            value = read(place.info.description, place.info.summary)
            if value is not None:
                values[place.run] = value
    mean = statistics.fmean(values.values()) if values else None
    std = (statistics.stdev(values.values()) if len(values) > 1 else 0.0) if values else None
    paper, paper_std = published or (None, None)
    return Entry(mean, std, tuple(place.run for place in places), values, paper, paper_std)


def published_values(
    show: Mapping[str, Any],
) -> Callable[[Mapping[str, Any], str], tuple[float, float | None] | None]:
    """A function from labels and the name of a figure to what the paper says: mean and standard deviation."""
    given = show.get("published")
    if not given:
        return lambda labels, name: None
    keys: Mapping[str, str] = given["keys"]
    columns: Mapping[str, str] = given.get("values") or {str(show.get("value")): given["value"]}
    rows = {
        tuple(_norm(row[column]) for column in keys.values()): row
        for row in reproduce.published(given["file"])
    }

    def look(labels: Mapping[str, Any], name: str) -> tuple[float, float | None] | None:
        wanted = given.get("only", {})
        if any(axis not in labels for axis in keys) or any(labels.get(k) != v for k, v in wanted.items()):
            return None
        row = rows.get(tuple(_norm(labels[axis]) for axis in keys))
        if row is None or name not in columns:
            return None
        std = row.get(given.get("std", f"{columns[name]}_std"))
        return float(row[columns[name]]), None if std in (None, "") else float(str(std))

    return look


def _norm(value: Any) -> str:
    """Labels as they are compared: numbers by value."""
    try:
        return f"{float(value):.9g}"
    except (TypeError, ValueError):
        return str(value).lower()


def as_list(value: Any) -> list[str]:
    """One axis or several, as a list."""
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def words(axis: str, label: Any) -> str:
    """A label as it is shown."""
    if axis in ("malicious", "participation", "dropout") and isinstance(label, float):
        return f"{label:.0%}"
    if axis == "q":
        return f"q = {label}"
    return str(label)


def file_name(*parts: str) -> str:
    """A name for a file.

    >>> file_name("mnist-accuracy@small", "Test accuracy (%)")
    'mnist-accuracy-small-test-accuracy'
    """
    text = "".join(c if c.isalnum() else "-" for c in "-".join(parts).lower())
    return "-".join(piece for piece in text.split("-") if piece)


def store_name(store: str | os.PathLike[str]) -> str:
    """The results file as the page names it."""
    return Path(store).name
