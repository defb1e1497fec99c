"""Chain: pre-aggregators one after the other, then a rule."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fedlaw.aggregators.base import Aggregate, PreAggregator, Rule, State


def _fitted(rule: Rule, n: int, received: int) -> Rule:
    """`rule` for n rows made of `received` ones: its f cut, with a warning, if the rows have become too few."""
    largest = rule.largest_f(n)
    if n == received or largest is None or largest == rule.f:  # type: ignore[attr-defined]
        return rule
    warnings.warn(
        f"{rule!r} gets {n} rows, made of {received} updates: its f is cut to {largest}, the largest it allows "
        f"for so many",
        stacklevel=3,
    )
    cut: Rule = replace(rule, f=largest)  # type: ignore[type-var]
    return cut


@dataclass(frozen=True, init=False)
class Chain(Rule):
    """Pre-aggregators one after the other, then a rule.

    Each stage sees the rows the one before handed on. Where a stage hands on fewer rows than the chain
    received (bucketing), those after it keep their f, cut to the largest they allow for so many rows, with a
    warning.

    Weights are products of the stages' weights, None if any stage has none. The state of stage i is kept
    under keys that begin with "i.". Counts go with the rows: a bucket's count is the sum of its members', a
    clipped or mixed row keeps its client's. A reference goes to every stage as it is.

    Settings:
        stages: pre-aggregators, and a rule last (which may be a chain itself).

    >>> from fedlaw.aggregators import Bucketing, Clip, Krum
    >>> rule = Chain(Clip("median"), Bucketing(2), Krum(f=1))
    >>> x = torch.arange(24.0).reshape(12, 2)
    >>> rule(x, generator=torch.Generator().manual_seed(0)).weights.shape
    torch.Size([12])
    """

    stages: tuple[Rule, ...]

    def __init__(self, *stages: Rule) -> None:
        if not stages:
            raise ValueError("a chain needs at least one stage, got none")
        for stage in stages:
            if not isinstance(stage, Rule):
                raise ValueError(
                    f"a chain's stages must be rules, got {stage!r}: make it with aggregators.parse"
                )
        for stage in stages[:-1]:
            if not isinstance(stage, PreAggregator):
                raise ValueError(
                    f"{stage!r} gives one vector: only a pre-aggregator may come before the last stage"
                )
        if isinstance(stages[-1], PreAggregator):
            raise ValueError(
                f"a chain must end in a rule that gives one vector, got the pre-aggregator {stages[-1]!r}"
            )
        object.__setattr__(self, "stages", stages)

    def __repr__(self) -> str:
        return f"Chain({', '.join(map(repr, self.stages))})"

    def minimum(self) -> int:
        n = 1
        while not self._enough(n):
            n += 1
        return n

    def _enough(self, n: int) -> bool:
        received = n
        for stage in self.stages:
            if stage.minimum() > n and (n == received or stage.largest_f(n) is None):
                return False
            if isinstance(stage, PreAggregator):
                n = stage.rows(n)
        return True

    def __call__(
        self,
        updates: Tensor,
        *,
        counts: Tensor | None = None,
        state: State | None = None,
        generator: torch.Generator | None = None,
        reference: Tensor | None = None,
    ) -> Aggregate:
        received = self._require(updates)
        rows, weights, known = updates, None, True
        kept: State = {}
        for i, stage in enumerate(self.stages):
            prefix = f"{i}."
            own = {key.removeprefix(prefix): v for key, v in (state or {}).items() if key.startswith(prefix)}
            shared: dict[str, Any] = {"generator": generator, "reference": reference}
            result = _fitted(stage, rows.shape[-2], received)(
                rows, counts=counts, state=own or None, **shared
            )
            kept.update({prefix + key: value for key, value in (result.state or {}).items()})
            if isinstance(stage, PreAggregator):
                if counts is not None and result.weights is not None:
                    counts = stage.carry_counts(counts, result.weights)
                elif result.vector.shape[-2] != rows.shape[-2]:
                    counts = None  # nothing says whose examples the new rows stand for
            known = known and result.weights is not None
            if known:
                weights = result.weights if weights is None else _product(result.weights, weights)
            rows = result.vector
        return Aggregate(rows, weights if known else None, kept or None)


def _product(outer: Tensor | None, inner: Tensor) -> Tensor:
    """Weights of the clients from those of the rows, (..., m) or (..., k, m), and those that made the rows."""
    assert outer is not None
    if outer.ndim == inner.ndim:
        return outer @ inner
    return (outer.unsqueeze(-2) @ inner).squeeze(-2)
