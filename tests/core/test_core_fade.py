"""Judging by a signal that fades: it ends while there is something to judge by, by as much as there was."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlaw.server import Status
from fedlaw.server.core_appeal import fade, settle
from tests.core.test_core_appeal import TAKEN, clique, halfway
from tests.core.test_core_judging import Crowd, drive, inverse, make, sit


class Fading(Crowd):
    """Clients who have less in common every round; after `last` rounds what one step takes the next takes back."""

    def __init__(self, last, **settings):
        super().__init__(d=400, **settings)
        self.full, self.last, self.played = self.signal, last, 0
        self.own = 0.5 * (self.own - self.own.mean(0))

    def round(self, forge=None):
        self.played += 1
        left = 1 - self.played / self.last
        self.signal = self.full * max(left, 0.1)
        updates, *_ = super().round(forge)
        self.signal = self.full * max(left, -0.1)
        return updates, *super().round(forge)[1:]


def lost(server, honest):
    return sum(server.statuses()[i][0] is not Status.MEMBER for i in honest)


@pytest.mark.parametrize("crew", [0, 10])
def test_judging_ends_while_there_is_something_to_judge_by(crew):
    late = make(Fading(24), rounds=60, judged_rounds=40, window=15)
    sit(late, Fading(24), inverse(list(range(crew))))
    assert int(late.state.judged) == 40
    assert lost(late, range(crew, 30)) > 2  # what it is for: windows that hold noise alone

    server = make(Fading(24), rounds=60, judged_rounds=40, window=15, fade=0.2)
    sit(server, Fading(24), inverse(list(range(crew))))
    assert int(server.state.judged) < 30
    assert lost(server, range(crew, 30)) == 0
    assert lost(server, range(crew)) == crew


def test_a_signal_that_lasts_changes_nothing():
    servers = [make(Crowd(), fade=share) for share in (0.0, 0.2)]
    for server in servers:
        sit(server, Crowd(), inverse([0, 1, 2]))
    plain, fading = servers
    assert int(plain.state.judged) == int(fading.state.judged) == 20
    assert torch.equal(plain.params, fading.params)


def spoken(levels, apart=0.0, assembly=None, **settings):
    """A judge, and its state after every round; everybody has the cosine that `levels` says, and `apart` of it."""
    settings = {"fade": 0.2, "fade_rounds": 2, "judged_rounds": 40, "window": 15} | settings
    judge, state = halfway(settings, rounds=60)
    if assembly is not None:
        state = replace(state, assembly=assembly[: len(state.assembly)])
    nothing = torch.full_like(state.cosines, torch.nan)
    seats = torch.arange(30) >= 13
    state = replace(state, cosines=nothing, judged=torch.tensor(0), core=seats, scored=0 * state.scored)
    for level in levels:
        cosines = state.cosines.clone()
        cosines[int(state.judged)] = level + apart
        scored = state.scored + ~cosines[int(state.judged)].isnan()
        state = fade(
            judge, replace(state, cosines=cosines, judged=state.judged + 1, scored=scored, asked=scored)
        )
        yield judge, state


@pytest.mark.parametrize(
    ("wanted", "against", "ends"),
    [(0.2, 0, 40), (0.02, 0, 23), (0.2, 5, 23), (0.3, 5, 40)],
    ids=["core", "both", "against", "idle"],
)
def test_where_nobody_is_left_out_everybodys_direction_must_have_faded_too(wanted, against, ends):
    """A core that loses its hold falls silent for a while, with nobody against it yet, and an idle one too."""
    apart = torch.where(torch.arange(30) < against, -0.6, 0.0)
    everybody = torch.full((40 + 25, 30), wanted, dtype=torch.float64)
    appeals = {"majority": 0.15, "two_groups": 2.2, "majority_window": 2, "assembly": everybody}
    *_, (_, state) = spoken([0.5] * 20 + [0.05] * 4, apart, **appeals)
    assert int(state.until) == ends


def test_judging_ends_when_little_has_been_left_for_long_enough():
    *_, (_, state) = spoken([0.5] * 20 + [0.05] * 4)
    assert int(state.until) == 23  # means of two rounds: the second and the third below a fifth of the peak
    *_, (_, state) = spoken([0.5] * 24)
    assert int(state.until) == 40


def test_nobody_raises_the_peak_of_others():
    """12 of 30 begin far above the others: what they lose by being like them later is not the others' signal."""
    levels = torch.full((24, 30), 0.3)
    levels[:6, :12] = 0.95
    levels[6:, :12] = 0.1
    *_, (_, state) = spoken(levels)
    assert int(state.faded) == 0
    assert int(state.until) == 40


def test_who_fell_silent_at_the_peak_does_not_keep_the_signal_alive():
    levels = torch.full((40, 30), 0.5)
    levels[20:] = 0.02
    levels[20:, :14] = torch.nan
    *_, (_, state) = spoken(levels)
    assert int(state.until) < 40


def test_judging_does_not_end_while_the_clients_lie_everywhere():
    """A core that loses its hold: no signal for a while, and nobody stands apart."""
    levels = [0.5] * 20 + [0.02] * 5
    *_, (_, state) = spoken(levels)
    assert int(state.until) < 40
    scattered = torch.linspace(-0.7, 0.0, 30)
    *_, (_, state) = spoken(levels, apart=scattered)
    assert int(state.faded) >= 2
    assert int(state.until) == 40
    split = torch.where(torch.arange(30) < 10, -0.4, 0.0)
    *_, (_, state) = spoken(levels, apart=split)
    assert int(state.until) < 40


def test_judging_does_not_end_while_the_verdict_changes():
    """Six are out, and with every round from the 20th on one more: the case is not closed before they all are."""
    levels = torch.full((34, 30), 0.5)
    levels[20:] = 0.02
    levels[12:, :6] = -0.6
    assert int(list(spoken(levels))[-1][1].until) == 23
    for i in range(6, 12):
        levels[11 + i :, i] = -2.0
    out = [int(state.outside.sum()) for _, state in spoken(levels)]
    assert out[19:26] == [6, 7, 8, 9, 11, 12, 12]
    assert int(list(spoken(levels))[-1][1].until) == 26


@pytest.mark.parametrize(("crew", "restless"), [(0, 1), (0, 2), (9, 1)])
def test_who_goes_to_and_fro_does_not_keep_judging_from_its_end(crew, restless):
    """With and against the others in turn, a client is in and out of the verdict: it unsettles it once."""
    crowd, phases = Fading(24), iter(range(10**6))

    def forge(rows):
        rows[:crew] *= -1
        rows[crew : crew + restless] = crowd.full if next(phases) // 4 % 2 else -crowd.full  # four a round

    server = make(crowd, rounds=60, judged_rounds=40, window=15, fade=0.2, two_groups=2.2)
    sit(server, crowd, forge)
    assert int(server.state.judged) < 30
    assert lost(server, range(crew + restless, 30)) == 0
    assert lost(server, range(crew)) == crew


def test_judging_does_not_end_with_those_inside_who_are_against_the_core_lately():
    """Ten attackers held seats until round 21, four more until round 26: by round 27 only the ten are outside."""
    levels = torch.full((40, 30), 0.5)
    levels[20:] = 0.02
    levels[20:, :10] = -0.4
    levels[25:, 10:13] = -0.15
    ends = {}
    for groups in (0.0, 2.2):
        *_, (_, state) = spoken(levels, two_groups=groups)
        ends[groups] = int(state.until)
    assert ends[0.0] < ends[2.2] < 40


def test_nothing_fades_before_the_too_good_check_is_over():
    rounds = list(spoken([0.5] * 2 + [0.05] * 20))
    ends = [int(state.judged) for _, state in rounds if int(state.until) < 40]
    assert ends[0] == 12  # ten rounds and two


def test_what_was_said_before_an_appeal_is_not_the_peak():
    crowd = Crowd()
    server = make(crowd, **TAKEN)
    forge = clique(crowd, 12)
    while not int(server.state.appeal):
        drive(server, *crowd.round(forge))
    assert float(server.state.peaks.max()) == int(server.state.faded) == 0
    sit(server, crowd, forge)
    cosines = server.state.cosines.numpy()
    said = cosines[~np.isnan(cosines).all(1)]
    means = np.lib.stride_tricks.sliding_window_view(said, 5, axis=0).mean(-1)
    torch.testing.assert_close(server.state.peaks[12:], torch.tensor(means.max(0))[12:])
    assert {server.statuses()[i][0] for i in range(12)} == {Status.LEFT_OUT}


def test_too_good_clients_are_checked_once_more_when_the_signal_ends_judging():
    """Ten honest clients answer too seldom to be checked in time, so that too few are below the gap at first."""
    crowd, few = Fading(30), tuple(range(20, 30))

    def forge(rows):
        rows[:10] = crowd.signal + 0.3 * (rows[:10] - crowd.signal)

    settings = {"judged_rounds": 40, "window": 15, "fade": 0.2, "too_good_most": 0.34}
    server = make(crowd, rounds=60, **settings)
    sit(server, crowd, forge, silent=lambda k: ((), ()) if k % 3 == 0 else (few, few))
    assert {server.statuses()[i][1].words for i in range(10)} == {"too good"}


def test_a_core_that_changes_for_no_reason_does_not_start_judging_again():
    """Nothing is left to judge by: who has the seats is chance, and another window would be, too."""
    judge, state = halfway(
        {"fade": 0.2, "fade_rounds": 2, "turnover": 0.4},
        judged=torch.tensor(20),
    )
    cosines = state.cosines.clone()
    cosines[:, :10] = -0.3
    peaks = torch.full_like(state.total, 0.5)
    state = replace(state, cores=torch.zeros_like(state.cores), core=torch.arange(30) >= 13, peaks=peaks)
    split = replace(state, cosines=cosines)
    assert int(settle(judge, split).until) == 28  # a core that has just come about, and clients against it
    assert int(settle(judge, replace(split, faded=torch.tensor(2), settled=torch.tensor(2))).until) == 20
    assert int(settle(judge, state).until) == 20  # nobody is against it
