"""Writing one run: rounds and checkpoints, each whole in the file when the call returns."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlaw.results.database import StoreError, transaction
from fedlaw.results.record import COLUMNS, RoundRecord, to_row


class RunWriter:
    """Writes one run. Everything it is given is in the file, whole, when the call returns.

    Attributes:
        id: of the run. checkpoint: what to go on from; None: start at round 1. done_rounds: rounds in it.
        ended: whether it was finished, interrupted or failed; nothing more can be written then.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        run: str,
        token: str,
        done: int,
        checkpoint: bytes | None,
        malicious: NDArray[Any] | None,
    ) -> None:
        self.id = run
        self.checkpoint = checkpoint
        self.done_rounds = done
        self.ended = False
        self._connection = connection
        self._token = token
        self._malicious = malicious

    def setup(self, **values: Any) -> None:
        """Write down what is fixed before round 1: arrays (numpy), and plain data for JSON.

        `malicious`, (n,) bool, is what the share of weight on attackers is computed from.
        """
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        plain = {name: value for name, value in values.items() if name not in arrays}
        with self._owned():
            self._connection.execute("UPDATE runs SET setup = ? WHERE id = ?", (to_json(plain), self.id))
            self._connection.execute("DELETE FROM arrays WHERE run = ?", (self.id,))
            for name, array in arrays.items():
                if array.dtype.kind not in "biuf":
                    raise ValueError(
                        f"setup {name!r} must be an array of numbers or bools, got {array.dtype}"
                    )
                little = array.astype(array.dtype.newbyteorder("<"))
                self._connection.execute(
                    "INSERT INTO arrays VALUES (?, ?, ?, ?, ?)",
                    (self.id, name, little.dtype.str, to_json(array.shape), little.tobytes()),
                )
        self._malicious = arrays.get("malicious")

    def append(self, record: RoundRecord) -> None:
        """Write a round; a reader sees it from now on."""
        with self._owned(done=record.round):
            self._insert(record)

    def save(self, round: int, checkpoint: bytes) -> None:
        """Write a checkpoint: all rounds up to `round` are in the file, and a resumed run goes on after it."""
        with self._owned():
            self._checkpoint(round, checkpoint)

    def finish(self, summary: dict[str, Any]) -> None:
        """The run is over; its checkpoint is no longer needed."""
        with self._owned(status="finished", summary=to_json(_finite(summary)), ended=now()):
            self._connection.execute("DELETE FROM checkpoints WHERE run = ?", (self.id,))

    def interrupt(self, round: int | None = None, checkpoint: bytes | None = None) -> None:
        """The run stops here and can be resumed: from `checkpoint`, the state after `round`, or from the last.

        An interruption comes at any moment, also between the end of a round and its `append`: a checkpoint
        whose rounds are not all written is left out, and the last one stays.
        """
        with self._owned(status="interrupted", ended=now()):
            if round is not None and checkpoint is not None and self._written(round) == round:
                self._checkpoint(round, checkpoint)

    def fail(self, message: str) -> None:
        """The run broke down; `message` says how."""
        with self._owned(status="failed", message=message, ended=now()):
            pass

    # -------------------------------------------------------------------------------------- transactions
    @contextmanager
    def _owned(self, **changes: Any) -> Iterator[None]:
        """A transaction on the run, if it is still this writer's, which also notes when it last wrote."""
        changes["updated"] = now()
        with transaction(self._connection):
            updated = self._connection.execute(
                f"UPDATE runs SET {', '.join(f'{name} = ?' for name in changes)} "
                "WHERE id = ? AND status = 'running' AND token = ?",
                (*changes.values(), self.id, self._token),
            ).rowcount
            if updated != 1:
                raise StoreError(f"run {self.id} is no longer this writer's: it was ended or taken over")
            yield
        self.ended = "status" in changes

    def _insert(self, record: RoundRecord) -> None:
        marks = ", ".join("?" * (len(COLUMNS) + 2))
        self._connection.execute(
            f"INSERT INTO rounds (run, {', '.join(COLUMNS)}, attacker_weight) VALUES ({marks})",
            (self.id, *to_row(record), attacker_weight(record.weights, self._malicious)),
        )

    def _written(self, round: int) -> int:
        """How many of the rounds up to `round` are in the file."""
        query = "SELECT count(*) FROM rounds WHERE run = ? AND round <= ?"
        return int(self._connection.execute(query, (self.id, round)).fetchone()[0])

    def _checkpoint(self, round: int, checkpoint: bytes) -> None:
        if (there := self._written(round)) != round:
            raise ValueError(f"checkpoint after round {round}: only {there} of its rounds were appended")
        self._connection.execute(
            "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?)", (self.id, round, checkpoint)
        )


def attacker_weight(weights: NDArray[Any] | None, malicious: NDArray[Any] | None) -> float | None:
    """Share of the weights that malicious clients have; None where there are no weights or nothing is known.

    >>> attacker_weight(np.array([0.5, 0.5, 0.0]), np.array([False, True, True]))
    0.5
    """
    if weights is None or malicious is None:
        return None
    total = float(np.sum(weights, dtype=np.float64))
    return float(np.sum(weights[malicious.astype(bool)], dtype=np.float64)) / total if total > 0 else None


def now() -> str:
    """The time, UTC, as it is written."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def to_json(value: Any) -> str:
    """JSON as it is written."""
    return json.dumps(value, allow_nan=False)


def _finite(summary: dict[str, Any]) -> dict[str, Any]:
    """Numbers that JSON does not have (NaN, infinities) as None."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in summary.items()
    }
