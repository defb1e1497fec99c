"""A local training function as a Flower ClientApp that answers both phases."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedlaw.flower.federation import log
from fedlaw.flower.replies import NOT_UNDERSTOOD, RESULT_UNUSABLE, TRAINING_FAILED, UPDATE, words_of_error
from fedlaw.server.protocol import LossPoint


@dataclass(frozen=True)
class Task:
    """What a client is asked to do.

    Attributes:
        round: from 1. phase: 1, or 2 (the look-ahead model); training is the same in both.
        loss_point: where the loss, over all of the client's data, is to be taken: at the model received ("before"
            local training) or at the trained one ("after").
        alpha: the step size, the learning rate of local training.
        config: whatever else the server sent. context: Flower's, with node_config and run_config.
    """

    round: int
    phase: int
    loss_point: LossPoint
    alpha: float
    config: ConfigRecord
    context: Context


class Trained(NamedTuple):
    """What local training came to: the trained state, the loss at the task's loss point, how many examples."""

    state: Mapping[str, Tensor]
    loss: float
    examples: int


TrainFn = Callable[[dict[str, Tensor], Task], Trained]


def client(
    train: TrainFn, *, loss_metric: str = "train_loss", count_metric: str = "num-examples"
) -> ClientApp:
    """Make a ClientApp of a local training function.

    The app answers both phases with the pseudo-gradient (theta - psi) / alpha, the loss and the example count. If
    `train` raises, the server learns a fixed error code and nothing else: exception texts can quote data. The
    text itself is in the log of the client's own machine.

    Args:
        train: given the model's state by name, and the task, returns `Trained(state, loss, examples)`. It must
            not keep what it returns.
        loss_metric, count_metric: as in the server's `Federation`.

    >>> def train(state, task):
    ...     return Trained({name: 0.5 * x for name, x in state.items()}, loss=1.0, examples=7)
    >>> app = client(train)
    """
    app = ClientApp()

    @app.train()
    def answer(message: Message, context: Context) -> Message:
        def fail(code: int) -> Message:
            log.exception("fedlaw client: %s", words_of_error(code))
            return Message(Error(code, words_of_error(code)), reply_to=message)

        try:
            theta, task = _request(message, context)
        except Exception:
            return fail(NOT_UNDERSTOOD)
        try:
            trained = train({name: tensor.clone() for name, tensor in theta.items()}, task)
        except Exception:
            return fail(TRAINING_FAILED)
        try:
            content = RecordDict(
                {
                    UPDATE: _update(theta, trained.state, task.alpha),
                    "metrics": MetricRecord(
                        {loss_metric: float(trained.loss), count_metric: int(trained.examples)}
                    ),
                }
            )
        except Exception:
            return fail(RESULT_UNUSABLE)
        return Message(content, reply_to=message)

    return app


def _request(message: Message, context: Context) -> tuple[dict[str, Tensor], Task]:
    content = message.content
    (arrays,) = (record for record in content.values() if isinstance(record, ArrayRecord))
    (config,) = (record for record in content.values() if isinstance(record, ConfigRecord))
    theta: dict[str, Tensor] = dict(arrays.to_torch_state_dict())
    task = Task(
        round=int(cast(Any, config["server-round"])),
        phase=int(cast(Any, config["phase"])),
        loss_point=cast(LossPoint, config["loss-point"]),
        alpha=float(cast(Any, config["alpha"])),
        config=config,
        context=context,
    )
    return theta, task


def _update(theta: Mapping[str, Tensor], psi: Mapping[str, Tensor], alpha: float) -> ArrayRecord:
    """(theta - psi) / alpha, array by array, divided in double precision."""
    if set(theta) != set(psi):
        raise ValueError("the trained state must have the names of the state it was given")
    arrays = {}
    for name, before in theta.items():
        after = psi[name].detach().cpu()
        if after.shape != before.shape:
            raise ValueError(f"the trained {name!r} must keep its shape")
        step = (before.to(torch.float64) - after.to(torch.float64)) / alpha
        arrays[name] = Array(step.to(before.dtype).numpy())
    return ArrayRecord(arrays)
