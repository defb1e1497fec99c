r"""Judging as published: FedLAW's weight step (Algorithm 2) and the BSUM baseline's linear program.

.. math:: h = w + \beta(\alpha\, G^\top \tilde G w - \tilde f), \qquad w \leftarrow \text{Proj}(h)

on the sparse capped simplex of sparsity s and cap t. What the paper leaves open is a setting here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor

from fedlaw._checks import check_choice, check_integer, check_number, check_positive
from fedlaw._linalg import clip_factors
from fedlaw.screening import clip_to_median, copy_clusters, loss_scores, masked_median
from fedlaw.server.core_math import rank, worst
from fedlaw.server.judge import (
    Arrived,
    Evidence,
    Examined,
    Exclusion,
    Scheduled,
    Status,
    Verdict,
    at_least,
    share,
)
from fedlaw.simplex import check_feasible, project_unchecked


@dataclass(frozen=True)
class PublishedState:
    """learned: weight rounds so far. since: rounds since the freeze. frozen: bool. asked, scored: per client in
    weight rounds. weights: on the sparse capped simplex. dropped: filtered out in this round. losses: last told.
    """

    learned: Tensor
    since: Tensor
    frozen: Tensor
    asked: Tensor
    scored: Tensor
    weights: Tensor
    dropped: Tensor
    losses: Tensor


@dataclass(frozen=True)
class Learned(Scheduled, ABC):
    """Settings that the published step and BSUM share.

    Attributes:
        attackers: share of clients assumed malicious: sparsity is n - floor(share * n).
        sparsity: s itself; overrides `attackers`.
        anneal_rounds: s goes from n to its value over this many rounds; 0: it is there from round 1.
        slack: the cap is t = 1 / (s - slack); None: max(1, n // 20), which is the paper's 10 at 200 clients.
        cap: t itself; overrides `slack`.
        weight_rounds: rounds in which weights are learned, then they are frozen; None: all.
        clip: updates are clipped to the "median" norm, to a number, or not at all (None).
        loss_filter: a loss this many robust standard deviations under the median drops its client from the
            round; None: no filter.
        copy_filter: max(3, 3 % of n) or more updates closer than this share of the median norm drop out of the
            round; None: no filter.
        presence: share of the weight rounds it was asked in that a client must have been scored in.
        quorum: share of those with weight that must answer, or the round is skipped.
        refresh_period: rounds from one refresh to the next after the freeze; 0: none.
        refresh_rounds: rounds of learning in one refresh.
    """

    attackers: float = 0.4
    sparsity: int | None = None
    anneal_rounds: int = 0
    slack: int | None = None
    cap: float | None = None
    weight_rounds: int | None = 20
    clip: float | Literal["median"] | None = None
    loss_filter: float | None = None
    copy_filter: float | None = None
    presence: float = 0.5
    quorum: float = 0.5
    refresh_period: int = 0
    refresh_rounds: int = 5

    def __post_init__(self) -> None:
        check_number("attackers", self.attackers, low=0, high=1)
        if self.attackers == 1:
            raise ValueError("attackers must be a share under 1, got 1: somebody must be left to learn from")
        for name, low in (("sparsity", 1), ("slack", 0), ("weight_rounds", 1)):
            if getattr(self, name) is not None:
                check_integer(f"{name} (or None)", getattr(self, name), low)
        check_integer("anneal_rounds", self.anneal_rounds)
        check_integer("refresh_period (0: none)", self.refresh_period)
        if isinstance(self.clip, str):
            check_choice("clip (a number, None or)", self.clip, ("median",))
        for name in ("clip", "loss_filter", "copy_filter", "cap"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                check_positive(f"{name} (or None)", getattr(self, name))
        for name in ("presence", "quorum"):
            check_number(name, getattr(self, name), low=0, high=1)
        if self.refresh_period and not 1 <= self.refresh_rounds <= self.refresh_period:
            raise ValueError(
                f"refresh_rounds must be from 1 to refresh_period = {self.refresh_period}, "
                f"got {self.refresh_rounds}"
            )

    # -------------------------------------------------------------------------------------- set-up
    def bind(self, n: int, rounds: int) -> Self:
        """The settings with sparsity, slack and weight rounds resolved for n clients; checks s * t >= 1."""
        sparsity = n - share(self.attackers, n) if self.sparsity is None else self.sparsity
        slack = max(1, n // 20) if self.slack is None else self.slack
        if self.cap is None and self.slack is not None and slack >= sparsity:
            raise ValueError(
                f"slack must be under the sparsity, {sparsity}, got {slack}: the cap is 1/(sparsity - slack)"
            )
        bound = replace(
            self, sparsity=sparsity, slack=slack, weight_rounds=min(self.weight_rounds or rounds, rounds)
        )
        for level in {n, sparsity}:
            check_feasible(n, level, bound._cap(torch.tensor(level)))
        return bound

    def _cap(self, sparsity: Tensor) -> Tensor:
        if self.cap is not None:
            return torch.as_tensor(self.cap, dtype=torch.float64, device=sparsity.device)
        return 1 / (sparsity - (self.slack or 0)).clamp(min=1).to(torch.float64)

    def start(self, n: int, like: Tensor) -> PublishedState:
        """The state before round 1: uniform weights."""
        zero = torch.zeros((), dtype=torch.int64, device=like.device)
        clients = torch.zeros(n, dtype=torch.int64, device=like.device)
        return PublishedState(
            learned=zero,
            since=zero,
            frozen=zero.to(torch.bool),
            asked=clients,
            scored=clients,
            weights=torch.full((n,), 1 / n, dtype=torch.float64, device=like.device),
            dropped=clients.to(torch.bool),
            losses=torch.full((n,), torch.nan, dtype=torch.float64, device=like.device),
        )

    # -------------------------------------------------------------------------------------- schedule
    def eligible(self, state: PublishedState) -> Tensor:
        """Everybody while weights are learned, those with weight otherwise."""
        return torch.ones_like(state.dropped) if self.phases(state) == 2 else state.weights > 0

    def statuses(self, state: PublishedState) -> list[tuple[Status, Exclusion]]:
        """By weight: core or on trial while learning, member or left out after the freeze."""
        inside, outside = (
            (Status.MEMBER, Status.LEFT_OUT) if self.frozen(state) else (Status.CORE, Status.TRIAL)
        )
        return [(inside if w > 0 else outside, Exclusion.NONE) for w in state.weights.tolist()]

    # -------------------------------------------------------------------------------------- a round
    def examine(self, state: PublishedState, arrived: Arrived) -> Examined:
        """Clip, drop copies if asked to, and weigh the look-ahead model with the current weights."""
        present = arrived.answered
        norms = arrived.norms.to(torch.float64)
        median, factors = clip_to_median(norms, present)
        radius = torch.full_like(median, torch.inf)
        if self.clip == "median":
            radius = median
        else:
            if self.clip is not None:
                radius = torch.full_like(median, self.clip)
            factors = clip_factors(norms, radius.unsqueeze(-1))
        dropped = torch.zeros_like(present)
        if self.copy_filter is not None:
            _, sizes = copy_clusters(arrived.updates, factors, self.copy_filter * median, present)
            dropped = present & (sizes >= max(3, at_least(0.03, present.shape[-1])))  # a pair proves nothing
        support = (state.weights > 0) & arrived.asked
        enough = (support & present).sum(-1) >= (support.sum(-1) * self.quorum).clamp(min=1)
        weights = _normalized(state.weights * ~dropped, arrived.asked)
        return Examined(replace(state, dropped=dropped), factors, radius, weights, present, enough)

    def weigh(self, state: PublishedState, examined: Examined, evidence: Evidence) -> Verdict:
        """The weight step and the projection; at the last weight round, the freeze."""
        scored, absent = evidence.scored, evidence.asked & ~evidence.scored
        losses = evidence.losses.to(torch.float64)
        dropped = state.dropped
        if self.loss_filter is not None:
            dropped = dropped | (scored & (loss_scores(losses, scored) < -self.loss_filter))
        judged = scored & ~dropped
        weights, reasons = self._step(state, evidence, judged, absent | dropped)
        state = replace(
            state,
            learned=state.learned + 1,
            since=state.since + (1 if self.frozen(state) else 0),
            asked=state.asked + evidence.asked,
            scored=state.scored + scored,
            losses=torch.where(scored, losses, state.losses),
            weights=weights,
            dropped=dropped,
        )
        now = state.learned >= (self.weight_rounds or 0)
        there = state.scored >= self.presence * state.asked
        final = _normalized(weights * there, torch.ones_like(there))
        weights = torch.where(now.unsqueeze(-1), final, weights)
        state = replace(state, weights=weights, frozen=state.frozen | now)
        enough = judged.sum(-1) >= 1
        return Verdict(state, state.weights * ~dropped, enough, reasons)

    def settle(self, state: PublishedState, examined: Examined) -> PublishedState:
        """A one-phase round is over."""
        return replace(state, since=state.since + 1)

    def _levels(self, state: PublishedState) -> tuple[Tensor, Tensor]:
        """Sparsity and cap of this round."""
        n, s = state.weights.shape[-1], self.sparsity or state.weights.shape[-1]
        if not self.anneal_rounds:
            level = torch.full_like(state.learned, s)
        else:
            done = ((state.learned + 1).to(torch.float64) / self.anneal_rounds).clamp(max=1)
            level = n - ((n - s) * done).round().to(torch.int64)
        return level, self._cap(level)

    def notes(self, state: PublishedState) -> tuple[str, ...]:
        """Nothing to say."""
        return ()

    @abstractmethod
    def _step(
        self, state: PublishedState, evidence: Evidence, judged: Tensor, unjudged: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """New weights and the parts they were made of. `unjudged`: to be scored as the worst that were."""


@dataclass(frozen=True)
class Published(Learned):
    """Settings of the published weight step (Algorithm 2); those of `Learned`, and two more.

    Attributes:
        beta: step size of the weights.
        beta_power: p of the Robbins-Monro schedule beta_k = beta / k^p, over 0.5 and at most 1; 0: constant.

    >>> Published(attackers=0.4).bind(n=200, rounds=200).sparsity
    120
    """

    beta: float = 0.01
    beta_power: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive("beta", self.beta)
        check_number("beta_power", self.beta_power, low=0, high=1)
        if self.beta_power != 0 and not 0.5 < self.beta_power <= 1:
            raise ValueError(f"beta_power must be 0 or over 0.5 and at most 1, got {self.beta_power}")

    def _step(
        self, state: PublishedState, evidence: Evidence, judged: Tensor, unjudged: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        beta = self.beta / (state.learned + 1).to(torch.float64) ** self.beta_power
        beta = beta.unsqueeze(-1)
        alignment = beta * evidence.alpha * evidence.along.to(torch.float64)
        loss = -beta * evidence.losses.to(torch.float64)
        h = torch.where(judged, state.weights + alignment + loss, state.weights)
        below = torch.nextafter(worst(h, judged), torch.full_like(h[..., :1], -torch.inf))
        h = torch.where(unjudged, below, h)  # as the worst that were, and behind them
        # Beyond 1e150 a finite score could overflow in the projection; an order of magnitude says enough.
        h = torch.nan_to_num(h).clamp(-1e150, 1e150)
        sparsity, cap = self._levels(state)
        nan = torch.full_like(h, torch.nan)
        reasons = {
            "alignment": torch.where(judged, alignment, nan),
            "loss": torch.where(judged, loss, nan),
            "score": torch.where(judged | unjudged, h, nan),
        }
        return project_unchecked(h, sparsity, cap), reasons


@dataclass(frozen=True)
class LinearProgram(Learned):
    """Settings of the BSUM baseline's weight step: those of `Learned`.

    The weights minimise sum_i w_i f~_i over the sparse capped simplex: t for the floor(1/t) smallest losses, the
    rest for the next. A client that was not asked keeps its last loss.

    >>> LinearProgram(attackers=0.3).bind(n=10, rounds=5).sparsity
    7
    """

    def _step(
        self, state: PublishedState, evidence: Evidence, judged: Tensor, unjudged: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        told = torch.where(judged, evidence.losses.to(torch.float64), state.losses)
        told = torch.where(told.isnan(), masked_median(told, judged).unsqueeze(-1), told)
        losses = torch.where(unjudged, torch.inf, told)
        _, cap = self._levels(state)
        place = rank(-losses).to(torch.float64)
        left = 1 - place * cap.unsqueeze(-1)  # rounding must not make a crumb of weight for one more client
        weights = torch.where(left > 1e-12, torch.minimum(left, cap.unsqueeze(-1)), 0.0)
        nan = torch.full_like(told, torch.nan)
        loss = torch.where(judged, -told, nan)
        return weights, {"alignment": torch.where(judged, 0.0, nan), "loss": loss, "score": loss}


def _normalized(weights: Tensor, mask: Tensor) -> Tensor:
    """Weights scaled to sum 1 over `mask`; zero where they have no mass there."""
    kept = weights * mask
    return kept / kept.sum(-1, keepdim=True).clamp(min=1e-300)
