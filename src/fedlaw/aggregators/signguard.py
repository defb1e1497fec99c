"""SignGuard: keep rows of ordinary length whose signs look like those of the majority."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedlaw._checks import check_number, check_positive
from fedlaw._linalg import (
    BLOCK_ELEMENTS,
    block_columns,
    clip_factors,
    median,
    row_norms,
    weighted_sum,
)
from fedlaw.aggregators.base import (
    BOUNDED,
    IDENTICAL,
    SCALE,
    Aggregate,
    Rule,
    State,
    draw_coordinates,
    registry,
)

_STEPS = 300  # of mean shift, at most; it ends after a handful


def mean_shift(points: Tensor, quantile: float) -> Tensor:
    """Cluster labels (n,) of a few-dimensional points (n, k): flat-kernel mean shift, nothing random.

    The bandwidth is the mean, over the points, of the distance to the farthest of their quantile * n nearest.
    Every point climbs to the mean of the points within it until it stands still; where two ends lie within
    one bandwidth, that with more points around it (then the first) stands for both, and each point belongs to
    the nearest end that is left.
    """
    n = len(points)
    near = max(1, int(quantile * n))
    bandwidth = _distances(points, points).kthvalue(near, dim=-1).values.mean()
    counted = torch.cat([points, torch.ones_like(points[:, :1])], dim=-1)
    ends, moving = points, torch.arange(n, device=points.device)
    for _ in range(_STEPS):
        here = ends[moving]
        sums = (_distances(here, points) <= bandwidth).to(points.dtype) @ counted
        size = sums[:, -1:]
        moved = torch.where(size > 0, sums[:, :-1] / size.clamp(min=1), here)
        ends = ends.index_copy(0, moving, moved)
        steps = (moved - here).abs().amax(-1)
        if bool(steps.max() <= 1e-3 * bandwidth):
            break
        moving = moving[steps > 0]  # the others have arrived for good
    crowd = (_distances(ends, points) <= bandwidth).sum(-1)
    left: list[int] = []
    apart = _distances(ends, ends) > bandwidth
    order = crowd.argsort(descending=True, stable=True)
    while len(order):
        left.append(int(order[0]))
        order = order[apart[left[-1], order]]
    return _distances(points, ends[left]).argmin(-1)


def _distances(a: Tensor, b: Tensor) -> Tensor:
    # Of few numbers a row, differences are faster than a product; and exact.
    distances: Tensor = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    return distances


@registry.register("signguard")
@dataclass(frozen=True)
class SignGuard(Rule):
    """Clipped mean of the rows with ordinary norms and the majority's sign statistics.

    A row is kept if lower <= |x_i| / M <= upper, M the median norm, and if it is in the right cluster: the
    shares of positive, zero and negative signs in a random part of the coordinates are clustered by mean
    shift, and the cluster that has most rows of ordinary norm is the right one. The aggregate is the mean of
    the kept rows, clipped to norm M.

    Settings:
        lower, upper: bounds of the norm, in units of the median norm.
        coordinates: share of the coordinates whose signs are counted; 1 takes all and draws nothing.
        quantile: share of the rows that sets the bandwidth of the mean shift.

    >>> x = torch.tensor([[1.0, 1.0], [1.0, 2.0], [2.0, 1.0], [-1.0, -1.0]])
    >>> SignGuard(coordinates=1.0)(x).weights[3]
    tensor(0.)

    Reference: Xu, Huang, Song, Lan, *Byzantine-robust Federated Learning through Collaborative Malicious
    Gradient Filtering*, ICDCS 2022.
    """

    lower: float = 0.1
    upper: float = 3.0
    coordinates: float = 0.1
    quantile: float = 0.5

    invariants: ClassVar[frozenset[str]] = frozenset({SCALE, IDENTICAL, BOUNDED})

    def __post_init__(self) -> None:
        check_number("lower", self.lower, low=0)
        check_number("upper", self.upper, low=2.0)  # so that some row always passes
        if self.lower > 1:
            raise ValueError(f"lower must be at most 1, got {self.lower!r}: the median itself has to pass")
        for name in ("coordinates", "quantile"):
            check_positive(name, getattr(self, name))
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be at most 1, got {getattr(self, name)!r}: it is a share")

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
        found = row_norms(updates)
        flat = updates.reshape(-1, n, updates.shape[-1])
        # What is left has a few numbers a client: a CPU is faster over them.
        shares = [self._sign_shares(rows, generator).cpu() for rows in flat]
        norms = found.cpu()
        middle = median(norms).unsqueeze(-1)
        ordinary = (norms >= self.lower * middle) & (norms <= self.upper * middle)
        kept = ordinary.reshape(-1, n).clone()
        for b, points in enumerate(shares):
            labels = mean_shift(points, self.quantile)
            sizes = torch.zeros(n, dtype=torch.int64).scatter_add(0, labels, kept[b].to(torch.int64))
            kept[b] &= labels == sizes.argmax()
        chosen = kept.reshape(ordinary.shape).to(updates.dtype)
        weights = (chosen * clip_factors(norms, middle) / chosen.sum(-1, keepdim=True)).to(updates.device)
        return Aggregate(weighted_sum(weights, updates), weights)

    def _sign_shares(self, rows: Tensor, generator: torch.Generator | None) -> Tensor:
        """(n, 3) float64: shares of positive, zero and negative entries of each row (n, d)."""
        d = rows.shape[-1]
        counted = math.ceil(self.coordinates * d)
        if counted == d:
            balance, filled = _sign_sums(rows)
        else:
            drawn = draw_coordinates(self, d, counted, generator)
            few = drawn if 2 * counted <= d else ~drawn
            balance, filled = _sign_sums(rows, few.to(rows.device).nonzero().flatten())
            if few is not drawn:  # those counted are all but the few
                every = _sign_sums(rows)
                balance, filled = every[0] - balance, every[1] - filled
        positive, negative = (filled + balance) / 2, (filled - balance) / 2
        return torch.stack([positive, counted - filled, negative], dim=-1) / counted


def _sign_sums(rows: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(n,) float64 each: positive less negative entries of rows (n, d), and those not zero; of all columns, or of
    those with these indices, in ascending order so that memory is read forwards."""
    balance = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    filled = torch.zeros_like(balance)
    width = block_columns(rows, BLOCK_ELEMENTS // 4)
    for start in range(0, rows.shape[-1] if columns is None else len(columns), width):
        if columns is None:
            signs = rows[:, start : start + width].sign()
        else:
            signs = rows.index_select(-1, columns[start : start + width]).sign_()
        balance += signs.sum(-1)
        filled += signs.abs_().sum(-1)
    return balance, filled
