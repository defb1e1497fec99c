"""When core judging decides: no core without a majority, an end when the verdict stands, and refreshes.

Pure functions of the settings and the state, over (..., n).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedlaw.screening import masked_median
from fedlaw.server.core_math import CoreState, by_count, rank, verdict, widest_gap, windowed_mean
from fedlaw.server.core_settings import CoreSettings


def unseat_minority(judge: CoreSettings, state: CoreState) -> CoreState:
    """A core that is behind itself and has not half of the clients behind it loses its seats, its score void.

    A client's own share is left out of its cosine, that of its friends is not: a clique that took the core votes
    for itself. But most clients are honest, so an honest core has most clients behind it. Out of the core the
    clique is judged by the others; a client that they point to comes back after `minority_window` rounds.
    """
    if not judge.minority_gap:
        return state
    # Only after the too-good check, which has to see such a group in the core.
    first = max(judge.too_good_to + 1, judge.minority_window)
    heard = (state.excluded == 0) & (state.scored >= first)
    recent = windowed_mean(state.cosines, judge.minority_window)
    behind = heard & (recent > judge.verdict_above)
    # Whoever is behind the core from outside it has no friends in it to thank for that.
    seated = heard & (state.seated >= judge.minority_window)
    apart = masked_median(recent, seated) - masked_median(recent, heard & ~seated) > judge.minority_gap
    minority = 2 * behind.sum(-1) <= heard.sum(-1)
    # Not where there is a verdict, nor when no time is left for another core: late in training all cosines fade.
    free = (state.standing == 0) & (4 * state.judged <= 3 * (judge.judged_rounds or 0))
    caught = behind & seated & (apart & minority & free).unsqueeze(-1)
    until = (state.judged + judge.minority_window).unsqueeze(-1)
    return replace(
        state,
        benched=torch.where(caught, until, state.benched),
        total=torch.where(caught, 0.0, state.total),
        decay=torch.where(caught, 0.0, state.decay),
    )


def deliberate(judge: CoreSettings, state: CoreState) -> CoreState:
    """The verdict of this round, and for how many rounds in a row it has stood."""
    if not judge.verdict_rounds:
        return state
    alive = state.excluded == 0
    there = state.scored >= judge.presence * state.asked
    absent = alive & ~there
    # Whoever has not been heard often enough is waited for, unless it stays away.
    waiting = alive & there & (state.scored < judge.verdict_window)
    room = judge.most_out(alive.shape[-1]) - (~alive | absent).sum(-1, keepdim=True)
    recent = windowed_mean(state.cosines, judge.verdict_window)
    given, against = verdict(recent, alive & there, room, judge.verdict_gap, judge.verdict_above)
    given = given & ~waiting.any(-1, keepdim=True)
    against = (against | absent) & given
    same = (against == state.verdict).all(-1) & (state.standing > 0)
    standing = torch.where(given.squeeze(-1), torch.where(same, state.standing + 1, 1), 0)
    return replace(state, verdict=against, standing=standing)


def refresh(
    judge: CoreSettings,
    state: CoreState,
    cosine: Tensor,
    scored: Tensor,
    absent: Tensor,
    counts: Tensor,
) -> tuple[CoreState, Tensor]:
    """One round of a burst; in its last one, members below the threshold leave and outsiders may join."""
    n = scored.shape[-1]
    burst = state.burst + torch.where(scored, cosine, 0.0)
    rounds = state.burst_rounds + scored
    asked = state.burst_asked + (scored | absent)
    alive = state.excluded == 0
    weights = state.weights * alive
    over = (int(state.since.max()) + 1) % judge.refresh_period == 0
    state = replace(state, since=state.since + 1)
    if not over:
        return replace(state, burst=burst, burst_rounds=rounds, burst_asked=asked), weights
    mean = burst / rounds.clamp(min=1)
    there = (rounds > 0) & (rounds >= judge.presence * asked)
    heard = alive & there
    stays = joins = heard & (mean > judge.threshold)
    if judge.refresh_gap:
        # Late in training all cosines are near zero: it takes a gap as well to tell who is against.
        room = judge.most_out(n) - (~alive).sum(-1, keepdim=True)
        gap, against = widest_gap(-mean, heard, 1, heard.sum(-1, keepdim=True) - room)
        against = against & (gap > judge.refresh_gap)
        stays, joins = heard & (stays | ~against), heard & (mean > judge.verdict_above) & ~against
    joining = torch.where(asked > 0, torch.where(joins, state.joining + 1, 0), state.joining)
    stay = state.members & alive & (stays | (asked == 0))
    join = ~state.members & joins & (joining >= judge.refresh_bursts)
    # Never fewer than the core's seats: of the members that would leave, the best aligned stay.
    short = (n - judge.most_out(n) - (stay | join).sum(-1, keepdim=True)).clamp(min=0)
    leaving = state.members & alive & ~stay
    kept = leaving & (rank(torch.where(leaving, torch.where(rounds > 0, mean, -2.0), -torch.inf)) < short)
    members = stay | join | kept
    zero = torch.zeros_like(rounds)
    state = replace(
        state,
        members=members,
        weights=by_count(members, counts, judge.count_cap),
        burst=torch.zeros_like(burst),
        burst_rounds=zero,
        burst_asked=zero,
        joining=joining,
    )
    return state, state.weights
