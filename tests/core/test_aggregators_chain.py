"""Chains, descriptions, settings: how rules are put together and what is said when they do not fit."""

import json
import warnings

import pytest
import torch

from fedlaw import aggregators as agg
from fedlaw.aggregators import Bucketing, Bulyan, Chain, Clip, Krum, Mean, Median, TooFewUpdates


def rows(n: int, d: int = 4) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(n), dtype=torch.float64)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def test_chain_is_one_stage_after_the_other() -> None:
    x = rows(12)
    rule = Chain(Clip("median"), agg.NearestNeighborMixing(2), agg.MultiKrum(2))
    clipped = Clip("median")(x).vector
    mixed = agg.NearestNeighborMixing(2)(clipped).vector
    result = rule(x)
    assert torch.equal(result.vector, agg.MultiKrum(2)(mixed).vector)
    assert result.weights is not None
    torch.testing.assert_close(result.weights @ x, result.vector)


def test_chain_has_no_weights_where_a_stage_has_none() -> None:
    assert Chain(Bucketing(2), Median())(rows(9), generator=seeded()).weights is None


def test_chain_keeps_each_stage_its_state() -> None:
    x = rows(9)
    rule = Chain(Clip(1.0), agg.CenteredClipping(0.5))
    first = rule(x)
    assert first.state is not None
    assert list(first.state) == ["1.last"]
    alone = agg.CenteredClipping(0.5)
    clipped = Clip(1.0)(x).vector
    assert torch.equal(rule(x, state=first.state).vector, alone(clipped, state=alone(clipped).state).vector)
    nested = Chain(Clip(1.0), Chain(Clip(0.5), agg.CenteredClipping(0.1)))
    state = nested(x).state
    assert state is not None
    assert list(state) == ["1.1.last"]
    assert not torch.equal(nested(x, state=state).vector, nested(x).vector)


def test_bucket_counts_are_sums() -> None:
    x = torch.eye(5, dtype=torch.float64)
    counts = torch.tensor([1, 2, 3, 4, 90])
    buckets = Bucketing(2)(x, generator=seeded())
    assert buckets.weights is not None
    members = (buckets.weights > 0).double() @ counts.double()
    expected = (members @ buckets.vector) / members.sum()
    torch.testing.assert_close(
        Chain(Bucketing(2), Mean())(x, counts=counts, generator=seeded()).vector, expected
    )
    assert float(members.sum()) == 100
    # stages that hand on one row per client leave the counts alone
    clipped = Chain(Clip(10.0), Mean())(x, counts=counts).vector
    torch.testing.assert_close(clipped, Mean()(x, counts=counts).vector)


def test_f_is_cut_after_bucketing_with_a_warning() -> None:
    rule = Chain(Bucketing(2), Krum(f=80))
    x = torch.randn(200, 3, generator=seeded())
    with pytest.warns(UserWarning, match="cut to 48"):
        result = rule(x, generator=seeded())
    expected = Krum(f=48)(Bucketing(2)(x, generator=seeded()).vector).vector
    assert torch.equal(result.vector, expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Chain(Bucketing(2), Krum(f=48))(x, generator=seeded())  # fits: nothing to say


def test_f_is_not_cut_where_no_rows_were_joined() -> None:
    with pytest.raises(TooFewUpdates):
        Chain(Clip(), Krum(f=4))(rows(10))


@pytest.mark.parametrize(
    ("rule", "n", "largest"),
    [
        (Krum(80), 200, 80), (Krum(80), 100, 48), (Krum(80), 3, 0), (Krum(80), 2, None),
        (agg.TrimmedMean(80), 100, 49), (Bulyan(80), 100, 24), (Median(), 100, None),
    ],
)  # fmt: skip
def test_largest_f(rule: agg.Rule, n: int, largest: int | None) -> None:
    assert rule.largest_f(n) == largest


def test_chain_minimum_counts_through_buckets() -> None:
    assert Chain(Bucketing(2), Krum(f=80)).minimum() == 5  # three buckets, f cut to 0
    assert Chain(Clip(), Krum(f=2)).minimum() == 7


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((), "at least one"),
        ((Median(), Krum(1)), "only a pre-aggregator"),
        ((Clip(), Bucketing(2)), "must end in a rule"),
        (("median",), "must be rules"),
    ],
)
def test_chains_that_make_no_sense(stages: tuple[agg.Rule, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Chain(*stages)


RULES = [
    Mean(), Median(), Krum(3), Krum(2, neighbors=0.5), agg.MultiKrum(2, selected=4), Bulyan(1, 5, 3, 2),
    agg.GeometricMedian(), agg.Huber(), agg.CenteredClipping(0.1), agg.MoNNA(1, "reference"), agg.MDA(1),
    agg.CAF(1), agg.DnC(1), agg.FoolsGold(), agg.SignGuard(), agg.FLTrust(), agg.Meamed(1), agg.TrimmedMean(1),
    Chain(Clip("median"), Bucketing(2), Krum(f=80)), Chain(agg.ARC(1), agg.NearestNeighborMixing(1), Median()),
    Chain(Clip(2.0), Chain(Bucketing(3), Mean())),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_a_description_survives_json_and_gives_the_rule_back(rule: agg.Rule) -> None:
    assert agg.parse(json.loads(json.dumps(agg.describe(rule)))) == rule


def test_parse() -> None:
    assert agg.parse("fedavg") == Mean()
    assert agg.parse("rfa") == agg.GeometricMedian()
    assert agg.parse({"name": "nnm", "f": 3}) == agg.NearestNeighborMixing(3)
    assert agg.parse([{"name": "bucketing", "size": 2}, {"name": "geometric_median"}]) == Chain(
        Bucketing(2), agg.GeometricMedian()
    )
    assert agg.parse(["median"]) == Median()
    assert agg.parse({"name": "chain", "stages": ["clip", "median"]}) == Chain(Clip(), Median())
    assert agg.parse(Median()) == Median()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"f": 1}, "needs a name"),
        ([], "non-empty list"),
        (3, "a rule is a name"),
        ("krumm", "did you mean 'krum'"),
        ({"name": "krum", "f": 1, "m": 2}, "no setting 'm'; it takes: f, neighbors"),
        ({"name": "krum"}, "needs the setting 'f'"),
        ({"name": "krum", "f": -1}, "f must be an integer of at least 0, got -1"),
        ({"name": "krum", "f": 1.5}, "f must be an integer"),
        ({"name": "krum", "f": True}, "f must be an integer"),
        ({"name": "krum", "f": 1, "neighbors": 0}, "neighbors must be a positive integer"),
        ({"name": "bulyan", "f": 1, "selected": 3, "nearest": 4}, "nearest must be at most selected"),
        ({"name": "clip", "radius": "mean"}, "radius"),
        ({"name": "clip", "radius": 0}, "radius"),
        ({"name": "huber", "tau": float("nan")}, "tau must be a finite number above 0"),
        ({"name": "geometric_median", "start": "last"}, "start must be one of 'mean', 'zero', 'median'"),
        ({"name": "bucketing", "size": 0}, "size must be an integer of at least 1"),
        ({"name": "signguard", "coordinates": 2}, "coordinates must be at most 1"),
        ({"name": "signguard", "lower": 1.5}, "lower must be at most 1"),
    ],
)
def test_wrong_descriptions_are_told_apart(spec: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        agg.parse(spec)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_an_unregistered_rule_cannot_be_described() -> None:
    class Own(Mean):
        pass

    with pytest.raises(ValueError, match="not registered"):
        agg.describe(Own())


def test_bulyan_outside_its_guarantee_says_so() -> None:
    x = rows(20)
    with pytest.raises(TooFewUpdates, match="at least 35"):
        Bulyan(8)(x)
    with pytest.warns(UserWarning, match="n >= 4f"):
        Bulyan(8, selected=4, nearest=2)(x)
    with pytest.raises(TooFewUpdates, match="give nearest between"):
        Bulyan(8, selected=4)(x)


def test_shares_follow_the_rows_received() -> None:
    for n in (10, 14):
        x = rows(n)
        assert torch.equal(
            agg.MultiKrum(2, selected=0.5, neighbors=0.3)(x).vector,
            agg.MultiKrum(2, selected=n // 2, neighbors=int(0.3 * n))(x).vector,
        )


def test_counts_weigh_and_zero_counts_do_not_break() -> None:
    x = rows(3)
    counts = torch.tensor([0, 0, 5])
    torch.testing.assert_close(Mean()(x, counts=counts).vector, x[2])
    torch.testing.assert_close(Mean()(x, counts=torch.zeros(3)).vector, x.mean(0))
    torch.testing.assert_close(Mean(weighted=False)(x, counts=counts).vector, x.mean(0))


def test_names_and_summaries() -> None:
    summaries = agg.registry.summaries()
    assert set(summaries) == set(agg.names())
    assert all(summaries.values())
    assert "fedavg" not in agg.names()
