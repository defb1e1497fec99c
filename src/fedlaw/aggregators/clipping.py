"""Centred clipping: steps from a point towards the rows, none longer than a radius."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedlaw._checks import check_choice, check_integer, check_positive
from fedlaw._linalg import clip_factors, distances_to, row_squares, weighted_sum
from fedlaw.aggregators.base import (
    BOUNDED,
    PERMUTATION,
    Aggregate,
    Rule,
    State,
    registry,
)


@registry.register("centered_clipping")
@dataclass(frozen=True)
class CenteredClipping(Rule):
    """Centred clipping: the mean of differences from the last aggregate, each clipped.

    v <- v + 1/n sum_i (x_i - v) min(1, tau / |x_i - v|), `iterations` times. However far away, a row moves v
    by tau / n a step at most.

    With start v0 the result is (1 - sum_i w_i) v0 + sum_i w_i x_i, w being the weights it returns. With
    "last" v0 is the `last` of the state, and the state returned holds the new aggregate; it fits any number
    of rows.

    Settings:
        tau: clipping radius, in the units of the updates. iterations: number of steps. start: v0: "last" (the
        last round's aggregate, 0 in the first), "zero", or "mean" (not bounded any more).

    >>> CenteredClipping(tau=1.0)(torch.tensor([[0.5], [1.0], [900.0]])).vector
    tensor([0.8333])

    Reference: Karimireddy, He, Jaggi, *Learning from History for Byzantine Robust Optimization*, ICML 2021.
    """

    tau: float = 10.0
    iterations: int = 1
    start: Literal["last", "zero", "mean"] = "last"

    invariants: ClassVar[frozenset[str]] = frozenset({PERMUTATION, BOUNDED})

    def __post_init__(self) -> None:
        check_positive("tau", self.tau)
        check_integer("iterations", self.iterations, 1)
        check_choice("start", self.start, ("last", "zero", "mean"))

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
        vector = torch.zeros_like(updates[..., 0, :])
        weights = torch.zeros(updates.shape[:-1], dtype=torch.float64, device=updates.device)
        if self.start == "last" and state is not None:
            vector = state["last"].to(vector)
            if vector.shape != updates[..., 0, :].shape:
                raise ValueError(
                    f"the state's last aggregate has shape {tuple(vector.shape)}, updates need "
                    f"{tuple(updates[..., 0, :].shape)}: pass the state of the same model, or None"
                )
        elif self.start == "mean":
            weights = weights + 1.0 / n
            vector = weighted_sum(weights, updates)
        # At zero a distance is a length; lengths are worth having where distances are wanted more than once.
        at_zero = self.start == "zero" or (self.start == "last" and state is None)
        squares = row_squares(updates) if at_zero or self.iterations > 1 else None
        for step in range(self.iterations):
            if squares is not None and at_zero and step == 0:
                distances = squares.sqrt()
            else:
                distances = distances_to(updates, vector, squares=squares)
            factors = clip_factors(distances, self.tau) / n
            kept = 1 - factors.sum(-1, keepdim=True)
            weights = kept * weights + factors
            vector = kept.to(vector.dtype) * vector + weighted_sum(factors, updates)
        return Aggregate(
            vector, weights.to(updates.dtype), {"last": vector.clone()} if self.start == "last" else None
        )
