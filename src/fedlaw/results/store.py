"""The results store: one SQLite file, written as runs go, safe to read meanwhile and after a kill."""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol, Self

import numpy as np

from fedlaw.results.database import StoreError, connect, transaction
from fedlaw.results.machine import is_writing, machine, this_writer, versions
from fedlaw.results.record import COLUMNS, RoundRecord, from_row
from fedlaw.results.writer import RunWriter, now, to_json

DEFAULT = "fedlaw.sqlite"
Status = Literal["running", "interrupted", "finished", "failed"]


class Described(Protocol):
    """What a run is a run of: an `Experiment`, or anything with an id, a number of rounds and a plain form."""

    @property
    def id(self) -> str: ...
    @property
    def rounds(self) -> int: ...
    def canonical(self) -> dict[str, Any]: ...


class AlreadyFinished(ValueError):
    """The run is finished: there is nothing to do, its results are in the store."""

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        super().__init__(
            f"run {run_id} is finished already: `fedlaw results show {run_id[:8]}` has its results; change a "
            "setting (such as seed) or name another --store"
        )


class AlreadyRunning(ValueError):
    """Another process is writing this run at this moment."""

    def __init__(self, run_id: str, writer: dict[str, Any]) -> None:
        self.run_id = run_id
        super().__init__(
            f"run {run_id} is being written by process {writer['pid']} on {writer['host']}: wait for it, stop it, "
            "or name another --store"
        )


@dataclass(frozen=True)
class RunInfo:
    """What the store knows about a run, without its rounds.

    Attributes:
        id: digest of the description. status: running, interrupted (resumable), finished or failed.
        done, total: rounds written, and rounds there are.
        description: canonical form. versions, machine: what made it.
        started, ended: UTC, ISO 8601; ended None while it runs.
        summary: of a finished run, else empty. message: of a failed run.
    """

    id: str
    status: Status
    done: int
    total: int
    description: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    started: str
    ended: str | None
    summary: dict[str, Any]
    message: str | None


_INFO = "id, status, done, total, description, versions, machine, started, ended, summary, message, writer, updated"

_BEGIN = """
INSERT INTO runs (id, status, description, total, done, started, updated, versions, machine, setup, writer, token)
VALUES (?, 'running', ?, ?, ?, ?, ?, ?, ?, '{}', ?, ?)
ON CONFLICT (id) DO UPDATE SET status = 'running', done = excluded.done, updated = excluded.updated, ended = NULL,
  message = NULL, versions = excluded.versions, machine = excluded.machine, writer = excluded.writer,
  token = excluded.token
"""


class Store:
    """A results file. Reading never waits for a writer; several processes may write different runs.

    Args:
        path: the file, made if it is not there (its folder has to be).
        read_only: for looking only; then the file has to be there.

    Raises:
        StoreError: the file cannot be used (see there); nothing was written.

    >>> import tempfile
    >>> from fedlaw.experiments.description import Experiment
    >>> with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "fedlaw.sqlite") as store:
    ...     run = store.begin(Experiment(rounds=1), resume=False)
    ...     run.append(RoundRecord(round=1, phases=2, test_accuracy=0.5))
    ...     run.finish({"accuracy": 0.5})
    ...     store.runs()[0].status, store.records(run.id)[0].test_accuracy
    ('finished', 0.5)
    """

    def __init__(self, path: str | os.PathLike[str] = DEFAULT, *, read_only: bool = False) -> None:
        self.path = Path(path)
        self._connection = connect(self.path, read_only=read_only)
        self._open: list[RunWriter] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. A run that was not ended is marked interrupted: it can be resumed."""
        try:
            for writer in self._open:
                if not writer.ended:
                    writer.interrupt()
        finally:
            self._connection.close()

    # -------------------------------------------------------------------------------------- reading
    def find(self, run_id: str) -> RunInfo | None:
        """What is known about a run; None if it is not there."""
        row = self._connection.execute(f"SELECT {_INFO} FROM runs WHERE id = ?", (run_id,)).fetchone()
        return None if row is None else _info(row)

    def runs(self) -> list[RunInfo]:
        """Every run, in the order in which they were begun."""
        rows = self._connection.execute(f"SELECT {_INFO} FROM runs ORDER BY started, rowid")
        return [_info(row) for row in rows]

    def resolve(self, run: str) -> RunInfo:
        """The run with this id, with an id that begins so, or the one begun last ("last")."""
        every = self.runs()
        if not every:
            raise StoreError(f"--store {self.path}: there are no runs in it yet; `fedlaw run` adds one")
        if run == "last":
            return every[-1]
        found = [info for info in every if info.id.startswith(run.lower())]
        if not run or not found:
            raise StoreError(f"no run {run!r} in {self.path}: `fedlaw results` lists those there are")
        if len(found) > 1:
            raise StoreError(
                f"run {run!r} is ambiguous ({', '.join(i.id[:12] for i in found)}): type more of it"
            )
        return found[0]

    def records(self, run_id: str) -> list[RoundRecord]:
        """The rounds of a run written so far, in order."""
        rows = self._connection.execute(
            f"SELECT {', '.join(COLUMNS)} FROM rounds WHERE run = ? ORDER BY round", (run_id,)
        )
        return [from_row(row) for row in rows]

    def setup(self, run_id: str) -> dict[str, Any]:
        """What `RunWriter.setup` was given: arrays as arrays, the rest as plain data."""
        row = self._connection.execute("SELECT setup FROM runs WHERE id = ?", (run_id,)).fetchone()
        values: dict[str, Any] = json.loads(row[0]) if row else {}
        query = "SELECT name, dtype, shape, data FROM arrays WHERE run = ?"
        for name, dtype, shape, data in self._connection.execute(query, (run_id,)):
            values[name] = np.frombuffer(data, np.dtype(dtype)).reshape(json.loads(shape))
        return values

    # -------------------------------------------------------------------------------------- writing
    def begin(self, experiment: Described, *, resume: bool) -> RunWriter:
        """Begin to write a run, or go on where its last checkpoint stands.

        A run that was interrupted starts anew, its rows replaced, unless `resume`; then the rows after its
        checkpoint are removed and `RunWriter.checkpoint` is what to go on from.

        Raises:
            AlreadyFinished: the run is in the store, finished.
            AlreadyRunning: another process, or this one, is writing it.
        """
        run, connection = experiment.id, self._connection
        writer, token, made_by, made_on = this_writer(), uuid.uuid4().hex, versions(), machine()
        checkpoint, done = None, 0
        with transaction(connection):
            row = connection.execute(f"SELECT {_INFO} FROM runs WHERE id = ?", (run,)).fetchone()
            if row is not None:
                info = _info(row)
                if info.status == "finished":
                    raise AlreadyFinished(run)
                if info.status == "running":
                    raise AlreadyRunning(run, json.loads(row[-2]))
                if resume:
                    query = "SELECT round, data FROM checkpoints WHERE run = ?"
                    done, checkpoint = connection.execute(query, (run,)).fetchone() or (0, None)
                if checkpoint is None:
                    connection.execute("DELETE FROM runs WHERE id = ?", (run,))
                else:
                    connection.execute("DELETE FROM rounds WHERE run = ? AND round > ?", (run, done))
            # A resumed run keeps its beginning and set-up; what it is made by from here on is what is said.
            connection.execute(
                _BEGIN,
                (
                    *(run, to_json(experiment.canonical()), experiment.rounds, done, now(), now()),
                    *(to_json(made_by), to_json(made_on), to_json(writer), token),
                ),
            )
        malicious = self.setup(run).get("malicious")
        opened = RunWriter(connection, run, token, done, checkpoint, malicious)
        self._open.append(opened)
        return opened


def _info(row: tuple[Any, ...]) -> RunInfo:
    *known, writer, updated = row
    values = dict(zip(_INFO.split(", "), known, strict=False))
    for name in ("description", "versions", "machine", "summary"):
        values[name] = json.loads(values[name] or "{}")
    if values["status"] == "running" and not is_writing(
        json.loads(writer), datetime.fromisoformat(updated).timestamp()
    ):
        values["status"] = "interrupted"  # its process died without a word
    return RunInfo(**values)
