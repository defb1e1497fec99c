"""A core with nothing left to judge by: the rounds decide in which it had something."""

from dataclasses import replace

import pytest
import torch

from fedlaw.server.core_verdict import admitted, decided
from tests.core.test_core_appeal import halfway
from tests.core.test_core_fade import Fading, lost
from tests.core.test_core_judging import Crowd, inverse, make, sit


@pytest.mark.parametrize("crew", [0, 10])
def test_drift_decides_nothing(crew):
    """Judged to the last round, long after clients had anything in common: the last window is against them all."""
    servers = [make(Fading(24), rounds=60, judged_rounds=40, window=15, quiet=quiet) for quiet in (-1.0, 0.0)]
    for server in servers:
        sit(server, Fading(24), inverse(list(range(crew))))
        assert int(server.state.judged) == 40
    late, heedful = servers
    assert lost(late, range(crew, 30)) > 2
    assert (lost(heedful, range(crew)), lost(heedful, range(crew, 30))) == (crew, 0)
    assert heedful.state.quiet.sum() > 10
    assert not bool(late.state.quiet.any())
    assert (
        float(heedful.state.competence) == float(late.state.competence) < 0
    )  # said to the operator all the same


def test_nothing_changes_where_the_core_has_something_to_judge_by():
    servers = [make(Crowd(), quiet=quiet) for quiet in (-1.0, 0.0)]
    for server in servers:
        sit(server, Crowd(), inverse([0, 1, 2]))
    plain, heedful = servers
    assert not bool(heedful.state.quiet.any())
    assert torch.equal(plain.params, heedful.params)


def adrift(told, **settings):
    """A judge and its state: clients 0 to 9 were against the core for `told` rounds, since then all others are."""
    judge, state = halfway({"quiet": 0.0, "window": 8} | settings)
    early = torch.where(torch.arange(30) < 10, -0.3, 0.3).to(state.cosines.dtype)
    rows = torch.arange(len(state.cosines)).unsqueeze(-1)
    cosines = torch.where(rows < told, early, -0.2 * early.sign())
    return judge, replace(
        state,
        cosines=torch.where(rows < 20, cosines, torch.nan),
        quiet=(rows >= told) & (rows < 20),
        core=torch.arange(30) >= 13,
        judged=torch.tensor(20),
    )


def test_the_verdict_is_by_the_rounds_before():
    judge, state = adrift(told=12)
    members, own = decided(judge, state)
    assert members.tolist() == [i >= 10 for i in range(30)]
    assert float(own) == pytest.approx(-0.2)
    assert admitted(judge, state)[0].tolist() == [i < 10 or i >= 13 for i in range(30)]


def test_unless_there_were_hardly_any():
    judge, state = adrift(told=9)
    assert torch.equal(decided(judge, state)[0], admitted(judge, state)[0])


def test_nobody_is_judged_by_rounds_it_was_not_there_in():
    """A client that came late was there in quiet rounds only, or in one more: it is judged by all of them."""
    judge, state = adrift(told=12)
    rows = torch.arange(len(state.cosines)).unsqueeze(-1)
    late = (torch.arange(30) >= 10) & (torch.arange(30) < 13)
    own = torch.where(rows == 11, -0.05, 0.5).to(state.cosines.dtype)
    cosines = torch.where(late & (rows < 20), torch.where(rows < 11, torch.nan, own), state.cosines)
    state = replace(state, cosines=cosines, scored=torch.where(late, 9, state.scored), asked=state.scored)
    assert decided(judge, state)[0][late].all()


def test_rounds_before_a_new_start_are_none_that_decide():
    """An appeal makes void what was said before it: not quiet, but nothing is on record of those rounds."""
    judge, state = adrift(told=12)
    rows = torch.arange(len(state.cosines)).unsqueeze(-1)
    state = replace(state, cosines=torch.where(rows < 4, torch.nan, state.cosines))
    assert torch.equal(decided(judge, state)[0], admitted(judge, state)[0])
