"""A model as one flat vector: parameters first, then floating-point buffers, in a fixed order."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Slot(NamedTuple):
    """Where one tensor of the model lies in the vector: elements start .. stop-1."""

    name: str
    shape: torch.Size
    start: int
    stop: int


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter, then every buffer, by name; a tensor shared by two layers once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def check_trainable(model: nn.Module) -> None:
    """Refuse a model that cannot be averaged: its state must be floating-point numbers of one dtype.

    A counter (BatchNorm's ``num_batches_tracked``) has no mean, and the statistics that go with it leak what
    a client's data looks like and drift between clients: use GroupNorm.

    >>> check_trainable(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    Traceback (most recent call last):
    ...
    ValueError: model: buffer '1.num_batches_tracked' is torch.int64, and only ...
    """
    for name, buffer in model.named_buffers():
        if not buffer.is_floating_point():
            raise ValueError(
                f"model: buffer {name!r} is {buffer.dtype}, and only floating-point state can be averaged; "
                "use GroupNorm, or BatchNorm with track_running_stats=False"
            )
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(f"model: parameter {name!r} is {parameter.dtype}; it must be floating-point")
    dtypes = sorted({str(tensor.dtype) for tensor in _tensors(model).values()})
    if len(dtypes) > 1:
        raise ValueError(f"model: its state must be of one dtype, got {', '.join(dtypes)}; use model.float()")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("model: it has no parameter that trains")


def layout(model: nn.Module) -> tuple[Slot, ...]:
    """Where each parameter and floating-point buffer of the model lies in its vector.

    >>> [(slot.name, slot.start, slot.stop) for slot in layout(nn.Linear(3, 2))]
    [('weight', 0, 6), ('bias', 6, 8)]
    """
    check_trainable(model)
    slots, start = [], 0
    for name, tensor in _tensors(model).items():
        stop = start + tensor.numel()
        slots.append(Slot(name, tensor.shape, start, stop))
        start = stop
    return tuple(slots)


def flatten(model: nn.Module) -> Tensor:
    """The model's state as a vector (d,): a copy, without gradient.

    >>> flatten(nn.Linear(3, 2)).shape
    torch.Size([8])
    """
    check_trainable(model)
    return torch.cat([tensor.detach().reshape(-1) for tensor in _tensors(model).values()])


def unflatten(vector: Tensor, slots: tuple[Slot, ...]) -> dict[str, Tensor]:
    """Views of `vector` (..., d) by name, each (..., *shape): what `torch.func.functional_call` takes.

    >>> slots = layout(nn.Linear(3, 2))
    >>> {name: tuple(view.shape) for name, view in unflatten(torch.zeros(5, 8), slots).items()}
    {'weight': (5, 2, 3), 'bias': (5, 2)}
    """
    size = slots[-1].stop if slots else 0
    if vector.shape[-1] != size:
        raise ValueError(f"vector must have {size} elements in its last dimension, got {tuple(vector.shape)}")
    lead = vector.shape[:-1]
    # splitting one dimension of a view is a view again, even where `vector` itself is not contiguous
    return {slot.name: vector[..., slot.start : slot.stop].view((*lead, *slot.shape)) for slot in slots}


def assign(model: nn.Module, vector: Tensor) -> None:
    """Set the model's state to `vector` (d,), in place: the inverse of `flatten`.

    >>> model = nn.Linear(3, 2)
    >>> assign(model, torch.arange(8.0))
    >>> model.bias.tolist()
    [6.0, 7.0]
    """
    if vector.ndim != 1:
        raise ValueError(f"vector must have shape (d,), got {tuple(vector.shape)}")
    views = unflatten(vector, layout(model))
    with torch.no_grad():
        for name, tensor in _tensors(model).items():
            tensor.copy_(views[name])


def count_parameters(model: nn.Module) -> int:
    """d, the length of the model's vector.

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(math.prod(slot.shape) for slot in layout(model))
