"""Attacks made of attacks: when and by whom, side by side, with false losses, larger than life."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedlaw._checks import check_choice, check_integer, check_number
from fedlaw.attacks._common import mean_std, normal
from fedlaw.attacks.base import Attack, Forged, View, ranks, registry
from fedlaw.attacks.data import Honest
from fedlaw.attacks.own import GlobalParameter, InverseGradient
from fedlaw.attacks.spec import parse


@dataclass(frozen=True)
class _Wrapper(Attack):
    """Another attack with something changed; what is not changed is left to it."""

    attack: Attack = field(default_factory=InverseGradient)

    def __post_init__(self) -> None:
        object.__setattr__(self, "attack", parse(self.attack))

    @property
    def poisons_data(self) -> bool:
        return self.attack.poisons_data

    @property
    def needs_rule(self) -> bool:
        return self.attack.needs_rule

    def poison(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        classes: int,
        black: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        return self.attack.poison(inputs, labels, classes=classes, black=black, generator=generator)

    def forge(self, view: View) -> Forged:
        return self.attack.forge(view)

    def acting(self, round: int, malicious: Tensor) -> Tensor:
        return self.attack.acting(round, malicious)

    def member(self, rank: int, crew: int) -> Attack:
        return self.attack.member(rank, crew)


@registry.register("schedule")
@dataclass(frozen=True)
class Schedule(_Wrapper):
    """An attack in some rounds and by some of the malicious clients; the rest is honest behaviour.

    Settings:
        attack: what they do then (an attack, a name, or a mapping).
        start, stop: first and last round, both included; stop None: to the end.
        every: act in rounds start, start + every, ... only.
        share: share of the malicious clients that ever act, the first of them in roster order.

    >>> fleet = torch.tensor([True, True, False, True, True])
    >>> Schedule("flip", start=3, share=0.5).acting(3, fleet).tolist()
    [True, True, False, False, False]
    >>> bool(Schedule("flip", start=3).acting(2, fleet).any())
    False
    """

    start: int = 1
    stop: int | None = None
    every: int = 1
    share: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("start", self.start, low=1)
        if self.stop is not None:
            check_integer("stop (last round; None: no end)", self.stop, low=self.start)
        check_integer("every", self.every, low=1)
        check_number("share", self.share, low=0, high=1)

    def acting(self, round: int, malicious: Tensor) -> Tensor:
        past = self.stop is not None and round > self.stop
        if round < self.start or past or (round - self.start) % self.every:
            return torch.zeros_like(malicious)
        members = malicious & (ranks(malicious) < self._members(int(malicious.sum())))
        return self.attack.acting(round, members)

    def forge(self, view: View) -> Forged:
        if view.ranks is not None and view.crew is not None:
            members = self._members(view.crew)
            view = replace(view, ranks=_within(view.ranks, 0, members), crew=members)
        return self.attack.forge(view)

    def member(self, rank: int, crew: int) -> Attack:
        members = self._members(crew)
        return self.attack.member(rank, members) if rank < members else Honest()

    def _members(self, crew: int) -> int:
        return _rounded(self.share, crew)


@registry.register("turns")
@dataclass(frozen=True)
class Turns(_Wrapper):
    """Honest for some rounds, an attack for some, and so on: a mean over many rounds hardly shows it.

    Settings:
        attack: what they do in their rounds (an attack, a name, or a mapping).
        honest: rounds of good behaviour at a time, the first ones too.
        lasting: rounds of the attack at a time.

    >>> fleet = torch.tensor([True, False])
    >>> [k for k in range(1, 12) if Turns(honest=3, lasting=2).acting(k, fleet).any()]
    [4, 5, 9, 10]
    """

    honest: int = 5
    lasting: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("honest", self.honest, low=0)
        check_integer("lasting", self.lasting, low=1)

    def acting(self, round: int, malicious: Tensor) -> Tensor:
        if (round - 1) % (self.honest + self.lasting) < self.honest:
            return torch.zeros_like(malicious)
        return self.attack.acting(round, malicious)


@registry.register("split")
@dataclass(frozen=True)
class Split(Attack):
    """Several attacks side by side: the malicious clients are divided among them in roster order.

    Each part sees its own clients as the malicious ones; honest are those that act in no part.

    Settings:
        parts: the attacks (attacks, names, or mappings).
        shares: share of the malicious clients that each part gets, together at most 1 (the rest is honest);
            None: equal shares.

    >>> both = Split(parts=("flip", "inverse"))
    >>> both.member(0, 4), both.member(3, 4)
    (LabelFlip(), InverseGradient())
    """

    parts: tuple[Attack, ...] = (InverseGradient(), GlobalParameter())
    shares: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.parts, (tuple, list)) or not self.parts:
            raise ValueError(f"parts must be a list of at least one attack, got {self.parts!r}")
        object.__setattr__(self, "parts", tuple(parse(part) for part in self.parts))
        if self.shares is None:
            return
        if not isinstance(self.shares, (tuple, list)) or len(self.shares) != len(self.parts):
            raise ValueError(f"shares must be one number per part ({len(self.parts)}), got {self.shares!r}")
        object.__setattr__(self, "shares", tuple(self.shares))
        for share in self.shares:
            check_number("each of shares", share, low=0, high=1)
        if math.fsum(self.shares) > 1 + 1e-9:
            raise ValueError(f"shares must add up to at most 1, got {self.shares!r}")

    @property
    def poisons_data(self) -> bool:
        return any(part.poisons_data for part in self.parts)

    @property
    def needs_rule(self) -> bool:
        return any(part.needs_rule for part in self.parts)

    def poison(
        self,
        inputs: Tensor,
        labels: Tensor,
        *,
        classes: int,
        black: float | Tensor = 0.0,
        generator: torch.Generator | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not self.poisons_data:
            return inputs, labels
        raise ValueError(
            "parts poison data differently; ask attack.member(rank, crew) for a client's own part"
        )

    def forge(self, view: View) -> Forged:
        if view.ranks is None or view.crew is None:
            raise ValueError(
                "View.ranks and View.crew must be given to an attack with parts, to tell them apart; got "
                "None (fedlaw.attacks.ranks makes the first)"
            )
        acting = view.malicious if view.acting is None else view.acting
        updates, losses = view.own_updates.clone(), view.own_losses.clone()
        for part, (first, last) in zip(self.parts, self._bounds(view.crew), strict=True):
            mine = view.malicious & (view.ranks >= first) & (view.ranks < last)
            if bool(mine.any()):
                places = _within(view.ranks, first, last)
                forged = part.forge(
                    replace(view, malicious=mine, ranks=places, crew=last - first, acting=acting)
                )
                rows = mine[view.malicious]
                updates[rows], losses[rows] = forged
        return Forged(updates, losses)

    def acting(self, round: int, malicious: Tensor) -> Tensor:
        places, out = ranks(malicious), torch.zeros_like(malicious)
        for part, (first, last) in zip(self.parts, self._bounds(int(malicious.sum())), strict=True):
            out = out | part.acting(round, malicious & (places >= first) & (places < last))
        return out

    def member(self, rank: int, crew: int) -> Attack:
        for part, (first, last) in zip(self.parts, self._bounds(crew), strict=True):
            if first <= rank < last:
                return part.member(rank - first, last - first)
        return Honest()

    def _bounds(self, crew: int) -> list[tuple[int, int]]:
        """First rank and one past the last of each part."""
        shares = self.shares if self.shares is not None else (1 / len(self.parts),) * len(self.parts)
        ends = [_rounded(math.fsum(shares[: i + 1]), crew) for i in range(len(shares))]
        return list(zip([0, *ends[:-1]], ends, strict=True))


@registry.register("forge_loss")
@dataclass(frozen=True)
class ForgeLoss(_Wrapper):
    """An attack whose clients report a false loss: mean - rho std of the honest losses.

    Settings:
        attack: what they do otherwise (an attack, a name, or a mapping).
        rho: how far below the mean, in standard deviations; negative values report too much.
        ddof: the variance is divided by (number - ddof): 0 or 1.
        noise: each attacker adds N(0, (noise std)^2), so that reported losses are not identical.

    Where nobody is honest, mean and deviation are those of all losses.

    Reference: the FedLAW paper (ICLR 2026), section on mimic attacks.

    >>> view = View(torch.ones(3, 1), torch.tensor([1.0, 3.0, 9.0]), torch.tensor([False, False, True]),
    ...             torch.zeros(1))
    >>> ForgeLoss("inverse", rho=0.5).forge(view).losses.tolist()
    [1.5]
    """

    rho: float = 0.3
    ddof: int = 0
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("rho", self.rho)
        check_choice("ddof", self.ddof, (0, 1))
        check_number("noise", self.noise, low=0)

    def forge(self, view: View) -> Forged:
        updates, own = self.attack.forge(view)
        honest = view.honest_losses
        mean, std = mean_std(honest if len(honest) else view.losses, self.ddof)
        losses = (mean - self.rho * std).expand(own.shape).clone()
        if self.noise > 0:
            losses = losses + self.noise * std * normal(tuple(own.shape), own, view.generator)
        return Forged(updates, losses)


@registry.register("scale")
@dataclass(frozen=True)
class Scale(_Wrapper):
    """Send a multiple of what one would send otherwise: c g_j.

    On a `TargetedBackdoor`, with c = n / m, this is model replacement.

    Settings:
        attack: what is scaled; by default the client's own honest update.
        factor: c; negative values invert as well.

    Reference: Bagdasaryan, Veit, Hua, Estrin, Shmatikov, "How to backdoor federated learning", AISTATS 2020.

    >>> view = View(torch.tensor([[1.0, 2.0]]), torch.ones(1), torch.tensor([True]), torch.zeros(2))
    >>> Scale(factor=3).forge(view).updates.tolist()
    [[3.0, 6.0]]
    """

    attack: Attack = field(default_factory=Honest)
    factor: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("factor", self.factor)

    def forge(self, view: View) -> Forged:
        updates, losses = self.attack.forge(view)
        return Forged(self.factor * updates, losses)


def _rounded(share: float, crew: int) -> int:
    """share * crew to the nearest integer, a half upwards, the same on every machine for shares like 1/3."""
    return min(crew, math.floor(share * crew + 0.5 + 1e-9))


def _within(places: Tensor, first: int, last: int) -> Tensor:
    """Ranks counted within first <= rank < last; -1 outside."""
    return torch.where((places >= first) & (places < last), places - first, torch.full_like(places, -1))
