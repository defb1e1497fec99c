"""Many experiments judged at once, each as if it were alone."""

from dataclasses import fields

import pytest
import torch

from fedlaw.server import Core
from fedlaw.server.core_math import CoreState
from fedlaw.server.judge import Arrived, Evidence
from tests.core.test_core_appeal import clique
from tests.core.test_core_fade import Fading
from tests.core.test_core_judging import Crowd, inverse


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


@pytest.mark.parametrize("majority", [0.0, 0.15])
def test_stacked_experiments_freeze_each_in_its_own_round(majority):
    early = {"fade": 0.2, "two_groups": 2.2, "catch_up": 4.0, "too_good_gap": 2.0}
    judge = Core(judged_rounds=30, window=11, majority=majority, turnover=0.4, **early).bind(30, 60)
    crowds = [Fading(14), Crowd(d=400), Crowd(d=400)]
    forges = [None, inverse(list(range(10))), clique(crowds[2], 12, first=12)]
    alone = [judge.start(30, torch.zeros(1)) for _ in crowds]
    stacked = CoreState(
        **{f.name: torch.stack([getattr(s, f.name) for s in alone]) for f in fields(CoreState)}
    )
    for _ in range(50):
        rounds = [crowd.round(forge)[:2] for crowd, forge in zip(crowds, forges, strict=True)]
        each = [run_alone(judge, state, *said) for state, said in zip(alone, rounds, strict=True)]
        alone = [state for state, _ in each]
        stacked, weights = run_alone(
            judge, stacked, *(torch.stack(said) for said in zip(*rounds, strict=True))
        )
        torch.testing.assert_close(weights, torch.stack([weight for _, weight in each]))

    assert stacked.judged.tolist() == [19, 30, 30]
    assert stacked.appeal.tolist() == [0, 0, 17 if majority else 0]
    for field in fields(CoreState):
        expected = torch.stack([getattr(state, field.name) for state in alone])
        torch.testing.assert_close(getattr(stacked, field.name), expected, equal_nan=True)
