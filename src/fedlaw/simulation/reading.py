"""Reading a Sequential: the layers that the batched backend has hand-written gradients for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_SPATIAL = (nn.Conv2d, nn.GroupNorm, nn.MaxPool2d)
_KNOWN = (nn.Linear, nn.ReLU, nn.Flatten, *_SPATIAL)


class UnknownLayer(ValueError):
    """The model has something that the batched backend has no hand-written gradient for."""


@dataclass(frozen=True)
class Part:
    """One layer of a model: its module, that module's name, and the shape of one example going in."""

    name: str
    module: nn.Module
    shape: tuple[int, ...]

    @property
    def trained(self) -> bool:
        """Whether it has parameters."""
        return next(self.module.parameters(), None) is not None


def read(model: nn.Module, shape: tuple[int, ...]) -> list[Part]:
    """The layers of `model`, for examples of `shape`.

    Raises:
        UnknownLayer: a layer is of another kind than those known, or is set up in a way that is not.
        ValueError: a layer does not fit the shape that reaches it.
    """
    parts: list[Part] = []
    for name, module in _leaves(model):
        part = Part(name, module, shape)
        reason = _objection(module, flat=len(shape) == 1)
        if part.trained and any(module is earlier.module for earlier in parts):
            reason = "it is used twice"
        if reason is not None:
            raise UnknownLayer(
                f"backend 'batched' cannot train layer {name!r}, {type(module).__name__}: {reason}; it knows "
                f"{', '.join(kind.__name__ for kind in _KNOWN)} in a Sequential; use backend='vmap' or 'auto'"
            )
        parts.append(part)
        shape = _shape_after(part)
    if len(shape) != 1:
        raise UnknownLayer(f"backend 'batched' needs a model that ends in class scores, not in shape {shape}")
    return parts


def convolves(parts: list[Part]) -> bool:
    """Whether examples enter the model as images, in channels and space."""
    first = next((part.module for part in parts if not isinstance(part.module, nn.ReLU)), None)
    return isinstance(first, _SPATIAL)


def _leaves(model: nn.Module, prefix: str = "model") -> Iterator[tuple[str, nn.Module]]:
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        for i, child in enumerate(model):
            yield from _leaves(child, f"{prefix}[{i}]")
    else:
        yield prefix, model


def _objection(module: nn.Module, flat: bool) -> str | None:
    """Why the layer cannot be trained here; None where it can."""
    if type(module) not in _KNOWN:  # a subclass may compute anything
        return "it is of no known kind"
    if any(not parameter.requires_grad for parameter in module.parameters()):
        return "its parameters are frozen"
    if isinstance(module, _SPATIAL) and flat:
        return "it works on images here, and a Flatten is before it"
    if isinstance(module, nn.Linear) and not flat:
        return "a Flatten must be before it"
    if isinstance(module, nn.Conv2d) and (
        module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str)
    ):
        return "it has groups, a padding given by name, or other than zero padding"
    if isinstance(module, nn.GroupNorm) and not module.affine:
        return "it is not affine"
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) != (1, -1):
        return "it flattens some of the dimensions only"
    return None


def _shape_after(part: Part) -> tuple[int, ...]:
    """The shape of one example that comes out."""
    module, shape = part.module, part.shape
    if isinstance(module, nn.Flatten):
        return (math.prod(shape),)
    if isinstance(module, nn.Linear):
        _fit(part, module.in_features, shape[0])
        return (module.out_features,)
    if isinstance(module, _SPATIAL) and len(shape) != 3:
        raise ValueError(
            f"layer {part.name!r} takes channels x height x width, the examples reach it as {shape}"
        )
    if isinstance(module, nn.GroupNorm):
        _fit(part, module.num_channels, shape[0])
    if isinstance(module, nn.Conv2d):
        _fit(part, module.in_channels, shape[0])
        return (module.out_channels, *_windows(module, shape[1:]))
    if isinstance(module, nn.MaxPool2d):
        return (shape[0], *_windows(module, shape[1:]))
    return shape


def _fit(part: Part, wants: int, gets: int) -> None:
    if wants != gets:
        raise ValueError(
            f"layer {part.name!r} takes {wants} channels or features, the examples have {gets} there"
        )


def _windows(module: nn.Conv2d | nn.MaxPool2d, shape: tuple[int, ...]) -> Iterator[int]:
    """Positions of the module's window along height and width."""
    ceil = isinstance(module, nn.MaxPool2d) and module.ceil_mode
    geometry = [pair(each) for each in (module.kernel_size, module.stride, module.padding, module.dilation)]
    for size, kernel, stride, padding, dilation in zip(shape, *geometry, strict=True):
        span = size + 2 * padding - dilation * (kernel - 1) - 1
        count = (-(-span // stride) if ceil else span // stride) + 1
        # A last window that would start in the padding on the right is dropped, as torch does.
        yield count - 1 if ceil and (count - 1) * stride >= size + padding else count


def pair(value: object) -> tuple[int, int]:
    """A setting of height and width, given as one number or as two."""
    if isinstance(value, int):
        return (value, value)
    assert isinstance(value, tuple | list), value
    height, width = value
    return (height, width)
