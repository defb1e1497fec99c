"""Attacks that try their one number out on the server's own rule and keep the most harmful."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedlaw._checks import check_choice, check_integer, check_number
from fedlaw.attacks._common import honest_rows, mean_std, repeat
from fedlaw.attacks.base import Attack, Forged, View, registry


@dataclass(frozen=True)
class _Searched(Attack, ABC):
    """start + c direction, c in [low, high], that takes the aggregate farthest from the honest mean."""

    low: float = 0.1
    high: float = 100.0
    evaluations: int = 16

    needs_rule = True

    def __post_init__(self) -> None:
        check_number("low", self.low, low=0, open_low=True)
        check_number("high", self.high, low=self.low)
        check_integer("evaluations", self.evaluations, low=1)

    @abstractmethod
    def _line(self, view: View) -> tuple[Tensor, Tensor]:
        """(d,) start and direction."""

    def forge(self, view: View) -> Forged:
        rule = view.rule
        if rule is None:
            raise ValueError(
                f"{type(self).__name__} searches against the server's rule; View.rule must be given, got None"
            )
        if not bool(view.malicious.any()):
            return Forged(view.own_updates, view.own_losses)
        start, direction = self._line(view)
        target = honest_rows(view).mean(dim=0)
        trial = view.updates.clone()

        def harm(factor: float) -> float:
            trial[view.malicious] = start + factor * direction
            moved = float(torch.linalg.vector_norm(rule(trial) - target))
            return moved if math.isfinite(moved) else -math.inf

        factor = _most_harmful(harm, self.low, self.high, self.evaluations)
        return Forged(repeat(start + factor * direction, view), view.own_losses)


@registry.register("optimized_ipm")
@dataclass(frozen=True)
class OptimizedIPM(_Searched):
    """IPM with the epsilon that does the most harm to the server's rule: -epsilon mu.

    Harm is the distance of the aggregate from the honest mean. Half of the evaluations look at a geometric
    grid from `low` to `high`, since harm rises with epsilon until a rule sees through it; the other half look
    between the neighbours of the best one. Among equals the smallest, the least conspicuous, is sent.

    Settings:
        low, high: where epsilon is looked for.
        evaluations: how often the rule is tried, in each phase.

    Reference: Allouah et al., "Fixing by mixing: a recipe for optimal Byzantine ML under heterogeneity",
    AISTATS 2023, which searches in the same spirit.

    >>> view = View(torch.tensor([[1.0], [3.0], [9.0]]), torch.ones(3), torch.tensor([False, False, True]),
    ...             torch.zeros(1), rule=lambda updates: updates.mean(dim=0))
    >>> OptimizedIPM(high=50).forge(view).updates.round(decimals=3).tolist()  # the mean bears no limit
    [[-100.0]]
    """

    def _line(self, view: View) -> tuple[Tensor, Tensor]:
        mean = honest_rows(view).mean(dim=0)
        return torch.zeros_like(mean), -mean


@registry.register("optimized_lie")
@dataclass(frozen=True)
class OptimizedLIE(_Searched):
    """LIE with the z that does the most harm to the server's rule: mu + z sigma, honest statistics.

    Settings:
        low, high, evaluations: the search for z, as for `OptimizedIPM`.
        sign: 1 for mu + z sigma, -1 for mu - z sigma.
        ddof: the variance is divided by (number - ddof): 0 or 1.

    Reference: as for `OptimizedIPM`.

    >>> view = View(torch.tensor([[1.0], [3.0], [9.0]]), torch.ones(3), torch.tensor([False, False, True]),
    ...             torch.zeros(1), rule=lambda updates: updates.median(dim=0).values)
    >>> OptimizedLIE(low=1).forge(view).updates.tolist()  # the median bears with one as far as the other
    [[3.0]]
    """

    high: float = 10.0
    sign: Literal[1, -1] = 1
    ddof: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("sign", self.sign, (1, -1))
        check_choice("ddof", self.ddof, (0, 1))

    def _line(self, view: View) -> tuple[Tensor, Tensor]:
        mean, std = mean_std(honest_rows(view), self.ddof)
        return mean, self.sign * std


def _most_harmful(harm: Callable[[float], float], low: float, high: float, evaluations: int) -> float:
    """Argument of the largest harm seen in [low, high], of equals the smallest: a grid, then a finer one."""
    coarse = _geometric(low, high, (evaluations + 1) // 2)
    seen = [(harm(factor), -factor) for factor in coarse]
    best = seen.index(max(seen))
    finer = evaluations - len(coarse)
    if finer > 0:
        left, right = coarse[max(0, best - 1)], coarse[min(len(coarse) - 1, best + 1)]
        seen += [(harm(factor), -factor) for factor in _geometric(left, right, finer + 2)[1:-1]]
    return -max(seen)[1]


def _geometric(low: float, high: float, count: int) -> list[float]:
    """`count` numbers from `low` to `high` in equal ratios, both ends exact; `high` alone if only one."""
    if count == 1:
        return [high]
    ratio = (high / low) ** (1 / (count - 1))
    return [low * ratio**i for i in range(count - 1)] + [high]
