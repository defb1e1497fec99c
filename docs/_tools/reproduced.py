"""Tables of the reproduction, from a results file of `results/`, when the site is built."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import fmean, median

from fedlaw.report.cells import Found, collect
from fedlaw.report.charts import chart
from fedlaw.report.tables import markdown, tables

RESULTS = Path(__file__).parents[2] / "results"


@cache
def _sweep(store: str, name: str) -> Found:
    return next(found for found in collect(RESULTS / f"{store}.sqlite") if found.sweep.name == name)


def shown(store: str, name: str) -> str:
    """The tables a sweep shows: ours, and in brackets the paper's and the difference."""
    found = _sweep(store, name)
    kinds = [show for show in found.sweep.show if show["kind"] == "table"]
    return "\n".join(markdown(table) for show in kinds for table in tables(found, show))


def distances(store: str, name: str, usual: str = "as everywhere else") -> str:
    """Mean distance from the published values of every reading and, in the same cells, of the usual one."""
    found = _sweep(store, name)
    (show,) = [show for show in found.sweep.show if show["kind"] == "table"]
    rows: dict[str, dict[tuple[str, str], float]] = {}
    for table in tables(found, show):
        for (method, reading), entries in table.rows:
            for (attack, *_), each in zip(table.columns, entries, strict=True):
                if each.difference is not None:
                    rows.setdefault(reading, {})[method, attack] = abs(each.difference)
    lines = ["| reading | tried with | distance | of the usual reading there |", "|---|---|---|---|"]
    for reading, cells in rows.items():
        if reading == usual:
            continue
        where = "; ".join(
            f"{method}: {', '.join(attack for with_, attack in cells if with_ == method)}"
            for method in dict.fromkeys(method for method, _ in cells)
        )
        here, there = fmean(cells.values()), fmean(rows[usual][cell] for cell in cells)
        better = [
            f"**{value:.1f}**" if value == min(here, there) else f"{value:.1f}" for value in (here, there)
        ]
        lines.append(f"| {reading} | {where} | {better[0]} | {better[1]} |")
    return "\n".join(lines)


def nearness(store: str, name: str) -> str:
    """Mean and median distance from the published values of every method, and how many cells are near them."""
    found = _sweep(store, name)
    show = next(show for show in found.sweep.show if show["kind"] == "table")
    rows: dict[str, list[float]] = {}
    for table in tables(found, {**show, "worst": None}):
        for (method,), entries in table.rows:
            rows.setdefault(method, []).extend(
                abs(each.difference) for each in entries if each.difference is not None
            )
    lines = ["| method | cells | mean | median | within 2 points |", "|---|---|---|---|---|"]
    lines += [
        f"| {method} | {len(far)} | {fmean(far):.1f} | {median(far):.1f} | {sum(each <= 2 for each in far)} |"
        for method, far in rows.items()
        if far
    ]
    return "\n".join(lines)


def behind(store: str, name: str, seed: str = "0") -> str:
    """How far each method is behind the best of all in the same setting, over all settings, with one seed."""
    accuracy: dict[str, dict[tuple[object, ...], float]] = {}
    for place in _sweep(store, name).places:
        at, info = place.labels, place.info
        if place.finished and info and str(info.description["seed"]) == seed and at["malicious"]:
            setting = (at["attack"], at["q"], at["malicious"])
            accuracy.setdefault(at["method"], {})[setting] = 100 * info.summary["test_accuracy"]
    accuracy.pop("Oracle", None)
    best = {each: max(rows[each] for rows in accuracy.values()) for each in accuracy["FedLAW"]}
    lines = ["| method | mean | at most | settings in which over 2 |", "|---|---|---|---|"]
    far = {method: [best[each] - value for each, value in rows.items()] for method, rows in accuracy.items()}
    for method, points in sorted(far.items(), key=lambda row: fmean(row[1])):
        over = f"{sum(each > 2 for each in points)} of {len(points)}"
        lines.append(f"| {method} | {fmean(points):.1f} | {max(points):.1f} | {over} |")
    return "\n".join(lines)


def by_round(store: str, name: str, *rounds: str) -> str:
    """The curves that a sweep shows, in thousandths, at some of their rounds; published ones beside ours."""
    found = _sweep(store, name)
    show = next(show for show in found.sweep.show if show["kind"] == "curves")
    made = chart(found, show, RESULTS / f"{store}.sqlite")
    head = [show["lines"], "", *(f"round {each}" for each in rounds)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for panel in made.panels if made else []:
        for line in panel.lines:
            at = {x: (y, spread) for x, y, spread in zip(line.x, line.y, line.spread, strict=True)}
            cells = [at.get(float(each)) for each in rounds]
            shown = [
                "-" if each is None else f"{1000 * each[0]:.2f} ± {1000 * each[1]:.2f}" for each in cells
            ]
            label, _, published = line.name.partition(", ")
            lines.append(f"| {label} | {published or panel.title} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def told_apart(store: str, name: str, method: str = "FedLAW_hardened") -> str:
    """Recall and share of honest clients lost of one method, per attack and share of attackers."""
    found, wanted = _sweep(store, name), method.replace("_", " ")
    places = [
        p for p in found.places if p.labels["method"] == wanted and p.labels["malicious"] and p.finished
    ]
    shown = {"rows": "attack", "columns": ["q", "malicious"]}
    parts = (("recall", "Attackers found (recall)"), ("honest_excluded", "Honest clients lost (%)"))
    return "\n".join(
        markdown(table)
        for value, title in parts
        for table in tables(replace(found, places=places), {**shown, "value": value, "title": title})
    )
