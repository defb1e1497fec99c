"""What every attack is: it may poison its clients' data, and forge their updates and losses."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedlaw._registry import Registry


@dataclass(frozen=True)
class View:
    """What the adversary sees in one phase: everything but the server's randomness.

    Attributes:
        updates: (n, d) every client's own update (pseudo-gradient), roster order; the rows of the malicious
            clients are what their (possibly poisoned) local training gave.
        losses: (n,) the losses that go with them.
        malicious: (n,) bool, who takes part in this attack now.
        params: (d,) the model the clients were sent.
        round: the round, from 1.
        phase: 1 or 2.
        alpha: step size that relates updates to parameters: psi = params - alpha * update.
        generator: source of randomness (on the device of `updates`).
        rule: what the server does with (n, d) updates to get its (d,) aggregate, for attacks that search.
    """

    updates: Tensor
    losses: Tensor
    malicious: Tensor
    params: Tensor
    round: int = 1
    phase: int = 1
    alpha: float = 1.0
    generator: torch.Generator | None = None
    rule: Callable[[Tensor], Tensor] | None = None

    @property
    def honest_updates(self) -> Tensor:
        """(n - m, d) the updates of those who do not take part."""
        return self.updates[~self.malicious]

    @property
    def honest_losses(self) -> Tensor:
        """(n - m,) their losses."""
        return self.losses[~self.malicious]

    @property
    def own_updates(self) -> Tensor:
        """(m, d) what the malicious clients' own training gave."""
        return self.updates[self.malicious]

    @property
    def own_losses(self) -> Tensor:
        """(m,) their losses."""
        return self.losses[self.malicious]


class Forged(NamedTuple):
    """What the m malicious clients send: updates (m, d) and losses (m,), roster order."""

    updates: Tensor
    losses: Tensor


class Attack(ABC):
    """An attack. Subclasses are frozen dataclasses whose fields are the settings.

    The defaults are those of an honest client: data untouched, own update and loss sent as they are. An attack
    overrides `poison` (and sets `poisons_data`), or `forge`, or both. It never changes its input.
    """

    poisons_data: ClassVar[bool] = False
    needs_rule: ClassVar[bool] = False

    def poison(
        self, inputs: Tensor, labels: Tensor, *, classes: int, black: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Training data (k, ...) and labels (k,) of a malicious client, poisoned; new tensors.

        `black` is the value of a black pixel after scaling, a number or (channels, 1, 1).
        """
        return inputs, labels

    def forge(self, view: View) -> Forged:
        """What the malicious clients send in this phase."""
        return Forged(view.own_updates, view.own_losses)

    def acting(self, round: int, malicious: Tensor) -> Tensor:
        """(n,) bool: which of the malicious clients misbehave in this round (data or updates)."""
        return malicious


registry: Registry[Attack] = Registry("attack", "attacks")


def create(name: str, /, **settings: Any) -> Attack:
    """Make an attack by name.

    >>> create("lie")
    LIE(...)
    """
    return registry.create(name, **settings)
