"""Results from several files in one: runs come home from other machines."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedlaw.results import notes
from fedlaw.results.database import StoreError, transaction
from fedlaw.results.store import Store

_RANK = {"finished": 3, "interrupted": 2, "running": 2, "failed": 1}
_TABLES = ("runs", "rounds", "arrays", "checkpoints")


@dataclass(frozen=True)
class Merged:
    """How a merge went: runs that are new, replaced by more, kept as they were, and still running over there.

    `different` are finished on both sides with other figures (another device computes other last digits):
    what was here first is kept.
    """

    added: int = 0
    replaced: int = 0
    kept: int = 0
    running: int = 0
    different: tuple[str, ...] = ()


def merge(
    sources: Sequence[str | os.PathLike[str]], into: str | os.PathLike[str], *, also_running: bool = False
) -> Merged:
    """Bring the runs of `sources` into one results file, made if it is not there.

    Of two records of a run the one that got further is kept: finished before interrupted before failed, more
    rounds before fewer, all weights before the last ones only. Notes (sweeps, choices) come along.

    Args:
        sources: results files; compact exports are such files too.
        into: the file to add to. also_running: runs that are being written over there are taken as they are.
    """
    total = Merged()
    for source in sources:
        if Path(source).resolve() == Path(into).resolve():
            raise StoreError(f"{source} cannot be merged into itself: name another file with --into")
        with Store(source, read_only=True) as there, Store(into) as here:
            total = _add(total, _merge_one(there, here, also_running))
    return total


def _add(a: Merged, b: Merged) -> Merged:
    sums = {name: getattr(a, name) + getattr(b, name) for name in vars(a)}
    return Merged(**sums)


def _merge_one(there: Store, here: Store, also_running: bool) -> Merged:
    added = replaced = kept = running = 0
    different = []
    theirs, ours = there._connection, here._connection
    for info in there.runs():
        if info.status == "running" and not also_running:
            running += 1
            continue
        mine = here.find(info.id)
        if mine is not None and mine.status == "running":
            kept += 1
            continue
        if mine is not None and mine.status == info.status == "finished":
            one, other = (x.summary.get("test_accuracy") for x in (mine, info))
            if one != other:
                different.append(info.id)
        before = (-1, 0, 0) if mine is None else (_RANK[mine.status], mine.done, _details(ours, info.id))
        now = (_RANK[info.status], info.done, _details(theirs, info.id))
        if mine is not None and (now <= before or info.id in different):
            kept += 1
            continue
        added, replaced = (added + 1, replaced) if mine is None else (added, replaced + 1)
        _copy(theirs, ours, info.id)
    found = notes.every(theirs)
    if found:
        present = notes.every(ours)
        for key, value in found.items():
            if key[0] == notes.SWEEP and key in present and present[key]["id"] == value["id"]:
                value["runs"] = {**present[key]["runs"], **value["runs"]}
        notes.put(ours, {**found, **{k: v for k, v in present.items() if k[0] == notes.PACE}})
    return Merged(added, replaced, kept, running, tuple(different))


def _details(connection: sqlite3.Connection, run: str) -> int:
    """How much is recorded of the clients of a run, round by round."""
    query = "SELECT count(weights) + count(statuses) FROM rounds WHERE run = ?"
    return int(connection.execute(query, (run,)).fetchone()[0])


def _copy(theirs: sqlite3.Connection, ours: sqlite3.Connection, run: str) -> None:
    """One run, whole or not at all, in place of what there was of it."""
    with transaction(ours):
        ours.execute("DELETE FROM runs WHERE id = ?", (run,))
        for table in _TABLES:
            columns = _columns(theirs, table)
            if unknown := [name for name in columns if name not in _columns(ours, table)]:
                raise StoreError(
                    f"a results file has a column {unknown[0]!r} that is unknown here: update fedlaw"
                )
            key = "id" if table == "runs" else "run"
            names, marks = ", ".join(columns), ", ".join("?" * len(columns))
            for row in theirs.execute(f"SELECT {names} FROM {table} WHERE {key} = ?", (run,)):
                ours.execute(f"INSERT INTO {table} ({names}) VALUES ({marks})", row)
        gone = json.dumps({"host": "", "pid": 0, "began": None})  # whoever wrote it does not write here
        ours.execute(
            "UPDATE runs SET writer = ?, token = '', status = CASE status WHEN 'running' THEN 'interrupted' "
            "ELSE status END WHERE id = ?",
            (gone, run),
        )


def _columns(connection: sqlite3.Connection, table: str) -> list[str]:
    return [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
