"""A core that a minority holds: most clients would be better off without it, and take its seats."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlaw.server import Core, Status
from fedlaw.server.core_appeal import appeal
from tests.core.test_core_appeal import halfway
from tests.core.test_core_judging import Crowd, drive, make

FEW = np.arange(30) < 12
CORE = np.arange(30) < 17
SETTINGS = {"majority": 0.15, "two_groups": 2.2, "judged_rounds": 40, "window": 15}


def judged_by(cosines, everybody=0.0, core=CORE, sampled=False, peaks=0.0, **settings):
    """In which round of these cosines (rounds, 30) a new core is seated, and the state then; None: in none.

    sampled: who has none in a round was not asked; otherwise it kept silent.
    """
    judge, state = halfway(SETTINGS | settings, rounds=100)
    state = replace(state, core=torch.as_tensor(core), peaks=torch.full_like(state.peaks, peaks))
    record, assembly = torch.full_like(state.cosines, torch.nan), torch.full_like(state.assembly, torch.nan)
    for k, row in enumerate(np.asarray(cosines)):
        record[k] = torch.as_tensor(row)
        assembly[k] = torch.where(record[k].isnan(), torch.nan, torch.as_tensor(everybody))
        scored = (~record.isnan()).sum(0)
        asked = scored if sampled else torch.full_like(scored, k + 1)
        now = {"cosines": record.clone(), "assembly": assembly.clone(), "judged": torch.tensor(k + 1)}
        state = appeal(judge, replace(state, asked=asked, scored=scored, **now))
        if int(state.appeal):
            return k + 1, state
    return None, None


def said(content, rounds=30, noise=0.02, seed=0):
    """The same cosines in every round, but for some noise."""
    return np.asarray(content) + noise * np.random.default_rng(seed).normal(size=(rounds, 30))


def parted(few=0.4, most=-0.4, spread=0.1):
    """12 clients and 18 around two values, each group spread evenly."""
    return np.concatenate(
        [np.linspace(few - spread, few + spread, 12), np.linspace(most - spread, most + spread, 18)]
    )


def seated(state):
    """Who has the best scores, as many as there are seats."""
    return set((state.total / state.decay).argsort(descending=True)[:17].tolist())


def in_turns(bad_rounds, rounds=30, few=0.5, most=-0.3):
    """12 of 30 hold the core and lead it astray in some rounds; in the others everybody is for it."""
    bad, good = np.where(FEW, few, most), np.where(FEW, 0.5, 0.25)
    turns = np.isin(np.arange(1, rounds + 1), bad_rounds)[:, None]
    return said(0, rounds) + np.where(turns, bad, good)


def test_a_minority_that_leads_the_core_astray_loses_it_within_three_rounds():
    granted, after = judged_by(said(parted()))
    assert granted == 5 + 2
    assert seated(after) <= set(range(12, 30))
    assert bool(after.cosines.isnan().all() and after.assembly.isnan().all())


def test_most_clients_must_be_against_the_core_by_content_or_by_its_direction_alone():
    assert judged_by(said(parted(most=-0.1)))[0] is None  # not far enough below zero
    assert judged_by(said(parted(few=0.9, most=0.3)))[0] is None
    assert judged_by(said(parted()), np.where(FEW, 0.4, -0.45))[0] == 7  # that, too, is the minority's
    assert judged_by(said(parted(few=0.1)), np.where(FEW, -0.1, 0.1))[0] == 7


def test_clients_that_lie_far_and_wide_are_not_two_groups():
    assert judged_by(said(np.linspace(0.4, -0.8, 30)))[0] is None
    assert judged_by(said(parted(few=0.3, most=-0.3, spread=0.35)))[0] is None
    dragged = parted()
    dragged[12:17] = 0.1  # honest, with data of their own, beside 13 that send what they like
    assert judged_by(said(dragged))[0] is None


def test_who_is_told_apart_by_the_core_has_no_vote():
    """Neither do they unseat it, nor is it safe for a few scapegoats that its holders send far below."""
    content = np.where(FEW, 0.1, np.where(np.arange(30) < 20, -0.16, -0.9))
    assert judged_by(said(content), content + np.where(FEW, -0.4, 0.4))[0] is None
    scapegoats = np.where(np.arange(30) < 9, 0.2, np.where(FEW, -0.98, -0.4))
    assert judged_by(said(scapegoats))[0] == 7


@pytest.mark.parametrize("crew", [8, 10, 12, 13])
def test_attackers_outside_a_clean_core_cannot_pass_honest_clients_off_as_discontent(crew):
    """They win everybody's direction for four and against thirteen, and stand far below on average themselves."""
    rng, honest = np.random.default_rng(crew), 30 - crew
    own = np.linspace(-0.6, 0, crew)
    for level in (0.0, 0.1, 0.3):
        cosines = np.concatenate([level + 0.15 * rng.normal(size=honest), own])
        content = np.concatenate([np.full(13, 0.4), np.full(honest - 13, -0.2), np.full(crew, -0.25)])
        assert judged_by(said(cosines), cosines - content)[0] is None


def test_silence_of_honest_clients_makes_attackers_no_majority():
    own = np.linspace(-0.7, 0.1, 12)
    cosines = np.concatenate([own, np.full(8, 0.15), np.full(10, np.nan)])
    everybody = np.concatenate([own + 0.3, np.full(8, -0.25), np.zeros(10)])
    assert judged_by(said(cosines), everybody, core=np.isin(np.arange(30), range(12, 25)))[0] is None


def test_rounds_in_which_most_are_against_the_core_need_not_be_in_a_row():
    granted, after = judged_by(in_turns([6, 12, 18, 24]))
    assert granted == 18 + 2
    assert seated(after) <= set(range(12, 30))
    assert judged_by(in_turns([6, 18]))[0] is None
    assert judged_by(in_turns([3, 12, 27]))[0] is None  # no three of them within a window


def test_one_bad_round_or_everybodys_drift_unseats_nobody():
    drift = 0.3 - np.linspace(0, 0.8, 30)[:, None]
    assert judged_by(said(drift, noise=0.15))[0] is None
    assert judged_by(in_turns([7]) + said(0, noise=0.2))[0] is None


def test_a_majority_is_one_of_all_clients():
    """A crew of 12 against a clean core: no majority, though ten honest clients keep silent."""
    rows = said(np.where(FEW, -0.4, 0.4))
    assert judged_by(rows, core=np.arange(30) >= 13)[0] is None
    rows[:, 20:] = np.nan
    assert judged_by(rows, core=np.arange(30) >= 13)[0] is None
    assert judged_by(said(np.where(np.arange(30) < 14, 0.4, -0.4)))[0] is None  # 16 are fewer than are honest
    assert judged_by(said(np.where(np.arange(30) < 13, 0.4, -0.4)))[0] == 7


def test_who_does_not_hold_the_core_cannot_be_unseated_from_it():
    """Attackers that do could have it praise the others, and be heard as victims beside a few honest clients."""
    assert judged_by(said(parted()), core=np.arange(30) >= 13)[0] is None
    core = np.zeros(30, bool)
    core[4:21] = True  # 8 of those 12 hold 8 of 17 seats
    assert judged_by(said(parted()), core=core)[0] is None
    core[3], core[20] = True, False
    assert judged_by(said(parted()), core=core)[0] == 7


def test_a_core_that_has_said_nothing_yet_is_not_appealed_from():
    rows = said(parted())
    rows[:20] = np.nan
    assert judged_by(rows)[0] == 20 + 7


@pytest.mark.parametrize("sampled", [False, True], ids=["silent", "not asked"])
def test_silence_is_no_fresh_start(sampled):
    rows = said(parted())
    rows[:, 0] = np.nan
    granted, after = judged_by(rows, sampled=sampled)
    assert granted == 7
    if sampled:
        assert float(after.decay[0]) == 0  # it has never been heard
    else:
        assert float(after.decay[0]) == pytest.approx(20)
        assert float(after.total[0]) == float(after.total.min())


def test_who_was_not_asked_when_it_mattered_is_judged_by_the_window():
    rows = in_turns([6, 12, 18])
    rows[[5, 11, 17], 0] = np.nan  # a holder
    rows[[5, 11, 17], 29] = np.nan
    _, after = judged_by(rows, sampled=True)
    assert float(after.decay[0]) == float(after.decay[29]) == pytest.approx(20)
    assert 0 not in seated(after)


def test_where_clients_are_sampled_more_rounds_are_taken():
    rows = said(parted())
    rows[(np.arange(30)[:, None] + np.arange(30)) % 3 > 0] = np.nan  # each client in one round of three
    granted, after = judged_by(rows, sampled=True)
    assert 5 * 3 <= granted <= 7 * 3
    assert seated(after) <= set(range(12, 30))


def test_the_new_core_has_as_many_seats_as_those_heard_make():
    """Sampled clients: ten have been heard, four of them are a clique, and six seats are not for it."""
    rows = said(np.where(np.arange(30) < 4, 0.4, -0.4))
    rows[:, 10:] = np.nan
    granted, after = judged_by(rows, core=np.arange(30) < 6, sampled=True)
    assert granted == 7
    judge = Core(**SETTINGS).bind(30, 100)
    assert judge._seat(after).core.nonzero().flatten().tolist() == list(range(4, 10))


def test_who_held_the_core_is_not_back_in_it_after_some_good_rounds():
    """Scores of the new core weigh as if they had always been these: a window of praise does not outweigh them."""
    _, after = judged_by(said(parted()))
    score, weight = after.total.clone(), after.decay.clone()
    assert weight.tolist() == pytest.approx([20.0] * 30)
    for _ in range(12):
        score, weight = (
            0.95 * score + torch.where(torch.arange(30) < 12, 0.4, 0.25),
            0.95 * weight + 1,
        )
    assert float((score / weight)[:12].max()) < float((score / weight)[12:].min())


def idle(own=0.0, usual=None, others=0.1):
    """In which round a new core is seated: cosines of its 17, of others, and of all by everybody's direction."""
    usual = np.where(FEW, -0.2, 0.4) if usual is None else usual
    everybody = usual + 0.02 * np.random.default_rng(1).normal(size=30)
    return judged_by(said(np.where(CORE, own, others)), everybody, fade=0.2, peaks=0.3)


def test_a_core_that_has_gone_idle_is_replaced_if_a_minority_that_is_content_holds_it():
    """Its own members want nothing of what it wants, and most clients do want: so it is not theirs."""
    granted, after = idle()
    assert granted == 15  # a whole window
    assert seated(after) <= set(range(12, 30))
    assert idle(own=0.12)[0] is None  # the core has something to say
    assert idle(usual=np.where(FEW, -0.2, 0.04))[0] is None  # most clients have nothing to say
    assert idle(usual=np.where(FEW, 0.1, 0.4))[0] is None  # nobody is against what everybody wants
    assert idle(usual=np.where(np.roll(FEW, 18), -0.2, 0.4))[0] is None  # those who are do not hold it
    assert idle(others=-0.4)[0] is None  # it has set others apart by itself
    assert idle(usual=np.linspace(-0.4, 0.9, 30))[0] is None  # they are no group


def test_settings_go_together():
    with pytest.raises(ValueError, match=r"majority = 0\.15 takes two_groups above 0"):
        Core(majority=0.15)


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
    server = make(crowd, rounds=100, majority=0.15, two_groups=2.2, **settings)
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
    """Within the rounds in which a model is lost."""
    crowd, forge, core = Crowd(), woken(14), []
    server = make(crowd, rounds=60, judged_rounds=40, too_good_gap=2.0, majority=0.15, two_groups=2.2)
    while not bool(server.state.frozen):
        drive(server, *crowd.round(forge))
        core.append(int(server.state.core[:12].sum()))
    assert core[13] == 12  # of 17 seats
    assert {server.statuses()[i][0] for i in range(12)} == {Status.LEFT_OUT}
    assert {server.statuses()[i][0] for i in range(12, 30)} == {Status.MEMBER}
    assert 14 < int(server.state.appeal) < 23
