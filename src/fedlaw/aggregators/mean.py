"""The mean of the updates: what robust rules replace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlaw._linalg import weighted_sum
from fedlaw.aggregators.base import (
    IDENTICAL,
    PERMUTATION,
    SCALE,
    TRANSLATION,
    Aggregate,
    Rule,
    State,
    client_shares,
    registry,
)


@registry.register("mean", "fedavg")
@dataclass(frozen=True)
class Mean(Rule):
    """Mean of the updates, weighted by example counts (FedAvg).

    F(x) = sum_i n_i x_i / sum_i n_i. One client can move it anywhere, by its update or by its count: bound
    counts before they get here.

    Settings:
        weighted: use the counts when the caller gives them; False: 1/n each, whatever they are.

    >>> Mean()(torch.tensor([[0.0], [4.0]]), counts=torch.tensor([3, 1])).vector
    tensor([1.])

    Reference: McMahan, Moore, Ramage, Hampson, Agüera y Arcas, *Communication-Efficient Learning of Deep
    Networks from Decentralized Data*, AISTATS 2017.
    """

    weighted: bool = True

    invariants: ClassVar[frozenset[str]] = frozenset({PERMUTATION, TRANSLATION, SCALE, IDENTICAL})

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
        weights = client_shares(updates, counts if self.weighted else None).to(updates.dtype)
        return Aggregate(weighted_sum(weights, updates), weights)
