"""What a judge is: the part of a two-phase server that turns evidence into weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Protocol

from torch import Tensor


class Status(StrEnum):
    """Where a client stands. Weight 0 while on trial accuses nobody."""

    CORE = "core"
    TRIAL = "on trial"
    MEMBER = "member"
    LEFT_OUT = "left out"
    EXCLUDED = "excluded"


class Exclusion(IntEnum):
    """Why a client was excluded for good; NONE where it was not."""

    NONE = 0
    NORM = 1
    COPIES = 2
    TOO_GOOD = 3

    @property
    def words(self) -> str:
        """The reason in words."""
        return ("", "norm", "copies", "too good")[self]


@dataclass(frozen=True)
class Arrived:
    """What phase 1 brought, for n clients (..., n).

    Attributes:
        updates: (..., n, d) zero rows for those who did not answer.
        norms: (..., n) of its rows.
        asked, answered: (..., n) bool; answered implies asked.
        counts: (..., n) example counts as last told, the median where never told.
    """

    updates: Tensor
    norms: Tensor
    asked: Tensor
    answered: Tensor
    counts: Tensor


@dataclass(frozen=True)
class Examined:
    """What a judge makes of phase 1.

    Attributes:
        state: the judge's state from here on.
        factors: (..., n) what clipping multiplies each update by.
        radius: (...) what phase 2 is clipped at; infinite: not at all.
        weights: (..., n) of the look-ahead model; in a one-phase round of the step itself.
        usable: (..., n) bool, whose phase-2 reply is wanted.
        enough: (...) bool, False: too few answered, the round is to be skipped.
        assembly: (..., n) other weights that the judge wants phase 2 summed by as well; None: it does not.
    """

    state: Any
    factors: Tensor
    radius: Tensor
    weights: Tensor
    usable: Tensor
    enough: Tensor
    assembly: Tensor | None = None


@dataclass(frozen=True)
class Evidence:
    """What phase 2 brought, as far as it is kept: no update of it, only products with phase 1's.

    With g_i clipped updates of phase 1, g~_i those of phase 2 (clipped at the same radius), w the look-ahead
    weights and z = sum_i w_i g~_i:

    Attributes:
        along: (..., n) g_i . z; (..., 2, n), with a second z by the weights of the assembly, if there are any.
        own: (..., n) g_i . g~_i.
        norms: (..., n) |g_i|.
        length: (...) |z|; (..., 2) with an assembly.
        losses: (..., n) f~_i.
        asked, scored: (..., n) bool; scored: answered both phases.
        counts: (..., n).
        alpha: step size.
    """

    along: Tensor
    own: Tensor
    norms: Tensor
    length: Tensor
    losses: Tensor
    asked: Tensor
    scored: Tensor
    counts: Tensor
    alpha: float


@dataclass(frozen=True)
class Verdict:
    """What a judge decides.

    Attributes:
        state: the judge's state from here on.
        weights: (..., n) of this round's step.
        enough: (...) bool, False: too few answered, the round is to be skipped (`state` is then unused).
        reasons: per client (..., n), the parts the weight was made of; NaN where there are none.
    """

    state: Any
    weights: Tensor
    enough: Tensor
    reasons: dict[str, Tensor]


class Judge(Protocol):
    """A way of judging: a frozen dataclass of settings with pure functions of a state of tensors."""

    def bind(self, n: int, rounds: int) -> Any:
        """The judge with every setting resolved for n clients and a number of rounds; errors are ValueErrors."""

    def start(self, n: int, like: Tensor) -> Any:
        """The state before round 1, on the device of `like`."""

    def phases(self, state: Any) -> int:
        """How many phases the coming round has: 2 while weights are learned, else 1."""

    def eligible(self, state: Any) -> Tensor:
        """(..., n) bool: who may be asked in the coming round."""

    def examine(self, state: Any, arrived: Arrived) -> Examined:
        """Phase 1 is over: clip, and weigh the look-ahead model (in a one-phase round, the step)."""

    def weigh(self, state: Any, examined: Examined, evidence: Evidence) -> Verdict:
        """Phase 2 is over: the weights of this round's step."""

    def settle(self, state: Any, examined: Examined) -> Any:
        """A one-phase round is over: the state from here on."""

    def frozen(self, state: Any) -> bool:
        """Whether weights are final (until a refresh)."""

    def statuses(self, state: Any) -> list[tuple[Status, Exclusion]]:
        """Status of every client, and why it was excluded where it was (one experiment)."""

    def notes(self, state: Any) -> tuple[str, ...]:
        """Sentences for the operator, after a round with two phases (one experiment)."""


def share(fraction: float, n: int) -> int:
    """floor(fraction * n), safe from 0.29 * 100 = 28.999999999999996."""
    return math.floor(fraction * n + 1e-9)


def at_least(fraction: float, n: int) -> int:
    """ceil(fraction * n), safe from 0.07 * 100 = 7.000000000000001."""
    return math.ceil(fraction * n - 1e-9)


class Scheduled:
    """When a judge with a freeze and refreshes has two phases; settings say how often, the state how long ago."""

    refresh_period: int
    refresh_rounds: int

    def frozen(self, state: Any) -> bool:
        """Whether weights are final (until a refresh)."""
        return bool(state.frozen.all())

    def in_burst(self, state: Any) -> bool:
        """Whether the coming round belongs to a refresh: the last `refresh_rounds` of every period."""
        if not self.refresh_period or not self.frozen(state):
            return False
        return int(state.since.max()) % self.refresh_period >= self.refresh_period - self.refresh_rounds

    def phases(self, state: Any) -> int:
        """Two while weights are learned and in a refresh, one otherwise."""
        return 2 if not self.frozen(state) or self.in_burst(state) else 1
