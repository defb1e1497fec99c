"""Servers that need one exchange a round: any aggregation rule, and the oracle."""

from __future__ import annotations

import contextlib
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor

from fedlaw._linalg import weighted_sum
from fedlaw._random import generator
from fedlaw.aggregators.base import Aggregate, PreAggregator, Rule, TooFewUpdates
from fedlaw.server.base import ROWS_AT_ONCE, Server
from fedlaw.server.judge import Exclusion, Status
from fedlaw.server.protocol import ClientId, RoundReport, Settings

Unit = Literal["gradient", "parameter"]


class _Collecting(Server):
    """Collects one phase of updates, then makes one vector of them."""

    def _eligible(self) -> Tensor:
        return torch.ones(self.n, dtype=torch.bool)

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

    @abstractmethod
    def _combine(self, rows: Tensor, updates: Tensor) -> tuple[Tensor | None, Tensor | None, str | None]:
        """The step (d,) and the weights (n,) from the answered `rows` of updates (n, d), or why there is none."""


class OnePhase(_Collecting):
    """Any aggregation rule as a server.

    Args:
        initial_params: (d,) the model to start from.
        clients: the roster.
        rule: the rule, applied to the updates of those who answered.
        settings: rounds, step size and the like.
        unit: what the rule's thresholds are meant for: "gradient" (pseudo-gradients g) or "parameter"
            (parameter differences alpha * g). A rule never knows alpha: the updates are scaled for it.
        reference: called as reference(round, params), makes the update (d,) that the server trusts, for rules that
            compare with one (FLTrust).
        count_bound: a client's claimed number of examples is believed up to this many times the median; None: as
            told. A client that told none has the median.

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
        reference: Callable[[int, Tensor], Tensor] | None = None,
        count_bound: float | None = 10.0,
    ) -> None:
        if not isinstance(rule, Rule) or isinstance(rule, PreAggregator):
            raise ValueError(f"rule must be an aggregation rule that ends in one vector, got {rule!r}")
        if unit not in ("gradient", "parameter"):
            raise ValueError(f"unit must be 'gradient' or 'parameter', got {unit!r}")
        self.rule = rule
        self.unit = unit
        self.reference = reference
        self.count_bound = count_bound
        self._state: dict[str, Tensor] | None = None
        super().__init__(initial_params, clients, settings)
        self._rehearse()

    def _combine(self, rows: Tensor, updates: Tensor) -> tuple[Tensor | None, Tensor | None, str | None]:
        scale = self.settings.alpha if self.unit == "parameter" else 1.0
        matrix = _compacted(updates, rows)
        if scale != 1.0:
            matrix = matrix.mul_(scale)  # ours, and written anew next round
        try:
            out = self._applied(matrix, rows, scale)
        except ValueError as error:  # too few updates, or settings that do not fit so many
            return None, None, str(error)
        self._remember(out.state, rows)
        weights = None
        if out.weights is not None:
            weights = torch.zeros(self.n, dtype=torch.float64)
            weights[rows] = out.weights.to("cpu", torch.float64)
        if not bool(torch.isfinite(out.vector).all()):
            return None, weights, "the aggregate is not finite"
        return out.vector / scale, weights, None

    def _applied(self, matrix: Tensor, rows: Tensor, scale: float) -> Aggregate:
        reference = None
        if self.reference is not None:
            reference = self.reference(self.round, self.params).to(matrix) * scale
        return self.rule(
            matrix,
            counts=self._examples(self.count_bound)[rows].to(matrix),
            state=self._recalled(rows),
            generator=generator(self.settings.seed, self.round, "rule", device=matrix.device),
            reference=reference,
        )

    def _rehearse(self) -> None:
        """Apply the rule to zeros once, so that settings that cannot work are refused before training."""
        zeros = torch.zeros(self.n, 1, dtype=self.params.dtype, device=self.params.device)
        stream = generator(self.settings.seed, 0, "rule", device=zeros.device)
        reference = None if self.reference is None else zeros[0]
        with contextlib.suppress(TooFewUpdates), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.rule(zeros, counts=torch.ones_like(zeros[:, 0]), generator=stream, reference=reference)

    def _remember(self, state: dict[str, Tensor] | None, rows: Tensor) -> None:
        """Keep a rule's state; what has a row per client is kept by client, whoever answers next time."""
        kept = {}
        for name, value in (state or {}).items():
            if value.ndim >= 2 and value.shape[0] == len(rows):
                table = (self._state or {}).get(name)
                if table is None:
                    table = value.new_zeros(self.n, *value.shape[1:])
                value = value if len(rows) == self.n else table.index_copy(0, rows.to(table.device), value)
            kept[name] = value
        self._state = kept or None

    def _recalled(self, rows: Tensor) -> dict[str, Tensor] | None:
        if self._state is None or len(rows) == self.n:
            return self._state
        return {
            name: x[rows] if x.ndim >= 2 and x.shape[0] == self.n else x for name, x in self._state.items()
        }

    def statuses(self) -> dict[ClientId, tuple[Status, Exclusion]]:
        """A rule judges each round anew: everybody is a member."""
        return dict.fromkeys(self.roster, (Status.MEMBER, Exclusion.NONE))

    def _pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        arrays = {f"rule.{name}": x for name, x in (self._state or {}).items()}
        return arrays, {"rule": repr(self.rule), "unit": self.unit, "count_bound": self.count_bound}

    def _unpack(self, arrays: dict[str, Tensor], description: dict[str, Any]) -> None:
        state = {
            name.removeprefix("rule."): x.to(self.params.device)
            for name, x in arrays.items()
            if name.startswith("rule.")
        }
        self._state = state or None


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
        self._honest = torch.tensor([client not in named for client in roster])
        super().__init__(initial_params, roster, settings)

    def _eligible(self) -> Tensor:
        return self._honest

    def _combine(self, rows: Tensor, updates: Tensor) -> tuple[Tensor | None, Tensor | None, str | None]:
        weights = torch.where(self._answered, self._examples(), 0.0)
        weights = weights / weights.sum()
        return weighted_sum(weights.to(updates.device), updates), weights, None

    def statuses(self) -> dict[ClientId, tuple[Status, Exclusion]]:
        """Members and, told from outside, left out."""
        both = (Status.LEFT_OUT, Status.MEMBER)
        return {c: (both[h], Exclusion.NONE) for c, h in zip(self.roster, self._honest.tolist(), strict=True)}

    def _pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {}, {"honest": self._honest.tolist()}

    def _unpack(self, arrays: dict[str, Tensor], description: dict[str, Any]) -> None:
        return None


def _compacted(matrix: Tensor, rows: Tensor) -> Tensor:
    """The given rows (m,), ascending, of a matrix of ours (n, d), moved to its beginning in place."""
    if len(rows) < len(matrix):
        at = 0
        for some in torch.split(rows, ROWS_AT_ONCE):  # sources lie at or behind their places: nothing is lost
            matrix[at : at + len(some)] = matrix[some]
            at += len(some)
    return matrix[: len(rows)]
