"""An appeal heard by groups: where everybody's direction parts the clients, and where most are against the core."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlaw.server import Status
from fedlaw.server.core_appeal import appeal
from tests.core.test_core_appeal import halfway
from tests.core.test_core_judging import Crowd, drive, make

FIRST = np.arange(30) < 17


def appealed(everybody, core=0.2, rounds=20, **settings):
    """How many rounds, all with these mean cosines, until a new core is seated; None: it never is."""
    chosen = {"appeal_gap": 0.15, "two_groups": 2.2, "judged_rounds": 20, "window": 8, "appeal_share": 0.5}
    judge, state = halfway(chosen | settings)
    everybody, core = (torch.as_tensor(x, dtype=torch.float64).expand(30) for x in (everybody, core))
    heard = (torch.arange(len(state.cosines)) < judge.appeal_window - 1).unsqueeze(-1)
    record = {"assembly": everybody, "cosines": core}
    record_so_far = {name: torch.where(heard, each, torch.nan) for name, each in record.items()}
    seated = core.argsort(descending=True, stable=True).argsort() < 17
    state = replace(state, core=seated, **record_so_far)
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


def test_an_outvoted_core_is_not_waited_for_and_everybodys_direction_is_given_its_time():
    against = -0.2 - parted(1.0, 0.15)[::-1]
    assert appealed(np.zeros(30), against) == 1
    assert appealed(parted(0.6, 0.2)) == appealed(parted(2.0, 0.2)) == 10
    assert appealed(np.zeros(30), against + 0.8) is None  # two groups, the lower one not below zero
    assert appealed(np.zeros(30), 0.2 * against) is None  # nor far enough below it


def test_a_gap_among_clients_that_lie_far_and_wide_is_not_a_division():
    """Few clients with little in common: some gap there always is, and a clean core would lose its seats."""
    wide = np.linspace(-0.9, 0.5, 30) + 0.2 * (np.arange(30) >= 9)
    assert appealed(wide) is None
    assert appealed(wide, two_groups=0.0) == 10


def test_no_appeal_from_a_core_that_divides_nor_by_a_division_above_zero():
    core = np.where(np.arange(30) < 12, -0.1, 0.1) + 0.03 * np.linspace(-1, 1, 30)
    assert appealed(parted(1.0, 0.2), core) is None
    assert appealed(parted(1.0, 0.2) + 0.7) is None


def judged_by(cosines, core=FIRST, sampled=False):
    """In which round of these cosines (rounds, 30) a new core is seated, and the state then; None: in none.

    sampled: who has none in a round was not asked; otherwise it kept silent.
    """
    settings = {"appeal_gap": 0.15, "two_groups": 2.2, "judged_rounds": 40, "window": 15}
    judge, state = halfway(settings, rounds=100)
    state = replace(state, core=torch.as_tensor(core))
    record = torch.full_like(state.cosines, torch.nan)
    for k, row in enumerate(np.asarray(cosines)):
        record[k] = torch.as_tensor(row)
        scored = (~record.isnan()).sum(0)
        asked = scored if sampled else torch.full_like(scored, k + 1)
        now = {"cosines": record, "assembly": record, "judged": torch.tensor(k + 1)}
        now |= {"asked": asked, "scored": scored}
        after = appeal(judge, replace(state, **now))
        if int(after.appeal):
            return k + 1, after
    return None, None


def in_turns(bad_rounds, rounds=30):
    """12 of 30 hold the core and lead it astray in some rounds; in the others everybody is for it."""
    rng = np.random.default_rng(0)
    good, bad = np.where(np.arange(30) < 12, 0.5, 0.25), np.where(np.arange(30) < 12, 0.5, -0.3)
    turns = np.isin(np.arange(1, rounds + 1), bad_rounds)[:, None]
    return np.where(turns, bad, good) + 0.03 * rng.normal(size=(rounds, 30))


def test_rounds_in_which_most_are_against_the_core_need_not_be_in_a_row():
    granted, after = judged_by(in_turns([6, 12, 18, 24]))
    assert granted == 18
    assert (after.total / after.decay).argsort()[:12].sort().values.tolist() == list(range(12))
    assert judged_by(in_turns([6, 18]))[0] is None
    assert judged_by(in_turns([3, 12, 27]))[0] is None  # no three of them within a window


def test_one_bad_round_or_of_everybodys_drift_unseats_nobody():
    rng = np.random.default_rng(1)
    drift = 0.3 + 0.15 * rng.normal(size=30) - np.linspace(0, 0.8, 30)[:, None]
    assert judged_by(drift + 0.03 * rng.normal(size=(30, 30)))[0] is None
    noisy = in_turns([7]) + 0.2 * rng.normal(size=(30, 30))
    assert judged_by(noisy)[0] is None


def test_who_does_not_hold_the_core_cannot_be_unseated_from_it():
    """Attackers that do could have it praise the others, and be heard as victims beside a few honest clients."""
    assert judged_by(in_turns([6, 12, 18]), core=np.arange(30) >= 13)[0] is None
    few, core = np.arange(30) < 12, np.zeros(30, bool)
    core[4:21] = True  # 8 of those 12 hold 8 of 17 seats
    assert judged_by(in_turns([6, 12, 18]), core=core)[0] is None
    core[3], core[20] = True, False
    assert judged_by(in_turns([6, 12, 18]), core=core)[0] == 18
    assert bool(few[core].sum() == 9)


def test_where_clients_are_sampled_more_rounds_are_taken():
    rows = in_turns(range(6, 30), rounds=30)
    rows[(np.arange(30)[:, None] + np.arange(30)) % 3 > 0] = np.nan  # each client in one round of three
    granted, after = judged_by(rows, sampled=True)
    assert granted is not None
    assert (after.total / after.decay).argsort()[:12].sort().values.tolist() == list(range(12))
    assert after.decay.tolist() == pytest.approx([20.0] * 30)


def test_most_are_most_of_all_clients_and_not_of_those_that_answer():
    """A crew of 12 against a clean core, ten honest clients silent: 60 % of those heard, and no majority."""
    rng = np.random.default_rng(0)
    rows = np.where(np.arange(30) < 12, -0.4, 0.4) + 0.03 * rng.normal(size=(30, 30))
    rows[:, 20:] = np.nan
    assert judged_by(rows, core=np.arange(30) >= 13)[0] is None


@pytest.mark.parametrize("sampled", [False, True], ids=["silent", "not asked"])
def test_silence_in_the_rounds_that_decide_is_no_fresh_start(sampled):
    rows = in_turns([6, 12, 18])
    rows[[5, 11, 17], 0] = np.nan
    granted, after = judged_by(rows, sampled=sampled)
    assert granted == 18
    score = after.total / after.decay
    if sampled:
        assert float(after.decay[0]) == 0  # it has not been heard yet
    else:
        assert float(after.decay[0]) == pytest.approx(20)
        assert float(score[0]) == float(score.min())


def held(own, usual, others=0.1, rounds=30):
    """In which round a new core is seated: these cosines of its 17, and of all clients by everybody's direction."""
    settings = {"appeal_gap": 2.0, "two_groups": 2.2, "judged_rounds": 40, "window": 15, "fade": 0.2}
    judge, state = halfway(settings, rounds=100)
    rng = np.random.default_rng(0)
    peaks = torch.full((30,), 0.3, dtype=torch.float64)
    core, everybody = (torch.full_like(state.cosines, torch.nan) for _ in range(2))
    for k in range(rounds):
        core[k] = torch.as_tensor(np.where(FIRST, own, others) + 0.02 * rng.normal(size=30))
        everybody[k] = torch.as_tensor(usual + 0.02 * rng.normal(size=30))
        now = {"cosines": core, "assembly": everybody, "judged": torch.tensor(k + 1), "peaks": peaks}
        state = appeal(judge, replace(state, core=torch.as_tensor(FIRST), **now))
        if int(state.appeal):
            return k + 1, state
    return None, None


def test_a_core_that_has_gone_idle_is_replaced_if_everybodys_direction_sets_its_holders_apart():
    """Its own members want nothing of what it wants, and most clients do want: so it is not theirs."""
    few = np.arange(30) < 12
    usual = np.where(few, -0.2, 0.4)
    granted, after = held(0.0, usual)
    assert granted == 15  # a whole window
    assert after.total.argsort()[:12].sort().values.tolist() == list(range(12))
    assert held(0.12, usual)[0] is None  # the core has something to say
    assert held(0.0, np.where(few, -0.2, 0.04))[0] is None  # most clients have nothing to say
    assert held(0.0, np.where(few, 0.1, 0.4))[0] is None  # nobody is against what everybody wants
    assert held(0.0, np.roll(usual, 18))[0] is None  # those who are do not hold it
    assert held(0.0, usual, others=-0.4)[0] is None  # it has set others apart by itself


def test_who_held_the_core_against_most_is_not_back_in_it_after_some_good_rounds():
    """Scores of the new core weigh as if they had always been these: a window of praise does not outweigh them."""
    _, after = judged_by(in_turns([6, 12, 18]))
    score, weight = after.total.clone(), after.decay.clone()
    assert weight.tolist() == pytest.approx([20.0] * 30)
    for _ in range(12):
        score, weight = (
            0.95 * score + torch.where(torch.arange(30) < 12, 0.4, 0.25),
            0.95 * weight + 1,
        )
    assert float((score / weight)[:12].max()) < float((score / weight)[12:].min())


def taking_turns(every, lasting):
    """12 of 30 that are the easiest to follow in some rounds, and invert in the others."""
    phases = iter(range(10**6))

    def forge(rows):
        mean = rows.mean(0)
        behave = (next(phases) // 2) % every < every - lasting
        rows[:12] = mean + 0.3 * (rows[:12] - mean) if behave else -rows[:12]

    return forge


@pytest.mark.parametrize(("every", "lasting"), [(10, 5), (20, 10), (8, 3)])
def test_attackers_that_take_turns_are_left_out(every, lasting):
    crowd = Crowd()
    settings = {"judged_rounds": 60, "window": 22, "too_good_gap": 2.0, "fade": 0.2}
    server = make(crowd, rounds=100, appeal_gap=0.15, two_groups=2.2, **settings)
    forge = taking_turns(every, lasting)
    while not bool(server.state.frozen):
        drive(server, *crowd.round(forge))
    assert {server.statuses()[i][0] for i in range(12)} == {Status.LEFT_OUT}
    assert {server.statuses()[i][0] for i in range(12, 30)} == {Status.MEMBER}


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
    assert 14 < appeals[2.2] < 20 < 25 < appeals[0.0]


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
    assert appealed(np.zeros(30), most) == 1
    assert appealed(np.zeros(30), most, two_groups=0.0) is None
