"""Tables of the reproduction, from a results file of `results/`, when the site is built."""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

from fedlaw.report.cells import Entry, Found, Place, as_list, collect, entry, published_values, words

RESULTS = Path(__file__).parents[2] / "results"


@cache
def _sweep(store: str, name: str) -> Found:
    return next(found for found in collect(RESULTS / f"{store}.sqlite") if found.sweep.name == name)


def accuracy(store: str, name: str) -> str:
    """Per attack, a row a method: ours, in brackets the paper's; how many seeds where not all are there."""
    found = _sweep(store, name)
    show = found.sweep.show[0]
    published = published_values(show)
    lines = []
    for attack in found.labels("attack"):
        lines += ["", f"**{attack}**", ""]
        head, cells = _grid(found, "method", as_list(show["columns"]), {"attack": attack})
        lines += ["| method | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
        for method, places in cells.items():
            row = []
            for labels, there in places:
                figure = entry(there, "test_accuracy", published(labels, "test_accuracy"))
                row.append(_shown(figure, len(found.sweep.seeds)))
            lines.append(f"| {method} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def told_apart(store: str, name: str, method: str = "FedLAW_hardened") -> str:
    """Recall and share of honest clients lost, per attack and share of attackers."""
    found = _sweep(store, name)
    columns = as_list(found.sweep.show[0]["columns"])
    head, cells = _grid(found, "attack", columns, {"method": method.replace("_", " ")}, attacked=True)
    lines = ["| attack | " + " | ".join(head) + " |", "|---" * (len(head) + 1) + "|"]
    for attack, places in cells.items():
        row = []
        for _, there in places:
            recall, lost = entry(there, "recall").mean, entry(there, "honest_excluded").mean
            row.append("-" if recall is None or lost is None else f"{recall:.2f} / {lost / 100:.2f}")
        lines.append(f"| {attack} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def _grid(
    found: Found, rows: str, columns: list[str], only: dict[str, Any], attacked: bool = False
) -> tuple[list[str], dict[Any, list[tuple[dict[str, Any], list[Place]]]]]:
    """Names of the columns; by row label, the labels and places of every column."""
    groups: dict[tuple[Any, ...], list[Place]] = defaultdict(list)
    for place in found.places:
        if all(place.labels[axis] == label for axis, label in only.items()):
            groups[(place.labels[rows], *(place.labels[axis] for axis in columns))].append(place)
    heads = [
        (q, share)
        for q in found.labels(columns[0])
        for share in found.labels(columns[1])
        if share or not attacked
    ]
    names = [
        ", ".join(words(axis, label) for axis, label in zip(columns, head, strict=True)) for head in heads
    ]
    cells = {}
    for row in found.labels(rows):
        there = [
            ({**only, rows: row, **dict(zip(columns, head, strict=True))}, groups.get((row, *head), []))
            for head in heads
        ]
        if any(place.finished for _, places in there for place in places):
            cells[row] = there
    return names, cells


def _shown(figure: Entry, seeds: int) -> str:
    if figure.mean is None:
        return "-" if figure.published is None else f"- [{figure.published:.1f}]"
    text = f"{figure.mean:.1f}"
    if figure.std is not None and len(figure.values) > 1:
        text += f" ± {figure.std:.1f}"
    if len(figure.values) < seeds:
        text += f" (n={len(figure.values)})"
    return text if figure.published is None else f"{text} [{figure.published:.1f}]"
