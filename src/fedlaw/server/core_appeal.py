"""When core judging does not simply run its rounds: an appeal, an early end, a late one, refreshes.

Pure functions of the settings and the state, over (..., n).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedlaw.screening import masked_median
from fedlaw.server.core_math import (
    CoreState,
    by_count,
    lowest_rounds,
    masked_mean,
    mean_over,
    rank,
    row_of,
    seats,
    two_groups,
    widest_gap,
    windowed_mean,
    worst,
)
from fedlaw.server.core_settings import CoreSettings
from fedlaw.server.core_verdict import (
    admitted,
    against,
    chasm,
    fresh,
    heard,
    idle,
    lower_group,
    margin,
    may_leave,
    wanted,
)


def appeal(judge: CoreSettings, state: CoreState) -> CoreState:
    """A new core, where a minority holds the old one and most clients would be better off without it.

    A client's own share is left out of its cosine, that of its friends is not: a clique that took the core is
    behind itself, and nobody need stand out against it. But the same replies tell where everybody together wants
    to go. A client's *content* is its cosine with the core's direction less that with everybody's. The core is
    replaced where those who are content are a group of their own, the smaller one, and hold most of its seats, and
    either the others are against it (`outvoted`), or it is idle (`taken`).

    The new scores are what clients are not content by, and weigh as much as if they had always been these, or the
    old holders would be back after some rounds of good behaviour; who was asked and kept silent has the worst.
    """
    if not judge.majority:
        return state
    lately, said = outvoted(judge, state)
    lasting = torch.where(lately, state.outvoted + 1, 0)
    out = lasting >= judge.majority_rounds
    asleep, over_window = taken(judge, state)
    granted = out | asleep
    # Who was not asked in the rounds that decide is judged by the window: it is no fresh start.
    content = torch.where(out.unsqueeze(-1) & ~said.isnan(), said, over_window)
    told = _known(judge, state) & ~content.isnan()
    silent = (state.excluded == 0) & ~told & (state.asked > state.scored)
    score = torch.where(silent, worst(-content, told), -content)
    weight = (told | silent) / max(1 - judge.decay, 1e-3)
    late = torch.clamp(state.judged + (judge.window or 1), max=judge.longest or 0)
    anew = granted.unsqueeze(-1)
    void = anew.unsqueeze(-1)  # what was said before that core proves nothing
    return replace(
        state,
        total=torch.where(anew, torch.where(weight > 0, weight * score, 0.0), state.total),
        decay=torch.where(anew, weight.to(state.decay.dtype), state.decay),
        cosines=torch.where(void, torch.nan, state.cosines),
        assembly=torch.where(void, torch.nan, state.assembly),
        outvoted=torch.where(granted, 0, lasting),
        peaks=torch.where(anew, 0.0, state.peaks),
        faded=torch.where(granted, 0, state.faded),
        appeal=torch.where(granted, state.judged, state.appeal),
        until=torch.where(granted, torch.maximum(state.until, late), state.until),
    )


def outvoted(judge: CoreSettings, state: CoreState) -> tuple[Tensor, Tensor]:
    """(...) whether most clients are against a core that a minority holds, and by what (..., n) that is seen.

    So it is where forged gradients hold the core, and lead the model uphill. Asked are those rounds of a window in
    which most clients stood lowest: the model is ruined within ten, and attackers that take turns show in single
    rounds only. The two groups may show by content, or by the core's direction alone: whoever forges most of all
    that is sent has everybody's direction, too.

    Attackers outside of a clean core can win everybody's direction for some honest clients and against others, and
    so pass them off as not content. They cannot change what those have in common with the core: so its majority
    must be against it even without as many of the lowest as may attack.
    """
    lowest = lowest_rounds(state.cosines, _known(judge, state), judge.window or 1, judge.majority_rounds)
    in_storm = mean_over(state.cosines, lowest)
    content = in_storm - mean_over(state.assembly, lowest)
    # Those whom the core has told apart by itself have no vote.
    apart = lower_group(judge, state, in_storm, ~content.isnan())
    apart = apart & (apart.sum(-1) < _majority(judge, state)).unsqueeze(-1)
    gone = (state.excluded != 0).sum(-1) + apart.sum(-1)
    attackers = (_asked(state).sum(-1) - _majority(judge, state) - gone).unsqueeze(-1)

    def against_it(said: Tensor) -> Tensor:
        most, held = minority_holds(judge, state, torch.where(apart, torch.nan, said))
        honest = most & (rank(torch.where(most, -in_storm, -torch.inf)) >= attackers)
        return held & (masked_mean(in_storm, honest) < -judge.majority)

    by_content = against_it(content)
    said = torch.where(by_content.unsqueeze(-1), content, in_storm)
    return by_content | against_it(in_storm), said


def taken(judge: CoreSettings, state: CoreState) -> tuple[Tensor, Tensor]:
    """(...) whether an idle core is held by a minority, by everybody's direction and by content (..., n), and that.

    So it is where flipped labels hold it, which do not add up to a direction of their own: its own members want
    next to nothing of what it wants, and most clients do want something. It takes a whole window, and a core that
    has told a group apart by itself is not asked.
    """
    window = judge.window or 1
    whole = (~state.cosines.isnan()).any(-1).sum(-1) >= max(window, judge.too_good_to)
    everybody = windowed_mean(state.assembly, window)
    content = windowed_mean(state.cosines, window) - everybody
    below = lower_group(judge, state, everybody, _known(judge, state))
    held = minority_holds(judge, state, content)[1] & _seated(state, below)
    return held & whole & idle(judge, state) & ~against(judge, state).any(-1), content


def _known(judge: CoreSettings, state: CoreState) -> Tensor:
    """(..., n) of whom enough has been heard since the record was last void."""
    spoken = (~state.cosines.isnan() & ~state.assembly.isnan()).sum(-2)
    return (state.excluded == 0) & (spoken >= judge.majority_window)


def _asked(state: CoreState) -> Tensor:
    """(..., n) who was ever asked."""
    return (state.asked > 0) | (state.excluded != 0)


def _majority(judge: CoreSettings, state: CoreState) -> Tensor:
    """(...) how many of those that were ever asked are more than may attack."""
    return seats(_asked(state), judge.attackers_below).squeeze(-1)


def _seated(state: CoreState, group: Tensor) -> Tensor:
    """(...) whether most of the core's seats are the group's (..., n)."""
    return 2 * (group & state.core).sum(-1) > state.core.sum(-1)


def minority_holds(judge: CoreSettings, state: CoreState, content: Tensor) -> tuple[Tensor, Tensor]:
    """Who is not content (..., n), and whether a minority that is holds the core against them (...).

    Two groups (who has NaN has no say), each client nearer to its own; those not content are below zero on average,
    and more than may attack: of all that were ever asked, not of those who answered, or silent honest clients would
    make attackers a majority. That the content hold most of the seats is there for attackers that do, and could
    otherwise have the core speak for some, and be heard as its victims.
    """
    compared = _known(judge, state) & ~content.isnan()
    content = torch.where(compared, content, 0.0)
    least = judge.group(content.shape[-1])
    apart, _, few = two_groups(-content, compared, least, may_leave(judge, state))
    most = compared & ~few
    enough = most.sum(-1) >= _majority(judge, state)
    high, low = masked_mean(content, few), masked_mean(content, most)
    nearest = torch.where(most, content, -torch.inf).amax(-1)
    parted = (apart.squeeze(-1) >= judge.two_groups) & (nearest < (high + low) / 2) & (low < 0)
    return most, enough & parted & _seated(state, few)


def fade(judge: CoreSettings, state: CoreState) -> CoreState:
    """Judging ends where next to nothing is left to judge by: after that, windows hold noise and drift.

    The more local steps a round has, and the harder the data, the sooner clients' updates stop having anything in
    common; no number of rounds fits all. What is left shows in the signal: of every client, its recent mean cosine
    as a share of its own peak (nobody can raise another's), the median of the s largest. It is small, too, while a
    core loses its hold: so the verdict must be clear, whoever would be left out below everybody else, and settled:
    nobody new for as long, nor by what the last rounds alone say. After a window of it nobody is waited for.
    """
    if not judge.fade:
        return state
    mean = windowed_mean(state.cosines, judge.fade_rounds)
    spoken = (~state.cosines.isnan()).cumsum(-2)
    lately = torch.clamp(state.judged - 1 - 2 * judge.fade_rounds, min=0)
    before = torch.where(row_of(spoken, lately), spoken, 0).sum(-2)
    known = (state.excluded == 0) & heard(judge, state) & (spoken[..., -1, :] >= judge.fade_rounds)
    known = known & ((spoken[..., -1, :] > before) | (state.judged <= 2 * judge.fade_rounds).unsqueeze(-1))
    peaks = torch.where(known, torch.maximum(state.peaks, mean), state.peaks)
    usual = masked_median(peaks, known & (peaks > 0)).unsqueeze(
        -1
    )  # a client that has never had much has not kept it
    shares = mean / torch.maximum(peaks, usual).clamp(min=1e-300)
    best = rank(torch.where(known, shares, -torch.inf)) < seats(
        known | (state.excluded != 0), judge.attackers_below
    )
    signal = masked_median(shares, best & known)
    faded = torch.where(signal < judge.fade, state.faded + 1, 0)
    # Since the signal faded: each client may unsettle the verdict once, or one that goes to and fro would for good.
    known_out = state.outside & (faded > 1).unsqueeze(-1)
    outside = known_out | ((state.excluded == 0) & ~admitted(judge, state)[0])
    same = (outside == known_out).all(-1)
    state = replace(
        state, peaks=peaks, faded=faded, outside=outside, settled=torch.where(same, state.settled + 1, 1)
    )
    until = torch.where(over(judge, state), torch.minimum(state.until, state.judged), state.until)
    return replace(state, until=until)


def over(judge: CoreSettings, state: CoreState) -> Tensor:
    """(...) bool: whether the signal has faded and the verdict is clear and settled, with nothing open."""
    there = (state.excluded == 0) & heard(judge, state)
    joins, window = admitted(judge, state)
    recent = windowed_mean(state.cosines, judge.fade_rounds)
    # By the last rounds alone they would be out: their turn comes when the window moves on.
    late = joins & lower_group(judge, state, recent, ~recent.isnan())
    told = there & ~window.isnan()
    lowest = torch.where(told & joins, window, torch.inf).amin(-1)
    highest = torch.where(told & ~joins, window, -torch.inf).amax(-1)
    apart = margin(judge, state)
    clear = (lowest - highest >= apart) | against(judge, state).any(-1)
    # Nobody out, and yet there is something most clients want: then it is the core that has lost its hold.
    if judge.majority:
        clear = clear & ((told & ~joins).any(-1) | (wanted(judge, state) <= apart)) & ~idle(judge, state)
    clear = clear & (apart > judge.fade * judge.competence) & (state.outvoted == 0)
    checked = ~(there & (state.scored < judge.too_good_to)).any(-1)
    record = (~state.cosines.isnan()).any(-1).sum(-1)  # rounds; none of those before an appeal or a new start
    least = torch.where(record < state.judged, judge.window or 1, judge.too_good_to + judge.fade_rounds)
    settled = (state.settled >= judge.fade_rounds) & ~late.any(-1)
    settled = settled | (state.faded >= (judge.window or 1))  # by then the window holds nothing else
    return (state.faded >= judge.fade_rounds) & clear & settled & checked & (record >= least)


def ends(judge: CoreSettings, state: CoreState) -> Tensor:
    """(...) bool: whether judging is over, unless the core has only just come about. An appeal is waited for."""
    standing = (state.outvoted > 0) & (state.judged < (judge.longest or 0))
    return (state.judged >= state.until) & ~standing


def settle(judge: CoreSettings, state: CoreState) -> CoreState:
    """No freeze by a core that has only just come about: judging starts again, and goes on for another window.

    Unless not even half a window is left: less than that says less than the record that would be given up. And
    unless there is no reason for the change: the signal has faded and the verdict is clear, or lately nothing
    divides the clients.
    """
    if judge.turnover >= 1:
        return state
    window = judge.window or 0
    left = (judge.longest or 0) - state.judged
    more = fresh(judge, state) & ends(judge, state) & (left >= max(1, window // 2))
    if judge.fade:
        recent, alive = windowed_mean(state.cosines, judge.fade_rounds), state.excluded == 0
        split = chasm(judge, alive, alive & ~recent.isnan(), recent) > margin(judge, state)
        if judge.two_groups:  # among a few clients some gap there always is
            split = split & lower_group(judge, state, recent, ~recent.isnan()).any(-1)
        more = more & ~over(judge, state) & split
    void = more.unsqueeze(-1).unsqueeze(-1)
    return replace(
        state,
        until=torch.where(more, state.judged + left.clamp(max=window), state.until),
        cosines=torch.where(void, torch.nan, state.cosines),
        assembly=torch.where(void, torch.nan, state.assembly),
        peaks=torch.where(more.unsqueeze(-1), 0.0, state.peaks),
        faded=torch.where(more, 0, state.faded),
    )


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
    # Late in training all cosines are near zero: it takes a gap as well, or two groups, to tell who is against.
    if judge.refresh_gap:
        majority = heard.sum(-1, keepdim=True) - may_leave(judge, state)
        gap, below = widest_gap(-mean, heard, 1, majority)
        below = below & (gap > judge.refresh_gap)
        stays, joins = heard & (stays | ~below), heard & (mean > judge.refresh_above) & ~below
    elif judge.two_groups:
        below = lower_group(judge, state, mean, heard, least=1) & (mean < 0)
        stays, joins = heard & ~below, heard & (mean > judge.refresh_above) & ~below
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
