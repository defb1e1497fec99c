"""What every aggregation rule is: a small frozen value with settings, called on (..., n, d) updates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedlaw._registry import Registry


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
    state: dict[str, Tensor] | None = None


class TooFewUpdates(ValueError):
    """Fewer updates than the rule can work with, for its settings."""


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
        state: dict[str, Tensor] | None = None,
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


PERMUTATION = "permutation"  # reordering the rows changes nothing (weights follow the rows)
TRANSLATION = "translation"  # shifting every row by v shifts the aggregate by v
SCALE = "scale"  # scaling every row by a > 0 scales the aggregate by a
IDENTICAL = "identical"  # identical rows give that row
BOUNDED = "bounded"  # f arbitrary rows cannot push the aggregate arbitrarily far
ROBUST = "robust"  # (f, kappa)-robust in the sense of Allouah et al. 2023

registry: Registry[Rule] = Registry("rule", "aggregators")


def create(name: str, /, **settings: Any) -> Rule:
    """Make a rule or pre-aggregator by name.

    >>> create("krum", f=1)
    Krum(f=1, neighbors=None)
    """
    return registry.create(name, **settings)
