"""ByzFL: its `Client`, one object each, `compute_model_update` for as many batches as the epochs have.

Variant `loader`: examples come one by one through a DataLoader, as those that its DataDistributor makes do (without
the shuffle). Variant `ready`: the same DataLoader class over batches that are ready, the cheapest there is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
from _torch import examples, flat, network, stacked
from torch.utils.data import DataLoader, TensorDataset
from worker import Array, Work, serve


def without_torchvision() -> None:
    """Let ByzFL import torchvision's names, which only its own data sets use."""
    stub = ModuleType("torchvision")
    stub.datasets, stub.transforms = MagicMock(), MagicMock()  # type: ignore[attr-defined]
    sys.modules["torchvision"] = stub


def make(work: Work) -> tuple[Callable[[], Any], Callable[[Any], tuple[Array, Array]]]:
    """One round."""
    without_torchvision()
    from byzfl import Client
    from byzfl.fed_framework import models

    torch.set_num_threads(work.cores)
    models.benchmark_mlp = lambda: network(work)  # it looks models up by name, in this module
    x, y = examples(work)
    batches = -(-x.shape[1] // work.batch)

    def loader(i: int) -> Any:
        if work.variant == "loader":
            return DataLoader(TensorDataset(x[i], y[i]), batch_size=work.batch)
        ready = list(zip(torch.split(x[i], work.batch), torch.split(y[i], work.batch), strict=True))
        return DataLoader(ready, batch_size=None)  # type: ignore[arg-type]

    clients = [
        Client(
            {
                "model_name": "benchmark_mlp",
                "device": "cpu",
                "optimizer_name": "SGD",
                "learning_rate": work.lr,
                "loss_name": "CrossEntropyLoss",
                "weight_decay": 0.0,
                "milestones": [],
                "learning_rate_decay": 1.0,
                "LabelFlipping": False,
                "training_dataloader": loader(i),
                "momentum": 0.0,
                "nb_labels": work.classes,
                "store_per_client_metrics": False,
            }
        )
        for i in range(len(x))
    ]
    start = network(work).state_dict()

    def run() -> Any:
        made = []
        for i, client in enumerate(clients):
            client.set_model_state(start)
            client.compute_model_update(work.epochs * batches)
            with torch.no_grad():
                loss = float(client.criterion(client.model(x[i]), y[i]))
            made.append((client.get_flat_parameters(), loss))
        return made

    def results(made: Any) -> tuple[Array, Array]:
        assert made[0][0].shape == flat(network(work)).shape
        return stacked(made)

    return run, results


if __name__ == "__main__":
    serve(make, ("byzfl", "torch"))
