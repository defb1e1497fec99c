"""What is told about a round: metrics by node id for Flower's result, a row for our own store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import MetricRecord
from numpy.typing import NDArray
from torch import Tensor

from fedlaw.results import RoundRecord
from fedlaw.server import RoundReport, Status

_STATUS_CODE = {status: code for code, status in enumerate(Status)}


@dataclass
class Timings:
    """What the transport measured in one round.

    Attributes:
        phases: seconds of each phase, from the first request to the judgement.
        nodes: seconds after which each node answered, by phase.
        bytes_up, bytes_down: of arrays.
    """

    phases: dict[int, float] = field(default_factory=dict)
    nodes: dict[tuple[int, int], float] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def seconds(self) -> float:
        """Of the whole round."""
        return sum(self.phases.values())


def round_metrics(report: RoundReport, roster: Sequence[int], timings: Timings) -> MetricRecord:
    """One round for `Result.train_metrics_clientapp`: what concerns a node ends in "/" and its id.

    weight/ID, refused/ID (replies that were not used), loss/ID as told, seconds/PHASE/ID until it answered.
    """
    found: dict[str, Any] = {
        "phases": report.phases,
        "asked": int(report.asked.sum()),
        "answered": int(report.answered.sum()),
        "refused": len(report.refusals),
        "skipped": int(report.skipped is not None),
        "seconds": timings.seconds,
    }
    found |= {f"seconds/{phase}": seconds for phase, seconds in timings.phases.items()}
    losses = report.losses.tolist()
    weights = [None] * len(roster) if report.weights is None else report.weights.tolist()
    for node, weight, loss in zip(roster, weights, losses, strict=True):
        if weight is not None:
            found[f"weight/{node}"] = float(weight)
        if loss == loss:
            found[f"loss/{node}"] = float(loss)
    for refusal in report.refusals:
        key = f"refused/{refusal.client}"
        found[key] = found.get(key, 0) + 1
    found |= {f"seconds/{phase}/{node}": seconds for (phase, node), seconds in timings.nodes.items()}
    return MetricRecord(found)


def round_record(
    report: RoundReport, timings: Timings, evaluated: Mapping[str, Any] | None, seconds: float
) -> RoundRecord:
    """One round for the store. "accuracy" and "loss" of the server's own evaluation are the test figures."""
    told = evaluated or {}
    return RoundRecord(
        round=report.round,
        phases=report.phases,
        test_accuracy=_number(told.get("accuracy")),
        test_loss=_number(told.get("loss")),
        weights=_floats(report.weights),
        statuses=np.array([_STATUS_CODE[status] for status, _ in report.statuses], np.int8),
        exclusions=np.array([int(code) for _, code in report.statuses], np.int8),
        alignment=_floats(report.reasons.get("alignment")),
        loss_part=_floats(report.reasons.get("loss")),
        score=_floats(report.reasons.get("score")),
        losses=_floats(report.losses),
        asked=int(report.asked.sum()),
        answered=int(report.answered.sum()),
        bytes_up=timings.bytes_up,
        bytes_down=timings.bytes_down,
        skipped=report.skipped,
        notes=list(report.notes),
        refusals=[[r.client, r.phase, r.reason] for r in report.refusals],
        seconds=seconds,
    )


def _floats(values: Tensor | None) -> NDArray[np.float32] | None:
    return None if values is None else values.detach().cpu().numpy().astype(np.float32)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None
