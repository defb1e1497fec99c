"""Defects seen in public implementations of these rules: none of them here."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from fedlaw import aggregators as agg
from fedlaw._linalg import pairwise_sq_distances
from fedlaw.aggregators.bulyan import repeated_krum


@pytest.mark.parametrize(("n", "size"), [(10, 2), (11, 2), (7, 3), (5, 5), (3, 8), (6, 1)])
def test_bucketing_takes_every_row_exactly_once(n: int, size: int) -> None:
    x = torch.eye(n, dtype=torch.float64)
    for seed in range(5):
        result = agg.Bucketing(size)(x, generator=torch.Generator().manual_seed(seed))
        members = result.vector > 0
        assert torch.equal(members.sum(0), torch.ones(n, dtype=torch.int64))
        sizes = members.sum(1)
        assert sizes.tolist() == [min(size, n - size * b) for b in range(-(-n // size))]
        torch.testing.assert_close(result.vector, members / sizes.unsqueeze(1).double())  # true bucket sizes


def test_bucketing_permutes_anew_every_call() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.arange(20.0).reshape(20, 1)
    assert not torch.equal(
        agg.Bucketing(2)(x, generator=generator).vector, agg.Bucketing(2)(x, generator=generator).vector
    )


def test_krum_adds_squared_distances_not_their_squares() -> None:
    # 100 has company at 2.2 and 2.2 (squares 9.68, fourth powers 46.9), 500 at 0.1 and 3.1 (9.62 and 92.4).
    x = torch.tensor([[100.0], [102.2], [97.8], [500.0], [500.1], [503.1], [900.0]], dtype=torch.float64)
    squared = (x - x.T).square()
    by_squares = squared.fill_diagonal_(torch.inf).sort().values[:, :2].sum(1).argmin()
    by_fourth = squared.square().sort().values[:, :2].sum(1).argmin()
    assert by_squares != by_fourth
    assert float(agg.Krum(2, neighbors=2)(x).vector) == float(x[by_squares])


def test_bulyan_picks_rows_of_the_full_set() -> None:
    # Each pick is the second of the rows left: as an index into the reduced set it would be 1 four times.
    x = torch.tensor([[0.0], [0.1], [0.3], [0.7], [5.0], [9.0], [-9.0]], dtype=torch.float64)
    assert repeated_krum(pairwise_sq_distances(x), 4, 2, 1).tolist() == [1, 2, 3, 4]
    assert len(set(repeated_krum(pairwise_sq_distances(x), 7, 2, 1).tolist())) == 7


def test_fltrust_is_not_the_mean() -> None:
    x = torch.tensor([[2.0, 0.0], [0.0, 4.0], [-30.0, 0.0], [3.0, 3.0]], dtype=torch.float64)
    g = torch.tensor([3.0, 4.0], dtype=torch.float64)
    trust = [max(0.0, float(xi @ g / xi.norm() / g.norm())) for xi in x]
    expected = sum(t * g.norm() / xi.norm() * xi for t, xi in zip(trust, x, strict=True)) / sum(trust)
    result = agg.FLTrust()(x, reference=g)
    torch.testing.assert_close(result.vector, expected)
    assert not torch.allclose(result.vector, x.mean(0))
    with pytest.raises(ValueError, match="needs reference"):
        agg.FLTrust()(x)
    against = agg.FLTrust()(-g.expand(3, 2), reference=g)  # nobody agrees with the server
    assert float(against.vector.norm()) == 0


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "meamed"])
def test_sorting_rules_have_no_limit_of_elements(name: str) -> None:
    # torch.quantile refuses more than 2^24 elements: n = 200 fails from d = 83,887 on
    x = torch.randn(200, 90_000, generator=torch.Generator().manual_seed(0))
    vector = agg.create(name, **({} if name == "median" else {"f": 80}))(x).vector
    some = slice(None, None, 9_000)
    ordered = np.sort(x[:, some].numpy(), axis=0)
    expected = {
        "median": np.median(ordered, axis=0),
        "trimmed_mean": ordered[80:120].mean(0),
        "meamed": np.stack([np.sort(np.abs(column - np.median(column))) for column in ordered.T], axis=1)[
            :120
        ].max(0),
    }[name]
    if name == "meamed":  # the mean is of values within that distance of the median
        assert bool((np.abs(vector[some].numpy() - np.median(ordered, axis=0)) <= expected).all())
    else:
        np.testing.assert_allclose(vector[some].numpy(), expected, atol=1e-6)


def test_distances_survive_an_offset_and_a_giant() -> None:
    # An uncentred Gram product loses 1e-4 of these distances, a mean carried off by one row all of them.
    honest = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    direct = torch.cdist(honest.double(), honest.double()).square()
    for shifted in (honest + 1000, torch.cat([honest, torch.full((1, 50), 1e17)])):
        ours = pairwise_sq_distances(shifted)[:20, :20]
        exact = torch.cdist(shifted[:20].double(), shifted[:20].double()).square()
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)
    assert int((pairwise_sq_distances(honest) - direct).abs().gt(1e-6).sum()) == 0


def test_even_median_is_the_mean_of_the_middle_two() -> None:
    assert agg.Median()(torch.tensor([[1.0], [2.0], [4.0], [9.0]])).vector.item() == 3.0


def test_ties_fall_to_the_lowest_index() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0], [3.0]]).repeat(2, 1)
    weights = agg.Krum(1)(x).weights
    assert weights is not None
    scores = pairwise_sq_distances(x).fill_diagonal_(torch.inf).sort().values[:, :5].sum(1)
    assert int(weights.argmax()) == int((scores == scores.min()).nonzero()[0])


_PEAK = """
import resource, sys, warnings
import torch
from fedlaw import aggregators as agg
warnings.simplefilter("ignore")
torch.set_num_threads(2)
rule = agg.parse(eval(sys.argv[1]))
n, d = map(int, sys.argv[2:4])
small = torch.randn(n, 64)
reference = torch.ones(64)
rule(small, generator=torch.Generator().manual_seed(0), reference=reference)  # libraries loaded
x = torch.empty(n, d).uniform_(-1, 1)
reference = torch.ones(d)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
vector = rule(x, generator=torch.Generator().manual_seed(0), reference=reference).vector
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert bool(vector.isfinite().all())
print((after - before) * 1024 / (4 * n * d))
"""

BIG = [
    {"name": "mean"}, {"name": "median"}, {"name": "trimmed_mean", "f": 80}, {"name": "meamed", "f": 80},
    {"name": "krum", "f": 80}, {"name": "multi_krum", "f": 80}, {"name": "bulyan", "f": 49},
    {"name": "geometric_median"}, {"name": "centered_clipping"}, {"name": "huber", "iterations": 10},
    {"name": "bucketing"}, {"name": "nnm", "f": 80}, {"name": "clip"}, {"name": "arc", "f": 80},
    {"name": "monna", "f": 80}, {"name": "caf", "f": 80}, {"name": "dnc", "f": 80}, {"name": "foolsgold"},
    {"name": "signguard"}, {"name": "fltrust"},
    [{"name": "clip"}, {"name": "bucketing"}, {"name": "krum", "f": 48}],
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("spec", BIG, ids=str)
def test_memory_beyond_the_input_is_two_copies_at_most(spec: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PEAK, repr(spec), "200", "300000"], capture_output=True, text=True, check=True
    )
    assert float(done.stdout) <= 2.0
