"""FLTrust: updates count as far as they point where the server's own update points."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlaw._linalg import row_norms, row_products, weighted_sum
from fedlaw.aggregators.base import BOUNDED, PERMUTATION, Aggregate, Rule, State, registry


@registry.register("fltrust")
@dataclass(frozen=True)
class FLTrust(Rule):
    """Mean of the updates, rescaled to a trusted update's norm and weighted by their cosine with it.

    With g the reference: TS_i = max(0, cos(x_i, g)) and F = sum_i TS_i (|g| / |x_i|) x_i / sum_i TS_i; 0 if
    every TS_i is 0. The server computes g from a small clean data set of its own; without `reference` the
    rule refuses to work.

    >>> x = torch.tensor([[2.0, 0.0], [-9.0, 0.0], [0.0, 3.0]])
    >>> FLTrust()(x, reference=torch.tensor([1.0, 0.0])).vector
    tensor([1., 0.])

    Reference: Cao, Fang, Liu, Gong, *FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping*,
    NDSS 2021.
    """

    invariants: ClassVar[frozenset[str]] = frozenset({PERMUTATION, BOUNDED})

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
        if reference is None:
            raise ValueError(
                "fltrust needs reference=, the update of the server's own trusted data; without one use a rule "
                "that trusts nobody, such as geometric_median"
            )
        tiny = torch.finfo(torch.float64).tiny
        reference = reference.to(updates)
        norms = row_norms(updates).to(torch.float64)
        length = torch.linalg.vector_norm(reference, dim=-1, keepdim=True).to(torch.float64)
        # A row so small that its norm is zero in the updates' own type has no direction that could be trusted.
        products = torch.where(norms > 0, row_products(updates, reference), 0.0)
        trust = (products / (norms * length).clamp(min=tiny)).clamp(0, 1)
        weights = trust / trust.sum(-1, keepdim=True).clamp(min=tiny) * length / norms.clamp(min=tiny)
        weights = weights.to(updates.dtype)
        return Aggregate(weighted_sum(weights, updates), weights)
