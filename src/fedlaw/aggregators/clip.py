"""Clipping of rows to a norm, fixed or found from the rows (pre-aggregators)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedlaw._checks import check_integer, check_positive
from fedlaw._linalg import clip_factors, median, row_norms
from fedlaw._pages import large_empty
from fedlaw.aggregators.base import (
    IDENTICAL,
    PERMUTATION,
    SCALE,
    Aggregate,
    PreAggregator,
    State,
    registry,
)


def _clipped(updates: Tensor, norms: Tensor, radius: Tensor | float) -> Aggregate:
    factors = clip_factors(norms, radius)
    clipped = large_empty(tuple(updates.shape), updates)
    torch.mul(updates.detach(), factors.detach().unsqueeze(-1), out=clipped)
    return Aggregate(clipped, torch.diag_embed(factors))


@registry.register("clip")
@dataclass(frozen=True)
class Clip(PreAggregator):
    """Rows scaled down to a norm of at most `radius` (a pre-aggregator).

    x_i <- x_i min(1, radius / |x_i|).

    Settings:
        radius: a number, or "median": the median of the rows' norms.

    >>> Clip(radius=1.0)(torch.tensor([[3.0, 4.0], [0.3, 0.4]])).vector
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])

    Reference: Sun, Kairouz, Suresh, McMahan, *Can You Really Backdoor Federated Learning?*, 2019.
    """

    radius: float | Literal["median"] = "median"

    invariants: ClassVar[frozenset[str]] = frozenset({PERMUTATION})

    def __post_init__(self) -> None:
        if self.radius != "median":
            check_positive('radius (unless it is "median")', self.radius)

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
        norms = row_norms(updates)
        radius = median(norms).unsqueeze(-1) if isinstance(self.radius, str) else self.radius
        return _clipped(updates, norms, radius)


@registry.register("arc")
@dataclass(frozen=True)
class ARC(PreAggregator):
    """Adaptive robust clipping: the largest rows scaled down to the next norm (a pre-aggregator).

    k = floor(2 f / n (n - f)); the k rows of largest norm are clipped to the norm of the (k + 1)-th largest.
    For f = 0 nothing is clipped.

    Settings:
        f: how many of the rows may be malicious; needs n >= 2f + 1 rows.

    >>> ARC(f=1)(torch.tensor([[1.0], [2.0], [9.0]])).vector.mT
    tensor([[1., 2., 2.]])

    Reference: Allouah, Guerraoui, Gupta, Jellouli, Rizk, Stephan, *Adaptive Gradient Clipping for Robust
    Federated Learning*, ICLR 2025.
    """

    f: int

    invariants: ClassVar[frozenset[str]] = frozenset({PERMUTATION, SCALE, IDENTICAL})

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
        clipped = 2 * self.f * (n - self.f) // n
        norms = row_norms(updates)
        radius = norms.sort(dim=-1).values[..., n - clipped - 1]
        return _clipped(updates, norms, radius.unsqueeze(-1))
