"""Notes in a results file beside the runs: the sweeps that asked for them, what was chosen, how fast it went."""

from __future__ import annotations

import json
import os
import sqlite3
from typing import Any

from fedlaw.results.database import transaction
from fedlaw.results.store import Store

SWEEP, CHOICE, PACE = "sweep", "choice", "pace"
_TABLE = (
    "CREATE TABLE IF NOT EXISTS notes (kind TEXT NOT NULL, name TEXT NOT NULL, value TEXT NOT NULL, "
    "PRIMARY KEY (kind, name))"
)


def write(path: str | os.PathLike[str], kind: str, name: str, value: Any) -> None:
    """Write a note, plain data for JSON; one of the same kind and name is replaced."""
    with Store(path) as store:
        put(store._connection, {(kind, name): value})


def read(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """The notes of a kind, by name, in the order in which they were first written.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder) / "a.sqlite", "pace", "mlp", 0.5)
    ...     read(Path(folder) / "a.sqlite", "pace")
    {'mlp': 0.5}
    """
    with Store(path, read_only=True) as store:
        return {name: value for (_, name), value in every(store._connection, kind).items()}


def every(connection: sqlite3.Connection, kind: str | None = None) -> dict[tuple[str, str], Any]:
    """All notes, or those of a kind."""
    if not connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'notes'").fetchone()[0]:
        return {}
    rows = connection.execute("SELECT kind, name, value FROM notes ORDER BY rowid")
    return {(k, name): json.loads(value) for k, name, value in rows if kind in (None, k)}


def put(connection: sqlite3.Connection, notes: dict[tuple[str, str], Any]) -> None:
    """Write notes in one transaction."""
    with transaction(connection):
        connection.execute(_TABLE)
        for (kind, name), value in notes.items():
            connection.execute(
                "INSERT INTO notes VALUES (?, ?, ?) ON CONFLICT (kind, name) DO UPDATE SET value = excluded.value",
                (kind, name, json.dumps(value)),
            )
