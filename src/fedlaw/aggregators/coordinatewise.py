"""Rules that look at one coordinate at a time: median, trimmed mean, mean around the median."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedlaw._checks import check_integer
from fedlaw._linalg import reduce_sorted_columns
from fedlaw.aggregators.base import (
    BOUNDED,
    IDENTICAL,
    PERMUTATION,
    ROBUST,
    SCALE,
    TRANSLATION,
    Aggregate,
    Rule,
    State,
    registry,
)

_ALL = frozenset({PERMUTATION, TRANSLATION, SCALE, IDENTICAL, BOUNDED, ROBUST})


def middle(columns: Tensor) -> Tensor:
    """Median (c,) of sorted columns (c, n); of an even number the mean of the middle two."""
    n = columns.shape[-1]
    # Halves before the sum: two values near the type's largest must not overflow.
    return columns[:, (n - 1) // 2] / 2 + columns[:, n // 2] / 2


def mean_around_median(columns: Tensor, nearest: int) -> Tensor:
    """Mean (c,) of the `nearest` values closest to the median, of sorted columns (c, n).

    The values closest to a point are neighbours in sorted order, so it is enough to find where their window
    starts: it moves up while the value it would take in is closer than the one it would leave behind. Of two
    values at the same distance the smaller one is kept, which depends on no order of the rows.
    """
    n = columns.shape[-1]
    if nearest == n:
        return columns.mean(-1)
    center = middle(columns).unsqueeze(-1)
    start = ((center - columns[:, : n - nearest]) > (columns[:, nearest:] - center)).sum(-1, keepdim=True)
    return _window_sums(columns, start, nearest) / nearest


def _window_sums(columns: Tensor, start: Tensor, width: int) -> Tensor:
    """Sums (c,) of `width` entries of each of the columns (c, n), from `start` (c, 1) on."""
    c, n = columns.shape
    if columns.device.type != "cpu" or not columns.is_contiguous():
        place = torch.arange(n, device=columns.device)
        return torch.where((place >= start) & (place < start + width), columns, 0.0).sum(-1)
    # Every other interval between these places in the flat array is a window; the sums between are not used.
    places = (torch.arange(0, c * n, n).unsqueeze(-1) + torch.cat([start, start + width], dim=-1)).flatten()
    within = places[:-1] if int(places[-1]) == c * n else places
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.add.reduceat(columns.numpy().reshape(-1), within.numpy())
    return torch.from_numpy(sums[::2])


@registry.register("median")
@dataclass(frozen=True)
class Median(Rule):
    """Coordinate-wise median.

    Of an even number of values, the mean of the two in the middle. Holds against fewer than half of the rows.

    >>> Median()(torch.tensor([[1.0, 5.0], [2.0, 4.0], [900.0, -900.0]])).vector
    tensor([2., 4.])

    Reference: Yin, Chen, Kannan, Bartlett, *Byzantine-Robust Distributed Learning: Towards Optimal
    Statistical Rates*, ICML 2018.
    """

    invariants: ClassVar[frozenset[str]] = _ALL

    def kappa(self, n: int) -> float:
        """4 (1 + f / (n - 2f))^2 at the largest f, (n - 1) // 2."""
        f = (n - 1) // 2
        return 4 * (1 + f / (n - 2 * f)) ** 2

    def __call__(
        self,
        updates: Tensor,
        *,
        counts: Tensor | None = None,
        state: State | None = None,
        generator: torch.Generator | None = None,
        reference: Tensor | None = None,
    ) -> Aggregate:
        self._require(updates)
        return Aggregate(reduce_sorted_columns(updates, middle))


@registry.register("trimmed_mean")
@dataclass(frozen=True)
class TrimmedMean(Rule):
    """Coordinate-wise mean without the f largest and the f smallest values.

    Settings:
        f: how many values to drop at either end of each coordinate; needs n >= 2f + 1 rows.

    >>> TrimmedMean(f=1)(torch.tensor([[1.0], [2.0], [4.0], [900.0]])).vector
    tensor([3.])

    Reference: Yin, Chen, Kannan, Bartlett, *Byzantine-Robust Distributed Learning: Towards Optimal
    Statistical Rates*, ICML 2018.
    """

    f: int

    invariants: ClassVar[frozenset[str]] = _ALL

    def __post_init__(self) -> None:
        check_integer("f", self.f)

    def minimum(self) -> int:
        return 2 * self.f + 1

    def kappa(self, n: int) -> float:
        """6f / (n - 2f) (1 + f / (n - 2f))."""
        ratio = self.f / (n - 2 * self.f)
        return 6 * ratio * (1 + ratio)

    def __call__(
        self,
        updates: Tensor,
        *,
        counts: Tensor | None = None,
        state: State | None = None,
        generator: torch.Generator | None = None,
        reference: Tensor | None = None,
    ) -> Aggregate:
        n = self._require(updates)
        return Aggregate(
            reduce_sorted_columns(updates, lambda columns: columns[:, self.f : n - self.f].mean(-1))
        )


@registry.register("meamed")
@dataclass(frozen=True)
class Meamed(Rule):
    """Coordinate-wise mean of the n - f values nearest to the median.

    Of two values equally far from the median on either side, the smaller one counts as nearer.

    Settings:
        f: how many values to leave out in each coordinate; needs n >= 2f + 1 rows.

    >>> Meamed(f=1)(torch.tensor([[1.0], [4.0], [5.0]])).vector
    tensor([4.5000])

    Reference: Xie, Koyejo, Gupta, *Generalized Byzantine-tolerant SGD*, 2018.
    """

    f: int

    invariants: ClassVar[frozenset[str]] = frozenset({PERMUTATION, TRANSLATION, SCALE, IDENTICAL, BOUNDED})

    def __post_init__(self) -> None:
        check_integer("f", self.f)

    def minimum(self) -> int:
        return 2 * self.f + 1

    def __call__(
        self,
        updates: Tensor,
        *,
        counts: Tensor | None = None,
        state: State | None = None,
        generator: torch.Generator | None = None,
        reference: Tensor | None = None,
    ) -> Aggregate:
        n = self._require(updates)
        return Aggregate(
            reduce_sorted_columns(updates, lambda columns: mean_around_median(columns, n - self.f))
        )
