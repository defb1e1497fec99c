"""A sweep's tables on a terminal."""

from __future__ import annotations

import os

from fedlaw.report.cells import collect, metric
from fedlaw.report.tables import compared, shown, tables


def summary(store: str | os.PathLike[str], name: str) -> None:
    """Print the tables of one sweep: mean and deviation over seeds, the best marked with a star."""
    from fedlaw import cli_show

    for found in collect(store):
        if found.sweep.name != name:
            continue
        for show in found.shows:
            if show["kind"] != "table":
                continue
            for table in tables(found, show):
                print(f"\n{table.title}")
                heads = [*table.row_axes, *(" ".join(filter(None, head)) for head in table.columns)]
                rows = []
                for row, (labels, entries) in enumerate(table.rows):
                    cells = []
                    for column, each in enumerate(entries):
                        digits = min(metric(table.figures[column]).digits, 3)
                        star = "*" if (row, column) in table.bold else ""
                        cells.append(
                            f"{shown(each, digits, table.seeds)}{star} {compared(each, digits)}".strip()
                        )
                    rows.append([*labels, *cells])
                cli_show.table(heads, rows)
        if found.missing:
            print(f"{len(found.missing)} of {len(found.places)} runs are missing")
