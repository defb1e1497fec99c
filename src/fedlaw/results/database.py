"""The SQLite file: its tables, and how it is opened without ever harming a file that is not ours."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedlaw.results.archive import DamagedArchive, is_archive, unfold
from fedlaw.results.record import COLUMNS, DTYPES

APPLICATION = 0x4645444C  # "FEDL" in the file's header: how we know our own
VERSION = 1
BUSY_SECONDS = 30.0
_NOT_OURS = "--store {} is not a fedlaw results file: name another file"

_INTEGERS = (
    *("round", "phases", "true_positives", "false_positives", "true_negatives", "false_negatives"),
    *("minority_excluded", "asked", "answered", "bytes_up", "bytes_down"),
)
_TEXTS = ("skipped", "notes", "refusals")


def _column(name: str) -> str:
    if name in DTYPES:
        return f"{name} BLOB /* {DTYPES[name]} */"
    return f"{name} {'INTEGER' if name in _INTEGERS else 'TEXT' if name in _TEXTS else 'REAL'}"


_SCHEMA = f"""
CREATE TABLE runs (
  id TEXT PRIMARY KEY,
  status TEXT NOT NULL,          -- running, interrupted, finished, failed
  description TEXT NOT NULL,     -- canonical form of the experiment, JSON
  total INTEGER NOT NULL,        -- rounds there are to do
  done INTEGER NOT NULL,         -- rounds written
  started TEXT NOT NULL, updated TEXT NOT NULL, ended TEXT,  -- UTC, ISO 8601
  versions TEXT NOT NULL, machine TEXT NOT NULL,             -- JSON
  setup TEXT NOT NULL,           -- JSON: what was fixed before round 1; its arrays are in `arrays`
  summary TEXT,                  -- JSON, of a finished run
  message TEXT,                  -- of a failed run
  writer TEXT NOT NULL,          -- JSON: the process that writes it
  token TEXT NOT NULL            -- what a writer knows the run to be its own by
);
CREATE TABLE rounds (
  run TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
  {", ".join(map(_column, COLUMNS))},
  attacker_weight REAL,          -- share of the weights that malicious clients have
  PRIMARY KEY (run, round)
);
CREATE TABLE arrays (
  run TEXT NOT NULL REFERENCES runs(id) ON DELETE CASCADE,
  name TEXT NOT NULL, dtype TEXT NOT NULL, shape TEXT NOT NULL, data BLOB NOT NULL,
  PRIMARY KEY (run, name)
);
CREATE TABLE checkpoints (
  run TEXT PRIMARY KEY REFERENCES runs(id) ON DELETE CASCADE,
  round INTEGER NOT NULL, data BLOB NOT NULL
);
"""


class StoreError(ValueError):
    """A results file that cannot be used: one line, with the remedy."""


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Open the results file, made anew if there is none (unless `read_only`).

    Raises:
        StoreError: no such folder or file, no permission, or a file that is not a fedlaw results file of this
            version. Nothing is written then.
    """
    there = path.is_file() and path.stat().st_size > 0
    if path.is_dir():
        raise StoreError(f"--store {path} is a folder: name a file, such as {path / 'fedlaw.sqlite'}")
    if read_only and not there:
        raise StoreError(
            f"--store {path}: there are no results; `fedlaw run` writes some, --store names the file"
        )
    if not path.parent.is_dir():
        raise StoreError(f"--store {path}: there is no folder {path.parent}; make it or name another file")
    if not read_only and not os.access(path if there else path.parent, os.W_OK):
        raise StoreError(f"--store {path}: no permission to write there; name another file with --store")
    if there:
        with path.open("rb") as file:
            if file.read(16) != b"SQLite format 3\0":
                raise StoreError(_NOT_OURS.format(path))
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection = _open(path, read_only)
            _prepare(connection, path, read_only)
            return _unfolded(connection, path, read_only) if is_archive(connection) else connection
        except sqlite3.Error as error:
            # SQLite waits for another process's lock, but not when it changes the journal's mode: then we do.
            if "locked" in str(error) and time.monotonic() < deadline:
                time.sleep(0.02)
                continue
            raise StoreError(
                f"--store {path}: cannot be opened ({error}); name another file with --store"
            ) from None


def _open(path: Path, read_only: bool) -> sqlite3.Connection:
    mode = "mode=rwc"
    if read_only:
        # A reader that may write at all (query_only keeps it from our tables) tidies up behind itself; where it may
        # not even make SQLite's own files beside ours, the file can be read as long as nobody is writing.
        quiet = not path.with_name(path.name + "-wal").exists()
        mode = "mode=rw" if _writable(path) else "immutable=1" if quiet else "mode=ro"
    address = f"{path.resolve().as_uri()}?{mode}"
    connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
    if read_only:
        connection.execute("PRAGMA query_only = ON")
    return connection


def _unfolded(archive: sqlite3.Connection, path: Path, read_only: bool) -> sqlite3.Connection:
    """What is in an archive, to be read."""
    try:
        if not read_only:
            raise StoreError(
                f"--store {path} is an archive, which is only read: `fedlaw results merge {path} --into FILE` "
                "makes a results file of it"
            )
        try:
            inside = unfold(archive)
        except DamagedArchive as error:
            raise StoreError(f"--store {path}: {error}; fetch it again") from None
    finally:
        archive.close()
    _prepare(inside, path, read_only=True)
    inside.execute("PRAGMA query_only = ON")
    return inside


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def _prepare(connection: sqlite3.Connection, path: Path, read_only: bool) -> None:
    """Make sure that the file is ours before anything of it is changed; make the tables of a new one."""
    try:
        connection.execute("PRAGMA foreign_keys = ON")
        if not read_only and _is_new(connection, path):
            with transaction(
                connection
            ):  # of two processes that make the file at once, the second finds it made
                if _is_new(connection, path):
                    for statement in _SCHEMA.split(";\n"):
                        connection.execute(statement)
                    connection.execute(f"PRAGMA application_id = {APPLICATION}")
                    connection.execute(f"PRAGMA user_version = {VERSION}")
        if _is_new(connection, path):
            raise StoreError(f"--store {path}: there are no results in it yet")
        found = _pragma(connection, "user_version")
        if found != VERSION:
            raise StoreError(
                f"--store {path} has format {found}, this fedlaw reads {VERSION}: use the fedlaw that wrote it, or "
                "another file"
            )
        if not read_only and not is_archive(connection):
            connection.execute("PRAGMA journal_mode = WAL")  # readers never wait for the writer
            connection.execute("PRAGMA synchronous = NORMAL")
    except BaseException:
        connection.close()
        raise


def _pragma(connection: sqlite3.Connection, name: str) -> int:
    return int(connection.execute(f"PRAGMA {name}").fetchone()[0])


def _is_new(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether the file has nothing in it; a StoreError if what it has is not ours."""
    # In this order: another process may be making the file between the two, and it writes both at once.
    if not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return True
    if _pragma(connection, "application_id") != APPLICATION:
        raise StoreError(_NOT_OURS.format(path))
    return False


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing; the write lock is taken at once, so that two writers queue instead of failing."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
