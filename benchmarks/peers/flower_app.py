"""What a Flower client does here. A module of its own, so that Ray's actors import it instead of being sent it."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from _torch import examples, flat, network, train
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn
from worker import Work, read

app = ClientApp()


@cache
def _kept() -> tuple[Work, Any, Any, nn.Module]:
    """Everything that an actor reads once: examples and a model to load parameters into."""
    torch.set_num_threads(1)
    work = read(os.environ["BENCHMARK_FOLDER"], os.environ["BENCHMARK_SETTINGS"])
    return (work, *examples(work), network(work))


@app.train()
def local_training(message: Message, context: Context) -> Message:
    """Train the client whose number Flower gave this node."""
    work, x, y, model = _kept()
    cid = int(context.node_config["partition-id"])
    sent: Any = message.content["arrays"]["theta"]
    start = torch.from_numpy(sent.numpy().copy())
    with torch.no_grad():
        nn.utils.vector_to_parameters(start, model.parameters())
    loss = train(model, x[cid], y[cid], work)
    content: Any = {
        "arrays": ArrayRecord({"theta": Array(flat(model).numpy())}),
        "metrics": MetricRecord({"loss": loss, "client": cid}),
    }
    return Message(RecordDict(content), reply_to=message)
