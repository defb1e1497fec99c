"""Krum and Multi-Krum: trust the rows with the closest company."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlaw._checks import check_integer
from fedlaw._linalg import pairwise_sq_distances, scatter_weights, weighted_sum
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
    check_share,
    registry,
    resolve_share,
)

_ALL = frozenset({PERMUTATION, TRANSLATION, SCALE, IDENTICAL, BOUNDED, ROBUST})


def krum_scores(squared: Tensor, neighbors: int) -> Tensor:
    """Sum (..., n) of each row's `neighbors` smallest squared distances to other rows, from (..., n, n)."""
    others = squared.clone()
    others.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)  # a row is no neighbour of its own
    return others.sort(dim=-1).values[..., :neighbors].sum(-1)


def _neighbors(rule: Krum | MultiKrum, n: int) -> int:
    neighbors = resolve_share(rule.neighbors, n, n - rule.f - 2)
    return min(neighbors, n - 1) if isinstance(rule.neighbors, float) else neighbors


def _minimum(f: int, neighbors: int | float | None) -> int:
    if neighbors is None:
        return 2 * f + 3
    return max(2 * f + 1, neighbors + 1 if isinstance(neighbors, int) else 2)


def _kappa(f: int, n: int) -> float:
    return 6 * (1 + f / (n - 2 * f))


@registry.register("krum")
@dataclass(frozen=True)
class Krum(Rule):
    """The one update with the closest neighbours.

    score_i is the sum of the n - f - 2 smallest squared distances from x_i to other rows; the row of least
    score is the aggregate (the first, if several have it).

    Settings:
        f: how many of the rows may be malicious; needs n >= 2f + 3 rows (2f + 1 with explicit `neighbors`).
        neighbors: how many other rows count in a score; None: n - f - 2, n being the rows received; a float
        is
            a share of the rows received. ByzFL uses n - f - 1.

    >>> Krum(f=1)(torch.tensor([[0.0], [1.0], [2.0], [3.0], [900.0]])).vector
    tensor([1.])

    Reference: Blanchard, El Mhamdi, Guerraoui, Stainer, *Machine Learning with Adversaries: Byzantine
    Tolerant Gradient Descent*, NeurIPS 2017.
    """

    f: int
    neighbors: int | float | None = None

    invariants: ClassVar[frozenset[str]] = _ALL

    def __post_init__(self) -> None:
        check_integer("f", self.f)
        check_share("neighbors", self.neighbors)

    def minimum(self) -> int:
        return _minimum(self.f, self.neighbors)

    def kappa(self, n: int) -> float:
        """6 (1 + f / (n - 2f))."""
        return _kappa(self.f, n)

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
        scores = krum_scores(pairwise_sq_distances(updates), _neighbors(self, n))
        best = scores.argmin(dim=-1, keepdim=True)
        vector = torch.take_along_dim(updates, best.unsqueeze(-1), dim=-2).squeeze(-2)
        return Aggregate(vector, scatter_weights(best, n, updates))


@registry.register("multi_krum")
@dataclass(frozen=True)
class MultiKrum(Rule):
    """Mean of the updates with the closest neighbours.

    Scores as in Krum; the mean of the `selected` rows of least score (of equal scores, the first).

    Settings:
        f: how many of the rows may be malicious; needs n >= 2f + 3 rows (2f + 1 with explicit `neighbors`).
        selected: how many rows are averaged; None: n - f; a float is a share of the rows received. neighbors:
        how many other rows count in a score; None: n - f - 2; a float is a share of the rows received.

    >>> MultiKrum(f=1, selected=3)(torch.tensor([[0.0], [1.0], [2.0], [3.0], [900.0]])).vector
    tensor([1.])

    Reference: Blanchard, El Mhamdi, Guerraoui, Stainer, *Machine Learning with Adversaries: Byzantine
    Tolerant Gradient Descent*, NeurIPS 2017.
    """

    f: int
    selected: int | float | None = None
    neighbors: int | float | None = None

    invariants: ClassVar[frozenset[str]] = _ALL

    def __post_init__(self) -> None:
        check_integer("f", self.f)
        check_share("selected", self.selected)
        check_share("neighbors", self.neighbors)

    def minimum(self) -> int:
        least = _minimum(self.f, self.neighbors)
        return max(least, self.selected) if isinstance(self.selected, int) else least

    def kappa(self, n: int) -> float | None:
        """6 (1 + f / (n - 2f)) while at most n - f rows are selected."""
        return _kappa(self.f, n) if resolve_share(self.selected, n, n - self.f) <= n - self.f else None

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
        selected = resolve_share(self.selected, n, n - self.f)
        scores = krum_scores(pairwise_sq_distances(updates), _neighbors(self, n))
        weights = scatter_weights(scores.argsort(dim=-1, stable=True)[..., :selected], n, updates)
        return Aggregate(weighted_sum(weights, updates), weights)
