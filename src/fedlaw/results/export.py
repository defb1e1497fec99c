"""A results file without what is large in it, to send home."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedlaw.results.archive import fold
from fedlaw.results.database import APPLICATION, VERSION, StoreError, transaction
from fedlaw.results.merge import Merged, merge
from fedlaw.results.record import DTYPES
from fedlaw.results.store import Store

_FIGURES = (
    *("test_accuracy", "test_loss", "validation_accuracy", "validation_loss", "attack_success"),
    *("epsilon", "attacker_weight"),
)
_PER_CLIENT = ("weights", "statuses", "exclusions", "alignment", "loss_part", "score", "losses")


def export(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    compact: bool = False,
    weights: bool = False,
    cosines: bool = False,
    archive: bool = False,
) -> Merged:
    """Copy the runs of a results file into a new one.

    Args:
        source: the results file. output: the file to write; it must not be there.
        compact: keep accuracy per round in single precision, and of the clients the last round only: final weights,
            statuses and reasons. Checkpoints go too, and with them what was interrupted: it has to start anew.
        weights: with `compact`, keep the weights of every round all the same.
        cosines: with `compact`, keep the alignment of every judged round in half precision.
        archive: compress it; an archive is read like any results file, but nothing can be added to it.

    The result is a results file: `fedlaw results`, `fedlaw report` and `merge` read it.
    """
    path = Path(output)
    if path.exists():
        raise StoreError(f"--output {path} is there already: name another file")
    done = merge([source], path, also_running=True)
    with Store(path) as store:
        if compact:
            _compact(store._connection, keep={"weights": weights, "alignment": cosines})
        done = replace(done, added=len(store.runs()))
        store._connection.execute("VACUUM")
        store._connection.execute("PRAGMA journal_mode = DELETE")  # one file, nothing beside it
    if archive:
        fold(path, APPLICATION, VERSION)
    return done


def _compact(connection: sqlite3.Connection, keep: dict[str, bool]) -> None:
    connection.create_function("single", 1, _single, deterministic=True)
    connection.create_function("half", 1, _half, deterministic=True)
    dropped = [name for name in _PER_CLIENT if not keep.get(name)]
    empty = ", ".join(f"{name} = NULL" for name in [*dropped, "per_class"])
    shorter = ", ".join(f"{name} = single({name})" for name in _FIGURES)
    with transaction(connection):
        connection.execute(
            f"UPDATE rounds SET {empty} "
            "WHERE round < (SELECT max(round) FROM rounds AS other WHERE other.run = rounds.run)"
        )
        connection.execute(f"UPDATE rounds SET {shorter}, alignment = half(alignment), seconds = 0.0")
        connection.execute("DELETE FROM checkpoints")
        connection.execute(
            "DELETE FROM runs WHERE status IN ('running', 'interrupted')"
        )  # their rounds go too


def _single(value: float | str | None) -> float | str | None:
    """A number in single precision; what is none ("nan", NULL) as it is."""
    return float(np.float32(value)) if isinstance(value, float) else value


def _half(data: bytes | None) -> bytes | None:
    """Numbers as RoundRecord keeps them, rounded to half precision: their last bytes are zero and compress away."""
    if data is None:
        return None
    stored = np.dtype(DTYPES["alignment"])
    return np.frombuffer(data, stored).astype(np.float16).astype(stored).tobytes()
