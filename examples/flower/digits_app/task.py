"""Data, model and local training: nothing in here knows of Flower or of FedLAW."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor, nn

from fedlaw.data import Examples, Prepared, load, partition, prepare

CLASSES = 10


@cache
def digits(seed: int) -> Prepared:
    """All of it, split and scaled; a real node would read its own files here."""
    return prepare(load("digits"), seed=seed)


def share_of(part: int, parts: int, seed: int) -> Examples:
    """The training examples of one node. Nodes differ: each label is divided unevenly (Dirichlet, 3)."""
    train = digits(seed).train
    shares = partition(
        "dirichlet", train.labels.numpy(), parts, alpha=3.0, generator=np.random.default_rng(seed)
    )
    own = torch.from_numpy(shares.indices[part])
    return Examples(train.inputs[own], train.labels[own])


def network(seed: int = 0) -> nn.Sequential:
    """A multi-layer perceptron, 64-64-10."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def train(model: nn.Module, data: Examples, *, epochs: int, learning_rate: float, seed: int) -> float:
    """Plain SGD, in place; returns the loss over all of the node's examples after it."""
    order = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for _ in range(epochs):
        for batch in torch.randperm(len(data.labels), generator=order).split(32):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.inputs[batch]), data.labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(data.inputs), data.labels))


@torch.no_grad()
def evaluate(model: nn.Module, data: Examples) -> dict[str, float]:
    """Accuracy and loss."""
    scores = model(data.inputs)
    return {
        "accuracy": float((scores.argmax(1) == data.labels).double().mean()),
        "loss": float(nn.functional.cross_entropy(scores, data.labels)),
    }


def poison(data: Examples, attack: str) -> Examples:
    """What a malicious node trains on."""
    return Examples(data.inputs, CLASSES - 1 - data.labels) if attack == "labels" else data


def forge(attack: str, before: dict[str, Tensor], after: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """What a malicious node sends in place of what it trained."""
    if attack == "sign":  # the opposite of what it learned
        return {name: 2 * before[name] - after[name] for name in after}
    if attack == "noise":
        stream = torch.Generator().manual_seed(seed)
        return {name: x + torch.randn(x.shape, generator=stream) for name, x in before.items()}
    return after
