"""What core judging would say now: who would be a member, who stands apart. Pure functions over (..., n)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedlaw.screening import masked_median
from fedlaw.server.core_math import (
    CoreState,
    lowest_mean,
    row_of,
    seats,
    two_groups,
    widest_gap,
    windowed_mean,
)
from fedlaw.server.core_settings import CoreSettings

WORST_SHARE = 0.25  # of a client's rounds: its worst, by which a group may stand apart, too


def admitted(judge: CoreSettings, state: CoreState) -> tuple[Tensor, Tensor]:
    """Who would be a member if judging ended now (..., n), and the windowed mean cosines that say so."""
    window = windowed_mean(state.cosines, judge.window or 1)
    alive = state.excluded == 0
    joins = (window > judge.threshold) & ~against(judge, state)
    members = (state.core | joins) & alive & heard(judge, state)
    return torch.where(members.any(-1, keepdim=True), members, state.core & alive), window


def decided(judge: CoreSettings, state: CoreState) -> tuple[Tensor, Tensor]:
    """Who is a member at the freeze (..., n), and what the core's word is worth: its own median cosine (...).

    A core whose own median member points away from what it wants next has nothing left to judge by: its window
    holds drift, which takes honest clients as far as any. Then the other rounds decide, in which it had something;
    of a client that was there in too few of them, all of its rounds.
    """
    window = windowed_mean(state.cosines, judge.window or 1)
    own = masked_median(window, state.core & ~window.isnan())
    others = (~state.quiet & ~state.cosines.isnan()).sum(-2, keepdim=True)
    adrift = (own < judge.quiet).unsqueeze(-1).unsqueeze(-1)
    void = state.quiet & adrift & (others >= judge.too_good_to)
    return admitted(judge, replace(state, cosines=torch.where(void, torch.nan, state.cosines)))[0], own


def is_quiet(judge: CoreSettings, state: CoreState) -> Tensor:
    """(...) bool: whether the core has nothing to judge by at present, as `decided` says."""
    recent = windowed_mean(state.cosines, judge.fade_rounds)
    return masked_median(recent, state.core & (state.excluded == 0) & ~recent.isnan()) < judge.quiet


def wanted(judge: CoreSettings, state: CoreState) -> Tensor:
    """(...) what everybody's direction still means to most clients: the median of their recent cosines with it."""
    mean = windowed_mean(state.assembly, judge.majority_window)
    return masked_median(mean, (state.excluded == 0) & ~mean.isnan())


def idle(judge: CoreSettings, state: CoreState) -> Tensor:
    """(...) bool: whether the core's own members want next to nothing of what it wants, while most clients do want.

    A core of honest clients is content, too, once it has learned what it knows; then so are most clients.
    """
    core = windowed_mean(state.cosines, judge.majority_window)
    own = masked_median(core, state.core & (state.excluded == 0) & ~core.isnan())
    usual = wanted(judge, state)
    return (own < judge.fade * usual) & (usual > margin(judge, state))


def heard(judge: CoreSettings, state: CoreState) -> Tensor:
    """(..., n) bool: who answered often enough to be a member."""
    return (state.scored >= judge.presence * state.asked) & (state.scored > 0)


def against(judge: CoreSettings, state: CoreState) -> Tensor:
    """(..., n) who belongs to a group that stands apart from the others and, as a group, against the core.

    How large cosines are depends on the model and the data, and so does how far below zero attackers lie; that they
    are a group of their own does not. Honest clients are one, however wide.

    Whoever attacks in some rounds and is as good as others in the rest has a mean like theirs. So a group may also
    stand apart by each client's worst rounds, with a gap above; those of it are out who are below zero then.
    """
    spoken = (~state.cosines.isnan()).sum(-2, keepdim=True)
    window = (spoken * judge.two_groups_share - 1e-9).ceil().clamp(min=judge.too_good_to)
    told = spoken.squeeze(-2) >= judge.too_good_to
    lower = lower_group(judge, state, windowed_mean(state.cosines, window), told)
    if not judge.fade:
        return lower
    worst = lowest_mean(state.cosines, window, WORST_SHARE)
    below = lower_group(judge, state, worst, told)
    others = told & (state.excluded == 0) & ~below
    highest = torch.where(below, worst, -torch.inf).amax(-1)
    apart = torch.where(others, worst, torch.inf).amin(-1) - highest > margin(judge, state)
    return lower | below & (worst < 0) & apart.unsqueeze(-1)


def margin(judge: CoreSettings, state: CoreState) -> Tensor:
    """(...) what counts as apart: as much as is left of the median client's peak once it has faded."""
    peaks = masked_median(state.peaks, (state.excluded == 0) & (state.peaks > 0))
    return judge.fade * peaks.nan_to_num()


def lower_group(
    judge: CoreSettings, state: CoreState, mean: Tensor, told: Tensor, least: int | None = None
) -> Tensor:
    """(..., n) who is in the lower of two groups of those `told` of, by mean cosines.

    Nobody is where they are one group, or where its lower part is not below zero on average. The lower one has
    `least` clients or more; None: as many as make a group.
    """
    if not judge.two_groups:
        return torch.zeros_like(state.core)
    alive = state.excluded == 0
    least = least or judge.group(alive.shape[-1])
    apart, low, lower = two_groups(mean, told & alive, least, may_leave(judge, state))
    return lower & (apart >= judge.two_groups) & (low < 0)


def may_leave(judge: CoreSettings, state: CoreState) -> Tensor:
    """(..., 1) how many clients may still be shut out, beside those excluded."""
    return judge.most_out(state.excluded.shape[-1]) - (state.excluded != 0).sum(-1, keepdim=True)


def chasm(judge: CoreSettings, alive: Tensor, compared: Tensor, mean: Tensor) -> Tensor:
    """(...) the widest gap with no more of `compared` below it than may attack, and no fewer than make a group."""
    majority = seats(compared | ~alive, judge.attackers_below)
    return widest_gap(-mean, compared, judge.group(alive.shape[-1]), majority)[0].squeeze(-1)


def fresh(judge: CoreSettings, state: CoreState) -> Tensor:
    """(...) bool: whether more of the core's seats than `turnover` have changed hands in the last half window."""
    before = torch.clamp(state.judged - 1 - (judge.window or 0) // 2, min=0)
    old = (state.cores & row_of(state.cores, before)).any(-2)
    return (state.core & ~old).sum(-1) > judge.turnover * state.core.sum(-1)
