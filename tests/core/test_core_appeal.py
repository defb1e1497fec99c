"""Core judging beside its rounds: the appeal from a core that was taken, and refreshes with a gap."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlaw.server import Core, Status
from fedlaw.server.core_appeal import settle
from tests.core.test_core_judging import Crowd, drive, inverse, make, sit


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


TAKEN = {"too_good_gap": 2.0, "majority": 0.15, "two_groups": 2.2, "fade": 0.2, "majority_window": 3}


def test_a_clique_that_took_the_core_loses_it_on_appeal():
    without = make(Crowd(), too_good_gap=2.0)
    sit(without, Crowd(), clique(Crowd(), 12))
    assert {without.statuses()[i][0] for i in range(12)} == {Status.MEMBER}  # what the appeal is for

    crowd = Crowd()
    server = make(crowd, **TAKEN)
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
    server = make(crowd, majority=0.15, two_groups=2.2)
    sit(server, crowd, forge)
    assert int(server.state.appeal) == 0
    assert int(server.state.until) == int(server.state.judged) == 20


def test_judging_goes_on_after_a_late_appeal_as_far_as_there_are_rounds():
    """A core taken late: what was said before it proves nothing, so a whole window follows the new one."""
    crowd = Crowd()
    server = make(crowd, rounds=40, **TAKEN)
    sit(server, crowd, clique(crowd, 12, first=12))
    state = server.state
    assert int(state.judged) == int(state.until) == int(state.appeal) + 8 > 20
    assert {server.statuses()[i][0] for i in range(12)} == {Status.LEFT_OUT}
    short = Core(judged_rounds=20, window=8, majority=0.15, two_groups=2.2).bind(30, 24)
    assert short.longest == 24
    assert Core(judged_rounds=20, window=8).bind(30, 24).longest == 20


def test_the_assembly_does_not_depend_on_how_replies_arrive():
    """One by one or in blocks, and the cosines are those of the definition."""
    servers = [make(Crowd(), majority=0.15, two_groups=2.2) for _ in range(2)]
    for server, single in zip(servers, (False, True), strict=True):
        crowd = Crowd()
        for _ in range(3):
            drive(server, *crowd.round(), one_by_one=single)
    block, single = (server.state.assembly[:3] for server in servers)
    torch.testing.assert_close(block, single)

    crowd, server = Crowd(), make(Crowd(), majority=0.15, two_groups=2.2)
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
    crowd, whole = Crowd(), make(Crowd(), **TAKEN)
    forge = clique(crowd, 12)
    rounds = [crowd.round(forge) for _ in range(24)]
    while int(whole.state.outvoted) == 0:
        drive(whole, *rounds.pop(0))
    again = make(Crowd(), **TAKEN)
    again.load(whole.dump())
    assert int(whole.state.appeal) == 0
    for each in rounds:
        drive(whole, *each)
        drive(again, *each)
    assert whole.statuses() == again.statuses()
    assert int(whole.state.appeal) == int(again.state.appeal) > 0


@pytest.mark.parametrize("name", ["majority", "majority_rounds", "refresh_gap", "fade"])
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


def test_whether_the_core_has_changed_is_asked_when_judging_ends():
    """Not while an appeal stands, and again if that delayed the end; and not where too little is left to judge."""
    judge, state = halfway(
        {"majority": 0.15, "two_groups": 2.2, "turnover": 0.4},
        judged=torch.tensor(20),
        outvoted=torch.tensor(2),
    )
    assert judge.longest == 31
    state = replace(state, cores=torch.zeros_like(state.cores))
    assert int(settle(judge, state).until) == 20
    assert not settle(judge, state).cosines.isnan().any()
    later = settle(judge, replace(state, judged=torch.tensor(22), outvoted=torch.tensor(0)))
    assert int(later.until) == 30
    assert bool(later.cosines.isnan().all())
    assert int(settle(judge, replace(state, judged=torch.tensor(30), outvoted=torch.tensor(0))).until) == 20


def test_an_appeal_in_the_last_round_is_told_as_one():
    crowd = Crowd()
    server = make(crowd, rounds=20, **TAKEN)
    report = sit(server, crowd, clique(crowd, 12, first=15))[-1]
    assert int(server.state.appeal) == 20
    assert server.frozen
    assert report.notes[0].endswith("a new one was seated, and decides alone: no rounds are left")
