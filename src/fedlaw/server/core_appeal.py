"""When core judging does not simply run its rounds: an appeal, early ends, a late end, refreshes.

Pure functions of the settings and the state, over (..., n).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from fedlaw.screening import masked_median
from fedlaw.server.core_math import (
    CoreState,
    by_count,
    lowest_rounds,
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
from fedlaw.server.judge import at_least

OUTVOTED_ROUNDS = 3  # in which most clients stood lowest; more where not all are asked


def appeal(judge: CoreSettings, state: CoreState) -> CoreState:
    """A new core: everybody's direction has long spoken against the old one, or it is outvoted.

    A client's own share is left out of its cosine, that of its friends is not: a clique that took the core is
    behind itself, and nobody stands out against it. The direction of all clients belongs to the honest ones as
    long as they are the majority and the others have no direction of their own to agree on, as with poisoned data.
    Where they do agree on one (gradient attacks), it does not set a minority apart, and the core's does. Unless
    they have the core: then it leads the model astray, and the majority is against it.

    Everybody's direction must divide the clients, and the core's must not, for a quarter of the judged rounds:
    early on it is wrong for a while, too. It need not be so clear where the core has gone idle, if it is held by
    those whom everybody's direction sets apart over a window. A core that is outvoted is not to be waited for.
    """
    if not judge.appeal_gap:
        return state
    alive = state.excluded == 0
    everybody = windowed_mean(state.assembly, judge.appeal_window)
    core = windowed_mean(state.cosines, judge.appeal_window)
    known = alive & _spoken(judge, state.assembly)
    compared = known & _spoken(judge, state.cosines)  # a core that has not spoken yet does not deny anything
    split = partial(chasm, judge, alive, compared)
    divided = split(everybody) > judge.appeal_gap
    outvoted, taken, opposed = torch.zeros_like(divided), torch.zeros_like(divided), core
    if judge.two_groups:  # among a few clients that lie far and wide there is always some gap
        one_by_core = ~lower_group(judge, state, core, compared).any(-1)
        divided = divided & lower_group(judge, state, everybody, compared).any(-1) & one_by_core
        taken = _taken(judge, state)
        opposed = lowest_rounds(state.cosines, compared, judge.window or 1, OUTVOTED_ROUNDS)
        outvoted = _outvoted(judge, state, opposed, compared)
    else:
        divided = divided & ~(split(core) > judge.appeal_gap / 2)
    lasting = torch.where(divided, state.divided + 1, 0.0)
    granted = outvoted | taken | (lasting >= judge.patience(judge.judged_rounds or 0))
    anew = granted.unsqueeze(-1)
    score = torch.where(outvoted.unsqueeze(-1), -opposed, everybody)
    told = known & ~score.isnan()
    # Whoever was seen to hold the core against most is not forgiven for a few rounds of good behaviour, nor is who
    # kept silent then: the new scores weigh as much as if they had always been these.
    silent = outvoted.unsqueeze(-1) & alive & ~told & (state.asked > state.scored)
    score = torch.where(silent, worst(score, told), score)
    told = told | silent
    weight = torch.where(outvoted, 1 / max(1 - judge.decay, 1e-3), 1.0).unsqueeze(-1)
    late = torch.clamp(state.judged + (judge.window or 0), max=judge.longest or 0)
    void = granted.unsqueeze(-1).unsqueeze(-1)  # what was said before that core proves nothing
    return replace(
        state,
        total=torch.where(anew, torch.where(told, weight * score, 0.0), state.total),
        decay=torch.where(anew, weight * told, state.decay),
        cosines=torch.where(void, torch.nan, state.cosines),
        assembly=torch.where(void, torch.nan, state.assembly),
        divided=torch.where(granted, 0.0, lasting),
        peaks=torch.where(anew, 0.0, state.peaks),
        faded=torch.where(granted, 0, state.faded),
        appeal=torch.where(granted, state.judged, state.appeal),
        until=torch.where(granted, torch.maximum(state.until, late), state.until),
    )


def _spoken(judge: CoreSettings, record: Tensor) -> Tensor:
    """(..., n) whether a record (..., J, n) says enough of a client since it was last void."""
    return (~record.isnan()).sum(-2) >= judge.appeal_window


def _taken(judge: CoreSettings, state: CoreState) -> Tensor:
    """(...) whether an idle core, which sets nobody apart, is held by those whom everybody's direction does.

    Where attackers forge gradients, everybody's direction may become theirs late in training; but a core that is
    not theirs has told them apart by then.
    """
    window = judge.window or 1
    whole = (~state.cosines.isnan()).any(-1).sum(-1) >= max(window, judge.too_good_to)
    told = _spoken(judge, state.assembly) & _spoken(judge, state.cosines)
    lower = lower_group(judge, state, windowed_mean(state.assembly, window), told)
    return whole & idle(judge, state) & _seated(state, lower) & ~against(judge, state).any(-1)


def _seated(state: CoreState, group: Tensor) -> Tensor:
    """(...) whether most of the core's seats are the group's (..., n)."""
    return 2 * (group & state.core).sum(-1) > state.core.sum(-1)


def _outvoted(judge: CoreSettings, state: CoreState, mean: Tensor, compared: Tensor) -> Tensor:
    """(...) whether most clients are against the core, by these mean cosines (..., n).

    Two groups, and the lower one is larger than may attack (of all that were ever asked): every one of it below
    zero, together clearly so, and nobody is between them and the others, who hold the core. Then it is not theirs.
    (If the others did not, attackers that hold it could have it speak for others, and be heard as its victims.)
    """
    compared = compared & ~mean.isnan()
    known = (state.asked > 0) | (state.excluded != 0)
    apart, level, upper = two_groups(-mean, compared, judge.group(mean.shape[-1]), may_leave(judge, state))
    favoured = level.squeeze(-1) < 0  # those above are for it: the sign is turned
    lower = compared & ~upper
    count = lower.sum(-1)
    lowest = torch.where(upper, mean, torch.inf).amin(-1)
    highest = torch.where(lower, mean, -torch.inf).amax(-1)
    below = torch.where(lower, mean, 0.0).sum(-1) / count
    most = count >= seats(known, judge.attackers_below).squeeze(-1)
    clear = (highest < 0) & (below < -judge.appeal_gap) & (lowest - highest > judge.appeal_gap)
    return most & _seated(state, upper) & clear & favoured & (apart.squeeze(-1) >= judge.two_groups)


def acquit(judge: CoreSettings, state: CoreState) -> CoreState:
    """Judging ends early, in one round set for it, where nobody has been against the core and nothing is open.

    Open are an appeal, a core that has just changed, the too-good check of a client that did not always answer, and
    the case of a client that would be left out for what it said before the last third of a window.
    Attackers that were not excluded by then have always shown: among honest clients, all of them learn.
    """
    if not judge.acquittal:
        return state
    due = max(at_least(judge.acquittal, judge.judged_rounds or 0), judge.too_good_to + 1)
    there = (state.excluded == 0) & (state.scored >= judge.presence * state.asked)
    recent = windowed_mean(state.cosines, max(1, (judge.window or 0) // 3))
    stays = state.core | (windowed_mean(state.cosines, judge.window or 1) > judge.threshold)
    cleared = (recent > 0) & stays & (state.scored >= judge.too_good_to)
    clear = ~(there & ~cleared).any(-1) & (state.divided == 0) & (state.appeal == 0)
    if judge.turnover < 1:
        clear = clear & ~fresh(judge, state)
    return replace(state, until=torch.where(clear & (state.judged == due), state.judged, state.until))


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
    if judge.appeal_gap:
        clear = clear & ((told & ~joins).any(-1) | (wanted(judge, state) <= apart)) & ~idle(judge, state)
    clear = clear & (apart > judge.fade * judge.competence) & (state.divided == 0)
    checked = ~(there & (state.scored < judge.too_good_to)).any(-1)
    record = (~state.cosines.isnan()).any(-1).sum(-1)  # rounds; none of those before an appeal or a new start
    least = torch.where(record < state.judged, judge.window or 1, judge.too_good_to + judge.fade_rounds)
    settled = (state.settled >= judge.fade_rounds) & ~late.any(-1)
    settled = settled | (state.faded >= (judge.window or 1))  # by then the window holds nothing else
    return (state.faded >= judge.fade_rounds) & clear & settled & checked & (record >= least)


def ends(judge: CoreSettings, state: CoreState) -> Tensor:
    """(...) bool: whether judging is over, unless the core has only just come about. An appeal is waited for."""
    standing = (state.divided > 0) & (state.judged < (judge.longest or 0))
    return (state.judged >= state.until) & ~standing


def settle(judge: CoreSettings, state: CoreState) -> CoreState:
    """No freeze by a core that has only just come about: judging starts again, and goes on for another window.

    Unless not even half a window is left: less than that says less than the record that would be given up. And
    unless there is no reason for the change: the signal has faded and the verdict is clear, or lately nothing
    divides the clients. (Where everybody's direction does, an appeal is under way, which is waited for.)
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
