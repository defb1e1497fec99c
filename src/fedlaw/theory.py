"""The paper's bounds, from what a recorded round shows and from constants the user supplies; detection counts.

The bounds are those of the FedLAW paper (ICLR 2026), Theorems "High-Probability Byzantine Resilience" and
"Byzantine Resilience Against Adversarial Loss and Gradient" and the lemma that bounds L_w, under its
assumptions: n clients of which b_f attack, 2 b_f + 2 <= n, each attacker's update no longer than the longest
honest one, cap t = 1/s and sparsity s = n - b_f.

>>> import torch
>>> updates = torch.tensor([[1.0, 0.0], [3.0, 0.0], [-9.0, 0.0]])
>>> seen = heterogeneity(updates, torch.tensor([0.4, 0.6, 0.0]), torch.tensor([True, True, False]))
>>> seen.mean_norm, seen.direction, round(seen.loss, 6)
(2.0, 1.0, 0.1)
>>> c = heterogeneity_budget(seen, n=20, malicious=4)
>>> alpha = max_step(seen, c, smoothness=1.0)
>>> bias_bound(seen, c, n=20, malicious=4, alpha=alpha, smoothness=1.0) > seen.mean_norm  # says nothing here
True
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fedlaw._detection import Detection, detection
from fedlaw._linalg import column_blocks, gram

__all__ = [
    "Detection",
    "Heterogeneity",
    "angle_bound",
    "bias_bound",
    "detection",
    "heterogeneity",
    "heterogeneity_budget",
    "max_step",
    "quadratic_parts",
    "sampling_error",
    "weight_smoothness",
    "weights_diameter",
]


@dataclass(frozen=True)
class Heterogeneity:
    """How much the honest clients of one round differ: the measured constants of assumption (D1).

    The assumption is on expectations; one round gives their plug-in values, in which the variance between
    clients and of mini-batches is contained.

    Attributes:
        mean_norm: |g|, g the mean of honest updates.
        direction: H_k, with H_k^2 = mean_i |g_i - g|^2.
        magnitude: K_k, with K_k^2 = max_i | |g_i|^2 - |g|^2 |.
        loss: epsilon_k = mean_i |f_i - f_avg|.
        mean_loss: f_avg, the mean honest loss.
    """

    mean_norm: float
    direction: float
    magnitude: float
    loss: float
    mean_loss: float


def heterogeneity(updates: Tensor, losses: Tensor, honest: Tensor | None = None) -> Heterogeneity:
    """Measure H_k, K_k and epsilon_k of a round.

    Args:
        updates: (n, d) gradients or pseudo-gradients.
        losses: (n,) losses at the same model.
        honest: (n,) bool, which rows count; None: all.
    """
    if updates.ndim != 2 or losses.shape != updates.shape[:1]:
        raise ValueError(
            f"updates must be (n, d) and losses (n,), got {tuple(updates.shape)} and {tuple(losses.shape)}"
        )
    rows, f = (updates, losses.double()) if honest is None else (updates[honest], losses[honest].double())
    if len(rows) == 0:
        raise ValueError("honest must name at least one client, got none")
    squares = gram(rows).diagonal()
    mean_square = sum(float(block.double().mean(dim=0).square().sum()) for block in column_blocks(rows))
    # The spread by its own, centred product: |g_i|^2 - |g|^2 would lose what is small against |g|.
    spread = gram(rows, center=True).diagonal().mean()
    return Heterogeneity(
        mean_norm=math.sqrt(mean_square),
        direction=math.sqrt(float(spread)),
        magnitude=math.sqrt(float((squares - mean_square).abs().max())),
        loss=float((f - f.mean()).abs().mean()),
        mean_loss=float(f.mean()),
    )


def sampling_error(deviation: float, dimension: int, batch: int, delta: float) -> float:
    """epsilon_S = sqrt(2 R_k^2 log(2 d / delta) / B): how far mini-batch gradients may be off.

    Args:
        deviation: R_k, bound on the distance of one example's gradient from the client's.
        dimension: d, number of parameters.
        batch: B, examples in a mini-batch.
        delta: probability with which the bound may fail.

    >>> round(sampling_error(1.0, dimension=1, batch=2, delta=2 / math.e), 12)
    1.0
    """
    _at_least("deviation", deviation, 0)
    _at_least("dimension", dimension, 1)
    _at_least("batch", batch, 1)
    if not 0 < delta < 1:
        raise ValueError(f"delta must be a probability between 0 and 1, got {delta!r}")
    return deviation * math.sqrt(2 * math.log(2 * dimension / delta) / batch)


def heterogeneity_budget(
    seen: Heterogeneity, *, n: int, malicious: int, variance: float = 0.0, sampling: float = 0.0
) -> float:
    """C_het = 4 K^2 b/(n-b) + 2 H^2 + 2 d sigma^2 (2n-b-2)/(n-b) + 2 epsilon_S^2 n/(n-b), b = b_f.

    Args:
        seen: the honest clients' measured differences.
        n, malicious: clients, and b_f, how many of them attack; 2 b_f + 2 <= n.
        variance: d sigma_k^2, bound on the variance of a client's full-batch gradient.
        sampling: epsilon_S (`sampling_error`).

    >>> heterogeneity_budget(Heterogeneity(0, direction=1, magnitude=2, loss=0, mean_loss=0), n=10, malicious=2)
    6.0
    """
    honest = _honest(n, malicious)
    _at_least("variance", variance, 0)
    _at_least("sampling", sampling, 0)
    return (
        4 * seen.magnitude**2 * malicious / honest
        + 2 * seen.direction**2
        + 2 * variance * (2 * n - malicious - 2) / honest
        + 2 * sampling**2 * n / honest
    )


def max_step(seen: Heterogeneity, budget: float, *, smoothness: float) -> float:
    """alpha_max = min(1 / L_max, C_het / (2 L_max |g|^2)): the largest step the theorem covers.

    Args:
        seen: the honest clients' measured differences, of which |g|.
        budget: C_het (`heterogeneity_budget`). With 0, and |g| > 0, no step is covered.
        smoothness: L_max, the largest smoothness constant of a client's loss.

    >>> max_step(Heterogeneity(mean_norm=1, direction=0, magnitude=0, loss=0, mean_loss=0), 1.0, smoothness=4)
    0.125
    """
    _at_least("budget", budget, 0)
    _above("smoothness", smoothness)
    if seen.mean_norm == 0:
        return 1 / smoothness
    return min(1 / smoothness, budget / (2 * smoothness * seen.mean_norm**2))


def bias_bound(
    seen: Heterogeneity,
    budget: float,
    *,
    n: int,
    malicious: int,
    alpha: float,
    smoothness: float,
    variance: float = 0.0,
    sampling: float = 0.0,
    forged_losses: bool = False,
) -> float:
    """eta_k: how far the aggregate's expectation may be from the honest mean gradient.

    eta = sqrt(2 b (e/alpha + C_het + L_max alpha (H^2/2 + K^2/2 + d sigma^2 + epsilon_S^2)))
          + 2 b H / sqrt(n - b) + epsilon_S,

    with e = epsilon_k where attackers forge updates only, and e = epsilon_k + b f_avg / (n - b) where they may
    report any non-negative loss too. Where eta < |g| the aggregate makes an angle of at most asin(eta / |g|)
    with the honest mean (`angle_bound`).

    Args:
        seen, n, malicious, variance, sampling: as for `heterogeneity_budget`.
        budget: C_het.
        alpha: step size, at most `max_step`.
        smoothness: L_max.
        forged_losses: whether losses may be forged.
    """
    honest = _honest(n, malicious)
    _above("alpha", alpha)
    _above("smoothness", smoothness)
    _at_least("budget", budget, 0)
    _at_least("variance", variance, 0)
    _at_least("sampling", sampling, 0)
    largest = max_step(seen, budget, smoothness=smoothness)
    if alpha > largest * (1 + 1e-12):
        raise ValueError(
            f"alpha must be at most alpha_max = {largest:g} for the bound to hold, got {alpha:g}"
        )
    gap = seen.loss + (malicious / honest * seen.mean_loss if forged_losses else 0.0)
    curvature = (seen.direction**2 + seen.magnitude**2) / 2 + variance + sampling**2
    inner = gap / alpha + budget + smoothness * alpha * curvature
    return math.sqrt(2 * malicious * inner) + 2 * malicious / math.sqrt(honest) * seen.direction + sampling


def angle_bound(seen: Heterogeneity, bias: float) -> float | None:
    """Largest angle, in radians, between aggregate and honest mean: asin(eta / |g|); None where eta >= |g|.

    >>> round(math.degrees(angle_bound(Heterogeneity(2, 0, 0, 0, 0), 1.0)), 6)
    30.0
    """
    _at_least("bias", bias, 0)
    return math.asin(bias / seen.mean_norm) if bias < seen.mean_norm else None


def weights_diameter(cap: float) -> float:
    """rho = sqrt(2 (k t^2 + r^2)), k = floor(1/t), r = 1 - k t: no two capped weight vectors are farther apart.

    The body of the paper prints sqrt(k t^2 + r^2); the lemma proves the value here, which is attained by
    vectors with disjoint supports. For whole 1/t it is sqrt(2 t).

    >>> weights_diameter(0.5)
    1.0
    """
    if not 0 < cap <= 1:
        raise ValueError(f"cap must be above 0 and at most 1, got {cap!r}")
    full = math.floor(1 / cap + 1e-9)
    rest = max(0.0, 1 - full * cap)
    return math.sqrt(2 * (full * cap**2 + rest**2))


def weight_smoothness(*, n: int, alpha: float, gradient: float, smoothness: float, cap: float) -> float:
    """Bound on L_w: alpha C^2 (n^(3/2) + n + alpha n L_max + alpha n^2 L_max rho / 2).

    The weight step's own step size beta must be below 1 / L_w for the convergence theorem.

    Args:
        n: clients.
        alpha: step size.
        gradient: C, bound on the norm of every client's gradient.
        smoothness: L_max.
        cap: t, the largest weight; rho is `weights_diameter(t)`.

    >>> weight_smoothness(n=4, alpha=1.0, gradient=1.0, smoothness=1.0, cap=0.5)
    24.0
    """
    _at_least("n", n, 1)
    _above("alpha", alpha)
    _at_least("gradient", gradient, 0)
    _at_least("smoothness", smoothness, 0)
    rho = weights_diameter(cap)
    return (
        alpha
        * gradient**2
        * (n * math.sqrt(n) + n + alpha * n * smoothness + alpha * n**2 * smoothness * rho / 2)
    )


def quadratic_parts(updates: Tensor, weights: Tensor) -> tuple[float, float]:
    """w^T G^T G w = |sum_i w_i v_i|^2, taken apart into two sums: their difference is it, where sum_i w_i = 1.

    First sum_i w_i |v_i|^2, then 1/2 sum_ij w_i w_j |v_i - v_j|^2: the weight step pays for long updates and is
    paid for distances, which is how distances enter the paper's analysis. (Its body prints the identity with a
    wrong sign and factor; the appendix uses this one.)

    Args:
        updates: (n, d) rows v_i.
        weights: (n,) that add up to 1.

    >>> import torch
    >>> quadratic_parts(torch.tensor([[1.0], [3.0]]), torch.tensor([0.5, 0.5]))
    (5.0, 1.0)
    """
    w = weights.double()
    if not math.isclose(float(w.sum()), 1, abs_tol=1e-6):
        raise ValueError(f"weights must add up to 1 for the identity to hold, got {float(w.sum()):g}")
    squares = gram(updates).diagonal()
    around = gram(updates, center=True)
    spread = around.diagonal()
    distances = (spread[:, None] + spread[None, :] - 2 * around).clamp(min=0)
    return float(w @ squares), float(w @ distances @ w) / 2


def _honest(n: int, malicious: int) -> int:
    _at_least("malicious", malicious, 0)
    if 2 * malicious + 2 > n:
        raise ValueError(f"malicious must satisfy 2 malicious + 2 <= n = {n}, got {malicious}")
    return n - malicious


def _at_least(setting: str, value: float, low: float) -> None:
    if not value >= low or not math.isfinite(value):
        raise ValueError(f"{setting} must be a finite number of at least {low:g}, got {value!r}")


def _above(setting: str, value: float) -> None:
    if not value > 0 or not math.isfinite(value):
        raise ValueError(f"{setting} must be a finite number above 0, got {value!r}")
