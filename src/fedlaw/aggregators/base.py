"""What every aggregation rule is: a small frozen value with settings, called on (..., n, d) updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedlaw._registry import Registry

State = dict[str, Tensor]


class Aggregate(NamedTuple):
    """What a rule makes of n updates.

    Attributes:
        vector: (..., d) the aggregate; of a pre-aggregator (..., m, d), the m rows handed on.
        weights: (..., n) the weight of each client where the aggregate is a weighted sum of updates; of a
            pre-aggregator (..., m, n), one such row per row handed on; None where the rule works per
            coordinate and no client has one weight.
        state: what the rule wants to see again in the next round, a dict of tensors, or None.
    """

    vector: Tensor
    weights: Tensor | None = None
    state: State | None = None


class TooFewUpdates(ValueError):
    """Fewer updates than the rule can work with, for its settings."""


PERMUTATION = "permutation"  # reordering the rows changes nothing (weights follow the rows)
TRANSLATION = "translation"  # shifting every row by v shifts the aggregate by v
SCALE = "scale"  # scaling every row by a > 0 scales the aggregate by a
IDENTICAL = "identical"  # identical rows give that row
BOUNDED = "bounded"  # f arbitrary rows cannot push the aggregate arbitrarily far
ROBUST = "robust"  # (f, kappa)-robust in the sense of Allouah et al. 2023, with the rule's `kappa`


class Rule(ABC):
    """An aggregation rule. Subclasses are frozen dataclasses whose fields are the settings.

    A rule never changes its input, never looks at anything but its arguments, and gives the same answer for
    the same arguments (randomness comes from `generator` only).

    Class attributes that the conformance suite reads:
        invariants: which of PERMUTATION, TRANSLATION, SCALE, IDENTICAL, BOUNDED, ROBUST the rule satisfies.
    """

    invariants: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def __call__(
        self,
        updates: Tensor,
        *,
        counts: Tensor | None = None,
        state: State | None = None,
        generator: torch.Generator | None = None,
        reference: Tensor | None = None,
    ) -> Aggregate:
        """Aggregate `updates` (..., n, d).

        Args:
            updates: (..., n, d) one row a client, finite.
            counts: (..., n) example counts of the clients; None: all alike.
            state: the `state` of the last round's Aggregate; None in the first round.
            generator: source of randomness for rules that draw.
            reference: (..., d) an update the server trusts, for rules that compare with one.

        Raises:
            TooFewUpdates: fewer rows than the settings need.
        """

    def minimum(self) -> int:
        """Fewest rows the rule can work with."""
        return 1

    def largest_f(self, n: int) -> int | None:
        """Largest f, up to the rule's own, with which it can work on n rows; None: no f at all, or none will do.

        >>> from fedlaw.aggregators import Krum
        >>> Krum(f=80).largest_f(100)
        48
        """
        rule: Any = self
        if "f" not in getattr(rule, "__dataclass_fields__", {}):
            return None
        return next((f for f in range(rule.f, -1, -1) if replace(rule, f=f).minimum() <= n), None)

    def kappa(self, n: int) -> float | None:
        """The proven kappa with which the rule is (f, kappa)-robust on n rows; None: none is known.

        That is |F - mean_S|^2 <= kappa / |S| * sum over S of |x_i - mean_S|^2 for every set S of n - f rows
        (Allouah et al., *Fixing by Mixing*, AISTATS 2023).
        """
        return None

    def _require(self, updates: Tensor) -> int:
        """Number of rows, after checking shape and minimum."""
        if updates.ndim < 2 or not updates.is_floating_point():
            raise ValueError(
                f"updates must be a floating-point tensor (..., n, d), got {updates.dtype} of shape "
                f"{tuple(updates.shape)}"
            )
        n = updates.shape[-2]
        if n < self.minimum():
            raise TooFewUpdates(f"{self!r} needs at least {self.minimum()} updates, got {n}")
        return n


class PreAggregator(Rule):
    """A rule whose Aggregate.vector is again rows (..., m, d): something to do before aggregating."""

    def rows(self, n: int) -> int:
        """How many rows it hands on when given n."""
        return n

    def carry_counts(self, counts: Tensor, weights: Tensor) -> Tensor:
        """Example counts (..., m) of the rows handed on, from those of the clients (..., n) and the (..., m, n)
        weights. Here row i still is client i and keeps its count."""
        return counts


registry: Registry[Rule] = Registry("rule", "aggregators")


def create(name: str, /, **settings: Any) -> Rule:
    """Make a rule or pre-aggregator by name.

    >>> create("krum", f=1)
    Krum(f=1, neighbors=None)
    """
    return registry.create(name, **settings)


def check_share(name: str, value: object) -> None:
    """A ValueError unless `value` is None, a positive integer, or a float in (0, 1]: a share of the rows."""
    if value is None or (isinstance(value, float) and 0 < value <= 1):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{name} must be a positive integer, a float in (0, 1] (a share of the rows received) or None, "
            f"got {value!r}"
        )


def resolve_share(value: int | float | None, n: int, default: int) -> int:
    """A setting that `check_share` allows, as a number of rows out of n."""
    if value is None:
        return default
    return value if isinstance(value, int) else max(1, int(value * n))


def require_generator(rule: Rule, generator: torch.Generator | None) -> torch.Generator:
    """The generator, or a ValueError that says the rule draws at random."""
    if generator is None:
        raise ValueError(f"{rule!r} draws at random: pass generator=torch.Generator().manual_seed(...)")
    return generator


def draw_coordinates(rule: Rule, d: int, count: int, generator: torch.Generator | None) -> Tensor:
    """(d,) bool, on the generator's device: `count` of d coordinates drawn without replacement.

    Coordinates are drawn with replacement until so many (or, if that is fewer, so many to leave out) are distinct:
    several times faster than a permutation of all of them.
    """
    source = require_generator(rule, generator)
    few = min(count, d - count)
    drawn = torch.zeros(d, dtype=torch.bool, device=source.device)
    while missing := few - int(torch.count_nonzero(drawn)):
        drawn.index_fill_(0, torch.randint(d, (missing,), generator=source, device=source.device), True)
    return drawn if few == count else ~drawn


def client_shares(updates: Tensor, counts: Tensor | None) -> Tensor:
    """(..., n) float64 shares of the clients: proportional to their counts; all 1/n if there are none."""
    lead_and_n = updates.shape[:-1]
    if counts is None:
        return torch.full(lead_and_n, 1.0 / lead_and_n[-1], dtype=torch.float64, device=updates.device)
    shares = counts.to(updates.device, torch.float64).expand(lead_and_n)
    total = shares.sum(-1, keepdim=True)
    return torch.where(total > 0, shares / total, 1.0 / lead_and_n[-1])
