"""From raw data to tensors that train: the seeded split, and the scaling of the inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlaw.data.base import DataError, Dataset

SCALINGS = ("standard", "unit", "none")
_SPLIT_STREAM = 0x5B117  # keeps the split's random stream apart from any other made of the same seed


class Split(NamedTuple):
    """Training, validation and test part of a data set."""

    train: Dataset
    validation: Dataset
    test: Dataset


class Examples(NamedTuple):
    """Scaled inputs (N, ...) float32 and labels (N,) int64."""

    inputs: Tensor
    labels: Tensor


@dataclass(frozen=True, eq=False)
class Scaling:
    """The affine map (x - shift) / factor that inputs go through.

    Attributes:
        shift, factor: float64, a scalar (), one per channel (C, 1, 1), or one per feature (d,).
        black: where it maps a black pixel (raw 0): a number, or float32 (C, 1, 1) when channels differ. Rows
            have no pixels: 0.0, which `standard` makes the mean of every feature.
    """

    shift: Tensor
    factor: Tensor
    black: float | Tensor

    def __call__(self, inputs: NDArray[Any]) -> Tensor:
        """`inputs` (N, ...) raw to float32."""
        scaled = torch.from_numpy(inputs.astype(np.float32))  # a copy, so the steps in place are ours
        return scaled.sub_(self.shift.float()).div_(self.factor.float())


@dataclass(frozen=True, eq=False)
class Prepared:
    """A data set ready to train on.

    Attributes:
        name, classes, class_names: as of the Dataset.
        input_shape: shape of one input.
        train, validation, test: scaled inputs and labels.
        scaling: the map that was applied, to be applied to whatever comes later; it knows `black`.
        keys: (N,) of the training examples, or None.
    """

    name: str
    classes: int
    class_names: tuple[str, ...]
    input_shape: tuple[int, ...]
    train: Examples
    validation: Examples
    test: Examples
    scaling: Scaling
    keys: NDArray[Any] | None

    @property
    def black(self) -> float | Tensor:
        """The value of a black pixel after scaling, for backdoor triggers."""
        return self.scaling.black


def split(
    dataset: Dataset, *, seed: int, fractions: Sequence[float] | Sequence[int] = (0.8, 0.1, 0.1)
) -> Split:
    """Training, validation and test data: a seeded random split, every example in at most one part.

    Args:
        dataset: all examples (of named sets: their training and test files together, as in the FedLAW paper).
        seed: decides the split, alone: neither global random state nor the numpy version matters.
        fractions: three numbers: fractions that sum to at most 1, or, as integers, counts of examples.

    >>> from fedlaw.data import load
    >>> [len(part) for part in split(load("digits"), seed=0)]
    [1438, 179, 180]
    >>> [len(part) for part in split(load("digits"), seed=0, fractions=(1500, 0, 297))]
    [1500, 0, 297]
    """
    ends = _ends(len(dataset), fractions)
    # Raw bits of a bit generator are numpy's only stream that is promised never to change; 64 of them tie, if
    # ever, harmlessly.
    bits = np.random.Philox(np.random.SeedSequence([_natural(seed), _SPLIT_STREAM])).random_raw(len(dataset))
    order = np.argsort(bits, kind="stable")
    starts = (0, *ends[:-1])
    return Split(*(dataset.subset(order[start:end]) for start, end in zip(starts, ends, strict=True)))


def _natural(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or seed < 0:
        raise ValueError(f"seed must be an integer of at least 0, got {seed!r}")
    return int(seed)


def _ends(total: int, fractions: Sequence[float] | Sequence[int]) -> tuple[int, int, int]:
    sizes = list(fractions)
    if len(sizes) != 3 or not all(size >= 0 for size in sizes):
        raise ValueError(
            f"fractions must be three numbers of at least 0 (train, validation, test), got {fractions}"
        )
    if all(isinstance(size, int) for size in sizes) and sum(sizes) > 1:
        cumulative = [int(end) for end in np.cumsum(sizes)]
        if cumulative[-1] > total:
            raise ValueError(f"fractions {fractions} ask for {cumulative[-1]} examples, there are {total}")
    else:
        sums = np.cumsum(sizes)
        if sums[-1] > 1 + 1e-9:
            raise ValueError(f"fractions must sum to at most 1, got {fractions}")
        cumulative = [min(total, int(np.floor(share * total + 0.5))) for share in sums]
    train, validation, test = cumulative
    if train == 0 or test == validation:
        raise ValueError(
            f"fractions {fractions} of {total} examples leave no training or no test data; raise their share"
        )
    return train, validation, test


def fit_scaling(train: Dataset, scaling: str = "standard") -> Scaling:
    """The scaling of the inputs, from known constants or from the training data alone.

    `standard`: mean 0 and standard deviation 1. The data set's own constants where it has them; otherwise
    those of `train`, one pair for all pixels of images, one per feature of rows. A constant feature is
    centred only. `unit`: to [0, 1], by the known largest value or the training data's range. `none`: as is.

    >>> from fedlaw.data import from_arrays
    >>> fit_scaling(from_arrays([[1.0, 5.0], [3.0, 5.0]], [0, 1])).shift.tolist()
    [2.0, 5.0]
    """
    if scaling not in SCALINGS:
        raise ValueError(f"scaling must be one of {', '.join(SCALINGS)}, got {scaling!r}")
    if len(train) == 0:
        raise DataError(f"{train.name}: no training data to take the scaling from")
    axes = None if train.is_image else 0
    shift: NDArray[Any] | float
    factor: NDArray[Any] | float
    if scaling == "none":
        shift, factor = 0.0, 1.0
    elif scaling == "unit" and train.unit is not None:
        shift, factor = 0.0, train.unit
    elif scaling == "unit":
        shift = train.inputs.min(axis=axes).astype(np.float64)
        factor = train.inputs.max(axis=axes) - shift
    elif train.mean is not None and train.std is not None:
        unit = 1.0 if train.unit is None else train.unit
        shift, factor = (unit * _per_channel(values) for values in (train.mean, train.std))
    else:
        shift = train.inputs.mean(axis=axes, dtype=np.float64)
        factor = train.inputs.std(axis=axes, dtype=np.float64)
    shift = np.asarray(shift, np.float64)
    factor = np.asarray(factor, np.float64)
    factor = np.where(factor > 1e-12 * np.maximum(1.0, np.abs(shift)), factor, 1.0)
    return Scaling(torch.from_numpy(shift), torch.from_numpy(factor), _black(shift, factor, train.is_image))


def _per_channel(values: tuple[float, ...]) -> NDArray[np.float64]:
    array = np.array(values, np.float64)
    return array[0] if len(values) == 1 else array.reshape(-1, 1, 1)


def _black(shift: NDArray[np.float64], factor: NDArray[np.float64], is_image: bool) -> float | Tensor:
    if not is_image:
        return 0.0
    black = -shift / factor
    return float(black) if black.ndim == 0 else torch.from_numpy(black).float()


def prepare(
    dataset: Dataset,
    *,
    seed: int,
    fractions: Sequence[float] | Sequence[int] = (0.8, 0.1, 0.1),
    scaling: str = "standard",
) -> Prepared:
    """Split and scale a data set: `split`, then `fit_scaling` on the training part, applied to all three.

    >>> from fedlaw.data import load
    >>> data = prepare(load("digits"), seed=0)
    >>> data.train.inputs.shape, data.test.labels.shape
    (torch.Size([1438, 1, 8, 8]), torch.Size([180]))
    """
    parts = split(dataset, seed=seed, fractions=fractions)
    scale = fit_scaling(parts.train, scaling)
    train, validation, test = (
        Examples(scale(part.inputs), torch.from_numpy(part.labels.copy())) for part in parts
    )
    return Prepared(
        name=dataset.name,
        classes=dataset.classes,
        class_names=dataset.class_names,
        input_shape=dataset.input_shape,
        train=train,
        validation=validation,
        test=test,
        scaling=scale,
        keys=parts.train.keys,
    )
