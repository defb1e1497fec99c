"""The report: one page that works from disk without a network, and its tables and figures as files beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from importlib import resources
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from fedlaw import __version__
from fedlaw.report import figures, memory
from fedlaw.report.cells import Found, Place, collect, file_name, metric, store_name
from fedlaw.report.charts import Chart, chart
from fedlaw.report.tables import Table, comma_separated, latex, markdown, tables
from fedlaw.results.writer import to_json

_LISTED = 40  # missing runs that are named
PAGE = "index.html"


def write(store: str | os.PathLike[str], output: str | os.PathLike[str]) -> Path:
    """Write the report of a results file into a folder; the page is `index.html` in it.

    Beside it lie, for each sweep, its tables (CSV, LaTeX, Markdown) and figures (PNG, PDF), and `runs.csv`: every
    run with its description, versions and seed.
    """
    folder = Path(output)
    sweeps = collect(store)
    if not sweeps:
        raise ValueError(f"{store} has no runs yet: `fedlaw reproduce` or `fedlaw sweep` adds some")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--output {folder}: cannot be made ({error.strerror}); name another folder"
        ) from None
    page = _Page(store, folder)
    for found in sweeps:
        page.sweep(found)
    (folder / "runs.csv").write_text(_runs_csv(sweeps), "utf-8")
    (folder / PAGE).write_text(page.text(), "utf-8")
    return folder / PAGE


class _Page:
    """The page while it is made: pieces of HTML, and the data that its script reads."""

    def __init__(self, store: str | os.PathLike[str], folder: Path) -> None:
        self.store, self.folder = store, folder
        self.sections: list[str] = []
        self.links: list[str] = []
        self.data: dict[str, Any] = {
            "runs": {},
            "descriptions": [],
            "versions": [],
            "machines": [],
            "cells": [],
            "charts": [],
            "colours": figures.COLOURS,
        }
        self.runs = self.finished = 0
        self._known: dict[str, int] = {}

    # -------------------------------------------------------------------------------------- a sweep
    def sweep(self, found: Found) -> None:
        sweep, anchor = found.sweep, file_name(found.sweep.name)
        done = len(found.places) - len(found.missing)
        self.runs += len(found.places)
        self.finished += done
        for place in found.places:
            self._run(place)
        self.links.append(f'<li><a href="#{anchor}">{escape(sweep.name)}</a></li>')
        pieces = [f'<section id="{anchor}"><h2>{escape(sweep.title or sweep.name)}</h2>']
        if sweep.note:
            pieces.append(f'<p class="note">{escape(sweep.note)}</p>')
        pieces.append(
            f'<p class="state"><code>{escape(sweep.name)}</code>: {done} of {len(found.places)} runs finished, '
            f"{len(found.labels('seed'))} seeds</p>"
        )
        if any("published" in show for show in found.shows):
            pieces.append(
                '<label class="switch"><input type="checkbox" data-paper checked> '
                "published value and difference beneath ours</label>"
            )
        made: list[Table] = []
        for number, show in enumerate(found.shows):
            pieces.append(self._show(found, show, f"{anchor}-{number + 1}", made))
        if made:
            self._table_files(anchor, made)
            pieces.append(self._files(anchor, ("csv", "tex", "md"), "tables"))
        pieces += [_missing(found), _choices(found), "</section>"]
        self.sections.append("\n".join(pieces))

    def _show(self, found: Found, show: Mapping[str, Any], name: str, made: list[Table]) -> str:
        if show["kind"] == "table":
            block = tables(found, show)
            made += block
            return "\n".join(self._table(table) for table in block)
        if show["kind"] == "memory":
            return memory.html(found, self.store)
        drawn = chart(found, show, self.store)
        if drawn is None:
            return f"<h3>{escape(str(show.get('title', '')))}</h3><p>nothing of it has been run yet</p>"
        figures.save(drawn, self.folder, name)
        number = len(self.data["charts"])
        self.data["charts"].append(_chart_data(drawn))
        return f'<h3>{escape(drawn.title)}</h3><div data-chart="{number}"></div>' + self._files(
            name, ("png", "pdf"), "figure"
        )

    def _table(self, table: Table) -> str:
        depth = len(table.columns[0])
        heads = []
        for level in range(depth):
            cells = [f'<th rowspan="{depth}">{escape(axis)}</th>' for axis in table.row_axes if level == 0]
            for head, group in groupby(table.columns, key=itemgetter(slice(level + 1))):
                width = len(list(group))
                cells.append(f'<th colspan="{width}" scope="col">{escape(head[-1])}</th>')
            heads.append(f"<tr>{''.join(cells)}</tr>")
        rows = []
        for row, (labels, entries) in enumerate(table.rows):
            cells = [f'<th scope="row">{escape(label)}</th>' for label in labels]
            for column, each in enumerate(entries):
                digits = metric(table.figures[column]).digits
                where = f"{table.title}, {', '.join(labels)}, {' '.join(table.columns[column])}".strip()
                if not each.runs:
                    cells.append('<td class="none">-</td>')
                    continue
                number = len(self.data["cells"])
                self.data["cells"].append({"title": where, "runs": each.runs, "values": each.values})
                text = '<span class="none">missing</span>'
                if each.mean is not None:
                    text = (
                        f"<b>{each.mean:.{digits}f}</b>"
                        if (row, column) in table.bold
                        else f"{each.mean:.{digits}f}"
                    )
                    if len(each.values) > 1:
                        text += f' <span class="std">± {each.std:.{digits}f}</span>'
                if each.published is not None:
                    apart = "" if each.difference is None else f" ({each.difference:+.{digits}f})"
                    text += f'<span class="paper">{each.published:.{digits}f}{apart}</span>'
                best = ' class="best"' if (row, column) in table.bold else ""
                cells.append(f'<td{best}><button type="button" data-cell="{number}">{text}</button></td>')
            rows.append(f"<tr>{''.join(cells)}</tr>")
        return (
            f'<h3>{escape(table.title)}</h3><div class="scroll"><table><thead>{"".join(heads)}</thead>'
            f"<tbody>{''.join(rows)}</tbody></table></div>"
        )

    def _table_files(self, name: str, made: Sequence[Table]) -> None:
        texts = {
            "csv": comma_separated(made),
            "tex": "\n".join(map(latex, made)),
            "md": "\n".join(map(markdown, made)),
        }
        for kind, text in texts.items():
            (self.folder / f"{name}.{kind}").write_text(text, "utf-8")

    def _files(self, name: str, kinds: Sequence[str], words: str) -> str:
        links = ", ".join(f'<a href="{name}.{kind}">{kind.upper()}</a>' for kind in kinds)
        return f'<p class="files">{words} as files: {links}</p>'

    # -------------------------------------------------------------------------------------- data
    def _run(self, place: Place) -> None:
        info = place.info
        about: dict[str, Any] = {"seed": place.labels.get("seed"), "status": "missing"}
        if info is not None:
            described = {key: value for key, value in info.description.items() if key != "seed"}
            about = {
                "seed": info.description["seed"],
                "status": info.status,
                "started": info.started,
                "description": self._index("descriptions", json.dumps(described, indent=1)),
                "versions": self._index("versions", info.versions),
                "machine": self._index("machines", info.machine),
            }
        self.data["runs"][place.run] = about

    def _index(self, kind: str, value: Any) -> int:
        """Where the value is in a list that holds each once."""
        key = f"{kind} {json.dumps(value, sort_keys=True)}"
        if key not in self._known:
            self._known[key] = len(self.data[kind])
            self.data[kind].append(value)
        return self._known[key]

    def text(self) -> str:
        """The whole page."""
        parts = resources.files("fedlaw.report") / "page"
        style, script = ((parts / name).read_text("utf-8") for name in ("page.css", "page.js"))
        data = to_json(self.data).replace("</", "<\\/").replace("<!--", "<\\!--")
        made = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>fedlaw: {escape(store_name(self.store))}</title>
<style>
{style}</style>
</head>
<body>
<header><div><h1>fedlaw report</h1>
<p>{escape(store_name(self.store))}: {self.finished} of {self.runs} runs finished. Click a number for its runs,
their description, versions and seeds. Made {made} by fedlaw {escape(__version__)}.</p></div></header>
<nav aria-label="sweeps"><ul>{"".join(self.links)}</ul></nav>
<main>
{"".join(self.sections)}
<footer>Mean ± standard deviation (of the sample) over seeds; best of a column in bold. Every run, with its
description, versions and seed: <a href="runs.csv">runs.csv</a>.</footer>
</main>
<dialog id="origin"><form method="dialog"><button aria-label="close">&times;</button></form><div></div></dialog>
<div id="tip" role="status"></div>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


# ------------------------------------------------------------------------------------------ pieces
def _chart_data(drawn: Chart) -> dict[str, Any]:
    plain, numbers = asdict(drawn), figures.palette(drawn)
    for panel in plain["panels"]:
        for line in panel["lines"]:
            line["number"] = numbers[line["name"]]
            if not line["spread"]:
                line["spread"] = []
    return plain


def _missing(found: Found) -> str:
    if not found.missing:
        return ""
    items = []
    for place in found.missing[:_LISTED]:
        state = "not run yet" if place.info is None else place.info.status
        message = f": {place.info.message}" if place.info is not None and place.info.message else ""
        labels = ", ".join(f"{axis} {label}" for axis, label in place.labels.items())
        items.append(f"<li><code>{place.run[:12]}</code> {escape(f'{labels}: {state}{message}')}</li>")
    more = len(found.missing) - len(items)
    rest = f"<li>and {more} more</li>" if more else ""
    return (
        f"<details><summary>{len(found.missing)} runs are missing</summary>"
        f"<ul>{''.join(items)}{rest}</ul></details>"
    )


def _choices(found: Found) -> str:
    if not found.choices:
        return ""
    rows = []
    for choice in found.choices:
        where = ", ".join(str(label) for label in choice["group"].values())
        scores = [
            f"{_settings(each['settings'])}: "
            + ("-" if each[choice["by"]] is None else f"{100 * each[choice['by']]:.2f}")
            for each in choice["candidates"]
        ]
        cells = (where, _settings(choice["chosen"]), "; ".join(scores))
        rows.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return (
        f"<details><summary>settings chosen on the validation split for {len(rows)} cells</summary>"
        '<div class="scroll"><table><thead><tr><th>cell</th><th>chosen</th><th>validation accuracy (%)</th></tr>'
        f"</thead><tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{path} = {str(value).removeprefix('= ')}" for path, value in settings.items())


def _runs_csv(sweeps: Sequence[Found]) -> str:
    import csv
    import io

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    heads = ["sweep", "run", "labels", "seed", "status", "test_accuracy", "started", "ended"]
    writer.writerow([*heads, "versions", "machine", "description"])
    for found in sweeps:
        for place in found.places:
            info = place.info
            labels = json.dumps(place.labels)
            if info is None:
                writer.writerow([found.sweep.name, place.run, labels, place.labels.get("seed"), "missing"])
                continue
            figures_ = [info.description["seed"], info.status, info.summary.get("test_accuracy")]
            origin = [json.dumps(x) for x in (info.versions, info.machine, info.description)]
            writer.writerow(
                [found.sweep.name, place.run, labels, *figures_, info.started, info.ended, *origin]
            )
    return out.getvalue()
