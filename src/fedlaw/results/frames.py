"""Results as data frames."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from fedlaw.results.record import SCALARS
from fedlaw.results.store import DEFAULT, RunInfo, Store

if TYPE_CHECKING:
    import pandas as pd

Path = str | os.PathLike[str]


def load(path: Path = DEFAULT, *, runs: Iterable[str] | str | None = None) -> pd.DataFrame:
    """One row per run and round: what was measured, beside the settings of the run.

    A column a setting (`rule`, `rule.f`, `attack`, `clients`, ...), then the round's numbers, NaN where they were
    not measured; `communication_rounds` counts the exchanges up to and with the round, `attacker_weight` is
    the share of the weights that malicious clients have.

    Args:
        path: the results file. It may be being written.
        runs: ids, or beginnings of ids, or "last"; None: all.
    """
    import pandas as pd

    with Store(path, read_only=True) as store:
        infos = _chosen(store, runs)
        columns = [*SCALARS, "attacker_weight"]
        query = f"SELECT {', '.join(columns)} FROM rounds WHERE run = ? ORDER BY round"
        frames = []
        for info in infos:
            rows = store._connection.execute(query, (info.id,)).fetchall()
            frame = pd.DataFrame(rows, columns=columns)
            for name in columns:
                if name != "skipped":
                    frame[name] = pd.to_numeric(frame[name], errors="coerce")  # written "nan" is NaN
            frame.insert(2, "communication_rounds", frame["phases"].cumsum())
            about = {"run": info.id, "status": info.status, **flatten(info.description)}
            about = {name: value for name, value in about.items() if name not in frame}
            frames.append(pd.concat([_repeated(about, len(frame)), frame], axis=1))
    filled = [frame for frame in frames if len(frame)]
    return pd.concat(filled or frames or [pd.DataFrame()], ignore_index=True)


def load_summary(path: Path = DEFAULT, *, runs: Iterable[str] | str | None = None) -> pd.DataFrame:
    """One row per run: its settings, status and times, and the numbers that it ended with."""
    import pandas as pd

    with Store(path, read_only=True) as store:
        rows = [
            {
                "run": info.id,
                "status": info.status,
                "done": info.done,
                "started": info.started,
                "ended": info.ended,
                **flatten(info.description),
                **info.summary,
            }
            for info in _chosen(store, runs)
        ]
    return pd.DataFrame(rows)


def load_weights(path: Path, run: str) -> pd.DataFrame:
    """Weights of a run, a row a round and a column a client; NaN in rounds that have none."""
    import pandas as pd

    with Store(path, read_only=True) as store:
        info = store.resolve(run)
        records = store.records(info.id)
    n = int(info.description["clients"])
    none = np.full(n, np.nan, np.float32)
    rows = np.array([none if r.weights is None else r.weights for r in records], np.float32).reshape(-1, n)
    index = pd.Index([r.round for r in records], name="round")
    return pd.DataFrame(rows, index=index, columns=pd.RangeIndex(n, name="client"))


def flatten(description: Mapping[str, Any]) -> dict[str, Any]:
    """A canonical description as one flat mapping: parts by their name, their settings as `part.setting`.

    >>> flatten({"clients": 9, "rule": {"name": "krum", "f": 2}, "partition": "q_groups",
    ...          "partition_settings": {"q": 0.6}})
    {'clients': 9, 'rule': 'krum', 'rule.f': 2, 'partition': 'q_groups', 'partition.q': 0.6}
    """
    flat: dict[str, Any] = {}
    for key, value in description.items():
        if key == "version":
            continue
        if isinstance(value, Mapping):
            part = key.removesuffix("_settings")
            if "name" in value:
                flat[part] = value["name"]
            flat.update({f"{part}.{name}": _cell(each) for name, each in value.items() if name != "name"})
        else:
            flat[key] = _cell(value)
    return flat


def _cell(value: Any) -> Any:
    """A value that can be grouped by: lists and tables as text."""
    return json.dumps(value) if isinstance(value, list | Mapping) else value


def _repeated(about: dict[str, Any], rows: int) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame({name: [value] * rows for name, value in about.items()})


def _chosen(store: Store, runs: Iterable[str] | str | None) -> list[RunInfo]:
    if runs is None:
        return store.runs()
    return [store.resolve(run) for run in ([runs] if isinstance(runs, str) else runs)]
