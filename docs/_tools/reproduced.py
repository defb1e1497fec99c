"""Tables of the reproduction, from a results file of `results/`, when the site is built."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

from fedlaw.report.cells import Found, collect
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
