"""What a server and whoever drives it say to each other. No transport, no clock, no randomness in here."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

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
