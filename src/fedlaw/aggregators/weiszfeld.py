"""Geometric median and Huber centre: weighted means whose weights fall with the distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedlaw._checks import check_choice, check_integer, check_number, check_positive
from fedlaw._linalg import distances_to, reduce_sorted_columns, row_squares, weighted_sum
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
    client_shares,
    registry,
)
from fedlaw.aggregators.coordinatewise import middle

Start = Literal["mean", "zero", "median"]
_STARTS = ("mean", "zero", "median")


def _starting_point(updates: Tensor, shares: Tensor, start: Start) -> Tensor:
    if start == "zero":
        return torch.zeros_like(updates[..., 0, :])
    if start == "median":
        return reduce_sorted_columns(updates, middle)
    return weighted_sum(shares, updates)


@registry.register("geometric_median", "rfa")
@dataclass(frozen=True)
class GeometricMedian(Rule):
    """Geometric median by smoothed Weiszfeld steps (RFA).

    v <- sum_i b_i x_i / sum_i b_i with b_i = a_i / max(nu, |v - x_i|), `iterations` times; a_i are the
    clients' shares of examples. Norms are over the whole vector. Few steps from the mean leave a far outlier
    some pull (each step divides its distance by about n / f): start at the median, or take more steps, where
    rows may be of any size.

    Settings:
        nu: smoothing, the distance below which a row's weight no longer grows.
        iterations: number of steps.
        start: where v starts: "mean" (weighted), "zero", or the coordinate-wise "median".
        weighted: a_i from the counts when the caller gives them; False: all alike. Counts are claims: a client that
            claims many examples is given the weight of many.

    >>> x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [900.0, 900.0]])
    >>> GeometricMedian(iterations=100)(x).vector
    tensor([0.5000, 0.5000])

    Reference: Pillutla, Kakade, Harchaoui, *Robust Aggregation for Federated Learning*, IEEE Transactions on
    Signal Processing, 2022.
    """

    nu: float = 1e-6
    iterations: int = 3
    start: Start = "mean"
    weighted: bool = False

    invariants: ClassVar[frozenset[str]] = frozenset(
        {PERMUTATION, TRANSLATION, SCALE, IDENTICAL, BOUNDED, ROBUST}
    )

    def __post_init__(self) -> None:
        check_positive("nu", self.nu)
        check_integer("iterations", self.iterations, 1)
        check_choice("start", self.start, _STARTS)

    def kappa(self, n: int) -> float:
        """4 (1 + f / (n - 2f))^2 at the largest f, (n - 1) // 2; of the exact geometric median."""
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
        shares = client_shares(updates, counts if self.weighted else None)
        vector = _starting_point(updates, shares, self.start)
        weights, squares = shares, row_squares(updates)
        for _ in range(self.iterations):
            pull = shares / distances_to(updates, vector, squares=squares).clamp(min=self.nu)
            weights = pull / pull.sum(-1, keepdim=True)
            vector = weighted_sum(weights, updates)
        return Aggregate(vector, weights.to(updates.dtype))


@registry.register("huber")
@dataclass(frozen=True)
class Huber(Rule):
    """Minimiser of the Huber loss of the distances: mean nearby, geometric median far away.

    Minimises sum_i n_i phi(|c - x_i|), phi(u) = u^2 / 2 up to tau and tau u - tau^2 / 2 beyond, by the fixed
    point b_i = min(1, tau / |c - x_i|), c <- sum_i n_i b_i x_i / sum_i n_i b_i. It ends when c moves by no
    more than tolerance * max(|c|, tau). The loss is convex: the start matters for speed only. tau to infinity
    gives the mean, tau to 0 the geometric median.

    Settings:
        tau: the distance up to which a row counts in full, in the units of the updates (2 / sqrt(examples per
            client) in the reference).
        tolerance: relative movement at which to stop.
        iterations: steps at most.
        start: "median" (coordinate-wise), "mean" or "zero". From the mean, rows of any size need many steps.
        weighted: n_i from the counts when the caller gives them; False: all alike. Counts are claims: a client that
            claims many examples is given the weight of many.

    >>> Huber(tau=1.0)(torch.tensor([[0.0], [1.0], [2.0], [900.0]])).vector
    tensor([1.5000])

    Reference: Zhao, Yu, Wan, *A Huber Loss Minimization Approach to Byzantine Robust Federated Learning*,
    AAAI 2024.
    """

    tau: float = 0.12
    tolerance: float = 1e-6
    iterations: int = 100
    start: Start = "median"
    weighted: bool = False

    invariants: ClassVar[frozenset[str]] = frozenset({PERMUTATION, TRANSLATION, IDENTICAL, BOUNDED})

    def __post_init__(self) -> None:
        check_positive("tau", self.tau)
        check_number("tolerance", self.tolerance, low=0)
        check_integer("iterations", self.iterations, 1)
        check_choice("start", self.start, _STARTS)

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
        shares = client_shares(updates, counts if self.weighted else None)
        vector = _starting_point(updates, shares, self.start)
        weights, squares = shares, row_squares(updates)
        running = torch.ones(updates.shape[:-2], dtype=torch.bool, device=updates.device)
        for _ in range(self.iterations):
            # Written as 1 / max(1, distance / tau): a row at the centre divides nothing by zero.
            pull = shares / (distances_to(updates, vector, squares=squares) / self.tau).clamp(min=1.0)
            moved_weights = pull / pull.sum(-1, keepdim=True)
            moved = weighted_sum(moved_weights, updates)
            step = torch.linalg.vector_norm(moved - vector, dim=-1)
            # tau is the length that matters; under the centre's own rounding nothing can be asked for.
            floor = 8 * torch.finfo(updates.dtype).eps * torch.linalg.vector_norm(moved, dim=-1)
            # Members of a batch that have arrived stay where they are, as if they were alone.
            weights = torch.where(running.unsqueeze(-1), moved_weights, weights)
            vector = torch.where(running.unsqueeze(-1), moved, vector)
            running = running & (step > floor.clamp(min=self.tolerance * self.tau))
            if not bool(running.any()):
                break
        return Aggregate(vector, weights.to(updates.dtype))
