"""What every attack is: it may poison its clients' data, and forge their updates and losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlaw._registry import Registry


@dataclass(frozen=True)
class View:
    """What the adversary sees in one phase: everything but the server's randomness.

    The first four say all that a simple attack needs. An attack that divides the malicious clients among
    several parts (`Split`, and so `double`) also needs `ranks` and `crew`, because who acts now does not tell
    who belongs to which part.

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
        ranks: (n,) integers, each client's place among all malicious clients of the roster, acting or not,
            asked or not; -1 for the others. See `ranks`.
        crew: number of malicious clients in the whole roster.
        acting: (n,) bool, who misbehaves now, in this part of the attack or in another; None: `malicious`.
        layers: sizes of the parameter tensors that make up `params`, in their order.
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
    ranks: Tensor | None = None
    crew: int | None = None
    acting: Tensor | None = None
    layers: tuple[int, ...] | None = None

    @property
    def honest(self) -> Tensor:
        """(n,) bool, who does not misbehave now."""
        return ~(self.malicious if self.acting is None else self.acting)

    @property
    def honest_updates(self) -> Tensor:
        """(n - m, d) the updates of those who do not take part."""
        return self.updates[self.honest]

    @property
    def honest_losses(self) -> Tensor:
        """(n - m,) their losses."""
        return self.losses[self.honest]

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


@dataclass(frozen=True)
class Attack:
    """An attack. Subclasses are frozen dataclasses whose fields are the settings.

    The defaults are those of an honest client: data untouched, own update and loss sent as they are. An
    attack overrides `poison` (and sets `poisons_data`), or `forge`, or both. It never changes its input, and
    what it draws comes from the generator it is given.
    """

    @property
    def poisons_data(self) -> bool:
        """Whether `poison` does something; a subclass says ``poisons_data = True``."""
        return False

    @property
    def needs_rule(self) -> bool:
        """Whether `forge` asks `View.rule`, the server's rule; a subclass says ``needs_rule = True``."""
        return False

    def poison(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        classes: int,
        black: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Training data (k, ...) and labels (k,) of a malicious client, poisoned; never changed in place.

        Args:
            inputs: (k, ...) as the model sees them; images are (k, channels, height, width).
            labels: (k,) integers from 0 to classes - 1.
            classes: the number of labels there are.
            black: the value of a black pixel after scaling, a number or (channels, 1, 1).
            generator: source of randomness.
        """
        return inputs, labels

    def forge(self, view: View) -> Forged:
        """What the malicious clients send in this phase."""
        return Forged(view.own_updates, view.own_losses)

    def acting(self, round: int, malicious: Tensor) -> Tensor:
        """(n,) bool: which of the malicious clients (of the whole roster) misbehave in this round."""
        return malicious

    def member(self, rank: int, crew: int) -> Attack:
        """What the malicious client of this rank (0 to crew - 1) does: the attack that poisons its data."""
        return self


def ranks(malicious: Tensor) -> Tensor:
    """Each client's place (n,) among the malicious ones (n,) bool, in roster order; -1 for the others.

    >>> ranks(torch.tensor([True, False, True, True])).tolist()
    [0, -1, 1, 2]
    """
    places = malicious.long().cumsum(0) - 1
    return torch.where(malicious, places, torch.full_like(places, -1))


registry: Registry[Attack] = Registry("attack", "attacks")


def create(name: str, /, **settings: Any) -> Attack:
    """Make an attack by name.

    >>> create("ipm", epsilon=0.5)
    IPM(epsilon=0.5)
    """
    return registry.create(name, **settings)
