"""An appeal heard by groups: where everybody's direction parts the clients, and where most are against the core."""

from dataclasses import replace

import numpy as np
import torch

from fedlaw.server import Status
from fedlaw.server.core_appeal import appeal
from tests.core.test_core_appeal import halfway
from tests.core.test_core_judging import Crowd, drive, make


def appealed(everybody, core=0.2, rounds=20, **settings):
    """How many rounds, all with these mean cosines, until a new core is seated; None: it never is."""
    chosen = {"appeal_gap": 0.15, "two_groups": 2.2, "judged_rounds": 20, "window": 8, "appeal_share": 0.5}
    judge, state = halfway(chosen | settings)
    everybody, core = (torch.as_tensor(x, dtype=torch.float64).expand(30) for x in (everybody, core))
    heard = (torch.arange(len(state.cosines)) < judge.appeal_window - 1).unsqueeze(-1)
    record = {"assembly": everybody, "cosines": core}
    state = replace(state, **{name: torch.where(heard, each, torch.nan) for name, each in record.items()})
    for k in range(1, rounds + 1):
        row = int(heard.sum()) + k - 1
        now = {name: getattr(state, name).clone() for name in record}
        for name, each in record.items():
            now[name][row] = each
        state = appeal(judge, replace(state, **now, judged=torch.tensor(row + 1), appeal=0 * state.appeal))
        if int(state.appeal):
            return k
    return None


def parted(distance, spread):
    """12 clients and 18, so far apart; each group spread evenly, and some gap in the lower one."""
    lower, upper = np.linspace(-spread, spread, 12), np.linspace(-spread, spread, 18)
    return np.concatenate([lower - 0.6 * distance, upper + 0.4 * distance])


def test_the_clearer_most_are_against_the_core_the_sooner_an_appeal_is_granted():
    just, clear, clearest = (appealed(np.zeros(30), -0.2 - parted(d, 0.2)[::-1]) for d in (0.8, 0.9, 1.0))
    assert 10 > just > clear > clearest == 3
    assert appealed(np.zeros(30), -0.2 - parted(4.0, 0.2)[::-1]) == 3  # however clear
    assert (
        appealed(parted(0.6, 0.2)) == appealed(parted(2.0, 0.2)) == 10
    )  # by everybody's direction it takes its time


def test_a_gap_among_clients_that_lie_far_and_wide_is_not_a_division():
    """Few clients with little in common: some gap there always is, and a clean core would lose its seats."""
    wide = np.linspace(-0.9, 0.5, 30) + 0.2 * (np.arange(30) >= 9)
    assert appealed(wide) is None
    assert appealed(wide, two_groups=0.0) == 10


def test_no_appeal_from_a_core_that_divides_nor_by_a_division_above_zero():
    core = np.where(np.arange(30) < 12, -0.1, 0.1) + 0.03 * np.linspace(-1, 1, 30)
    assert appealed(parted(1.0, 0.2), core) is None
    assert appealed(parted(1.0, 0.2) + 0.7) is None


def woken(rounds):
    """12 of 30 that are the easiest to follow for some rounds, hold most of the seats, and then invert."""
    phases = iter(range(10**6))

    def forge(rows):
        mean = rows.mean(0)
        rows[:12] = mean + 0.3 * (rows[:12] - mean) if next(phases) < 2 * rounds else -rows[:12]

    return forge


def test_a_core_that_most_clients_are_against_loses_its_seats_soon():
    """Judged by gaps alone it takes ten rounds in a row: those in which a model is lost."""
    appeals = {}
    for groups in (0.0, 2.2):
        crowd, forge, core = Crowd(), woken(14), []
        settings = {"judged_rounds": 40, "too_good_gap": 2.0, "appeal_gap": 0.15, "two_groups": groups}
        server = make(crowd, rounds=60, **settings)
        while not bool(server.state.frozen):
            drive(server, *crowd.round(forge))
            core.append(int(server.state.core[:12].sum()))
        assert core[13] == 12  # of 17 seats
        assert {server.statuses()[i][0] for i in range(12)} == {Status.LEFT_OUT}
        assert {server.statuses()[i][0] for i in range(12, 30)} == {Status.MEMBER}
        appeals[groups] = int(server.state.appeal)
    assert 14 < appeals[2.2] < 22 < 25 < appeals[0.0]


def test_most_clients_must_be_against_it_in_one_body():
    """A few whom the core follows far, and everybody else a little below zero: that is how training ends."""
    few = np.where(np.arange(30) < 4, 0.5, -0.08) + 0.02 * np.linspace(-1, 1, 30)
    assert appealed(np.zeros(30), few) is None
    wide = np.where(np.arange(30) < 12, 0.3, -0.3) + 0.25 * np.linspace(-1, 1, 30)
    assert appealed(np.zeros(30), wide) is None
    dragged = np.where(np.arange(30) < 12, 0.5, -0.5) + 0.02 * np.linspace(-1, 1, 30)
    dragged[12:17] = 0.1  # honest, with data of their own, beside 13 that send what they like
    assert appealed(np.zeros(30), dragged) is None
    half = np.where(np.arange(30) < 14, 0.5, -0.5) + 0.02 * np.linspace(-1, 1, 30)
    assert appealed(np.zeros(30), half) is None  # 16 of 30: fewer than are honest for sure
    most = np.where(np.arange(30) < 12, 0.5, -0.5) + 0.02 * np.linspace(-1, 1, 30)
    assert appealed(np.zeros(30), most) == 3
    assert appealed(np.zeros(30), most, two_groups=0.0) is None
