"""A small federation in memory: ten clients, a linear problem, real client code, and faults on demand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from fedlaw.flower import Federation, LocalGrid, Task, Trained, client

CLIENTS, FEATURES, CLASSES, ALPHA = 10, 4, 3, 0.3
FAULTY = 105
ATTACKERS = (108, 109)
CENTERS = torch.tensor([[2.0, 0, 0, 0], [0, 2.0, 0, 0], [0, 0, 2.0, 0]])

Fault = Callable[[Message, Message], list[Message]]


@cache
def examples(seed: int, count: int = 60) -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, CLASSES, (count,), generator=stream)
    return CENTERS[labels] + torch.randn(count, FEATURES, generator=stream), labels


def model() -> ArrayRecord:
    return ArrayRecord({"weight": _array(np.zeros((CLASSES, FEATURES))), "bias": _array(np.zeros(CLASSES))})


def _array(values: Any) -> Any:
    from flwr.app import Array

    return Array(np.asarray(values, np.float32))


def accuracy(arrays: ArrayRecord) -> float:
    state = arrays.to_torch_state_dict()
    inputs, labels = examples(999, 600)
    return float(((inputs @ state["weight"].T + state["bias"]).argmax(1) == labels).double().mean())


def fit(state: dict[str, Tensor], part: int) -> Trained:
    """Five steps of gradient descent; the last two clients send the opposite of what they learned."""
    inputs, labels = examples(part)
    trained = {name: x.clone() for name, x in state.items()}
    for _ in range(5):
        scores = inputs @ trained["weight"].T + trained["bias"]
        error = (scores.softmax(1) - torch.nn.functional.one_hot(labels, CLASSES)) / len(labels)
        trained["weight"] -= ALPHA * error.T @ inputs
        trained["bias"] -= ALPHA * error.sum(0)
    loss = torch.nn.functional.cross_entropy(inputs @ trained["weight"].T + trained["bias"], labels)
    if 100 + part in ATTACKERS:
        trained = {name: 2 * state[name] - x for name, x in trained.items()}
    return Trained(trained, float(loss), len(labels))


def wrapped_app() -> ClientApp:
    """The training function behind `fedlaw.flower.client`."""

    def train(state: dict[str, Tensor], task: Task) -> Trained:
        return fit(state, int(task.context.node_config["partition-id"]))

    return client(train)


def plain_app() -> ClientApp:
    """The same clients as anybody would write them for FedAvg."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        state = message.content["arrays"].to_torch_state_dict()
        trained = fit(state, int(context.node_config["partition-id"]))
        content = {
            "arrays": ArrayRecord(dict(trained.state)),
            "metrics": MetricRecord({"train_loss": trained.loss, "num-examples": trained.examples}),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


class FaultyGrid(LocalGrid):
    """One node breaks: `fault` makes of its request and its real reply what arrives, in the phases given."""

    def __init__(
        self, fault: Fault | None = None, phases: tuple[int, ...] = (1, 2), app: ClientApp | None = None
    ) -> None:
        super().__init__(app or plain_app(), CLIENTS)
        self.fault, self.phases = fault, phases
        self.asked: list[tuple[int, int, int]] = []

    def handle(self, message: Message) -> list[Message]:
        replies = super().handle(message)
        config = message.content["config"]
        phase, node = int(config["phase"]), message.metadata.dst_node_id
        self.asked.append((int(config["server-round"]), phase, node))
        if self.fault is None or node != FAULTY or phase not in self.phases:
            return replies
        return self.fault(message, replies[0])


def federation(**changes: Any) -> Federation:
    return Federation(**{"min_nodes": CLIENTS, "poll": 0.0, "wait": 0.0, **changes})
