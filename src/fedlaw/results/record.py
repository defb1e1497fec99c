"""What is written down of a round, and how it goes into a row and comes back the same."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Codes = NDArray[np.int8]


@dataclass(frozen=True, eq=False)
class RoundRecord:
    """Everything that is kept of one round, n clients in roster order.

    Attributes:
        round: from 1. phases: exchanges it had.
        test_accuracy, test_loss, validation_accuracy, validation_loss: None where not evaluated.
        per_class: test accuracy of each class. attack_success: share of triggered test inputs taken for the
            target, of targeted backdoors.
        weights: (n,) weights of the step; None where the rule works per coordinate.
        statuses: (n,) places in `tuple(fedlaw.server.Status)`. exclusions: (n,) `Exclusion` codes.
        alignment, loss_part, score: (n,) what the weights were made of; None where no weight was learned.
        losses: (n,) as the clients told them, NaN elsewhere.
        true_positives, false_positives, true_negatives, false_negatives: a positive is a client taken for
            malicious; None where nobody was judged.
        minority_excluded: honest clients of minority groups wrongly excluded.
        epsilon: the bound's epsilon_k of the round, where it can be computed.
        asked, answered: how many clients. bytes_up, bytes_down: sent by the clients, and to them.
        skipped: why the model was left as it was. notes: sentences for the operator.
        refusals: [client, phase, reason] of each reply that was not used.
        seconds: wall time of the round.
    """

    round: int
    phases: int
    test_accuracy: float | None = None
    test_loss: float | None = None
    validation_accuracy: float | None = None
    validation_loss: float | None = None
    per_class: list[float] | None = None
    attack_success: float | None = None
    weights: Floats | None = None
    statuses: Codes | None = None
    exclusions: Codes | None = None
    alignment: Floats | None = None
    loss_part: Floats | None = None
    score: Floats | None = None
    losses: Floats | None = None
    true_positives: int | None = None
    false_positives: int | None = None
    true_negatives: int | None = None
    false_negatives: int | None = None
    minority_excluded: int | None = None
    epsilon: float | None = None
    asked: int = 0
    answered: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    skipped: str | None = None
    notes: list[str] = field(default_factory=list)
    refusals: list[list[Any]] = field(default_factory=list)
    seconds: float = 0.0


DTYPES = {  # of the columns that hold arrays: raw little-endian bytes, one entry a client (or class)
    "per_class": "<f8",
    **dict.fromkeys(("weights", "alignment", "loss_part", "score", "losses"), "<f4"),
    **dict.fromkeys(("statuses", "exclusions"), "|i1"),
}
JSON = ("notes", "refusals")
COLUMNS = tuple(each.name for each in fields(RoundRecord))
SCALARS = tuple(name for name in COLUMNS if name not in DTYPES and name not in JSON)


def to_row(record: RoundRecord) -> tuple[Any, ...]:
    """The record as SQLite values, in the order of COLUMNS."""
    row = []
    for name in COLUMNS:
        value = getattr(record, name)
        if name in JSON:
            value = json.dumps(value)
        elif value is None:
            pass
        elif name in DTYPES:
            array = np.asarray(value)
            if array.ndim != 1:
                raise ValueError(f"{name} must have one dimension, got shape {array.shape}")
            value = array.astype(DTYPES[name], copy=False).tobytes()
        elif isinstance(value, str):
            pass
        elif isinstance(value, float | np.floating):
            value = (
                "nan" if math.isnan(value) else float(value)
            )  # SQLite would make NULL of it, "not measured"
        else:
            value = int(value)
        row.append(value)
    return tuple(row)


def from_row(row: tuple[Any, ...]) -> RoundRecord:
    """The record that `to_row` made the row of."""
    values: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
    for name, value in values.items():
        if name in JSON:
            values[name] = json.loads(value)
        elif name in DTYPES and value is not None:
            array = np.frombuffer(value, DTYPES[name])
            values[name] = array.tolist() if name == "per_class" else array
        elif value == "nan":
            values[name] = math.nan
    return RoundRecord(**values)
