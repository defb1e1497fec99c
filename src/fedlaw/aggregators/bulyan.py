"""Bulyan: Krum again and again, then a mean around the median of what it chose."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedlaw._checks import check_integer
from fedlaw._linalg import pairwise_sq_distances, reduce_sorted_columns
from fedlaw.aggregators.base import (
    BOUNDED,
    IDENTICAL,
    PERMUTATION,
    SCALE,
    TRANSLATION,
    Aggregate,
    Rule,
    State,
    TooFewUpdates,
    check_share,
    registry,
    resolve_share,
)
from fedlaw.aggregators.coordinatewise import mean_around_median


def repeated_krum(squared: Tensor, selected: int, neighbors: int | None, f: int) -> Tensor:
    """Indices (..., selected) of the rows that Krum picks one after the other, each time among those left.

    Works on the squared distances (..., n, n) alone. With `neighbors` None a pick among r rows counts
    r - f - 2 neighbours, one at least. Indices are those of the full set, in order of picking.
    """
    n = squared.shape[-1]
    matrices = squared.reshape(-1, n, n).cpu().numpy()
    picks = torch.from_numpy(np.stack([_picks(each, selected, neighbors, f) for each in matrices]))
    return picks.reshape(*squared.shape[:-2], selected).to(squared.device)


def _picks(squared: NDArray[np.float64], selected: int, neighbors: int | None, f: int) -> NDArray[np.int64]:
    """The picks of one (n, n). Neighbours are sorted once; who is picked is taken out of everybody's list."""
    n = len(squared)
    others = squared[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    names = np.arange(n)
    who = np.broadcast_to(names, (n, n))[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    order = others.argsort(axis=-1, kind="stable")
    others, who = np.take_along_axis(others, order, -1), np.take_along_axis(who, order, -1)
    picks = np.empty(selected, dtype=np.int64)
    for i, left in enumerate(range(n, n - selected, -1)):
        count = min(max(1, left - f - 2) if neighbors is None else neighbors, left - 1)
        pick = int(others[:, :count].sum(-1).argmin())
        picks[i] = names[pick]
        names = np.delete(names, pick)
        stay = who != picks[i]
        stay[pick] = False
        others = others[stay].reshape(left - 1, max(0, left - 2))
        who = who[stay].reshape(left - 1, max(0, left - 2))
    return picks


@registry.register("bulyan")
@dataclass(frozen=True)
class Bulyan(Rule):
    """Mean around the median of what repeated Krum chooses.

    Krum picks a row, the row is put aside, and so on with those left until theta rows are chosen; then, in
    each coordinate, the mean of the beta values nearest to the median of the chosen (of two equally near the
    smaller).

    Canonical: theta = n - 2f, beta = theta - 2f, n >= 4f + 3. With `selected` or `nearest` given, fewer rows
    are accepted, with a warning: the published guarantee no longer holds.

    Settings:
        f: how many of the rows may be malicious. selected: theta; None: n - 2f; a float is a share of the
        rows received. neighbors: how many other rows count in a Krum score, fewer when fewer are left; None:
        r - f - 2 of the r
            rows left, one at least; a float is a share of the rows received.
        nearest: beta; None: theta - 2f; a float is a share of the rows received.

    >>> Bulyan(f=1)(torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0], [5.0], [900.0]])).vector
    tensor([2.])

    Reference: El Mhamdi, Guerraoui, Rouault, *The Hidden Vulnerability of Distributed Learning in Byzantium*,
    ICML 2018.
    """

    f: int
    selected: int | float | None = None
    neighbors: int | float | None = None
    nearest: int | float | None = None

    invariants: ClassVar[frozenset[str]] = frozenset({PERMUTATION, TRANSLATION, SCALE, IDENTICAL, BOUNDED})

    def __post_init__(self) -> None:
        check_integer("f", self.f)
        for name in ("selected", "neighbors", "nearest"):
            check_share(name, getattr(self, name))
        if isinstance(self.selected, int) and isinstance(self.nearest, int) and self.nearest > self.selected:
            raise ValueError(
                f"nearest must be at most selected ({self.selected}), got {self.nearest}: they are taken from those"
            )

    def minimum(self) -> int:
        if self.selected is None and self.nearest is None:
            return 4 * self.f + 3
        # theta = n - 2f rows are needed, and beta >= 1 values among them
        needs = [2 * self.f + 1]
        if isinstance(self.selected, int):
            needs.append(self.selected)
        if self.selected is None:
            needs.append(2 * self.f + (self.nearest if isinstance(self.nearest, int) else 1))
        return max(needs)

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
        selected = resolve_share(self.selected, n, n - 2 * self.f)
        nearest = resolve_share(self.nearest, n, selected - 2 * self.f)
        if not 1 <= nearest <= selected:
            raise TooFewUpdates(
                f"{self!r} on {n} updates would average nearest={nearest} of selected={selected} values: "
                f"give nearest between 1 and {selected}"
            )
        if n < 4 * self.f + 3:
            warnings.warn(
                f"{self!r} on {n} updates: Bulyan's guarantee needs n >= 4f + 3 = {4 * self.f + 3}; using "
                f"selected={selected}, nearest={nearest}",
                stacklevel=2,
            )
        neighbors = None if self.neighbors is None else resolve_share(self.neighbors, n, 1)
        chosen = repeated_krum(pairwise_sq_distances(updates), selected, neighbors, self.f)
        return Aggregate(
            reduce_sorted_columns(updates, lambda columns: mean_around_median(columns, nearest), rows=chosen)
        )
