"""CAF: give less weight to rows that stand out along the direction of largest variance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlaw._checks import check_integer
from fedlaw._linalg import centered_gram, weighted_sum
from fedlaw.aggregators.base import (
    BOUNDED,
    IDENTICAL,
    PERMUTATION,
    SCALE,
    TRANSLATION,
    Aggregate,
    Rule,
    State,
    registry,
)

_STALL = 1e-3  # share of the weight that a step has to take


def _leading(gram: Tensor, masses: Tensor) -> tuple[Tensor, Tensor]:
    """Largest eigenvalue (...) of the weighted covariance of rows, and the rows' squared deviations (..., n) along
    its eigenvector, from the rows' Gram matrix (..., n, n) about any origin.

    With rows Y centred at their weighted mean and p the normalised masses, the covariance Y^T diag(p) Y (d x
    d) has the eigenvalues of B = diag(sqrt p) Y Y^T diag(sqrt p) (n x n): from B u = lambda u follows the
    eigenvector v = Y^T diag(sqrt p) u / sqrt(lambda), and Y v = Y Y^T diag(sqrt p) u / sqrt(lambda).
    """
    p = masses / masses.sum(-1, keepdim=True)
    shared = (gram @ p.unsqueeze(-1)).squeeze(-1)
    centered = gram - shared.unsqueeze(-1) - shared.unsqueeze(-2) + (p * shared).sum(-1)[..., None, None]
    root = p.sqrt()
    values, vectors = torch.linalg.eigh(root.unsqueeze(-1) * centered * root.unsqueeze(-2))
    value, u = values[..., -1].clamp(min=0), vectors[..., -1]
    along = (centered @ (root * u).unsqueeze(-1)).squeeze(-1).square()
    return value, along / value.unsqueeze(-1).clamp(min=torch.finfo(gram.dtype).tiny)


def _filtered(masses: Tensor, deviations: Tensor) -> Tensor:
    """Masses (..., n) after one step: less for rows that deviate, nothing for the one that deviates most."""
    tiny = torch.finfo(masses.dtype).tiny
    lighter = masses * (1 - deviations / deviations.amax(-1, keepdim=True).clamp(min=tiny))
    left = torch.where(masses > 0, deviations, 0.0)
    firmer = masses * (1 - left / left.amax(-1, keepdim=True).clamp(min=tiny))
    stalls = lighter.sum(-1, keepdim=True) > (1 - _STALL) * masses.sum(-1, keepdim=True)
    return torch.where(stalls, firmer, lighter)


@registry.register("caf")
@dataclass(frozen=True)
class CAF(Rule):
    """Covariance-bound agnostic filter: rows far out along the leading eigenvector lose weight.

    c_i = 1 at first. While sum_i c_i > n - 2f: take the mean of the rows with weights c, the leading eigenpair
    (lambda, v) of their covariance with these weights, t_i = <x_i - mean, v>^2, and
    c_i <- c_i (1 - t_i / max_j t_j). The aggregate is the mean that had the least lambda; for f = 0 the plain
    mean. Rows that have lost all weight still set the scale max_j t_j, as in ByzFL; where that would stall the
    filter (a step would take less than 1/1000 of the weight left), only rows with weight set it. So every step
    takes that much or silences a row, and it ends, however far out a row may be.

    The eigenpair is exact and comes from the n x n Gram matrix: only two passes over the rows depend on d, and
    nothing is drawn at random. (ByzFL takes one power step from a random vector: the same for d = 1.)

    Settings:
        f: how many of the rows may be malicious; needs n >= 2f + 1 rows.

    >>> CAF(f=1)(torch.tensor([[0.0], [1.0], [2.0], [3.0], [900.0]])).vector
    tensor([1.5009])

    Reference: Allouah, Guerraoui, Stephan, *Towards Trustworthy Federated Learning with Untrusted
    Participants*, ICML 2025.
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
        masses = torch.ones(updates.shape[:-1], dtype=torch.float64)
        best = masses / n
        if self.f > 0:
            gram = centered_gram(updates).cpu()  # small: an accelerator takes longer over its eigenvectors
            least = torch.full_like(masses[..., 0], torch.inf)
            running = masses.sum(-1) > n - 2 * self.f
            while bool(running.any()):
                value, deviations = _leading(gram, masses)
                better = running & (value < least)
                least = torch.where(better, value, least)
                best = torch.where(better.unsqueeze(-1), masses / masses.sum(-1, keepdim=True), best)
                lighter = _filtered(masses, deviations)
                # No spread left means nothing to filter; a filter that leaves nobody is not applied either.
                running = running & (lighter != masses).any(-1) & (lighter.sum(-1) > 0)
                masses = torch.where(running.unsqueeze(-1), lighter, masses)
                running = running & (masses.sum(-1) > n - 2 * self.f)
        weights = best.to(device=updates.device, dtype=updates.dtype)
        return Aggregate(weighted_sum(weights, updates), weights)
