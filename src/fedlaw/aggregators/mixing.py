"""Nearest-neighbour mixing: every row replaced by the mean of the rows around it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlaw._checks import check_integer
from fedlaw._linalg import pairwise_sq_distances, scatter_weights, weighted_sums
from fedlaw.aggregators.base import (
    IDENTICAL,
    PERMUTATION,
    SCALE,
    TRANSLATION,
    Aggregate,
    PreAggregator,
    State,
    registry,
)


@registry.register("nearest_neighbor_mixing", "nnm")
@dataclass(frozen=True)
class NearestNeighborMixing(PreAggregator):
    """Each row replaced by the mean of its n - f nearest rows, itself included (a pre-aggregator).

    Brings honest rows together before a rule looks at them: a (f, kappa)-robust rule becomes
    (f, 8 f / (n - f) (kappa + 1))-robust. Of rows equally near the first ones are taken.

    Settings:
        f: how many of the rows may be malicious; needs n >= 2f + 1 rows.

    >>> NearestNeighborMixing(f=1)(torch.tensor([[0.0], [1.0], [3.0]])).vector.mT
    tensor([[0.5000, 0.5000, 2.0000]])

    Reference: Allouah, Farhadkhani, Guerraoui, Gupta, Pinot, Stephan, *Fixing by Mixing: A Recipe for Optimal
    Byzantine ML under Heterogeneity*, AISTATS 2023.
    """

    f: int

    invariants: ClassVar[frozenset[str]] = frozenset({PERMUTATION, TRANSLATION, SCALE, IDENTICAL})

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
        squared = pairwise_sq_distances(updates)
        squared.diagonal(dim1=-2, dim2=-1).fill_(-1.0)  # itself first, even among copies
        nearest = squared.argsort(dim=-1, stable=True)[..., : n - self.f]
        weights = scatter_weights(nearest, n, updates)
        return Aggregate(weighted_sums(weights, updates), weights)
