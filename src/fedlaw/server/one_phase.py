"""Servers that need one exchange a round: any aggregation rule, and the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from fedlaw._linalg import weighted_sum
from fedlaw._random import generator
from fedlaw.aggregators.base import PreAggregator, Rule, TooFewUpdates
from fedlaw.server.base import Server
from fedlaw.server.judge import Exclusion, Status
from fedlaw.server.protocol import ClientId, RoundReport, Settings

Unit = Literal["gradient", "parameter"]


class _Collecting(Server):
    """Collects one phase of updates, then makes one vector of them."""

    def _eligible(self) -> Tensor:
        return torch.ones(self.n, dtype=torch.bool, device=self.params.device)

    def _needs_loss(self) -> bool:
        return False

    def _receive(self, rows: Tensor, updates: Tensor, norms: Tensor) -> None:
        self._store(rows, updates)

    def _close(self) -> RoundReport:
        rows = self._answered.nonzero().flatten()
        if len(rows) < self.settings.minimum_replies:
            return self._report(
                weights=None,
                skipped=f"{len(rows)} usable replies, at least {self.settings.minimum_replies} are needed",
            )
        vector, weights, skipped = self._combine(rows, self._collected())
        if vector is not None:
            skipped = self._apply(vector)
        return self._report(weights=weights, skipped=skipped)

    def _combine(self, rows: Tensor, updates: Tensor) -> tuple[Tensor | None, Tensor | None, str | None]:
        """The step (d,) and the weights (n,) from the answered `rows` of updates (n, d), or why there is none."""
        raise NotImplementedError


class OnePhase(_Collecting):
    """Any aggregation rule as a server.

    Args:
        initial_params: (d,) the model to start from.
        clients: the roster.
        rule: the rule, applied to the updates of those who answered.
        settings: rounds, step size and the like.
        unit: what the rule's thresholds are meant for: "gradient" (pseudo-gradients g) or "parameter"
            (parameter differences alpha * g). A rule never knows alpha: the updates are scaled for it.
        reference: (d,) callable given (round, params) that makes the update the server trusts, for rules that
            compare with one (FLTrust).

    With fewer replies than the rule can work with, the round is skipped: the report says so and the model stays.

    >>> from fedlaw.aggregators import Krum
    >>> server = OnePhase(torch.zeros(3), clients=range(10), rule=Krum(f=2))
    >>> server.ask().clients
    (0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    """

    kind = "one_phase"

    def __init__(
        self,
        initial_params: Tensor,
        clients: Iterable[ClientId],
        rule: Rule,
        settings: Settings | None = None,
        *,
        unit: Unit = "gradient",
        reference: Any = None,
    ) -> None:
        if not isinstance(rule, Rule) or isinstance(rule, PreAggregator):
            raise ValueError(f"rule must be an aggregation rule that ends in one vector, got {rule!r}")
        if unit not in ("gradient", "parameter"):
            raise ValueError(f"unit must be 'gradient' or 'parameter', got {unit!r}")
        self.rule = rule
        self.unit = unit
        self.reference = reference
        self._state: dict[str, Tensor] | None = None
        self._state_rows: Tensor | None = None
        super().__init__(initial_params, clients, settings)

    def _combine(self, rows: Tensor, updates: Tensor) -> tuple[Tensor | None, Tensor | None, str | None]:
        everybody = len(rows) == self.n
        scale = self.settings.alpha if self.unit == "parameter" else 1.0
        matrix = updates if everybody else updates[rows]
        if scale != 1.0:
            matrix = matrix * scale
        reference = None
        if self.reference is not None:
            reference = self.reference(self.round, self.params).to(matrix) * scale
        # State with a row per client means something only for the clients it was made of.
        kept = self._state
        if kept is not None and not torch.equal(
            rows.cpu(), self._state_rows if self._state_rows is not None else rows
        ):
            kept = {name: x for name, x in kept.items() if x.ndim < 2} or None
        try:
            out = self.rule(
                matrix,
                counts=self._counts[rows].to(matrix.dtype),
                state=kept,
                generator=generator(self.settings.seed, self.round, "rule", device=matrix.device),
                reference=reference,
            )
        except TooFewUpdates as error:
            return None, None, str(error)
        self._state = out.state
        self._state_rows = rows.cpu()
        weights = None
        if out.weights is not None:
            weights = torch.zeros(self.n, dtype=torch.float64, device=matrix.device)
            weights[rows] = out.weights.to(torch.float64)
        if not bool(torch.isfinite(out.vector).all()):
            return None, weights, "the aggregate is not finite"
        return out.vector / scale, weights, None

    def statuses(self) -> dict[ClientId, tuple[Status, Exclusion]]:
        """A rule judges each round anew: everybody is a member."""
        return dict.fromkeys(self.roster, (Status.MEMBER, Exclusion.NONE))

    def _pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays = {f"rule.{name}": x for name, x in (self._state or {}).items()}
        if self._state_rows is not None:
            arrays["rows"] = self._state_rows
        return arrays, {"rule": repr(self.rule), "unit": self.unit}

    def _unpack(self, arrays: dict[str, Tensor], description: dict[str, Any]) -> None:
        state = {
            name.removeprefix("rule."): x.to(self.params.device)
            for name, x in arrays.items()
            if name.startswith("rule.")
        }
        self._state = state or None
        self._state_rows = arrays.get("rows")


class Oracle(_Collecting):
    """Told who is malicious: the mean of the honest updates, weighted by example counts. The ceiling.

    >>> server = Oracle(torch.zeros(3), clients=["a", "b", "c"], malicious=["b"])
    >>> server.ask().clients
    ('a', 'c')
    """

    kind = "oracle"

    def __init__(
        self,
        initial_params: Tensor,
        clients: Iterable[ClientId],
        malicious: Iterable[ClientId],
        settings: Settings | None = None,
    ) -> None:
        roster, named = tuple(clients), set(malicious)
        unknown = named - set(roster)
        if unknown:
            raise ValueError(f"malicious names {sorted(map(str, unknown))[0]!r}, which is not on the roster")
        if len(named) == len(set(roster)):
            raise ValueError("malicious names every client: nobody is left to learn from")
        self._honest = torch.tensor([client not in named for client in roster], device=initial_params.device)
        super().__init__(initial_params, roster, settings)

    def _eligible(self) -> Tensor:
        return self._honest

    def _combine(self, rows: Tensor, updates: Tensor) -> tuple[Tensor | None, Tensor | None, str | None]:
        weights = torch.where(self._answered, self._counts, 0.0)
        weights = weights / weights.sum()
        return weighted_sum(weights, updates), weights, None

    def statuses(self) -> dict[ClientId, tuple[Status, Exclusion]]:
        """Members and, told from outside, left out."""
        both = (Status.LEFT_OUT, Status.MEMBER)
        return {c: (both[h], Exclusion.NONE) for c, h in zip(self.roster, self._honest.tolist(), strict=True)}

    def _pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {"honest": self._honest.tolist()}

    def _unpack(self, arrays: dict[str, Tensor], description: dict[str, Any]) -> None:
        return None
