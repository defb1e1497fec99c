r"""Judging by a core: who points where a small clean core's next gradient points.

Our extension of FedLAW's weight step. The score is scale-free, it is accumulated over the judged rounds, and a
client's own share is left out. In judged round k, with g_i the updates clipped to their median norm, w uniform
over the last core, g~_i the updates at the look-ahead model theta - alpha sum_i w_i g_i, z = sum_i w_i g~_i:

.. math::
    c_i = \frac{g_i \cdot z - w_i\, g_i \cdot \tilde g_i}{(1 - w_i)\,|g_i|\,|z|}, \qquad
    s_i = c_i - \lambda\, l_i, \qquad S_i \leftarrow \text{decay} \cdot S_i + s_i

(l_i the robust standard score of the client's loss), and the core is the s clients of largest S. At the freeze
everybody in the core or not against it joins. The functions here are pure, over (..., n), without a Python
branch on values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedlaw.screening import clip_to_median, copy_clusters, loss_scores
from fedlaw.server.core_appeal import appeal, ends, fade, refresh, settle
from fedlaw.server.core_math import (
    CoreState,
    by_count,
    caught_up,
    cosines,
    exclude,
    hold,
    largest,
    rank,
    row_of,
    seats,
    uniform,
    whole_clusters,
    widest_gap,
    worst,
)
from fedlaw.server.core_settings import CoreSettings
from fedlaw.server.core_verdict import decided, is_quiet
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


@dataclass(frozen=True)
class Core(CoreSettings, Scheduled):
    """Judging by a core; the settings are those of `CoreSettings`. Preset `hardened` adds to it.

    >>> Core().bind(n=200, rounds=200).judged_rounds
    80
    """

    def start(self, n: int, like: Tensor) -> CoreState:
        """The state before round 1: everybody is the core."""

        def of(fill: float | bool, dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.full(shape, fill, dtype=dtype, device=like.device)

        i, f, b = torch.int64, torch.float64, torch.bool
        return CoreState(
            judged=of(0, i), since=of(0, i), frozen=of(False, b), competence=of(torch.nan, f),
            excluded=of(0, i, n), strikes=of(0, i, n), copies=of(0, i, n), asked=of(0, i, n),
            scored=of(0, i, n), total=of(0, f, n), decay=of(0, f, n), early=of(0, f, n),
            early_rounds=of(0, i, n), core=of(True, b, n), members=of(False, b, n), weights=of(1 / n, f, n),
            cosines=of(torch.nan, f, self.longest or 0, n), burst=of(0, f, n), burst_rounds=of(0, i, n),
            burst_asked=of(0, i, n), joining=of(0, i, n), until=of(self.judged_rounds or 0, i),
            assembly=of(torch.nan, f, (self.longest or 0) if self.majority else 0, n), appeal=of(0, i),
            outvoted=of(0, i), cores=of(False, b, (self.longest or 0) if self.turnover < 1 else 0, n),
            peaks=of(0, f, n), faded=of(0, i), quiet=of(False, b, self.longest or 0, 1),
            outside=of(False, b, n), settled=of(0, i), given=of(0, f, n),
        )  # fmt: skip

    # -------------------------------------------------------------------------------------- schedule
    def eligible(self, state: CoreState) -> Tensor:
        """All but the excluded while judging and in a refresh; members otherwise."""
        alive = state.excluded == 0
        if self.phases(state) == 1:
            return alive & state.members
        return alive & (state.members | ~self._done(state).unsqueeze(-1))

    def _done(self, state: CoreState) -> Tensor:
        """(...) bool: which experiments are frozen while others, stacked with them, are still judged."""
        return state.frozen & (not self.frozen(state))

    def statuses(self, state: CoreState) -> list[tuple[Status, Exclusion]]:
        """Core or on trial before the freeze, member or left out after it, excluded at any time."""
        inside, outside = (
            (Status.MEMBER, Status.LEFT_OUT) if bool(state.frozen.all()) else (Status.CORE, Status.TRIAL)
        )
        seats = (state.members if bool(state.frozen.all()) else state.core).tolist()
        return [
            (Status.EXCLUDED, Exclusion(code)) if code else (inside if seat else outside, Exclusion.NONE)
            for code, seat in zip(state.excluded.tolist(), seats, strict=True)
        ]

    # -------------------------------------------------------------------------------------- phase 1
    def examine(self, state: CoreState, arrived: Arrived) -> Examined:
        """Steps 1 and 2: strikes, clipping, copies, and the weights of the look-ahead model."""
        present = arrived.answered & (state.excluded == 0)
        norms = arrived.norms.to(torch.float64)
        radius, factors = clip_to_median(norms, present)
        if self.phases(state) == 1:
            weights = self._due(state)
            return Examined(
                state, factors, radius, weights, present, self._quorum(state.members & arrived.asked, present)
            )
        done = self._done(state)
        after, sitting = self._suspect(state, arrived, present, norms, radius, factors)
        state = hold(done, state, after)
        alive = state.excluded == 0
        bench = self._bench(state, arrived.asked)
        weights = torch.where(
            done.unsqueeze(-1),
            self._due(state),
            uniform(bench & ~sitting, fallback=alive & arrived.asked),
        )
        enough = self._quorum(bench, present)
        usable = arrived.asked & present & alive
        judging = self.majority and not self.frozen(state)
        assembly = uniform(usable & ~sitting, fallback=usable) if judging else None
        return Examined(state, factors, radius, weights, usable, enough, assembly)

    def _suspect(
        self,
        state: CoreState,
        arrived: Arrived,
        present: Tensor,
        norms: Tensor,
        radius: Tensor,
        factors: Tensor,
    ) -> tuple[CoreState, Tensor]:
        """Strikes for norms, then clusters of copies; the state after it and who sits this round out."""
        n = norms.shape[-1]
        most = self.most_out(n)
        strike = present & (norms > self.strike_ratio * radius.unsqueeze(-1))
        strikes = state.strikes + strike
        struck = strike & (strikes > self.strikes_allowed)
        excluded = exclude(state.excluded, largest(norms, struck, most, state.excluded), Exclusion.NORM)

        compared = present & (excluded == 0)
        labels, sizes = copy_clusters(arrived.updates, factors, self.copy_ratio * radius, compared)
        # More copies than may attack are no evidence: then it is the data that is alike.
        sitting = compared & (sizes >= self._cluster(n)) & (sizes <= most)
        copies = state.copies + sitting
        caught = sitting & (copies > self.sittings_allowed)
        # Those who were copies before must be a cluster by themselves: otherwise two attackers at a time could copy
        # an honest client until it has been in clusters often enough, and they have not.
        again = torch.zeros_like(labels).scatter_add(-1, labels, caught.to(labels.dtype)).gather(-1, labels)
        caught = caught & (again >= self._cluster(n))
        excluded = exclude(excluded, whole_clusters(labels, caught, most, excluded), Exclusion.COPIES)
        return replace(state, strikes=strikes, copies=copies, excluded=excluded), sitting

    def _cluster(self, n: int) -> int:
        """How many copies make a cluster."""
        return max(self.copy_least, at_least(self.copy_share, n))

    def _bench(self, state: CoreState, asked: Tensor) -> Tensor:
        """Who judges: the core (after the freeze the members) of those asked; if none of it was, all asked."""
        alive = (state.excluded == 0) & asked
        bench = torch.where(state.frozen.unsqueeze(-1), state.members, state.core) & alive
        return torch.where(bench.any(-1, keepdim=True), bench, alive)

    def _quorum(self, bench: Tensor, present: Tensor) -> Tensor:
        """Whether at least the quorum of those on the bench is present (and anybody at all)."""
        needed = (bench.sum(-1) * self.quorum).clamp(min=1)
        return (bench & present).sum(-1) >= needed

    # -------------------------------------------------------------------------------------- phase 2
    def weigh(self, state: CoreState, examined: Examined, evidence: Evidence) -> Verdict:
        """Steps 3 to 6: score, too-good check, core; at the freeze, members and their weights."""
        alive = state.excluded == 0
        scored = evidence.scored & alive
        absent = evidence.asked & alive & ~scored
        assembly: Tensor | None = None
        if examined.assembly is None:
            cosine = cosines(examined.weights, evidence.along, evidence.length, evidence)
        else:
            both = torch.stack([examined.weights, examined.assembly], dim=-2)
            own = replace(evidence, own=evidence.own.unsqueeze(-2), norms=evidence.norms.unsqueeze(-2))
            cosine, assembly = cosines(both, evidence.along, evidence.length, own).unbind(-2)
            assembly = torch.where(scored, assembly, torch.nan)
        block = (self._cluster(scored.shape[-1]), self.most_out(scored.shape[-1]))
        scores = loss_scores(
            evidence.losses.to(torch.float64),
            scored,
            bound=self.loss_bound,
            block=block if self.equal_losses == "once" else None,
        )
        loss = self.loss_weight * scores
        enough = self._quorum(self._bench(state, evidence.asked), scored)
        score = cosine - loss
        score = torch.where(absent, worst(score, scored), score)
        cosine = torch.where(scored, cosine, torch.nan)
        reasons = {"alignment": cosine, "loss": torch.where(scored, -loss, torch.nan)}
        if self.frozen(state):
            state, weights = refresh(self, state, cosine, scored, absent, evidence.counts)
        else:
            before, done = self.settle(state, examined), self._done(state)
            state = self._accumulate(state, score, cosine, assembly, scored, absent)
            state = self._too_good(state, scored)
            state = self._seat(appeal(self, state))
            state = settle(self, self._close(state, fade(self, state), scored))
            state = self._freeze(state, evidence.counts)
            state = hold(done, before, replace(state, given=state.given + state.weights))
            weights = torch.where(done.unsqueeze(-1), examined.weights, state.weights)
        score = state.total / state.decay.clamp(min=1e-300)
        reasons["score"] = torch.where(state.decay > 0, score, torch.nan)
        return Verdict(state, weights, enough, reasons)

    def _accumulate(
        self,
        state: CoreState,
        score: Tensor,
        cosine: Tensor,
        assembly: Tensor | None,
        scored: Tensor,
        absent: Tensor,
    ) -> CoreState:
        """S and what it is divided by; a client that was not asked keeps both."""
        fade = (state.judged.unsqueeze(-1) >= 2).to(torch.float64) * self.decay
        counted = scored | absent
        own = state.scored + scored
        early = scored & (own >= self.too_good_from) & (own <= self.too_good_to)
        row = row_of(state.cosines, state.judged)
        state = replace(
            state,
            judged=state.judged + 1,
            asked=state.asked + counted,
            scored=own,
            total=torch.where(counted, fade * state.total + score, state.total),
            decay=torch.where(counted, fade * state.decay + 1, state.decay),
            early=state.early + torch.where(early, cosine, 0.0),
            early_rounds=state.early_rounds + early,
            cosines=torch.where(row, cosine.unsqueeze(-2), state.cosines),
            assembly=state.assembly
            if assembly is None
            else torch.where(row, assembly.unsqueeze(-2), state.assembly),
        )
        quiet = is_quiet(self, state).unsqueeze(-1).unsqueeze(-1)
        return replace(state, quiet=state.quiet | (row & quiet))

    def _too_good(self, state: CoreState, scored: Tensor) -> CoreState:
        """Step 4, whenever a client completes its own rounds of the check, and once more at the freeze."""
        n = scored.shape[-1]
        last = (state.judged == state.until).unsqueeze(-1)
        complete = (state.scored >= self.too_good_to) | (last & (state.early_rounds > 0))
        due = last | (scored & (state.scored == self.too_good_to)).any(-1, keepdim=True)
        checked = complete & (state.excluded == 0)
        mean = state.early / state.early_rounds.clamp(min=1)
        gone = (state.excluded != 0).sum(-1, keepdim=True)
        # Those below the gap must be the majority of all clients, not of those checked so far: otherwise honest
        # clients that complete their rounds first would be too good beside attackers.
        gap, above = widest_gap(mean, checked, self.group(n), n - share(self.too_good_most, n) - gone)
        room = self.most_out(n) - gone
        lowest = torch.where(above, mean, torch.inf).amin(-1, keepdim=True)
        wide = (gap > self.too_good_gap) & (lowest >= self.too_good_level) | (gap > self.too_good_wide)
        guilty = above & due & wide & (above.sum(-1, keepdim=True) <= room)
        return replace(state, excluded=exclude(state.excluded, guilty, Exclusion.TOO_GOOD))

    def _seat(self, state: CoreState) -> CoreState:
        """Step 5: the core. Top s of S: the sparse projection of S with sparsity s and cap 1/s.

        Seats are in proportion to those heard so far (all n, unless clients are sampled): before everybody was
        asked once, or once more after an appeal, a core of full size would seat attackers for want of others.
        """
        candidates = (state.excluded == 0) & (state.decay > 0)
        most = seats(candidates | (state.excluded != 0), self.attackers_below)
        score = torch.where(candidates, state.total / state.decay.clamp(min=1e-300), -torch.inf)
        core = candidates & (rank(score) < most)
        now = row_of(state.cores, state.judged - 1)
        return replace(state, core=core, cores=state.cores | (now & core.unsqueeze(-2)))

    def _close(self, before: CoreState, state: CoreState, scored: Tensor) -> CoreState:
        """Where the signal has just ended judging, the too-good check's last turn; who fails it prolongs it."""
        now = state.until != before.until
        checked = hold(~now, state, self._too_good(state, scored))
        caught = (checked.excluded != state.excluded).any(-1)
        checked = replace(checked, until=torch.where(caught, before.until, checked.until))
        return hold(~caught, checked, self._seat(checked))

    def _freeze(self, state: CoreState, counts: Tensor) -> CoreState:
        """Step 6 in the last judged round; before it, uniform weights on the core."""
        members, competence = decided(self, state)
        now = ends(self, state)
        weights = by_count(members, counts, self.count_cap)
        during = uniform(state.core, fallback=state.excluded == 0)
        final = now.unsqueeze(-1)
        return replace(
            state,
            frozen=state.frozen | now,
            competence=torch.where(now, competence, state.competence),
            members=torch.where(final, members, state.members),
            weights=torch.where(final, weights, during),
        )

    def _due(self, state: CoreState) -> Tensor:
        """The weights of a step after the freeze."""
        weights = state.weights * state.members
        if self.catch_up == 1:
            return weights
        left = (state.judged * self.catch_up_share).ceil().to(torch.int64) - state.since
        lifted = caught_up(weights, state.given, left, self.catch_up)
        return torch.where((left > 0).unsqueeze(-1), lifted, weights)

    def settle(self, state: CoreState, examined: Examined) -> CoreState:
        """A one-phase round is over."""
        return replace(state, since=state.since + 1, given=state.given + examined.weights)

    def notes(self, state: CoreState) -> tuple[str, ...]:
        """What the operator should be told: a new core, and at the freeze a court that could not tell."""
        if int(state.appeal) and int(state.appeal) == int(state.judged) and not int(state.since):
            then = "decides alone: no rounds are left" if bool(state.frozen) else "judging starts again"
            return (
                f"judged round {int(state.appeal)}: a minority seems to hold the core, and most clients would be "
                f"better off without it; a new one was seated, and {then}",
            )
        if not bool(state.frozen.all()) or int(state.since) > 0 or float(state.competence) > self.competence:
            return ()
        return (
            f"clients overlap too little to be judged: the core's own median cosine is "
            f"{float(state.competence):.3f}, not clearly above zero (needs {self.competence:g}). Who was left "
            "out by score is no evidence against anybody; use more data per client, or clients that share more.",
        )
