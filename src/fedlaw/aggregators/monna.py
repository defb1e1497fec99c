"""MoNNA: the mean of the rows nearest to a trusted one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedlaw._checks import check_integer
from fedlaw._linalg import distances_to, scatter_weights, weighted_sum
from fedlaw.aggregators.base import (
    BOUNDED,
    IDENTICAL,
    SCALE,
    TRANSLATION,
    Aggregate,
    Rule,
    State,
    registry,
)


@registry.register("monna")
@dataclass(frozen=True)
class MoNNA(Rule):
    """Mean of the n - f rows nearest to a trusted row.

    The pivot is one of the rows (it counts as its own nearest) or the caller's reference. Whoever chooses the
    pivot chooses the aggregate: it has to be trusted. Of rows equally near the first ones are taken.

    Settings:
        f: how many of the rows may be malicious; needs n >= 2f + 1 rows.
        pivot: index of the trusted row, or "reference".

    >>> MoNNA(f=1)(torch.tensor([[0.0], [1.0], [900.0]])).vector
    tensor([0.5000])

    Reference: Farhadkhani, Guerraoui, Gupta, Hoang, Pinot, Stephan, *Robust Collaborative Learning with
    Linear Gradient Overhead*, ICML 2023.
    """

    f: int
    pivot: int | Literal["reference"] = 0

    invariants: ClassVar[frozenset[str]] = frozenset({TRANSLATION, SCALE, IDENTICAL, BOUNDED})

    def __post_init__(self) -> None:
        check_integer("f", self.f)
        if self.pivot != "reference":
            check_integer('pivot (unless it is "reference")', self.pivot)

    def minimum(self) -> int:
        return max(2 * self.f + 1, self.pivot + 1 if isinstance(self.pivot, int) else 1)

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
        if isinstance(self.pivot, int):
            pivot = updates[..., self.pivot, :]
        elif reference is None:
            raise ValueError(
                f"{self!r} needs reference=, an update the server trusts; or a row index as pivot"
            )
        else:
            pivot = reference.to(updates)
        nearest = distances_to(updates, pivot).argsort(dim=-1, stable=True)[..., : n - self.f]
        weights = scatter_weights(nearest, n, updates)
        return Aggregate(weighted_sum(weights, updates), weights)
