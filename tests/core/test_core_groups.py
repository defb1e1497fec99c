"""Judging ends: a verdict by groups where there are two, and more weight for those who had none."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlaw.server import Status
from fedlaw.server.core_math import caught_up, lowest_mean, lowest_rounds, mean_over, two_groups
from fedlaw.server.core_verdict import admitted, against
from tests.core.test_core_appeal import halfway
from tests.core.test_core_judging import Crowd, inverse, make, sit


def by_trying(values, least, most):
    """Otsu's criterion by trying every cut."""
    values = np.sort(values)
    parts = [(values[:k], values[k:]) for k in range(least, most + 1) if k < len(values)]
    if not parts:
        return 0.0, 0
    low, high = min(parts, key=lambda p: len(p[0]) * p[0].var() + len(p[1]) * p[1].var())
    return (high.mean() - low.mean()) / max(low.std() + high.std(), 1e-12), len(low)


@given(st.integers(0, 10**6), st.integers(3, 30), st.integers(1, 4), st.integers(1, 14), st.booleans())
def test_the_cut_is_the_one_that_trying_every_cut_finds(seed, n, least, most, masked):
    rng = np.random.default_rng(seed)
    values = rng.normal(size=n) + 3 * (rng.random(n) < 0.4)
    mask = rng.random(n) < 0.8 if masked else np.ones(n, bool)
    apart, mean, lower = two_groups(torch.tensor(values), torch.tensor(mask), least, torch.tensor([most]))
    expected, size = by_trying(values[mask], least, most)
    assert float(apart) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert int(lower.sum()) == size
    if size:
        assert float(mean) == pytest.approx(np.sort(values[mask])[:size].mean())
        assert values[lower.numpy()].max() <= values[mask & ~lower.numpy()].min()


def test_one_group_is_never_two():
    """Normally, uniformly and exponentially distributed clients, and four overlapping groups of them."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        steps = np.repeat([0.0, 1.0, 2.0, 3.0], 50) + 0.3 * rng.normal(size=200)
        for values in (rng.normal(size=200), rng.random(200), rng.exponential(size=200), steps):
            mask = torch.ones(200, dtype=torch.bool)
            assert float(two_groups(torch.tensor(values), mask, 6, torch.tensor([90]))[0]) < 2.2


def sitting(levels, **settings):
    """A judge and its state half-way, every client with its level of cosine and a little noise in every round."""
    judge, state = halfway({"two_groups": 2.2} | settings)
    noise = 0.01 * torch.randn(state.cosines.shape, generator=torch.Generator().manual_seed(0))
    spoken = ~state.cosines.isnan()
    return judge, replace(
        state,
        cosines=torch.where(spoken, torch.tensor(levels) + noise, torch.nan),
        core=torch.arange(30) >= 13,
    )


@pytest.mark.parametrize("scale", [1.0, 0.2, 0.05])
def test_a_group_below_zero_is_left_out_however_small_cosines_are(scale):
    """On hard data all cosines are small: attackers are not below the threshold, but they are still a group."""
    levels = scale * np.where(np.arange(30) < 10, -0.1, np.linspace(0.2, 0.6, 30))
    judge, state = sitting(levels)
    if scale == 0.2:
        assert judge.threshold < levels.min()
        assert bool(admitted(replace(judge, two_groups=0.0), state)[0].all())
    assert admitted(judge, state)[0].tolist() == [i >= 10 for i in range(30)]


def turning(share, gap):
    """Ten of 30 as good as the others, but in a share of the rounds as far below zero as otherwise above it."""
    judge, state = sitting(np.full(30, 0.3), fade=0.2)
    rounds = torch.arange(len(state.cosines)) * share % 1 < share
    turns = rounds.unsqueeze(-1) & (torch.arange(30) < 10)
    peaks = torch.full((30,), 0.3, dtype=torch.float64)
    return judge, replace(state, cosines=torch.where(turns, -gap, 0.0) + state.cosines, peaks=peaks)


def test_a_group_that_is_against_the_core_in_some_rounds_is_left_out():
    judge, state = turning(0.4, gap=0.6)
    assert admitted(judge, state)[0].tolist() == [i >= 10 for i in range(30)]
    assert float(state.cosines.nanmean(0)[:10].min()) > 0  # by their mean they are with it
    # Nearer to the others than a fifth of what once was the signal:
    far = replace(state, peaks=torch.full((30,), 5.0, dtype=torch.float64))
    assert bool(admitted(judge, far)[0].all())
    assert not bool(against(*turning(0.4, gap=0.2)).any())  # never below zero


@given(st.integers(0, 10**6), st.integers(6, 12), st.floats(0.1, 1), st.integers(1, 14))
def test_the_lowest_of_each_clients_last_rounds_by_sorting_them(seed, rounds, share, window):
    rng = np.random.default_rng(seed)
    record = np.where(rng.random((rounds, 5)) < 0.2, np.nan, rng.normal(size=(rounds, 5)))
    record[0] = 0.0
    found = lowest_mean(torch.tensor(record), window, share)
    for i in range(5):
        spoken = record[~np.isnan(record[:, i]), i][-window:]
        few = int(np.ceil(len(spoken) * share - 1e-9))
        assert float(found[i]) == pytest.approx(np.sort(spoken)[:few].mean(), abs=1e-12)


@given(st.integers(0, 10**6), st.integers(3, 12), st.integers(1, 4), st.integers(1, 14))
def test_the_rounds_in_which_most_stood_lowest_by_trying_each(seed, rounds, times, window):
    rng = np.random.default_rng(seed)
    record, compared = rng.normal(size=(rounds, 7)), rng.random(7) < 0.8
    record[rng.random((rounds, 7)) < 0.3] = np.nan
    record[:, 0], compared[0] = rng.normal(size=rounds), True
    last = record[-window:]
    answers = (~np.isnan(last[:, compared])).sum() / len(last)
    few = int(np.round(times * compared.sum() / answers))
    medians = [np.nanmedian(row[compared]) for row in last]
    chosen = last[np.argsort(medians, kind="stable")[:few]]
    rounds = lowest_rounds(torch.tensor(record), torch.tensor(compared), window, times)
    if len(last) < few:
        assert not bool(rounds.any())
        return
    found = mean_over(torch.tensor(record), rounds)
    for i in np.flatnonzero(compared):
        said = chosen[~np.isnan(chosen[:, i]), i]
        assert float(found[i]) == pytest.approx(said.mean() if len(said) else np.nan, abs=1e-12, nan_ok=True)


def test_who_is_in_the_lower_group_and_never_against_the_core_speaks_for_itself_alone():
    """Nobody honest is left out for the company it is in, and nobody is let in for it."""
    judge, state = turning(0.4, gap=0.6)
    state = replace(state, cosines=state.cosines.clone())
    state.cosines[:, 0] = state.cosines[:, 0].clamp(min=0.05)
    assert admitted(judge, state)[0].tolist() == [i == 0 or i >= 10 for i in range(30)]


def test_a_group_stands_apart_where_it_is_cut():
    """A few far below, a wide gap elsewhere, honest clients in between: nobody is left out for their company."""
    rng = np.random.default_rng(0)
    judge, state = sitting(np.zeros(30), fade=0.2)
    rows = 0.5 + 0.1 * rng.normal(size=(len(state.cosines), 30))
    bad = np.concatenate([np.full(3, -2.0), np.linspace(0.22, 0.33, 10), np.linspace(0.5, 0.6, 17)])
    rows[::3] = bad + 0.005 * rng.normal(size=(len(rows[::3]), 30))
    peaks = torch.full((30,), 0.5, dtype=torch.float64)
    out = against(judge, replace(state, cosines=torch.tensor(rows), peaks=peaks))
    assert not bool(out[3:].any())


def test_a_group_above_zero_is_let_in():
    judge, state = sitting(np.where(np.arange(30) < 10, 0.05, 0.5))
    assert not bool(against(judge, state).any())
    assert bool(admitted(judge, state)[0].all())


def test_groups_do_not_take_a_seat_from_the_core_nor_more_than_may_be_shut_out():
    judge, state = sitting(np.where(np.arange(30) < 16, -0.2, 0.5))
    members = admitted(judge, state)[0]
    assert bool(members[state.core].all())
    assert int((~members).sum()) <= 13


@given(
    st.lists(st.floats(0.01, 1), min_size=2, max_size=12),
    st.integers(0, 10**6),
    st.integers(1, 50),
    st.floats(1, 8),
)
def test_weights_that_catch_up_are_weights(parts, seed, rounds, most):
    weights = torch.tensor([0.0, *parts], dtype=torch.float64)
    weights = weights / weights.sum()
    given_ = torch.tensor(np.random.default_rng(seed).random(len(weights)) * 80)
    lifted = caught_up(weights, given_, torch.tensor(rounds), most)
    assert float(lifted.sum()) == pytest.approx(1)
    assert float(lifted[0]) == 0
    assert bool((lifted >= 0).all())
    assert bool((lifted <= most * weights + 1e-12).all())


def test_members_outside_the_core_catch_up_and_then_all_weigh_the_same():
    """Over all steps together every member ends with the share of its weight; those left out have none."""
    crowd = Crowd()
    server = make(crowd, rounds=60, catch_up=4.0, catch_up_share=1.0)
    reports = sit(server, crowd, inverse([0, 1, 2, 3]))
    weights = server.weights
    members = weights > 0
    assert [i for i, (s, _) in server.statuses().items() if s is Status.MEMBER] == list(range(4, 30))
    assert server.state.given[members].std() < 0.02 * server.state.given[members].mean()
    lifted = [report.weights for report in reports[20:40]]
    assert any((step > 1.2 * weights).any() for step in lifted)
    assert all(float(step[:4].sum()) == 0 for step in lifted)
    for report in reports[40:]:
        assert torch.equal(report.weights, weights)
