"""The networks that have names, each a plain `nn.Sequential` whose layers a simulator can read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import nn

from fedlaw._registry import Registry

registry: Registry[nn.Module] = Registry("model", "models")


def _widths(values: Any, setting: str) -> tuple[int, ...]:
    if not isinstance(values, list | tuple) or any(type(width) is not int or width < 1 for width in values):
        raise ValueError(f"{setting} must be a list of integers of at least 1, got {values!r}")
    return tuple(values)


def _dense(inputs: int, hidden: Sequence[int], classes: int) -> list[nn.Module]:
    """Linear layers with ReLU between them, from `inputs` through `hidden` to `classes`."""
    layers: list[nn.Module] = []
    for width in _widths(hidden, "hidden"):
        layers += [nn.Linear(inputs, width), nn.ReLU()]
        inputs = width
    return [*layers, nn.Linear(inputs, classes)]


@registry.register("mlp")
def mlp(input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (128, 64)) -> nn.Sequential:
    """Fully connected network with ReLU; three layers by default, as in the paper on MNIST.

    Flatten, then Linear and ReLU for each width of `hidden`, then Linear to the classes. On MNIST the default
    has 784*128+128 + 128*64+64 + 64*10+10 = 109,386 parameters.

    Settings:
        hidden: widths of the hidden layers; the paper does not give them.

    >>> [type(layer).__name__ for layer in mlp((1, 28, 28), 10)]
    ['Flatten', 'Linear', 'ReLU', 'Linear', 'ReLU', 'Linear']
    """
    return nn.Sequential(nn.Flatten(), *_dense(math.prod(input_shape), hidden, classes))


@registry.register("logistic")
def logistic(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Logistic regression: one linear layer, a convex problem.

    >>> [type(layer).__name__ for layer in logistic((20,), 3)]
    ['Flatten', 'Linear']
    """
    return nn.Sequential(nn.Flatten(), *_dense(math.prod(input_shape), (), classes))


@registry.register("cnn")
def cnn(
    input_shape: Sequence[int],
    classes: int,
    channels: Sequence[int] = (32, 64, 128),
    hidden: Sequence[int] = (),
    groups: int = 8,
) -> nn.Sequential:
    """Convolutional network with group normalization; four layers by default, as in the paper on CIFAR-10.

    For each number of `channels`: 3x3 convolution (padding 1), GroupNorm, ReLU, 2x2 max-pooling; then Flatten,
    the `hidden` fully connected layers with ReLU, and Linear to the classes. On CIFAR-10:

    ============ ======= ===========
    channels     hidden  parameters
    ============ ======= ===========
    32, 64, 128          114,186
    32, 64       128     545,290
    64, 128      128     1,126,026
    ============ ======= ===========

    Settings:
        channels: of the convolutions; the paper gives neither these nor `hidden`.
        hidden: widths of the fully connected layers before the last.
        groups: of the normalization; it must divide every number of channels.

    >>> sum(p.numel() for p in cnn((3, 32, 32), 10).parameters())
    114186

    Reference: Wu and He, "Group Normalization", ECCV 2018.
    """
    if len(input_shape) != 3:
        raise ValueError(
            f"model 'cnn' needs images (C, H, W), got inputs of shape {tuple(input_shape)}; use 'mlp'"
        )
    widths = _widths(channels, "channels")
    if not widths:
        raise ValueError("channels must list at least one convolution; use the model 'mlp' for none")
    depth, height, width = input_shape
    if min(height, width) >> len(widths) < 1:
        raise ValueError(
            f"channels {list(widths)} halve images of {height}x{width} {len(widths)} times, to nothing; use fewer"
        )
    layers: list[nn.Module] = []
    for out in widths:
        if groups < 1 or out % groups:
            raise ValueError(f"groups must divide every number of channels, got {groups} and {list(widths)}")
        layers += [nn.Conv2d(depth, out, 3, padding=1), nn.GroupNorm(groups, out), nn.ReLU(), nn.MaxPool2d(2)]
        depth = out
    features = depth * (height >> len(widths)) * (width >> len(widths))
    return nn.Sequential(*layers, nn.Flatten(), *_dense(features, hidden, classes))
