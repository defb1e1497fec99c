"""Tables in the paper's layout: mean and standard deviation over seeds beside the published value, best in bold."""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from fedlaw.report.cells import Entry, Found, Place, as_list, entry, metric, published_values, words


@dataclass(frozen=True)
class Table:
    """Rows and columns of entries.

    Attributes:
        title: what it shows.
        row_axes: what the row labels are of.
        columns: a tuple of words each, from the outermost head to the innermost.
        rows: labels of the row, and an entry a column.
        figures: name of the figure of each column.
        bold: places (row, column) of the best of each column.
    """

    title: str
    row_axes: tuple[str, ...]
    columns: list[tuple[str, ...]]
    rows: list[tuple[tuple[str, ...], list[Entry]]]
    figures: list[str]
    bold: frozenset[tuple[int, int]] = frozenset()

    @property
    def seeds(self) -> int:
        """Finished runs behind the best founded entry."""
        return max((len(each.values) for _, entries in self.rows for each in entries), default=0)


def tables(found: Found, show: Mapping[str, Any]) -> list[Table]:
    """The tables of one `show` block: one a label of its `split`, and one of the worst over `worst`."""
    splits, rows, columns = (as_list(show.get(key)) for key in ("split", "rows", "columns"))
    names = as_list(show.get("values") or show.get("value") or "test_accuracy")
    title, worst = str(show.get("title", "")), show.get("worst")
    made = []
    for parts in itertools.product(*(found.labels(axis) for axis in splits)):
        fixed = dict(zip(splits, parts, strict=True))
        about = ", ".join(words(axis, label) for axis, label in fixed.items())
        table = _table(found, show, f"{title}: {about}" if about else title, fixed, rows, columns, names)
        if table.rows:
            made.append(table)
    if worst and splits == [worst] and len(made) > 1:
        made.append(_worst_table(f"{title}: worst over {worst}s", made))
    elif worst and columns == [worst] and len(names) == 1:
        made = [_worst_column(table) for table in made]
    return [_with_bold(table) for table in made]


def _table(
    found: Found,
    show: Mapping[str, Any],
    title: str,
    fixed: Mapping[str, Any],
    rows: Sequence[str],
    columns: Sequence[str],
    names: Sequence[str],
) -> Table:
    look = published_values(show)
    same = {axis: found.labels(axis)[0] for axis in found.sweep.axes if len(found.labels(axis)) == 1}
    by_labels: dict[str, list[Place]] = {}
    for place in found.places:
        if all(place.labels.get(axis) == label for axis, label in fixed.items()):
            by_labels.setdefault(_key(place.labels, [*rows, *columns]), []).append(place)
    heads, figures, combinations = [], [], []
    for column in itertools.product(*(found.labels(axis) for axis in columns)):
        for name in names:
            labels = dict(zip(columns, column, strict=True))
            shown = [words(axis, label) for axis, label in labels.items()]
            heads.append(tuple([*shown, metric(name).words] if len(names) > 1 or not shown else shown))
            figures.append(name)
            combinations.append((labels, name))
    made = []
    for row in itertools.product(*(found.labels(axis) for axis in rows)):
        at = dict(zip(rows, row, strict=True))
        entries, missing = [], False
        for labels, name in combinations:
            every = {**fixed, **at, **labels}
            places = by_labels.get(_key(every, [*rows, *columns]), [])
            missing |= not all(place.finished for place in places)
            # a cell that the sweep skips has nothing to be compared with
            entries.append(entry(places, name, look({**same, **every}, name) if places else None))
        # A rule that tells nobody apart has no recall: no row of dashes once all its runs are there.
        says = any(each.mean is not None or each.published is not None for each in entries)
        if any(each.runs for each in entries) and (says or missing):
            made.append((tuple(words(axis, label) for axis, label in at.items()), entries))
    return Table(title, tuple(rows), heads, made, figures)


def _key(labels: Mapping[str, Any], axes: Sequence[str]) -> str:
    return repr([labels.get(axis) for axis in axes])


def lowest(entries: Sequence[Entry]) -> Entry:
    """The worst of several figures: the entry of least mean, the paper's least beside it; none if one lacks."""
    paper = [each.published for each in entries]
    published = None if None in paper or not paper else min(p for p in paper if p is not None)
    there = [each for each in entries if each.runs]
    runs = tuple(run for each in there for run in each.runs)
    if not there or any(each.mean is None for each in there):
        return Entry(None, None, runs, {}, published)
    least = min(there, key=lambda each: each.mean if each.mean is not None else 0.0)
    return replace(least, published=published, published_std=None)


def _worst_table(title: str, parts: Sequence[Table]) -> Table:
    """Row by row and column by column the worst over the parts, and in a last column the worst of all."""
    first = parts[0]
    heads = [*first.columns, ("worst", *[""] * (len(first.columns[0]) - 1))]
    rows = []
    for labels, _ in first.rows:
        matching = [entries for part in parts for at, entries in part.rows if at == labels]
        entries = [lowest([each[column] for each in matching]) for column in range(len(first.columns))]
        rows.append((labels, [*entries, lowest(entries)]))
    return Table(title, first.row_axes, heads, rows, [*first.figures, first.figures[0]])


def _worst_column(table: Table) -> Table:
    rows = [(labels, [*entries, lowest(entries)]) for labels, entries in table.rows]
    return replace(
        table,
        columns=[*table.columns, ("worst",)],
        rows=rows,
        figures=[*table.figures, table.figures[0]],
    )


def _with_bold(table: Table) -> Table:
    """Mark the best of each column, all of them if they tie as they are shown."""
    bold = set()
    for column, name in enumerate(table.figures):
        best = metric(name).best
        shown = {
            row: round(entries[column].mean or 0.0, metric(name).digits)
            for row, (_, entries) in enumerate(table.rows)
            if entries[column].mean is not None
        }
        if best is not None and len(shown) > 1:
            bold |= {(row, column) for row, value in shown.items() if value == best(shown.values())}
    return replace(table, bold=frozenset(bold))


# ------------------------------------------------------------------------------------------ as text
def shown(each: Entry, digits: int, seeds: int) -> str:
    """Mean and standard deviation, and the number of runs where it is below `seeds`; a dash for nothing."""
    if each.mean is None:
        return "-"
    spread = f" ± {each.std:.{digits}f}" if each.std is not None and len(each.values) > 1 else ""
    few = f" (n={len(each.values)})" if len(each.values) < seeds else ""
    return f"{each.mean:.{digits}f}{spread}{few}"


def compared(each: Entry, digits: int) -> str:
    """The published value and the difference from it, as text; empty where there is none."""
    if each.published is None:
        return ""
    difference = "" if each.difference is None else f", {each.difference:+.{digits}f}"
    return f"[{each.published:.{digits}f}{difference}]"


def markdown(table: Table, *, published: bool = True) -> str:
    """A Markdown table; published values in brackets, then the difference; n where runs are missing."""
    heads = [*table.row_axes, *(" · ".join(part for part in head if part) for head in table.columns)]
    lines = [f"**{table.title}**", "", _bar(heads), _bar(["---"] * len(heads))]
    for row, (labels, entries) in enumerate(table.rows):
        cells = []
        for column, each in enumerate(entries):
            digits = metric(table.figures[column]).digits
            text = shown(each, digits, table.seeds)
            text = f"**{text}**" if (row, column) in table.bold else text
            cells.append(f"{text} {compared(each, digits)}".strip() if published else text)
        lines.append(_bar([*labels, *cells]))
    return "\n".join(lines) + "\n"


def _bar(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def latex(table: Table) -> str:
    """A LaTeX table (booktabs) in the paper's layout."""
    many = len(table.columns)
    lines = [
        "\\begin{table}[t]",
        "  \\centering\\footnotesize",
        f"  \\caption{{{_tex(table.title)}}}",
        f"  \\begin{{tabular}}{{{'l' * len(table.row_axes)}{'c' * many}}}",
        "    \\toprule",
    ]
    for level in range(len(table.columns[0]) if table.columns else 0):
        last = level == len(table.columns[0]) - 1
        heads = [_tex(axis) if last else "" for axis in table.row_axes]
        for text, group in itertools.groupby(table.columns, key=itemgetter(slice(level + 1))):
            width = len(list(group))
            word = _tex(text[-1])
            heads.append(f"\\multicolumn{{{width}}}{{c}}{{{word}}}" if width > 1 else word)
        lines.append("    " + " & ".join(heads) + " \\\\")
    lines.append("    \\midrule")
    for row, (labels, entries) in enumerate(table.rows):
        cells = [_tex(label) for label in labels]
        for column, each in enumerate(entries):
            value = shown(each, metric(table.figures[column]).digits, table.seeds).replace(" ± ", "$\\pm$")
            cells.append(f"\\textbf{{{value}}}" if (row, column) in table.bold else value)
        lines.append("    " + " & ".join(cells) + " \\\\")
    return "\n".join([*lines, "    \\bottomrule", "  \\end{tabular}", "\\end{table}", ""])


def _tex(text: str) -> str:
    for plain, escaped in (
        ("\\", "\\textbackslash "),
        ("%", "\\%"),
        ("_", "\\_"),
        ("&", "\\&"),
        ("#", "\\#"),
    ):
        text = text.replace(plain, escaped)
    return text


def comma_separated(made: Sequence[Table]) -> str:
    """CSV with a line an entry: its labels, figures, the published value, and the ids of its runs."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    figures = ("mean", "std", "seeds", "planned", "published", "published_std", "difference", "best", "runs")
    writer.writerow(["table", "row", "column", "figure", *figures])
    for table in made:
        for row, (labels, entries) in enumerate(table.rows):
            for column, each in enumerate(entries):
                head = " / ".join(part for part in table.columns[column] if part)
                numbers = [each.mean, each.std, len(each.values), len(each.runs)]
                paper = [each.published, each.published_std, each.difference]
                values = ["" if x is None else x for x in [*numbers, *paper]]
                where = [table.title, " / ".join(labels), head, table.figures[column]]
                writer.writerow([*where, *values, (row, column) in table.bold, " ".join(each.runs)])
    return out.getvalue()
