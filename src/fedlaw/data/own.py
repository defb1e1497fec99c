"""Data sets of one's own: arrays, and anything that torch would call a Dataset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedlaw.data.base import DataError, Dataset


def from_arrays(
    inputs: ArrayLike,
    labels: ArrayLike,
    *,
    name: str = "own",
    classes: int | None = None,
    class_names: Sequence[str] = (),
    keys: ArrayLike | None = None,
) -> Dataset:
    """A data set of one's own arrays (or tensors, or data frame columns).

    Args:
        inputs: (N, d) rows, (N, H, W) grey images or (N, C, H, W) images, any real dtype; bytes are kept as
            such, everything else becomes float32.
        labels: (N,) integers 0 .. classes-1, or names, which are numbered in sorted order.
        classes: how many labels there are; without it the largest label decides.
        class_names: what the labels are called; labels given as names bring their own.
        keys: (N,) who each example belongs to, for the `natural` partition.

    >>> data = from_arrays([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], ["ill", "well", "ill"])
    >>> data.classes, data.class_names, data.labels.tolist()
    (2, ('ill', 'well'), [0, 1, 0])
    """
    x = _array(inputs)
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim < 2 or len(x) == 0:
        raise DataError(
            f"{name}: inputs must be (N, d), (N, H, W) or (N, C, H, W) with N >= 1, got {x.shape}"
        )
    if x.ndim == 4 and x.shape[-1] in (3, 4) and x.shape[1] not in (1, 3, 4):
        raise DataError(
            f"{name}: inputs of shape {x.shape} look like (N, H, W, C); "
            "put the channels first: inputs.transpose(0, 3, 1, 2)"
        )
    if x.dtype.kind not in "buif":
        raise DataError(
            f"{name}: inputs must be numbers, got dtype {x.dtype}; encode text and categories as numbers first"
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # what does not fit into float32 is reported below, once
            x = x.astype(np.float32)
        bad = ~np.isfinite(x).reshape(len(x), -1).all(axis=1)
        if bad.any():
            raise DataError(
                f"{name}: {int(bad.sum())} of {len(x)} inputs hold NaN or infinite values "
                f"(the first is number {int(bad.argmax())}); fill or drop them"
            )
    y, found_names = _labels(labels, name)
    if classes is None:
        classes = len(found_names) or len(class_names) or int(y.max(initial=0)) + 1
    return Dataset(
        name=name,
        inputs=x,
        labels=y,
        classes=classes,
        class_names=tuple(class_names) or found_names,
        keys=None if keys is None else np.asarray(keys),
        unit=255.0 if x.dtype == np.uint8 and x.ndim == 4 else None,
    )


def from_torch(dataset: Any, *, name: str = "own", **settings: Any) -> Dataset:
    """A data set of a torch Dataset (map-style), whose items are (input, label).

    Every item is read once, here, with whatever transform the dataset applies; a random transform is thus drawn
    once, not per epoch. PIL images become bytes (C, H, W). Further settings are those of `from_arrays`.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> items = TensorDataset(torch.zeros(4, 3), torch.tensor([0, 1, 1, 0]))
    >>> from_torch(items).inputs.shape
    (4, 3)
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise DataError(
            f"{name}: from_torch needs a map-style dataset (len and [index]), got {type(dataset).__name__}; "
            "collect an iterable one into arrays and use from_arrays"
        )
    if len(dataset) == 0:
        raise DataError(f"{name}: the dataset has no items")
    inputs: list[NDArray[Any]] = []
    labels: list[Any] = []
    for index in range(len(dataset)):
        item = dataset[index]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(f"{name}: item {index} is not a pair (input, label)")
        inputs.append(_item(item[0]))
        labels.append(_array(item[1]).item())
        if inputs[-1].shape != inputs[0].shape:
            raise DataError(
                f"{name}: item {index} has shape {inputs[-1].shape}, item 0 {inputs[0].shape}; "
                "all inputs must have one shape (resize or pad them in the dataset's transform)"
            )
    return from_arrays(np.stack(inputs), labels, name=name, **settings)


def _array(values: Any) -> NDArray[Any]:
    """A copy as an array: what the caller does to the original later changes nothing here."""
    if hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    return np.array(values)


def _item(value: Any) -> NDArray[Any]:
    array = _array(value)
    if hasattr(value, "getbands"):  # a PIL image: (H, W) or (H, W, C)
        array = array[None] if array.ndim == 2 else array.transpose(2, 0, 1)
    return array


def _labels(labels: ArrayLike, name: str) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    y = _array(labels)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise DataError(f"{name}: labels must have shape (N,), got {y.shape}")
    if y.dtype.kind in "USO":
        if not all(isinstance(label, str) for label in y.tolist()):
            raise DataError(f"{name}: labels must be integers or names, got a mixture")
        names, numbers = np.unique(y.astype(str), return_inverse=True)
        return numbers.astype(np.int64), tuple(names.tolist())
    if y.dtype.kind == "f" and not (np.isfinite(y) & (y == np.floor(y))).all():
        raise DataError(f"{name}: labels must be integers 0 .. classes-1 or names, got fractions or NaN")
    if y.dtype.kind not in "buif":
        raise DataError(f"{name}: labels must be integers or names, got dtype {y.dtype}")
    return y.astype(np.int64), ()
