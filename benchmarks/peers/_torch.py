"""The MLP in plain PyTorch, and how to train it, for peers that leave both to their user."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from worker import Array, Work


def network(work: Work) -> nn.Sequential:
    """The MLP with the parameters everybody starts from."""
    made: list[nn.Module] = []
    for weight, bias in work.layers():
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight))
            layer.bias.copy_(torch.from_numpy(bias))
        made += [layer, nn.ReLU()]
    return nn.Sequential(*made[:-1])


def examples(work: Work) -> tuple[Tensor, Tensor]:
    """Inputs (n, m, features) and labels (n, m)."""
    return torch.from_numpy(work.flat_inputs), torch.from_numpy(work.labels)


def train(model: nn.Module, x: Tensor, y: Tensor, work: Work) -> float:
    """All epochs of SGD over one client's examples, ready slices of them; its loss over all of them afterwards."""
    optimizer = torch.optim.SGD(model.parameters(), lr=work.lr)
    loss_of = nn.CrossEntropyLoss()
    for _ in range(work.epochs):
        for xs, ys in zip(torch.split(x, work.batch), torch.split(y, work.batch), strict=True):
            optimizer.zero_grad()
            loss_of(model(xs), ys).backward()
            optimizer.step()
    with torch.no_grad():
        return float(loss_of(model(x), y))


def flat(model: nn.Module) -> Tensor:
    """The model's parameters (d,)."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def stacked(made: list[tuple[Any, float]]) -> tuple[Array, Array]:
    """Models (n, d) and losses (n,) of what each client came back with."""
    import numpy as np

    return np.stack([np.asarray(model) for model, _ in made]), np.array([loss for _, loss in made])
