"""A results file without what is large in it, to send home."""

from __future__ import annotations

import os
from pathlib import Path

from fedlaw.results.database import StoreError, transaction
from fedlaw.results.merge import Merged, merge
from fedlaw.results.store import Store

_PER_CLIENT = ("weights", "statuses", "exclusions", "alignment", "loss_part", "score", "losses")


def export(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    compact: bool = False,
    weights: bool = False,
) -> Merged:
    """Copy the runs of a results file into a new one.

    Args:
        source: the results file. output: the file to write; it must not be there.
        compact: keep accuracy per round, and of the clients the last round only: final weights, statuses and
            reasons. Checkpoints go too, so what was interrupted starts anew.
        weights: with `compact`, keep the weights of every round all the same.

    The result is a results file: `fedlaw results`, `fedlaw report` and `merge` read it.
    """
    path = Path(output)
    if path.exists():
        raise StoreError(f"--output {path} is there already: name another file")
    done = merge([source], path, also_running=True)
    if compact:
        dropped = [name for name in _PER_CLIENT if not (weights and name == "weights")]
        empty = ", ".join(f"{name} = NULL" for name in [*dropped, "per_class"])
        with Store(path) as store:
            with transaction(store._connection):
                store._connection.execute(
                    f"UPDATE rounds SET {empty} "
                    "WHERE round < (SELECT max(round) FROM rounds AS other WHERE other.run = rounds.run)"
                )
                store._connection.execute("DELETE FROM checkpoints")
            store._connection.execute("VACUUM")
            store._connection.execute("PRAGMA journal_mode = DELETE")  # one file, nothing beside it
    return done
