"""Core judging that decides by its evidence: verdicts that stand, and cores without a majority."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlaw.server import Core, Status
from fedlaw.server.core_math import verdict
from tests.core.test_core_judging import Crowd, drive, inverse, make, sit

EARLY = {"verdict_rounds": 4, "verdict_window": 5}


def frozen_at(reports):
    """The first round after which there are members."""
    return next(k for k, r in enumerate(reports, 1) if any(s is Status.MEMBER for s, _ in r.statuses))


def test_a_verdict_that_stands_ends_the_judging():
    crowd, bad = Crowd(), list(range(10))
    server = make(crowd, **EARLY)
    reports = sit(server, crowd, inverse(bad))
    assert 8 <= frozen_at(reports) < 20
    assert int(server.state.standing) == 4
    assert {server.statuses()[i][0] for i in bad} == {Status.LEFT_OUT}
    assert {server.statuses()[i][0] for i in range(10, 30)} == {Status.MEMBER}


def test_nobody_attacking_is_a_verdict_too():
    crowd = Crowd()
    server = make(crowd, **EARLY)
    reports = sit(server, crowd)
    assert frozen_at(reports) == 8  # five rounds to hear, the verdict of round 5 stands for four
    assert all(status is Status.MEMBER for status, _ in server.statuses().values())


def test_without_agreement_the_last_judged_round_decides():
    rng = np.random.default_rng(0)
    crowd = Crowd()
    server = make(crowd, **EARLY)

    def fickle(rows):  # who is against changes from round to round
        rows[rng.permutation(30)[:10]] *= -1

    assert frozen_at(sit(server, crowd, fickle)) == 20


def test_who_stays_away_delays_nothing_and_is_left_out():
    crowd = Crowd()
    server = make(crowd, **EARLY)
    away = (0, 1)
    reports = sit(server, crowd, silent=lambda k: (away, away) if k > 1 else ((), ()))
    assert frozen_at(reports) < 12
    assert {server.statuses()[i][0] for i in away} == {Status.LEFT_OUT}
    assert {server.statuses()[i][0] for i in range(2, 30)} == {Status.MEMBER}


def test_sampled_clients_are_all_heard_before_a_verdict():
    crowd, bad = Crowd(), list(range(10))
    from fedlaw.server import FedLAW, Settings

    judge = Core(judged_rounds=40, window=8, **EARLY)
    server = FedLAW(
        torch.zeros(crowd.d, dtype=torch.float64),
        range(30),
        judge,
        Settings(rounds=45, participation=0.5, seed=3),
    )
    sit(server, crowd, inverse(bad))
    assert int(server.state.judged) < 40
    assert int(server.state.scored.min()) >= 5
    assert float(server.weights[:10].sum()) == 0


def conspiracy(crowd, size):
    """`size` clients with one direction, against the others': aligned with each other as nobody is."""
    own = np.random.default_rng(7).normal(size=crowd.d) - 0.9 * crowd.signal
    noise = np.random.default_rng(8)

    def forge(rows):
        rows[:size] = 1.3 * (own + 0.3 * noise.normal(size=(size, crowd.d)))

    return forge


def noisy_crowd():
    crowd = Crowd()
    crowd.own = crowd.own * 1.5
    return crowd


def test_a_clique_that_took_the_core_loses_it():
    without = make(noisy_crowd(), too_good_gap=2.0)
    sit(without, noisy_crowd(), conspiracy(noisy_crowd(), 12))
    assert {without.statuses()[i][0] for i in range(12)} == {Status.MEMBER}  # what the check is for

    crowd = noisy_crowd()
    server = make(crowd, too_good_gap=2.0, minority_gap=0.12)
    sit(server, crowd, conspiracy(crowd, 12))
    assert {server.statuses()[i][0] for i in range(12)} == {Status.LEFT_OUT}
    assert {server.statuses()[i][0] for i in range(12, 30)} == {Status.MEMBER}


@pytest.mark.parametrize("forge", [None, inverse(list(range(12)))], ids=["nobody attacks", "inverse"])
def test_a_core_with_a_majority_behind_it_keeps_its_seats(forge):
    crowd = Crowd()
    server = make(crowd, minority_gap=0.12)
    sit(server, crowd, forge)
    assert int(server.state.benched.max()) == 0


def faded(crowd):
    """The same clients when nothing is left to learn: updates without a common direction."""
    later = Crowd(d=crowd.d, seed=1)
    later.signal = np.zeros(crowd.d)
    later.own = later.own - later.own.mean(0)
    return later


@pytest.mark.parametrize("gap", [0.0, 0.15])
def test_a_refresh_late_in_training_needs_a_gap(gap):
    crowd = Crowd(d=400)
    server = make(crowd, rounds=40, refresh_period=5, refresh_rounds=3, refresh_gap=gap)
    while server.round <= 20:
        drive(server, *crowd.round())
    sit(server, faded(crowd))
    left = sum(status is Status.LEFT_OUT for status, _ in server.statuses().values())
    assert left == 0 if gap else left > 5


def test_a_refresh_with_a_gap_throws_out_a_sleeper():
    crowd = Crowd()
    server = make(crowd, rounds=40, refresh_period=10, refresh_rounds=3, refresh_gap=0.08)
    while server.round <= 20:
        drive(server, *crowd.round())
    sit(server, crowd, inverse(list(range(6))))
    assert {server.statuses()[i][0] for i in range(6)} == {Status.LEFT_OUT}
    assert {server.statuses()[i][0] for i in range(6, 30)} == {Status.MEMBER}


@given(
    st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=30),
    st.integers(0, 12),
    st.floats(0, 0.3),
    st.floats(-0.1, 0.1),
)
def test_a_verdict_has_few_against_and_nobody_between(values, room, gap, above):
    recent = torch.tensor(values, dtype=torch.float64)
    there, against = verdict(
        recent, torch.ones(len(values), dtype=torch.bool), torch.tensor([room]), gap, above
    )
    assert torch.equal(against, recent <= above)
    if bool(there):
        assert int(against.sum()) <= room
        assert not bool(against.all())
        assert not bool(against.any()) or float(recent[~against].min() - recent[against].max()) > gap


@pytest.mark.parametrize("name", ["minority_gap", "verdict_rounds", "verdict_gap"])
def test_settings_are_checked(name):
    with pytest.raises(ValueError, match=name):
        Core(**{name: -1})
