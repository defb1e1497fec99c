"""What a server and whoever drives it say to each other. No transport, no clock, no randomness in here."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from fedlaw._checks import check_choice, check_integer, check_number, check_positive
from fedlaw.server.judge import Exclusion, Status

ClientId = Hashable
LossPoint = Literal["before", "after"]


@dataclass(frozen=True)
class Request:
    """What to send now, and to whom.

    Attributes:
        round: the model update this belongs to, from 1.
        phase: 1 (update from the current model) or 2 (update from the look-ahead model).
        params: (d,) the model to train from. Not to be changed.
        clients: whom to ask, roster order.
        loss_point: where a client takes its loss, over its full data: at `params` ("before") or at the end
            of its local training ("after").
    """

    round: int
    phase: int
    params: Tensor
    clients: tuple[ClientId, ...]
    loss_point: LossPoint = "after"


@dataclass(frozen=True)
class Reply:
    """One client's answer, believed in nothing: every field may be anything.

    Attributes:
        client: who says it is (the transport vouches for that, nothing else).
        update: (d,) pseudo-gradient (params - psi) / alpha.
        loss: its loss at the request's loss point.
        count: its number of training examples; None: not told.
        round, phase: which request it answers; None: the current one.
    """

    client: ClientId
    update: Any
    loss: Any = None
    count: Any = None
    round: int | None = None
    phase: int | None = None


@dataclass(frozen=True)
class Replies:
    """Many answers at once, the simulator's way: row i of each is the answer of clients[i].

    `updates` (m, d), `losses` (m,) or None, `counts` (m,) or None. Rows are screened one by one.
    """

    clients: Sequence[ClientId]
    updates: Tensor
    losses: Tensor | None = None
    counts: Tensor | None = None


@dataclass(frozen=True)
class Refusal:
    """A reply that was not used: who sent it, in which round and phase, and why."""

    round: int
    phase: int
    client: ClientId
    reason: str


@dataclass(frozen=True)
class Settings:
    """What every server is told, whatever its rule.

    Attributes:
        rounds: number of model updates.
        alpha: step size of the model, the clients' local learning rate.
        loss_point: where clients take their loss: "before" or "after" local training.
        participation: share of the eligible clients that is asked each round, drawn anew.
        minimum_replies: fewest usable replies a phase may end with; under it the round is skipped.
        seed: of the draws the server makes (participation, rules that draw).
    """

    rounds: int = 200
    alpha: float = 0.01
    loss_point: LossPoint = "after"
    participation: float = 1.0
    minimum_replies: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        check_integer("rounds", self.rounds, 1)
        check_positive("alpha", self.alpha)
        check_choice("loss_point", self.loss_point, ("before", "after"))
        check_number("participation", self.participation, low=0, high=1, open_low=True)
        check_integer("minimum_replies", self.minimum_replies, 1)
        check_integer("seed", self.seed)


@dataclass(frozen=True)
class RoundReport:
    """What a round came to.

    Attributes:
        round: its number, from 1.
        phases: how many exchanges it had.
        asked: (n,) bool. answered: (n,) bool, usable replies in every phase.
        weights: (n,) float64, the weights of the step, before absent mass is lost; None where the rule works per
            coordinate.
        statuses: per client, with the reason of an exclusion.
        reasons: per client (n,), the parts its weight was made of ("alignment", "loss", "score"); empty in rounds
            in which no weight was learned.
        losses: (n,) float64 losses as told in the last phase that asked for them, NaN elsewhere.
        skipped: why the model was left as it was; None: it was not.
        notes: sentences for the operator.
        refusals: replies refused in this round.
    """

    round: int
    phases: int
    asked: Tensor
    answered: Tensor
    weights: Tensor | None
    statuses: tuple[tuple[Status, Exclusion], ...]
    reasons: dict[str, Tensor]
    losses: Tensor
    skipped: str | None
    notes: tuple[str, ...]
    refusals: tuple[Refusal, ...]
