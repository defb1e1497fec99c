"""FoolsGold: clients whose updates agree too well over time lose weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlaw._checks import check_positive
from fedlaw._linalg import gram, weighted_sum
from fedlaw.aggregators.base import (
    PERMUTATION,
    SCALE,
    Aggregate,
    Rule,
    State,
    registry,
)


def foolsgold_weights(similarity: Tensor, confidence: float) -> Tensor:
    """Weights (..., n) in [0, 1] from cosine similarities (..., n, n) of the clients' histories."""
    eye = torch.eye(similarity.shape[-1], dtype=torch.bool, device=similarity.device)
    others = similarity.masked_fill(eye, -torch.inf)
    closest = others.amax(-1)
    # Pardoning: client i is compared less strictly with those who have closer company than i has itself.
    ratio = closest.unsqueeze(-1) / closest.unsqueeze(-2)
    pardoned = torch.where(closest.unsqueeze(-2) > closest.unsqueeze(-1), others * ratio, others)
    trust = (1 - pardoned.masked_fill(eye, -torch.inf).amax(-1)).clamp(0, 1)
    trust = trust / trust.amax(-1, keepdim=True).clamp(min=torch.finfo(trust.dtype).tiny)
    trust = trust.clamp(max=0.99)  # 1 would have an infinite logit
    return (confidence * torch.logit(trust) + 0.5).clamp(0, 1)


@registry.register("foolsgold")
@dataclass(frozen=True)
class FoolsGold(Rule):
    """Mean in which clients with similar histories (Sybils) lose weight.

    H_i is the sum of client i's updates so far, cs_ij the cosine of H_i and H_j, v_i = max_j cs_ij. Where v_j
    > v_i, cs_ij is multiplied by v_i / v_j. a_i = 1 - max_j cs_ij in [0, 1], divided by the largest, then
    through confidence * ln(a / (1 - a)) + 1/2 and cut to [0, 1]. The aggregate is sum_i a_i x_i / sum_i a_i,
    or 0 if all a_i are 0 (everybody says the same). It needs no f, and only copies frighten it: one attacker
    alone has full weight.

    The state keeps the histories (..., n, d): pass it back only with the same clients in the same order.

    Settings:
        confidence: steepness of the logit.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]])
    >>> FoolsGold()(x).weights
    tensor([0.5000, 0.5000, 0.0000, 0.0000])

    Reference: Fung, Yoon, Beschastnikh, *The Limitations of Federated Learning in Sybil Settings*, RAID 2020.
    """

    confidence: float = 1.0

    invariants: ClassVar[frozenset[str]] = frozenset({PERMUTATION, SCALE})

    def __post_init__(self) -> None:
        check_positive("confidence", self.confidence)

    def minimum(self) -> int:
        return 2

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
        if state is None:
            history = updates.clone()
        else:
            if state["history"].shape != updates.shape:
                raise ValueError(
                    f"the state's history has shape {tuple(state['history'].shape)}, the updates "
                    f"{tuple(updates.shape)}: FoolsGold's state is for the same clients in the same order, "
                    f"pass None when they change"
                )
            history = state["history"].to(updates) + updates
        products = gram(history)
        length = products.diagonal(dim1=-2, dim2=-1).sqrt()
        scale = (length.unsqueeze(-1) * length.unsqueeze(-2)).clamp(min=torch.finfo(torch.float64).tiny)
        trust = foolsgold_weights(products / scale, self.confidence)
        total = trust.sum(-1, keepdim=True)
        weights = torch.where(total > 0, trust / total, torch.zeros_like(trust)).to(updates.dtype)
        return Aggregate(weighted_sum(weights, updates), weights, {"history": history})
