"""Models by name or import path, initialised from a seed of their own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fedlaw._imports import import_object, is_import_path
from fedlaw.models.networks import registry
from fedlaw.models.vector import check_trainable


def create(
    name: str, /, input_shape: Sequence[int], classes: int, *, seed: int, **settings: Any
) -> nn.Module:
    """A model by name, or by the import path ``package.module:factory`` of anything that returns an nn.Module.

    Args:
        name: mlp, cnn, logistic, or an import path. Importing runs that module: use paths you trust.
        input_shape: shape of one input, (C, H, W) or (d,).
        classes: number of outputs.
        seed: decides the initial parameters, alone: PyTorch's global random state is neither read nor changed.
        settings: the model's own. A factory by import path is given `input_shape` and `classes` too if it has
            parameters of these names.

    Raises:
        ValueError: an unknown name or setting, or a model that cannot be trained federatedly
            (see `check_trainable`).

    >>> model = create("mlp", (1, 28, 28), 10, seed=0, hidden=[32])
    >>> model(torch.zeros(5, 1, 28, 28)).shape
    torch.Size([5, 10])
    """
    shape = tuple(int(size) for size in input_shape)
    if not shape or min(shape) < 1 or classes < 1:
        raise ValueError(
            f"model {name!r}: input_shape and classes must be at least 1, got {shape} and {classes}"
        )
    with _seeded(seed):
        if not is_import_path(name):
            return registry.create(name, input_shape=shape, classes=classes, **settings)
        model = _call(
            name, import_object(name, "model"), {"input_shape": shape, "classes": classes}, settings
        )
        _check_outputs(name, model, shape, classes)
    return model


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """PyTorch's CPU generator set to `seed` within, and as it was afterwards; new tensors on the CPU."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 64:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
    # not torch.manual_seed: that would seed the GPUs' generators as well, which fork_rng does not restore here
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def _call(
    name: str, factory: Callable[..., Any], offered: dict[str, Any], settings: dict[str, Any]
) -> nn.Module:
    parameters = inspect.signature(factory).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for setting in settings:
        if setting not in parameters and not takes_any:
            raise ValueError(
                f"model {name!r} has no setting {setting!r}; it takes: {', '.join(parameters) or 'none'}"
            )
    arguments = {key: value for key, value in offered.items() if key in parameters} | settings
    model = factory(**arguments)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r} gave a {type(model).__name__}; it must return a torch.nn.Module")
    check_trainable(model)
    return model


def _check_outputs(name: str, model: nn.Module, shape: tuple[int, ...], classes: int) -> None:
    """One forward pass of two zero inputs: a wrong shape should be said now, not in the first round."""
    training = model.training
    parameter = next(model.parameters())
    try:
        with torch.no_grad():
            outputs = model.eval()(torch.zeros(2, *shape, dtype=parameter.dtype))
    except Exception as error:
        detail = str(error).split("\n")[0]
        raise ValueError(
            f"model {name!r} fails on inputs (2, {', '.join(map(str, shape))}): {detail}"
        ) from error
    finally:
        model.train(training)
    given = tuple(outputs.shape) if isinstance(outputs, torch.Tensor) else type(outputs).__name__
    if given != (2, classes):
        raise ValueError(
            f"model {name!r} must give outputs (N, {classes}), one per class; for N = 2 it gave {given}"
        )
