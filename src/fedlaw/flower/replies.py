"""Taking one reply apart: what a client's message says, believed in nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord
from torch import Tensor

from fedlaw.flower.layout import Fault, Layout

UPDATE = (
    "fedlaw.update"  # an array record of this name is a pseudo-gradient; any other holds trained parameters
)
MAX_RECORDS = 8

TRAINING_FAILED = 101
NOT_UNDERSTOOD = 102
RESULT_UNUSABLE = 103

_ERRORS = {  # Flower's codes, then ours
    0: "unknown error",
    1: "its app could not be loaded",
    2: "its app raised an exception",
    3: "the request expired or is gone",
    4: "the reply expired or is gone",
    5: "node is unavailable",
    6: "a mod refused the request",
    7: "its app bundle is invalid",
    8: "its app crashed",
    TRAINING_FAILED: "local training failed",
    NOT_UNDERSTOOD: "the request was not understood",
    RESULT_UNUSABLE: "local training returned something unusable",
}


class Answer(NamedTuple):
    """What a reply holds: the update (d,), and loss and count as they are, to be screened."""

    update: Tensor
    loss: Any
    count: Any


def words_of_error(code: Any) -> str:
    """Fixed words for an error code. The text that came with it, which may quote a client's data, is dropped.

    >>> words_of_error(2), words_of_error(-77)
    ('client error: its app raised an exception', 'client error: unknown error')
    """
    known = isinstance(code, int) and code in _ERRORS
    return f"client error: {_ERRORS[code if known else 0]}"


def read_reply(
    message: Message, layout: Layout, sent: Tensor, alpha: float, loss_metric: str, count_metric: str
) -> Answer | str:
    """The answer in a message, or in fixed words why there is none.

    Args:
        message: from a client.
        layout: of the model.
        sent: (d,) the model that was sent out; trained parameters psi become (sent - psi) / alpha.
        alpha: step size.
        loss_metric, count_metric: names of the metrics that hold loss and example count.
    """
    if message.has_error():
        return words_of_error(message.error.code)
    if not message.has_content():
        return Fault.NO_CONTENT
    content = message.content
    if len(content) > MAX_RECORDS:
        return Fault.TOO_MANY_RECORDS
    arrays = [(name, record) for name, record in content.items() if isinstance(record, ArrayRecord)]
    metrics = [record for record in content.values() if isinstance(record, MetricRecord)]
    if not arrays:
        return Fault.NO_ARRAYS
    if len(arrays) > 1:
        return Fault.TWO_ARRAYS
    if len(metrics) > 1:
        return Fault.TWO_METRICS
    name, record = arrays[0]
    vector = layout.read(record)
    if isinstance(vector, Fault):
        return vector
    if name != UPDATE:
        psi = (
            vector.numpy()
        )  # one thread: a pool of them costs more than it gains on one vector of a busy server
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(sent.numpy(), psi, out=psi)
            psi /= alpha
    told: Any = metrics[0] if metrics else {}
    return Answer(vector, told.get(loss_metric), told.get(count_metric))


def bytes_of(message: Message) -> int:
    """Bytes of the arrays in a message."""
    if not message.has_content():
        return 0
    records = (record for record in message.content.values() if isinstance(record, ArrayRecord))
    return sum(len(array.data) for record in records for array in record.values())
