"""A results file without what is large in it, to send home."""

from __future__ import annotations

import os
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedlaw.results.archive import fold
from fedlaw.results.database import APPLICATION, VERSION, StoreError, transaction
from fedlaw.results.merge import Merged, merge
from fedlaw.results.record import DTYPES
from fedlaw.results.store import Store

_FIGURES = ("test_accuracy", "validation_accuracy", "attack_success")
_ROUGH = ("test_loss", "validation_loss", "epsilon", "attacker_weight")
_ROUGH_PER_CLIENT = ("alignment", "losses")
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
        compact: keep accuracy per round in single precision, other figures to three digits, and of the clients the
            last round only: final weights, statuses and reasons. Checkpoints go too, and with them what was
            interrupted: it has to start anew.
        weights: with `compact`, keep the weights of every round all the same.
        cosines: with `compact`, keep the alignment of every judged round, to three digits.
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
    connection.create_function("rough", 1, _rough, deterministic=True)
    connection.create_function("roughs", 1, _roughs, deterministic=True)
    dropped = [name for name in _PER_CLIENT if not keep.get(name)]
    empty = ", ".join(f"{name} = NULL" for name in [*dropped, "per_class"])
    how = dict.fromkeys(_FIGURES, "single") | dict.fromkeys(_ROUGH, "rough")
    how |= dict.fromkeys(_ROUGH_PER_CLIENT, "roughs")
    shorter = ", ".join(f"{name} = {function}({name})" for name, function in how.items())
    with transaction(connection):
        connection.execute(
            f"UPDATE rounds SET {empty} "
            "WHERE round < (SELECT max(round) FROM rounds AS other WHERE other.run = rounds.run)"
        )
        connection.execute(f"UPDATE rounds SET {shorter}, seconds = 0.0")
        connection.execute("DELETE FROM checkpoints")
        connection.execute(
            "DELETE FROM runs WHERE status IN ('running', 'interrupted')"
        )  # their rounds go too


def _single(value: float | str | None) -> float | str | None:
    """A number in single precision; what is none ("nan", NULL) as it is."""
    return float(np.float32(value)) if isinstance(value, float) else value


def _rough(value: float | str | None) -> float | str | None:
    """A number with as many digits as half precision has, of any size; what is none as it is."""
    return float(_rounded(np.float64(value))) if isinstance(value, float) else value


def _roughs(data: bytes | None) -> bytes | None:
    """Numbers as RoundRecord keeps them, with as many digits as half precision has."""
    if data is None:
        return None
    stored = np.dtype(DTYPES["alignment"])
    rounded: bytes = _rounded(np.frombuffer(data, stored)).astype(stored).tobytes()
    return rounded


def _rounded(values: Any) -> Any:
    """To 11 binary digits: the bytes behind them are zero and compress away."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(mantissa * 2048) / 2048, exponent)
