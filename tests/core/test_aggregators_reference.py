"""Rules against slow transcriptions of their definitions, written with loops and NumPy only."""

import itertools
import math
import warnings
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import minimize

from fedlaw import aggregators as agg
from fedlaw.aggregators.base import draw_coordinates

Array = NDArray[np.float64]
seeds = st.integers(0, 2**32 - 1)
some = settings(max_examples=15)


def rows(seed: int, n: int, d: int) -> Array:
    source = np.random.default_rng(seed)
    return source.normal(size=(n, d)) + source.normal(size=d) * 5


def run(rule: agg.Rule, x: Array, **more: torch.Tensor) -> Array:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return rule(torch.from_numpy(x), **more).vector.numpy()  # type: ignore[arg-type]


def naive_krum_index(x: Array, left: list[int], neighbors: int) -> int:
    """The member of `left` with the least sum of squared distances to its nearest others in `left`."""
    best, best_score = -1, np.inf
    for i in left:
        distances = sorted(float(((x[i] - x[j]) ** 2).sum()) for j in left if j != i)
        score = sum(distances[:neighbors])
        if score < best_score - 1e-12 * max(1.0, score):  # equal but for rounding: the first stays
            best, best_score = i, score
    return best


@some
@given(seed=seeds, n=st.integers(7, 16), d=st.integers(1, 9))
def test_krum(seed: int, n: int, d: int) -> None:
    x, f = rows(seed, n, d), (n - 3) // 2
    np.testing.assert_allclose(run(agg.Krum(f), x), x[naive_krum_index(x, list(range(n)), n - f - 2)])
    np.testing.assert_allclose(
        run(agg.Krum(f, neighbors=n - f - 1), x), x[naive_krum_index(x, list(range(n)), n - f - 1)]
    )


@some
@given(seed=seeds, n=st.integers(7, 16), d=st.integers(1, 9))
def test_multi_krum(seed: int, n: int, d: int) -> None:
    x, f = rows(seed, n, d), (n - 3) // 2
    squared = ((x[:, None] - x[None]) ** 2).sum(-1)
    scores = [np.sort(np.delete(squared[i], i))[: n - f - 2].sum() for i in range(n)]
    for selected in (1, 3, n - f):
        expected = x[np.argsort(scores, kind="stable")[:selected]].mean(0)
        np.testing.assert_allclose(run(agg.MultiKrum(f, selected=selected), x), expected, atol=1e-9)
    np.testing.assert_array_equal(run(agg.MultiKrum(f), x), run(agg.MultiKrum(f, selected=n - f), x))


def naive_bulyan(x: Array, f: int, theta: int, beta: int, neighbors: int | None) -> Array:
    left, chosen = list(range(len(x))), []
    while len(chosen) < theta:
        count = max(1, len(left) - f - 2) if neighbors is None else neighbors
        pick = naive_krum_index(x, left, min(count, len(left) - 1)) if len(left) > 1 else left[0]
        left.remove(pick)
        chosen.append(pick)
    out = np.empty(x.shape[1])
    for k in range(x.shape[1]):
        values = x[chosen, k]
        middle = np.median(values)
        out[k] = np.mean(sorted(values, key=lambda v: (round(abs(v - middle), 12), v))[:beta])
    return out


@some
@given(seed=seeds, f=st.integers(0, 3), extra=st.integers(0, 4), d=st.integers(1, 6))
def test_bulyan(seed: int, f: int, extra: int, d: int) -> None:
    n = 4 * f + 3 + extra
    x = rows(seed, n, d)
    theta = n - 2 * f
    np.testing.assert_allclose(
        run(agg.Bulyan(f), x), naive_bulyan(x, f, theta, theta - 2 * f, None), atol=1e-9
    )
    explicit = agg.Bulyan(f, selected=n - f, nearest=2, neighbors=4)
    np.testing.assert_allclose(run(explicit, x), naive_bulyan(x, f, n - f, 2, 4), atol=1e-9)


@some
@given(
    seed=seeds, n=st.integers(3, 12), d=st.integers(1, 6), start=st.sampled_from(["mean", "zero", "median"])
)
def test_geometric_median(seed: int, n: int, d: int, start: str) -> None:
    x = rows(seed, n, d)
    counts = np.random.default_rng(seed).integers(1, 9, n)
    v = {"mean": counts @ x / counts.sum(), "zero": np.zeros(d), "median": np.median(x, axis=0)}[start]
    for _ in range(3):
        pull = np.array([counts[i] / counts.sum() / max(1e-6, np.linalg.norm(v - x[i])) for i in range(n)])
        v = pull @ x / pull.sum()
    rule = agg.create("rfa", start=start, weighted=True)
    np.testing.assert_allclose(run(rule, x, counts=torch.from_numpy(counts)), v, atol=1e-9)


def huber_loss(c: Array, x: Array, counts: Array, tau: float) -> float:
    u = np.linalg.norm(x - c, axis=1)
    return float((counts * np.where(u <= tau, u**2 / 2, tau * u - tau**2 / 2)).sum())


@some
@given(seed=seeds, n=st.integers(3, 10), d=st.integers(1, 4), tau=st.floats(0.3, 5.0))
def test_huber_minimises_its_loss(seed: int, n: int, d: int, tau: float) -> None:
    x = rows(seed, n, d)
    counts = np.random.default_rng(seed).integers(1, 9, n).astype(float)
    rule = agg.Huber(tau, tolerance=1e-12, iterations=20_000, weighted=True)
    ours = run(rule, x, counts=torch.from_numpy(counts))
    best = minimize(huber_loss, x.mean(0), args=(x, counts, tau), method="BFGS", options={"gtol": 1e-9})
    assert huber_loss(ours, x, counts, tau) <= best.fun * (1 + 1e-9)


def test_huber_lies_between_mean_and_geometric_median() -> None:
    x = rows(5, 9, 3)
    np.testing.assert_allclose(run(agg.Huber(1e6), x), x.mean(0), atol=1e-9)
    near_zero = run(agg.Huber(1e-7, tolerance=1e-12, iterations=5000), x)
    exact = run(agg.GeometricMedian(nu=1e-12, iterations=5000), x)
    np.testing.assert_allclose(near_zero, exact, atol=1e-5)


@some
@given(seed=seeds, n=st.integers(3, 12), d=st.integers(1, 6), tau=st.floats(0.1, 20))
def test_centered_clipping_over_rounds(seed: int, n: int, d: int, tau: float) -> None:
    rule = agg.CenteredClipping(tau, iterations=2)
    v, state = np.zeros(d), None
    for step in range(3):
        x = rows(seed + step, n + step, d)  # the number of clients may change
        result = rule(torch.from_numpy(x), state=state)
        start = v
        for _ in range(2):
            v = v + np.mean([(xi - v) * min(1, tau / np.linalg.norm(xi - v)) for xi in x], axis=0)
        np.testing.assert_allclose(result.vector.numpy(), v, atol=1e-9)
        assert result.weights is not None
        weights = result.weights.numpy()
        np.testing.assert_allclose((1 - weights.sum()) * start + weights @ x, v, atol=1e-9)
        state = result.state


@some
@given(seed=seeds, n=st.integers(5, 12), d=st.integers(1, 6))
def test_caf(seed: int, n: int, d: int) -> None:
    x, f = rows(seed, n, d), (n - 1) // 4
    c, best, least = np.ones(n), x.mean(0), np.inf
    while c.sum() > n - 2 * f:
        mean = c @ x / c.sum()
        covariance = (x - mean).T @ np.diag(c) @ (x - mean) / c.sum()
        values, vectors = np.linalg.eigh(covariance)
        if values[-1] < least:
            least, best = values[-1], mean
        t = ((x - mean) @ vectors[:, -1]) ** 2
        lighter = c * (1 - t / t.max())
        if lighter.sum() > 0.999 * c.sum():
            lighter = c * (1 - t / t[c > 0].max())
        c = lighter
    np.testing.assert_allclose(run(agg.CAF(f), x), best, atol=1e-7)


def test_caf_without_attackers_is_the_mean() -> None:
    x = rows(1, 8, 3)
    np.testing.assert_allclose(run(agg.CAF(0), x), x.mean(0))


@some
@given(seed=seeds, n=st.integers(5, 9), d=st.integers(1, 6))
def test_mda(seed: int, n: int, d: int) -> None:
    x, f = rows(seed, n, d), (n - 1) // 2
    diameters = {
        subset: max(np.linalg.norm(x[i] - x[j]) for i, j in itertools.combinations(subset, 2))
        for subset in itertools.combinations(range(n), n - f)
    }
    np.testing.assert_allclose(run(agg.MDA(f), x), x[list(min(diameters, key=diameters.__getitem__))].mean(0))


def test_mda_refuses_a_search_without_end() -> None:
    with pytest.raises(ValueError, match="subsets"):
        agg.MDA(80)(torch.randn(200, 3))


@some
@given(seed=seeds, n=st.integers(5, 12), d=st.integers(1, 6))
def test_nearest_neighbor_mixing_and_monna(seed: int, n: int, d: int) -> None:
    x, f = rows(seed, n, d), (n - 1) // 2
    nearest = [np.argsort(((x - xi) ** 2).sum(1), kind="stable")[: n - f] for xi in x]
    expected = np.stack([x[index].mean(0) for index in nearest])
    np.testing.assert_allclose(run(agg.NearestNeighborMixing(f), x), expected, atol=1e-9)
    for pivot in (0, n - 1):
        np.testing.assert_allclose(run(agg.MoNNA(f, pivot), x), expected[pivot], atol=1e-9)
    by_reference = run(agg.MoNNA(f, "reference"), x, reference=torch.from_numpy(x[2]))
    np.testing.assert_allclose(by_reference, expected[2], atol=1e-9)


@some
@given(seed=seeds, n=st.integers(7, 12), d=st.integers(2, 6))
def test_dnc_on_all_coordinates(seed: int, n: int, d: int) -> None:
    x, f = rows(seed, n, d), 2
    centered = x - x.mean(0)
    leading = np.linalg.svd(centered)[2][0]
    kept = np.argsort((centered @ leading) ** 2, kind="stable")[: n - f]
    np.testing.assert_allclose(run(agg.DnC(f), x), x[kept].mean(0), atol=1e-9)


@pytest.mark.parametrize(("d", "count"), [(7, 3), (7, 5), (5, 1), (5, 5), (4, 0)])
def test_every_set_of_coordinates_is_drawn_as_often(d: int, count: int) -> None:
    source, draws = torch.Generator().manual_seed(11), 3000
    sets = [tuple(draw_coordinates(agg.DnC(1), d, count, source).tolist()) for _ in range(draws)]
    assert {sum(drawn) for drawn in sets} == {count}
    expected = draws / math.comb(d, count)
    seen = Counter(sets)
    assert len(seen) == math.comb(d, count)
    assert all(abs(times - expected) <= 5 * math.sqrt(expected) for times in seen.values())


def test_dnc_draws_coordinates_and_intersects() -> None:
    x = rows(3, 9, 8)
    rule = agg.DnC(2, iterations=3, subsample=4)
    result = rule(torch.from_numpy(x), generator=torch.Generator().manual_seed(7))
    source, kept = torch.Generator().manual_seed(7), set(range(9))
    for _ in range(3):
        drawn: set[int] = set()
        while len(drawn) < 4:
            drawn |= set(torch.randint(8, (4 - len(drawn),), generator=source).tolist())
        part = x[:, sorted(drawn)]
        centered = part - part.mean(0)
        kept &= set(np.argsort((centered @ np.linalg.svd(centered)[2][0]) ** 2, kind="stable")[:7].tolist())
    np.testing.assert_allclose(result.vector.numpy(), x[sorted(kept)].mean(0), atol=1e-9)
    with pytest.raises(ValueError, match="generator"):
        rule(torch.from_numpy(x))


@some
@given(seed=seeds, n=st.integers(3, 9), d=st.integers(2, 6))
def test_foolsgold_over_rounds(seed: int, n: int, d: int) -> None:
    rule, history, state = agg.FoolsGold(), np.zeros((n, d)), None
    for step in range(3):
        x = rows(seed + step, n, d)
        x[1] = x[0] * 1.1 if n > 3 else x[1]
        history = history + x
        unit = history / np.linalg.norm(history, axis=1, keepdims=True)
        cs = unit @ unit.T - 2 * np.eye(n)  # never its own closest
        v = cs.max(1)
        for i, j in itertools.permutations(range(n), 2):
            if v[j] > v[i]:
                cs[i, j] *= v[i] / v[j]
        trust = np.clip(1 - cs.max(1), 0, 1)
        trust = np.minimum(trust / trust.max(), 0.99)
        with np.errstate(divide="ignore"):
            trust = np.clip(np.log(trust / (1 - trust)) + 0.5, 0, 1)
        result = rule(torch.from_numpy(x), state=state)
        np.testing.assert_allclose(result.vector.numpy(), trust @ x / trust.sum(), atol=1e-6)
        state = result.state


def test_foolsgold_refuses_the_history_of_others() -> None:
    first = agg.FoolsGold()(torch.randn(4, 3))
    with pytest.raises(ValueError, match="same clients"):
        agg.FoolsGold()(torch.randn(5, 3), state=first.state)


def test_signguard_keeps_the_majority_and_clips() -> None:
    source = np.random.default_rng(0)
    honest = np.abs(source.normal(size=(7, 40))) * np.where(np.arange(40) < 30, 1, -1)
    x = np.concatenate([honest, -honest[:2], 50 * honest[:1], 0.001 * honest[:1]])
    norms = np.linalg.norm(x, axis=1)
    middle = np.median(norms)
    expected = np.mean([xi * min(1, middle / np.linalg.norm(xi)) for xi in honest], axis=0)
    result = agg.SignGuard(coordinates=1.0)(torch.from_numpy(x))
    np.testing.assert_allclose(result.vector.numpy(), expected, atol=1e-9)
    order = np.random.default_rng(1).permutation(len(x))
    np.testing.assert_allclose(run(agg.SignGuard(coordinates=1.0), x[order]), expected, atol=1e-9)
