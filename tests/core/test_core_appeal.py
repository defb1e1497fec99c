"""Core judging beside its rounds: the appeal from a core that was taken, and refreshes with a gap."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from fedlaw.server import Core, Status
from fedlaw.server.core_appeal import acquit, appeal, settle
from fedlaw.server.core_math import CoreState
from fedlaw.server.judge import Arrived, Evidence
from tests.core.test_core_judging import Crowd, drive, inverse, make, sit, too_good


def clique(crowd, size, first=5):
    """`size` clients like poisoned data: the easiest to follow at first, then one direction against the others'."""
    rng = np.random.default_rng(7)
    unit = crowd.signal / np.linalg.norm(crowd.signal)
    aside = rng.normal(size=crowd.d)
    aside -= (aside @ unit) * unit
    against = np.linalg.norm(crowd.signal) * (-0.8 * unit + 0.6 * aside / np.linalg.norm(aside))
    phases = iter(range(10**6))

    def forge(rows):
        early = next(phases) < 2 * first
        rows[:size] = (1.6 * crowd.signal if early else against) + 0.3 * rng.normal(size=(size, crowd.d))

    return forge


TAKEN = {"too_good_gap": 2.0, "appeal_share": 0.2, "appeal_window": 3}


def test_a_clique_that_took_the_core_loses_it_on_appeal():
    without = make(Crowd(), too_good_gap=2.0)
    sit(without, Crowd(), clique(Crowd(), 12))
    assert {without.statuses()[i][0] for i in range(12)} == {Status.MEMBER}  # what the appeal is for

    crowd = Crowd()
    server = make(crowd, appeal_gap=0.1, **TAKEN)
    reports = sit(server, crowd, clique(crowd, 12))
    assert {server.statuses()[i][0] for i in range(12)} == {Status.LEFT_OUT}
    assert {server.statuses()[i][0] for i in range(12, 30)} == {Status.MEMBER}
    assert sum("a new one was seated" in note for report in reports for note in report.notes) == 1


def faded(crowd):
    """The same clients when nothing is left to learn: updates without a common direction."""
    later = Crowd(d=crowd.d, seed=1)
    later.signal = np.zeros(crowd.d)
    later.own = later.own - later.own.mean(0)
    return later


@pytest.mark.parametrize(
    "more", [{}, {"refresh_gap": 0.15}, {"two_groups": 2.2}], ids=["neither", "gap", "groups"]
)
def test_a_refresh_late_in_training_needs_a_gap_or_groups(more):
    crowd = Crowd(d=400)
    server = make(crowd, rounds=40, refresh_period=5, refresh_rounds=3, **more)
    while server.round <= 20:
        drive(server, *crowd.round())
    sit(server, faded(crowd))
    left = sum(status is Status.LEFT_OUT for status, _ in server.statuses().values())
    assert left == 0 if more else left > 5


@pytest.mark.parametrize("more", [{"refresh_gap": 0.08}, {"two_groups": 2.2}], ids=["gap", "groups"])
def test_a_refresh_throws_out_a_sleeper(more):
    crowd = Crowd()
    server = make(crowd, rounds=40, refresh_period=10, refresh_rounds=3, **more)
    while server.round <= 20:
        drive(server, *crowd.round())
    sit(server, crowd, inverse(list(range(6))))
    assert {server.statuses()[i][0] for i in range(6)} == {Status.LEFT_OUT}
    assert {server.statuses()[i][0] for i in range(6, 30)} == {Status.MEMBER}


def test_a_refresh_by_groups_throws_out_one_sleeper_and_nobody_beside_it():
    """Fewer than make a group: nobody honest is needed to make up the number."""
    crowd = Crowd(n=100)
    server = make(crowd, rounds=40, refresh_period=10, refresh_rounds=3, two_groups=2.2)
    assert server.judge.group(100) == 3
    while server.round <= 20:
        drive(server, *crowd.round())
    sit(server, crowd, inverse([0]))
    assert [i for i, (status, _) in server.statuses().items() if status is not Status.MEMBER] == [0]


@pytest.mark.parametrize("forge", [None, inverse(list(range(12)))], ids=["nobody attacks", "inverse"])
def test_a_core_that_divides_the_clients_itself_keeps_its_seats(forge):
    crowd = Crowd()
    server = make(crowd, appeal_gap=0.1, appeal_share=0.1, appeal_window=3)
    sit(server, crowd, forge)
    assert int(server.state.appeal) == 0
    assert int(server.state.until) == int(server.state.judged) == 20


def test_judging_goes_on_after_a_late_appeal_as_far_as_there_are_rounds():
    """A core taken late: what was said before it proves nothing, so a whole window follows the new one."""
    crowd = Crowd()
    server = make(crowd, rounds=40, appeal_gap=0.1, **TAKEN)
    sit(server, crowd, clique(crowd, 12, first=12))
    state = server.state
    assert int(state.judged) == int(state.until) == int(state.appeal) + 8 > 20
    assert {server.statuses()[i][0] for i in range(12)} == {Status.LEFT_OUT}
    short = Core(judged_rounds=20, window=8, appeal_gap=0.1).bind(30, 24)
    assert short.longest == 24
    assert Core(judged_rounds=20, window=8).bind(30, 24).longest == 20


def test_the_assembly_does_not_depend_on_how_replies_arrive():
    """One by one or in blocks, and the cosines are those of the definition."""
    servers = [make(Crowd(), appeal_gap=0.1) for _ in range(2)]
    for server, single in zip(servers, (False, True), strict=True):
        crowd = Crowd()
        for _ in range(3):
            drive(server, *crowd.round(), one_by_one=single)
    block, single = (server.state.assembly[:3] for server in servers)
    torch.testing.assert_close(block, single)

    crowd, server = Crowd(), make(Crowd(), appeal_gap=0.1)
    updates, lookahead, losses = crowd.round()
    drive(server, updates, lookahead, losses)
    radius = updates.norm(dim=1).median()

    def clipped(rows):
        return rows * (radius / rows.norm(dim=1, keepdim=True)).clamp(max=1)

    g, later = clipped(updates), clipped(lookahead)
    z = later.mean(0)
    expected = (g @ z - (g * later).sum(1) / 30) / ((1 - 1 / 30) * g.norm(dim=1) * z.norm())
    torch.testing.assert_close(server.state.assembly[0], expected, rtol=1e-2, atol=1e-3)


def test_a_resumed_server_goes_on_counting():
    crowd, whole = Crowd(), make(Crowd(), appeal_gap=0.1, **TAKEN)
    forge = clique(crowd, 12)
    rounds = [crowd.round(forge) for _ in range(24)]
    for each in rounds[:10]:
        drive(whole, *each)
    again = make(Crowd(), appeal_gap=0.1, **TAKEN)
    again.load(whole.dump())
    assert int(whole.state.divided) > 0
    for each in rounds[10:]:
        drive(whole, *each)
        drive(again, *each)
    assert whole.statuses() == again.statuses()
    assert int(whole.state.appeal) == int(again.state.appeal) > 0


@pytest.mark.parametrize("name", ["appeal_gap", "appeal_share", "refresh_gap", "fade"])
def test_settings_are_checked(name):
    with pytest.raises(ValueError, match=name):
        Core(**{name: -0.1})


def test_a_core_that_has_just_changed_does_not_decide():
    """Others are the best aligned from round 16 on: half a window later most seats are new, and judging goes on."""
    crowd = Crowd()

    def changing(last):
        phases = iter(range(10**6))

        def forge(rows):
            favoured = slice(0, 12) if next(phases) < 2 * last else slice(18, 30)
            rows[favoured] = crowd.signal + 0.3 * (rows[favoured] - crowd.signal)

        return forge

    fast = {"decay": 0.5, "too_good_gap": 2.0}
    plain = make(Crowd(), rounds=40, **fast)
    sit(plain, crowd, changing(17))
    assert int(plain.state.judged) == 20
    server = make(crowd, rounds=40, turnover=0.4, **fast)
    sit(server, crowd, changing(17))
    assert int(server.state.judged) == int(server.state.until) == 28
    calm = make(crowd, rounds=40, turnover=0.4, **fast)
    sit(calm, crowd, changing(5))
    assert int(calm.state.judged) == 20


@pytest.mark.parametrize("crew", [0, 1, 10])
def test_judging_ends_early_where_nobody_is_against_the_core(crew):
    crowd = Crowd()
    server = make(crowd, rounds=40, acquittal=0.6)
    sit(server, crowd, inverse(list(range(crew))))
    assert int(server.state.judged) == (20 if crew else 12)
    assert [s is Status.MEMBER for s, _ in server.statuses().values()] == [i >= crew for i in range(30)]


def test_nobody_is_acquitted_before_the_too_good_check_nor_while_an_appeal_stands():
    crowd = Crowd()
    server = make(crowd, rounds=40, acquittal=0.1)
    sit(server, crowd)
    assert int(server.state.judged) == 11  # the check is in round 10

    crowd = Crowd()
    server = make(crowd, rounds=40, appeal_gap=0.1, acquittal=0.55, **TAKEN | {"appeal_share": 0.3})
    sit(server, crowd, clique(crowd, 12))
    assert int(server.state.appeal) > 11
    assert {server.statuses()[i][0] for i in range(12)} == {Status.LEFT_OUT}


def test_who_stays_away_does_not_keep_the_others_from_an_early_end():
    crowd = Crowd()
    server = make(crowd, rounds=40, acquittal=0.6)
    away = (0, 1)
    sit(server, crowd, silent=lambda k: (away, away) if k > 1 else ((), ()))
    assert int(server.state.judged) == 12
    assert {server.statuses()[i][0] for i in away} == {Status.LEFT_OUT}


def test_too_good_clients_that_stay_away_are_not_acquitted_before_their_check():
    crowd, away = Crowd(), tuple(range(6))
    server = make(crowd, rounds=40, acquittal=0.5)
    sit(server, crowd, too_good, silent=lambda k: (away, away) if 4 <= k <= 8 else ((), ()))
    assert {server.statuses()[i][1].words for i in away} == {"too good"}


def halfway(judge, n=30, rounds=40, **changes):
    """The bound judge, and a state of it in judged round 14 of 20 in which nothing is open."""
    bound = Core(**{"judged_rounds": 20, "window": 8} | judge).bind(n, rounds)
    state = bound.start(n, torch.zeros(1))
    ones = torch.ones(n, dtype=torch.int64)
    usual = {
        "judged": torch.tensor(14),
        "asked": 14 * ones,
        "scored": 14 * ones,
        "decay": ones.double(),
        "cosines": torch.full_like(state.cosines, 0.3),
        "cores": torch.ones_like(state.cores),
    }
    return bound, replace(state, **usual | changes)


def test_a_core_that_has_just_changed_does_not_acquit_nor_end_earlier_for_it():
    judge, state = halfway({"acquittal": 0.7, "turnover": 0.4})
    assert int(acquit(judge, state).until) == 14
    state = replace(state, cores=torch.zeros_like(state.cores))
    assert int(settle(judge, acquit(judge, state)).until) == 20


def test_judging_does_not_end_early_to_leave_somebody_out():
    """Against the core for most of a window and behind it lately: that is not over yet."""
    judge, state = halfway({"acquittal": 0.7})
    cosines = state.cosines.clone()
    cosines[: len(cosines) - 2, 0] = -0.3
    state = replace(state, cosines=cosines)
    assert int(acquit(judge, state).until) == 14  # it has a seat
    state = replace(state, core=torch.arange(30) > 0)
    assert int(acquit(judge, state).until) == 20


def test_whether_the_core_has_changed_is_asked_when_judging_ends():
    """Not while an appeal stands, and again if that delayed the end; and not where too little is left to judge."""
    judge, state = halfway(
        {"appeal_gap": 0.1, "turnover": 0.4}, judged=torch.tensor(20), divided=torch.tensor(2)
    )
    assert judge.longest == 33
    state = replace(state, cores=torch.zeros_like(state.cores))
    assert int(settle(judge, state).until) == 20
    assert not settle(judge, state).cosines.isnan().any()
    later = settle(judge, replace(state, judged=torch.tensor(22), divided=torch.tensor(0)))
    assert int(later.until) == 30
    assert bool(later.cosines.isnan().all())
    assert int(settle(judge, replace(state, judged=torch.tensor(30), divided=torch.tensor(0))).until) == 20


def divided_by_everybody(state, below, heard=30):
    """Everybody's direction against the clients `below`, the core's behind all; the first `heard` have answered."""
    assembly, cosines = torch.full_like(state.assembly, 0.3), state.cosines.clone()
    assembly[:, below] = -0.3
    assembly[:, heard:] = cosines[:, heard:] = torch.nan
    return replace(state, assembly=assembly, cosines=cosines)


def test_a_core_that_has_said_nothing_yet_is_not_appealed_from():
    judge, state = halfway({"appeal_gap": 0.1})
    state = divided_by_everybody(state, slice(0, 12))
    assert int(appeal(judge, state).divided) == 1
    silent = replace(state, cosines=torch.full_like(state.cosines, torch.nan))
    assert int(appeal(judge, silent).divided) == 0


def test_an_appeal_takes_the_majority_of_those_heard():
    """Of ten heard so far seven are below the gap: they are no minority, although 13 of all clients may attack."""
    judge, state = halfway({"appeal_gap": 0.1})
    assert int(appeal(judge, divided_by_everybody(state, slice(0, 7), heard=10)).divided) == 0
    assert int(appeal(judge, divided_by_everybody(state, slice(0, 4), heard=10)).divided) == 1


def test_the_new_core_has_as_many_seats_as_those_heard_make():
    """Sampled clients: ten have been heard, four of them are a clique, and six seats are not for it."""
    judge, state = halfway({"appeal_gap": 0.1}, divided=torch.tensor(4))
    state = appeal(judge, divided_by_everybody(state, slice(0, 4), heard=10))
    assert int(state.appeal) == 14
    assert judge._seat(state).core.nonzero().flatten().tolist() == list(range(4, 10))


def test_an_appeal_in_the_last_round_is_told_as_one():
    crowd = Crowd()
    server = make(crowd, rounds=20, appeal_gap=0.1, too_good_gap=2.0, appeal_window=3, appeal_share=0.1)
    report = sit(server, crowd, clique(crowd, 12, first=11))[-1]
    assert int(server.state.appeal) == 20
    assert server.frozen
    assert report.notes[0].endswith("a new one was seated, and decides alone: no rounds are left")


def run_alone(judge, state, updates, lookahead):
    """One round of any number of stacked experiments, updates (..., n, d), everybody answers who is asked."""
    asked = judge.eligible(state)
    ones = torch.ones_like(asked, dtype=torch.float64)
    g = updates * asked.unsqueeze(-1)
    examined = judge.examine(state, Arrived(g, g.norm(dim=-1), asked, asked, ones))
    if judge.phases(state) == 1:
        return judge.settle(state, examined), examined.weights
    lengths = lookahead.norm(dim=-1)
    later = lookahead * (examined.radius.unsqueeze(-1) / lengths).clamp(max=1).unsqueeze(-1)
    g, weights = g * examined.factors.unsqueeze(-1), examined.weights.unsqueeze(-2)
    if examined.assembly is not None:
        weights = torch.stack([examined.weights, examined.assembly], dim=-2)
    z = weights @ later
    along, length = z @ g.mT, z.norm(dim=-1)
    if examined.assembly is None:
        along, length = along.squeeze(-2), length.squeeze(-1)
    evidence = Evidence(along, (g * later).sum(-1), g.norm(dim=-1), length, ones, asked, asked, ones, 0.1)
    verdict = judge.weigh(examined.state, examined, evidence)
    return verdict.state, verdict.weights


@pytest.mark.parametrize("gap", [0.0, 0.1])
def test_stacked_experiments_freeze_each_in_its_own_round(gap):
    early = {"acquittal": 0.6, "fade": 0.2, "two_groups": 2.2, "catch_up": 4.0}
    judge = Core(judged_rounds=20, window=8, appeal_gap=gap, turnover=0.4, **early).bind(30, 40)
    crowds = [Crowd(seed=seed) for seed in range(3)]
    forges = [None, inverse(list(range(10))), None]
    alone = [judge.start(30, torch.zeros(1)) for _ in crowds]
    stacked = CoreState(
        **{f.name: torch.stack([getattr(s, f.name) for s in alone]) for f in fields(CoreState)}
    )
    for _ in range(24):
        rounds = [crowd.round(forge)[:2] for crowd, forge in zip(crowds, forges, strict=True)]
        each = [run_alone(judge, state, *said) for state, said in zip(alone, rounds, strict=True)]
        alone = [state for state, _ in each]
        stacked, weights = run_alone(
            judge, stacked, *(torch.stack(said) for said in zip(*rounds, strict=True))
        )
        torch.testing.assert_close(weights, torch.stack([weight for _, weight in each]))
    assert stacked.judged.tolist() == [12, 20, 12]
    for field in fields(CoreState):
        expected = torch.stack([getattr(state, field.name) for state in alone])
        torch.testing.assert_close(getattr(stacked, field.name), expected, equal_nan=True)
