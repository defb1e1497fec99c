"""DnC: leave out the rows that stand out along the leading direction of a few coordinates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlaw._checks import check_integer, check_positive
from fedlaw._linalg import gram, weighted_sum
from fedlaw.aggregators.base import (
    IDENTICAL,
    SCALE,
    TRANSLATION,
    Aggregate,
    Rule,
    State,
    draw_coordinates,
    registry,
)


@registry.register("dnc")
@dataclass(frozen=True)
class DnC(Rule):
    """Divide and conquer: mean of the rows that no random projection shows as outliers.

    `iterations` times: draw `subsample` coordinates, centre the rows there, take the leading right singular
    vector v, score s_i = <x_i - mean, v>^2, and keep the n - floor(fraction f) rows of least score. The
    aggregate is the mean of the rows kept every time; if there is none, of those kept most often.

    Settings:
        f: how many of the rows may be malicious. iterations: number of draws. subsample: coordinates a draw;
        with that many or fewer in all, every coordinate is used and nothing drawn. fraction: how many rows a
        draw leaves out, in units of f.

    >>> x = torch.tensor([[0.0], [1.0], [2.0], [900.0]])
    >>> DnC(f=1)(x).vector
    tensor([1.])

    Reference: Shejwalkar, Houmansadr, *Manipulating the Byzantine: Optimizing Model Poisoning Attacks and
    Defenses for Federated Learning*, NDSS 2021.
    """

    f: int
    iterations: int = 5
    subsample: int = 10_000
    fraction: float = 1.0

    invariants: ClassVar[frozenset[str]] = frozenset({TRANSLATION, SCALE, IDENTICAL})

    def __post_init__(self) -> None:
        check_integer("f", self.f)
        check_integer("iterations", self.iterations, 1)
        check_integer("subsample", self.subsample, 1)
        check_positive("fraction", self.fraction)

    def minimum(self) -> int:
        return max(2 * self.f, int(self.fraction * self.f)) + 1

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
        d = updates.shape[-1]
        kept = n - int(self.fraction * self.f)
        flat = updates.reshape(-1, n, d)
        votes = torch.zeros(flat.shape[:-1], dtype=torch.int64, device=updates.device)
        for b in range(flat.shape[0]):
            # All coordinates every time is the same draw every time.
            products = []
            for _ in range(self.iterations if self.subsample < d else 1):
                part = flat[b]
                if self.subsample < d:
                    drawn = draw_coordinates(self, d, self.subsample, generator)
                    part = part.index_select(-1, drawn.to(updates.device).nonzero().flatten())
                products.append(gram(part, center=True))
            # s_i = lambda u_i^2, u being the leading eigenvector of the n x n Gram matrix. Small matrices: an
            # accelerator takes longer over them than a CPU does.
            leading = torch.linalg.eigh(torch.stack(products).cpu()).eigenvectors[..., -1]
            rest = leading.square().argsort(stable=True)[:, :kept].to(updates.device)
            votes[b] = torch.zeros_like(votes[b]).scatter_add(
                0, rest.flatten(), torch.ones_like(rest).flatten()
            )
        chosen = (votes == votes.amax(-1, keepdim=True)).to(updates.dtype)
        weights = (chosen / chosen.sum(-1, keepdim=True)).reshape(updates.shape[:-1])
        return Aggregate(weighted_sum(weights, updates), weights)
