"""Exact Euclidean projections on the capped simplex and on its sparse subset.

The capped simplex is {w : 0 <= w_i <= cap, sum_i w_i = 1}. FedLAW's weights live in its sparse subset, in
which at most `sparsity` entries are not zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEASIBILITY_TOLERANCE = 1e-6
_POLISH = 2  # corrections of the active set; one is enough unless rounding moved an entry across its edge


def project_capped_simplex(y: Tensor, cap: float | Tensor) -> Tensor:
    r"""Project y on the capped simplex.

    .. math:: \arg\min_w \tfrac12 \|w - y\|^2 \quad\text{s.t.}\quad 0 \le w_i \le \text{cap},\ \sum_i w_i = 1

    The solution is w_i = min(cap, max(0, y_i + gamma)) with the one gamma that makes the sum 1: one sort of
    the 2n points at which an entry leaves zero or reaches the cap, and a scan; O(n log n).

    Args:
        y: (..., n) float32 or float64, finite. Worked on in float64.
        cap: number or tensor broadcastable to (...), at least 1/n.

    Returns:
        (..., n) the projection, of y's dtype.

    Raises:
        ValueError: n * cap < 1 (no such point), or y is not finite.

    >>> project_capped_simplex(torch.tensor([3.0, 0.2, 0.1, -1.0]), cap=0.5)
    tensor([0.5000, 0.3000, 0.2000, 0.0000])

    Reference: W. Wang and C. Lu, Projection onto the capped simplex, 2015, arXiv:1503.01002.
    """
    return project_sparse_capped_simplex(y, y.shape[-1], cap)


def project_sparse_capped_simplex(y: Tensor, sparsity: int | Tensor, cap: float | Tensor) -> Tensor:
    r"""Project y on the sparse capped simplex: at most `sparsity` entries may differ from zero.

    The support is the *indices* of the `sparsity` largest entries (whatever their sign; among equal entries
    the lowest index first), on which y is projected on the capped simplex: Theorem 1 of the FedLAW paper.

    Args:
        y: (..., n) float32 or float64, finite.
        sparsity: number or integer tensor broadcastable to (...), 1 to n.
        cap: number or tensor broadcastable to (...); sparsity * cap >= 1 up to a relative 1e-6, so that
            cap = 1/sparsity always passes.

    Returns:
        (..., n) the projection, of y's dtype.

    Raises:
        ValueError: sparsity * cap < 1, sparsity outside 1 to n, or y is not finite.

    >>> project_sparse_capped_simplex(torch.tensor([0.1, -0.3, 0.4, 0.2]), sparsity=2, cap=0.8)
    tensor([0.0000, 0.0000, 0.6000, 0.4000])

    Reference: Byzantine-Robust Federated Learning with Learnable Aggregation Weights, ICLR 2026, Theorem 1;
    the projection on the support: Wang and Lu 2015.
    """
    if y.ndim == 0 or not y.is_floating_point():
        raise ValueError(f"y must be a floating-point tensor (..., n), got {y.dtype}, shape {tuple(y.shape)}")
    if not bool(torch.isfinite(y).all()):
        raise ValueError("y must be finite")
    check_feasible(y.shape[-1], sparsity, cap)
    return project_unchecked(y, sparsity, cap)


def check_feasible(n: int, sparsity: int | Tensor, cap: float | Tensor) -> None:
    """Raise a ValueError unless n weights of at most `cap`, `sparsity` of them not zero, can sum to 1.

    >>> check_feasible(10, sparsity=4, cap=0.2)
    Traceback (most recent call last):
    ValueError: sparsity * cap must be at least 1, got 4 * 0.2 = 0.8: raise cap ...
    """
    s = torch.as_tensor(sparsity, dtype=torch.float64)
    t = torch.as_tensor(cap, dtype=torch.float64)
    s, t = (s + torch.zeros_like(t)).flatten(), (t + torch.zeros_like(s)).flatten()
    outside = ~((s >= 1) & (s <= n))
    if bool(outside.any()):
        raise ValueError(f"sparsity must be from 1 to n = {n}, got {s[outside][0].item():g}")
    infeasible = ~(s * t >= 1 - FEASIBILITY_TOLERANCE)
    if bool(infeasible.any()):
        s0, t0 = s[infeasible][0].item(), t[infeasible][0].item()
        raise ValueError(
            f"sparsity * cap must be at least 1, got {s0:g} * {t0:g} = {s0 * t0:g}: "
            f"raise cap to 1/{s0:g} or more, or raise sparsity"
        )


def project_unchecked(y: Tensor, sparsity: int | Tensor, cap: float | Tensor) -> Tensor:
    """The projection without its checks: no host synchronisation. Arguments as above, known to be valid."""
    n = y.shape[-1]
    v, order = torch.sort(y.to(torch.float64), dim=-1, descending=True, stable=True)
    s = torch.as_tensor(sparsity, device=y.device).unsqueeze(-1)
    t = torch.as_tensor(cap, dtype=torch.float64, device=y.device).unsqueeze(-1)
    # cap = 1/s rounded down would leave a sum just under 1: the tolerance is taken up here. No weight exceeds 1.
    t = torch.maximum(t.clamp(max=1), 1 / s.to(torch.float64))
    inside = torch.arange(n, device=y.device).expand(v.shape) < s
    v = _drawn_together(v)
    gamma = _crossing(v, inside, t)
    w = torch.where(inside, torch.minimum((v + gamma).clamp(min=0), t), 0.0)
    for _ in range(_POLISH):
        w = _polish(v, w, inside, t)
    return torch.zeros_like(w).scatter(-1, order, w).to(y.dtype)


def _drawn_together(v: Tensor) -> Tensor:
    """Sorted v with every gap over 2 made 2, counted from the largest: the projection is the same.

    Entries more than 1 apart are never both strictly between 0 and the cap, so how far apart does not matter; and
    numbers 1e38 apart could not be added up.
    """
    gaps = (v[..., :-1] - v[..., 1:]).clamp(max=2)
    return torch.cat([torch.zeros_like(v[..., :1]), -gaps.cumsum(-1)], dim=-1)


def _crossing(v: Tensor, inside: Tensor, t: Tensor) -> Tensor:
    """gamma (..., 1) at which phi(gamma) = sum over `inside` of clip(v + gamma, 0, t) reaches 1.

    phi is piecewise linear and increasing; its slope grows by one at -v_i and falls by one at t - v_i.
    """
    far = v.abs().amax(dim=-1, keepdim=True) * 2 + t.abs() + 2  # beyond every breakpoint
    leave = torch.where(inside, -v, far)
    reach = torch.where(inside, t - v, far)
    points, order = torch.sort(torch.cat([leave, reach], dim=-1), dim=-1, stable=True)
    counted = inside.to(v.dtype)
    step = torch.cat([counted, -counted], dim=-1)
    slope = step.gather(-1, order).cumsum(-1)
    phi = torch.zeros_like(points)
    phi[..., 1:] = (slope[..., :-1] * points.diff(dim=-1)).cumsum(-1)
    last = points.shape[-1] - 1
    k = (phi < 1).sum(-1, keepdim=True).clamp(1, last)
    before = slope.gather(-1, k - 1)
    return points.gather(-1, k) - torch.where(
        before > 0, (phi.gather(-1, k) - 1) / before.clamp(min=1), torch.zeros_like(before)
    )


def _polish(v: Tensor, w: Tensor, inside: Tensor, t: Tensor) -> Tensor:
    """Solve again on the set of entries strictly between 0 and t, from differences within that set.

    Entries near each other but far from zero (or far from the capped ones) keep their differences exactly,
    which a gamma of that magnitude would lose.
    """
    full = inside & (w >= t)
    free = inside & (w > 0) & ~full
    size = free.sum(-1, keepdim=True)
    anchor = torch.where(free, v, -torch.inf).amax(dim=-1, keepdim=True)
    anchor = torch.where(size > 0, anchor, torch.zeros_like(anchor))
    relative = torch.where(free, v - anchor, 0.0)
    room = 1 - full.sum(-1, keepdim=True) * t
    level = (room - relative.sum(-1, keepdim=True)) / size.clamp(min=1)
    solved = torch.where(inside, torch.minimum((v - anchor + level).clamp(min=0), t), 0.0)
    return torch.where(size > 0, solved, w)
