"""What a data set is: raw inputs, labels, and what is known about their scale."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedlaw._imports import import_object, is_import_path
from fedlaw._registry import Registry


class DataError(ValueError):
    """Data that is missing, damaged, or not what it should be; one line, with the remedy."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """N labelled examples, as they were stored: nothing scaled, nothing split.

    Attributes:
        name: what to call it.
        inputs: (N, C, H, W) images or (N, d) rows, uint8 or float32, read-only.
        labels: (N,) int64 in 0 .. classes-1, read-only.
        classes: how many labels there are, seen or not.
        class_names: a name for each label, or empty.
        keys: (N,) who each example belongs to (a writer, a hospital), for the `natural` partition; or None.
        unit: the raw value that stands for 1 (255 for bytes); None: not known, taken from the training data.
        mean, std: of inputs / unit, one number or one per channel, where commonly agreed constants exist;
            None: taken from the training data.
    """

    name: str
    inputs: NDArray[Any]
    labels: NDArray[np.int64]
    classes: int
    class_names: tuple[str, ...] = ()
    keys: NDArray[Any] | None = None
    unit: float | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        """Check that the parts agree, and make them read-only."""
        inputs, labels = self.inputs, self.labels
        if inputs.ndim < 2 or inputs.dtype not in (np.dtype(np.uint8), np.dtype(np.float32)):
            raise DataError(
                f"{self.name}: inputs must be uint8 or float32 of shape (N, ...), "
                f"got {inputs.dtype} of shape {inputs.shape}"
            )
        if labels.dtype != np.int64 or labels.shape != inputs.shape[:1]:
            raise DataError(
                f"{self.name}: labels must be int64 of shape ({len(inputs)},), one for each input, "
                f"got {labels.dtype} of shape {labels.shape}"
            )
        if self.classes < 1 or (labels.size and not 0 <= labels.min() <= labels.max() < self.classes):
            raise DataError(f"{self.name}: labels must lie in 0 .. {self.classes - 1}, got {_range(labels)}")
        if self.class_names and len(self.class_names) != self.classes:
            raise DataError(f"{self.name}: {len(self.class_names)} class_names for {self.classes} classes")
        if self.keys is not None and self.keys.shape != labels.shape:
            raise DataError(f"{self.name}: keys must have shape {labels.shape}, got {self.keys.shape}")
        for field in ("inputs", "labels", "keys"):
            array = getattr(self, field)
            if array is not None:
                view = array.view()
                view.flags.writeable = False
                object.__setattr__(self, field, view)

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(int(size) for size in self.inputs.shape[1:])

    @property
    def is_image(self) -> bool:
        """Whether the inputs are images (C, H, W)."""
        return self.inputs.ndim == 4

    def subset(self, indices: NDArray[np.int64]) -> Dataset:
        """The examples at `indices`, in that order."""
        keys = None if self.keys is None else self.keys[indices]
        return replace(self, inputs=self.inputs[indices], labels=self.labels[indices], keys=keys)


def _range(labels: NDArray[Any]) -> str:
    return f"{labels.min()} to {labels.max()}" if labels.size else "none"


registry: Registry[Dataset] = Registry("dataset", "datasets")


def load(name: str, /, *, data_dir: Any = None, **settings: Any) -> Dataset:
    """A data set by name, or by the import path ``package.module:factory`` of a function that returns one.

    `data_dir` is the folder that holds the files of `mnist`, `fashion_mnist`, `cifar10` and `cifar100` (the
    layout is torchvision's); without it the environment variable FEDLAW_DATA is read. Sets that need no files
    ignore it.

    >>> load("digits").inputs.shape
    (1797, 1, 8, 8)
    """
    if is_import_path(name):
        made = import_object(name, "dataset")(**settings)
        if not isinstance(made, Dataset):
            raise ValueError(
                f"dataset {name!r} gave a {type(made).__name__}; return a Dataset (see fedlaw.data.from_arrays)"
            )
        return made
    if "data_dir" in registry.settings(name):
        settings["data_dir"] = data_dir
    return registry.create(name, **settings)
