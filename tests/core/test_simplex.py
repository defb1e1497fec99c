"""Projections: KKT, an independent bisection in float64, and inputs made to break them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedlaw.simplex import project_capped_simplex, project_sparse_capped_simplex


def bisection(y, s, t):
    """Independent reference on one float64 vector: support by stable sort, gamma by bisection."""
    y = np.asarray(y, dtype=np.float64)
    support = np.argsort(-y, kind="stable")[:s]
    v = y[support]
    shift = v.max()
    low, high = -1.0, shift - v.min() + t + 1.0
    for _ in range(300):
        mid = (low + high) / 2
        if np.clip((v - shift) + mid, 0, t).sum() < 1:
            low = mid
        else:
            high = mid
    w = np.zeros_like(y)
    w[support] = np.clip((v - shift) + high, 0, t)
    return w


def assert_kkt(y, w, s, t, tol):
    """w = clip(y + gamma, 0, t) on the support of the s largest, zero elsewhere, sum 1."""
    y, w = y.double().numpy(), w.double().numpy()
    assert abs(w.sum() - 1) <= tol * 10
    assert (w >= 0).all()
    assert (w <= max(t, 1 / s) + tol).all()
    support = np.argsort(-y, kind="stable")[:s]
    outside = np.setdiff1d(np.arange(len(y)), support)
    assert (w[outside] == 0).all()
    free = [i for i in support if tol < w[i] < t - tol]
    scale = tol * (1 + np.abs(y[support]).max() * 1e-8)
    if free:
        gamma = w[free] - y[free]
        assert np.ptp(gamma) <= scale
        g = gamma.mean()
        for i in support:
            if w[i] <= tol:
                assert y[i] + g <= 2 * scale
            if w[i] >= t - tol:
                assert y[i] + g >= t - 2 * scale
    else:
        full = [i for i in support if w[i] > tol]
        zero = [i for i in support if w[i] <= tol]
        if zero:
            assert min(y[full]) - max(y[zero]) >= t - 2 * scale


kinds = st.sampled_from(["normal", "ties", "zeros", "negative", "far", "tiny"])


def draw_y(kind, n, rng):
    y = rng.normal(size=n)
    if kind == "ties":
        y = np.round(y)
    elif kind == "zeros":
        y = y * (rng.random(n) < 0.3)
    elif kind == "negative":
        y = -np.abs(y) * 10
    elif kind == "far":
        y = y * 0.3 + rng.choice([0.0, 1e8, -1e8], size=n)
    elif kind == "tiny":
        y = y * 1e-12
    return y


@given(kinds, st.integers(1, 40), st.integers(0, 10_000), st.data())
def test_agrees_with_bisection_and_kkt(kind, n, seed, data):
    rng = np.random.default_rng(seed)
    s = data.draw(st.integers(1, n))
    t = data.draw(st.sampled_from([1 / s, min(1.0, 1.5 / s), 1.0, 3.0]))
    y = draw_y(kind, n, rng)
    w = project_sparse_capped_simplex(torch.tensor(y), s, t)
    # The bisection itself resolves gamma to about 1e-8 when entries are 1e8 apart.
    assert np.abs(w.numpy() - bisection(y, s, max(t, 1 / s))).max() <= (3e-7 if kind == "far" else 1e-9)
    assert_kkt(torch.tensor(y), w, s, t, 3e-7 if kind == "far" else 1e-9)
    single = project_sparse_capped_simplex(torch.tensor(y, dtype=torch.float32), s, t)
    assert single.dtype == torch.float32
    assert abs(float(single.double().sum()) - 1) < 1e-5
    y32 = torch.tensor(y, dtype=torch.float32).double()
    wide = project_sparse_capped_simplex(y32, s, t)
    assert (single.double() - wide).abs().max() < 1e-6


@given(st.integers(2, 6), st.integers(0, 500))
def test_agrees_with_a_quadratic_program(n, seed):
    rng = np.random.default_rng(seed)
    y = rng.normal(size=n)
    t = rng.uniform(1 / n, 1.2)
    solution = minimize(
        lambda w: ((w - y) ** 2).sum() / 2,
        np.full(n, 1 / n),
        jac=lambda w: w - y,
        bounds=[(0, t)] * n,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(n)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 500},
    )
    w = project_capped_simplex(torch.tensor(y), t).numpy()
    assert ((w - y) ** 2).sum() <= ((solution.x - y) ** 2).sum() + 1e-7
    assert np.abs(w - solution.x).max() < 1e-5


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 500))
def test_every_support_is_worse_than_the_largest_entries(s, n, seed):
    """Theorem 1: no other support of size s gives a nearer point."""
    from itertools import combinations

    n, s = min(n, 7), min(s, n, 7)
    y = np.random.default_rng(seed).normal(size=n)
    t = 1.3 / s
    best = project_sparse_capped_simplex(torch.tensor(y), s, t).numpy()
    for support in combinations(range(n), s):
        w = np.zeros(n)
        w[list(support)] = bisection(y[list(support)], s, t)
        assert ((best - y) ** 2).sum() <= ((w - y) ** 2).sum() + 1e-9


def test_far_entries_keep_their_differences():
    y = torch.tensor([1e8 + 0.25, 1e8, -1e8, 0.0], dtype=torch.float64)
    assert torch.allclose(
        project_capped_simplex(y, 1.0), torch.tensor([0.625, 0.375, 0, 0], dtype=torch.float64), atol=1e-15
    )
    y = torch.tensor([1e8, 0.3, 0.2, 0.1], dtype=torch.float64)
    expected = torch.tensor([0.5, 0.3 - 1 / 30, 0.2 - 1 / 30, 0.1 - 1 / 30], dtype=torch.float64)
    assert torch.allclose(project_capped_simplex(y, 0.5), expected, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cap_of_one_over_sparsity_passes_for_every_sparsity(dtype):
    y = torch.linspace(-1, 1, 500, dtype=dtype)
    for s in range(1, 501):
        for cap in (1 / s, float(np.float32(1 / s)), torch.tensor(1.0, dtype=dtype) / s):
            w = project_sparse_capped_simplex(y, s, cap)
            assert int((w > 0).sum()) == s
            assert abs(float(w.double().sum()) - 1) < 1e-5


@pytest.mark.parametrize(
    ("sparsity", "cap", "says"),
    [
        (4, 0.2, r"sparsity \* cap"),
        (0, 1.0, "from 1 to n"),
        (6, 1.0, "from 1 to n"),
        (4, float("nan"), "cap"),
    ],
)
def test_infeasible_settings_say_so(sparsity, cap, says):
    with pytest.raises(ValueError, match=says):
        project_sparse_capped_simplex(torch.zeros(5), sparsity, cap)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_input_says_so(bad):
    with pytest.raises(ValueError, match="finite"):
        project_capped_simplex(torch.tensor([0.0, bad]), 1.0)


@given(st.integers(0, 1000))
def test_batched_with_tensor_settings_equals_one_by_one(seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randn(3, 4, 9, generator=g, dtype=torch.float64)
    s = torch.randint(1, 10, (3, 4), generator=g)
    t = (1.0 + torch.rand(3, 4, generator=g, dtype=torch.float64)) / s
    before = y.clone()
    whole = project_sparse_capped_simplex(y, s, t)
    assert torch.equal(y, before)
    for i in range(3):
        for j in range(4):
            one = project_sparse_capped_simplex(y[i, j], int(s[i, j]), float(t[i, j]))
            assert (whole[i, j] - one).abs().max() < 1e-14


def test_ties_go_to_the_lowest_index():
    w = project_sparse_capped_simplex(torch.zeros(6), 3, 1.0)
    assert torch.equal(w > 0, torch.tensor([True, True, True, False, False, False]))
    assert torch.allclose(w[:3], torch.full((3,), 1 / 3))
