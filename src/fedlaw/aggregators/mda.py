"""Minimum-diameter averaging: the mean of the tightest n - f rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations, islice
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlaw._checks import check_integer
from fedlaw._linalg import pairwise_sq_distances, scatter_weights, weighted_sum
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

_CHUNK = 1 << 18  # subsets looked at together


def _tightest(squared: NDArray[np.float64], size: int) -> NDArray[np.intp]:
    """The subset of `size` indices with the least largest distance; of several the first in lexicographic order."""
    n = len(squared)
    out = n - size
    first, second = np.triu_indices(n, 1)
    # Leaving out `out` rows breaks at most out * (n - 1) pairs: a subset's largest distance is among so many + 1.
    apart = squared[first, second]
    count = min(out * (n - 1) + 1, len(apart))
    far = np.argpartition(-apart, count - 1)[:count] if count else np.arange(0)
    far = far[np.argsort(-apart[far], kind="stable")]
    first, second = first[far], second[far]
    # The first subset in lexicographic order is the one whose complement comes last.
    removed = combinations(range(n), out)
    best, best_distance = np.zeros(n, dtype=bool), np.inf
    while chunk := list(islice(removed, _CHUNK)):
        index = np.array(chunk, dtype=np.intp).reshape(len(chunk), out)
        distances = np.zeros(len(chunk))
        undecided = np.arange(len(chunk))
        for i, j, distance in zip(first, second, squared[first, second], strict=True):
            whole = ~((index[undecided] == i) | (index[undecided] == j)).any(-1)
            distances[undecided[whole]] = distance
            undecided = undecided[~whole]
            if not len(undecided):
                break
        last = len(chunk) - 1 - int(distances[::-1].argmin())
        if distances[last] <= best_distance:
            best_distance = distances[last]
            best = np.ones(n, dtype=bool)
            best[index[last]] = False
    return best.nonzero()[0]


@registry.register("mda")
@dataclass(frozen=True)
class MDA(Rule):
    """Mean of the n - f rows of least diameter (minimum-diameter averaging).

    The diameter of a set is the largest distance between two of its rows. The search is exact, over all C(n, f)
    subsets; of several with the least diameter, the first in lexicographic order is taken.

    Settings:
        f: how many of the rows may be malicious; needs n >= 2f + 1 rows.
        limit: refuse to search more subsets than this.

    >>> MDA(f=1)(torch.tensor([[0.0], [1.0], [900.0]])).vector
    tensor([0.5000])

    Reference: El Mhamdi, Farhadkhani, Guerraoui, Guirguis, Hoang, Rouault, *Genuinely Distributed Byzantine
    Machine Learning*, PODC 2020 (after Rousseeuw, 1985).
    """

    f: int
    limit: int = 1_000_000

    invariants: ClassVar[frozenset[str]] = frozenset({TRANSLATION, SCALE, IDENTICAL, BOUNDED})

    def __post_init__(self) -> None:
        check_integer("f", self.f)
        check_integer("limit", self.limit, 1)

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
        subsets = math.comb(n, self.f)
        if subsets > self.limit:
            raise ValueError(
                f"{self!r} on {n} updates would search {subsets} subsets: raise limit, or use another rule "
                f"(multi_krum comes close)"
            )
        squared = pairwise_sq_distances(updates).reshape(-1, n, n).cpu().numpy()
        chosen = torch.from_numpy(np.stack([_tightest(each, n - self.f) for each in squared]))
        chosen = chosen.to(updates.device).reshape(*updates.shape[:-2], n - self.f)
        weights = scatter_weights(chosen, n, updates)
        return Aggregate(weighted_sum(weights, updates), weights)
