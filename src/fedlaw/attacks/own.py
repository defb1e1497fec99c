"""Attacks that need nobody else's update: each malicious client spoils what it has, or makes it up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlaw._checks import check_choice, check_number
from fedlaw.attacks._common import normal
from fedlaw.attacks.base import Attack, Forged, View, registry


@registry.register("inverse_gradient", "inverse")
@dataclass(frozen=True)
class InverseGradient(Attack):
    """Send the negative of one's own update: -g_j.

    >>> updates, malicious = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([False, True])
    >>> view = View(updates, torch.ones(2), malicious, torch.zeros(2))
    >>> InverseGradient().forge(view).updates.tolist()
    [[-3.0, -4.0]]
    """

    def forge(self, view: View) -> Forged:
        return Forged(-view.own_updates, view.own_losses)


@registry.register("misaligned")
@dataclass(frozen=True)
class Misaligned(Attack):
    """Send the negative of one's own update plus a short random vector: -g_j + eta u_j, |u_j| = 1.

    The update half of `mimic_misaligned`, with honest losses.

    Settings:
        eta: length of the random vector.

    >>> view = View(torch.ones(1, 4), torch.ones(1), torch.tensor([True]), torch.zeros(4),
    ...             generator=torch.Generator().manual_seed(0))
    >>> round(float((Misaligned(eta=0.1).forge(view).updates + 1).norm()), 6)
    0.1
    """

    eta: float = 0.1

    def __post_init__(self) -> None:
        check_number("eta", self.eta, low=0)

    def forge(self, view: View) -> Forged:
        own = view.own_updates
        drawn = normal(tuple(own.shape), own, view.generator)
        lengths = torch.linalg.vector_norm(drawn, dim=1, keepdim=True)
        unit = drawn / torch.where(lengths > 0, lengths, torch.ones_like(lengths))
        return Forged(self.eta * unit - own, view.own_losses)


@registry.register("gaussian")
@dataclass(frozen=True)
class Gaussian(Attack):
    """Send pure noise: every coordinate drawn from N(mean, std^2), instead of an update.

    Settings:
        mean, std: of a coordinate, in the unit of updates (pseudo-gradients).

    Reference: Blanchard, El Mhamdi, Guerraoui, Stainer, "Machine learning with adversaries: Byzantine
    tolerant gradient descent", NeurIPS 2017.

    >>> view = View(torch.ones(2, 4), torch.ones(2), torch.tensor([True, True]), torch.zeros(4),
    ...             generator=torch.Generator().manual_seed(0))
    >>> Gaussian(mean=5, std=0).forge(view).updates.unique().tolist()
    [5.0]
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        check_number("mean", self.mean)
        check_number("std", self.std, low=0)

    def forge(self, view: View) -> Forged:
        own = view.own_updates
        return Forged(self.mean + self.std * normal(tuple(own.shape), own, view.generator), view.own_losses)


@registry.register("global_parameter")
@dataclass(frozen=True)
class GlobalParameter(Attack):
    """Submit the server's own model plus noise: psi = theta + N(nu1 mu, nu2 sigma^2).

    mu and sigma are the mean and standard deviation of theta's entries; nu2 scales the variance. As an update
    that is (theta - psi) / alpha = -noise / alpha. Noise is drawn anew by each client in each phase.

    Settings:
        nu1, nu2: factors of the mean and of the variance.
        statistics: mu and sigma of the whole "model", or of each "layer" (each parameter tensor; then
            `View.layers` must tell their sizes).

    Reference: the FedLAW paper (ICLR 2026), which leaves the choice of statistics open.

    >>> view = View(torch.ones(1, 2), torch.ones(1), torch.tensor([True]), torch.ones(2), alpha=0.1,
    ...             generator=torch.Generator().manual_seed(0))
    >>> GlobalParameter().forge(view).updates.round(decimals=4).tolist()  # sigma = 0 leaves 5 mu / alpha
    [[50.0, 50.0]]
    """

    nu1: float = -5.0
    nu2: float = 1.5
    statistics: Literal["model", "layer"] = "model"

    def __post_init__(self) -> None:
        check_number("nu1", self.nu1)
        check_number("nu2", self.nu2, low=0)
        check_choice("statistics", self.statistics, ("model", "layer"))

    def forge(self, view: View) -> Forged:
        own = view.own_updates
        mean, std = self._moments(view)
        noise = self.nu1 * mean + math.sqrt(self.nu2) * std * normal(tuple(own.shape), own, view.generator)
        return Forged(-noise / view.alpha, view.own_losses)

    def _moments(self, view: View) -> tuple[Tensor, Tensor]:
        """(1,) or (d,) mean and standard deviation for each coordinate, in the dtype of the updates."""
        theta = view.params.to(view.updates.dtype)
        if self.statistics == "model":
            variance, mean = torch.var_mean(theta, dim=0, keepdim=True, correction=0)
            return mean, variance.sqrt()
        if view.layers is None or sum(view.layers) != theta.numel():
            raise ValueError(
                f"statistics='layer' needs View.layers to add up to {theta.numel()} parameters, got "
                f"{view.layers}; give the sizes, or use statistics='model'"
            )
        moments = [
            torch.var_mean(layer, dim=0, correction=0) for layer in torch.split(theta, list(view.layers))
        ]
        sizes = torch.tensor(view.layers, device=theta.device)
        variances, means = (torch.stack(each).repeat_interleave(sizes) for each in zip(*moments, strict=True))
        return means, variances.sqrt()
