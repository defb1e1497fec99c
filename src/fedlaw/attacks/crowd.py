"""Attacks built on what the other clients send: one row, made from it, sent by all attackers."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor

from fedlaw._checks import check_choice, check_integer, check_number
from fedlaw.attacks._common import honest_rows, mean_std, normal, repeat
from fedlaw.attacks.base import Attack, Forged, View, registry


def stealth_bound(n: int, m: int) -> float:
    """The z of LIE: the largest deviation, in standard deviations, that still finds enough supporters.

    z = Phi^-1((n - m - s) / (n - m)) with s = floor(n / 2 + 1) - m: m attackers among n need s honest clients
    beyond mu + z sigma to be with the majority. The probability is kept half a client away from 0 and 1, so
    that z is finite for attackers who are the majority already, and 0 where fewer than two clients are
    honest. It is negative where m is small (n = 10, m = 1).

    >>> [round(stealth_bound(200, m), 4) for m in (20, 40, 60, 80)]
    [0.1257, 0.3022, 0.5451, 0.9346]
    """
    honest = max(1, n - m)
    supporters = n // 2 + 1 - m
    p = min(max((honest - supporters) / honest, 0.5 / honest), 1 - 0.5 / honest)
    return NormalDist().inv_cdf(p)


@registry.register("lie", "alie")
@dataclass(frozen=True)
class LIE(Attack):
    """A little is enough: the mean, moved by a few standard deviations in every coordinate: mu + z sigma.

    Settings:
        z: how far; None: `stealth_bound` of the clients and attackers at hand.
        statistics: whose mean and deviation: of "all" updates as they came from training (the FedLAW paper),
            of the "honest" ones (an adversary that sees all), or of the "malicious" ones (one that sees only
            its own, as in the original).
        sign: 1 for mu + z sigma, -1 for mu - z sigma.
        ddof: the variance is divided by (number - ddof): 0 or 1.
        noise: each attacker adds N(0, (noise sigma_j)^2) to coordinate j, so that copies are not identical.

    Reference: Baruch, Baruch, Goldberg, "A little is enough: circumventing defenses for distributed
    learning", NeurIPS 2019.

    >>> updates = torch.tensor([[0.0], [2.0], [9.0]])
    >>> view = View(updates, torch.ones(3), torch.tensor([False, False, True]), torch.zeros(1))
    >>> LIE(z=1.5, statistics="honest").forge(view).updates.tolist()
    [[2.5]]
    """

    z: float | None = None
    statistics: Literal["all", "honest", "malicious"] = "all"
    sign: int = 1
    ddof: int = 0
    noise: float = 0.0

    def __post_init__(self) -> None:
        if self.z is not None:
            check_number("z", self.z)
        check_choice("statistics", self.statistics, ("all", "honest", "malicious"))
        check_choice("sign", self.sign, (1, -1))
        check_choice("ddof", self.ddof, (0, 1))
        check_number("noise", self.noise, low=0)

    def forge(self, view: View) -> Forged:
        m = int(view.malicious.sum())
        if m == 0:
            return Forged(view.own_updates, view.own_losses)
        z = stealth_bound(len(view.updates), m) if self.z is None else self.z
        mean, std = _moments(view, self.statistics, self.ddof)
        rows = repeat(mean + self.sign * z * std, view)
        if self.noise > 0:
            rows = rows + self.noise * std * normal(tuple(rows.shape), rows, view.generator)
        return Forged(rows, view.own_losses)


@registry.register("noisy_lie")
def noisy_lie(
    noise: float = 0.3,
    z: float | None = None,
    statistics: Literal["all", "honest", "malicious"] = "all",
    sign: int = 1,
    ddof: int = 0,
) -> LIE:
    """LIE whose copies differ: each attacker adds noise of 0.3 standard deviations to every coordinate.

    >>> noisy_lie()
    LIE(z=None, statistics='all', sign=1, ddof=0, noise=0.3)
    """
    return LIE(z=z, statistics=statistics, sign=sign, ddof=ddof, noise=noise)


@registry.register("ipm")
@dataclass(frozen=True)
class IPM(Attack):
    """Inner product manipulation: a negative multiple of the honest mean: -epsilon mu.

    Settings:
        epsilon: small values pass distance checks, values of (n - m) / m and more turn the plain mean round.

    Reference: Xie, Koyejo, Gupta, "Fall of empires: breaking Byzantine-tolerant SGD by inner product
    manipulation", UAI 2019.

    >>> view = View(torch.tensor([[1.0], [3.0], [9.0]]), torch.ones(3), torch.tensor([False, False, True]),
    ...             torch.zeros(1))
    >>> IPM(epsilon=2).forge(view).updates.tolist()
    [[-4.0]]
    """

    epsilon: float = 0.1

    def __post_init__(self) -> None:
        check_number("epsilon", self.epsilon)

    def forge(self, view: View) -> Forged:
        return Forged(repeat(-self.epsilon * honest_rows(view).mean(dim=0), view), view.own_losses)


@registry.register("mimic")
@dataclass(frozen=True)
class Mimic(Attack):
    """Send what one honest client sends, update and loss, so that it counts many times over.

    Settings:
        client: which one: its place among the honest clients in roster order (counted round again past the
            last), or "farthest": the one farthest from the honest mean in this phase.

    Reference: Karimireddy, He, Jaggi, "Byzantine-robust learning on heterogeneous datasets via bucketing",
    ICLR 2022.

    >>> view = View(torch.tensor([[1.0], [3.0], [9.0]]), torch.tensor([0.5, 0.7, 0.9]),
    ...             torch.tensor([False, False, True]), torch.zeros(1))
    >>> Mimic(client=1).forge(view).updates.tolist()
    [[3.0]]
    """

    client: int | Literal["farthest"] = 0

    def __post_init__(self) -> None:
        if self.client != "farthest":
            check_integer("client", self.client, low=0)

    def forge(self, view: View) -> Forged:
        rows, losses = view.honest_updates, view.honest_losses
        if len(rows) == 0:
            rows, losses = view.updates, view.losses
        if isinstance(self.client, int):
            chosen = self.client % len(rows)
        else:
            chosen = int(torch.linalg.vector_norm(rows - rows.mean(dim=0), dim=1).argmax())
        return Forged(repeat(rows[chosen], view), losses[chosen].repeat(len(view.own_losses)))


def _moments(view: View, statistics: str, ddof: int) -> tuple[Tensor, Tensor]:
    if statistics == "honest":
        return mean_std(honest_rows(view), ddof)
    return mean_std(view.own_updates if statistics == "malicious" else view.updates, ddof)
