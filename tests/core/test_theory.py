"""The paper's bounds against a second transcription, limits and hand-worked numbers; detection counts."""

import math
import statistics
from dataclasses import astuple
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlaw.theory import (
    Detection,
    Heterogeneity,
    angle_bound,
    bias_bound,
    detection,
    heterogeneity,
    heterogeneity_budget,
    max_step,
    quadratic_parts,
    sampling_error,
    weight_smoothness,
    weights_diameter,
)

positive = st.floats(0.01, 10)
amount = st.floats(0, 10)


def seen(
    g: float = 1.0, h: float = 0.0, k: float = 0.0, loss: float = 0.0, mean_loss: float = 0.0
) -> Heterogeneity:
    return Heterogeneity(mean_norm=g, direction=h, magnitude=k, loss=loss, mean_loss=mean_loss)


def random_rows(n: int, d: int, seed: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# --- what a round shows ------------------------------------------------------------------------------------


@given(
    n=st.integers(1, 9),
    d=st.integers(1, 6),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_heterogeneity_against_numpy(n: int, d: int, seed: int, dtype: type) -> None:
    updates = random_rows(n + 2, d, seed).numpy().astype(dtype)
    losses = np.abs(random_rows(1, n + 2, seed + 1).numpy()[0]).astype(dtype)
    honest = np.arange(n + 2) % (n + 2) < n
    x, f = updates[honest].astype(np.float64), losses[honest].astype(np.float64)
    g = x.mean(axis=0)
    found = heterogeneity(torch.from_numpy(updates), torch.from_numpy(losses), torch.from_numpy(honest))
    expected = (
        np.linalg.norm(g),
        np.sqrt(np.mean(np.linalg.norm(x - g, axis=1) ** 2)),
        np.sqrt(np.max(np.abs(np.linalg.norm(x, axis=1) ** 2 - g @ g))),
        np.mean(np.abs(f - f.mean())),
        f.mean(),
    )
    assert astuple(found) == pytest.approx(expected, rel=1e-9, abs=1e-7)


def test_heterogeneity_by_hand() -> None:
    updates = torch.tensor([[3.0, 4.0], [3.0, -4.0], [100.0, 0.0]])
    found = heterogeneity(updates, torch.tensor([1.0, 2.0, 50.0]), torch.tensor([True, True, False]))
    assert astuple(found) == pytest.approx((3.0, 4.0, 4.0, 0.5, 1.5))  # |g_i|^2 = 25, |g|^2 = 9


def test_clients_alike_show_none_and_an_offset_changes_directions_not() -> None:
    alike = heterogeneity(torch.ones(4, 3), torch.ones(4))
    assert astuple(alike) == pytest.approx((math.sqrt(3), 0, 0, 0, 1))
    x = random_rows(6, 4, 0)
    near, far = (heterogeneity(x + shift, torch.ones(6)).direction for shift in (0, 1e4))
    assert near == pytest.approx(far, rel=1e-9)


def test_heterogeneity_needs_an_honest_client_and_right_shapes() -> None:
    with pytest.raises(ValueError, match="honest must name at least one client"):
        heterogeneity(torch.ones(2, 1), torch.ones(2), torch.zeros(2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"updates must be \(n, d\) and losses \(n,\)"):
        heterogeneity(torch.ones(2, 1), torch.ones(3))


# --- the bounds --------------------------------------------------------------------------------------------


def transcribed(
    n: int, b: int, alpha: float, big_l: float, s: Heterogeneity, dsig2: float, eps_s: float, forged: bool
) -> tuple[float, float, float]:
    """C_het, alpha_max and eta_k, term by term from the theorem's statement."""
    h2, k2, g2 = s.direction**2, s.magnitude**2, s.mean_norm**2
    c = (
        (4 * k2 * b) / (n - b)
        + 2 * h2
        + (2 * dsig2 * (2 * n - b - 2)) / (n - b)
        + (2 * eps_s**2 * n) / (n - b)
    )
    alpha_max = min(1 / big_l, c / (2 * big_l * g2))
    first = s.loss + (b / (n - b) * s.mean_loss if forged else 0)
    eta = math.sqrt(2 * b * (first / alpha + c + big_l * alpha * (h2 / 2 + k2 / 2 + dsig2 + eps_s**2)))
    return c, alpha_max, eta + 2 * b / math.sqrt(n - b) * s.direction + eps_s


@given(
    b=st.integers(0, 20), more=st.integers(2, 40), step=st.floats(0.01, 1), big_l=positive, g=positive, h=positive,
    k=amount, loss=amount, mean_loss=amount, variance=amount, sampling=amount, forged=st.booleans(),
)  # fmt: skip
def test_bounds_against_the_transcription(
    b: int, more: int, step: float, big_l: float, g: float, h: float, k: float, loss: float, mean_loss: float,
    variance: float, sampling: float, forged: bool,
) -> None:  # fmt: skip
    n, s = 2 * b + more, seen(g, h, k, loss, mean_loss)
    budget = heterogeneity_budget(s, n=n, malicious=b, variance=variance, sampling=sampling)
    largest = max_step(s, budget, smoothness=big_l)
    alpha = step * largest
    eta = bias_bound(
        s, budget, n=n, malicious=b, alpha=alpha, smoothness=big_l, variance=variance, sampling=sampling,
        forged_losses=forged,
    )  # fmt: skip
    expected = transcribed(n, b, alpha, big_l, s, variance, sampling, forged)
    assert (budget, largest, eta) == pytest.approx(expected, rel=1e-9)


def test_limits() -> None:
    """No attackers leave the sampling error; alike and noiseless clients leave nothing, and no step at all."""
    s = seen(g=1.0, h=2.0, k=3.0, loss=0.5)
    budget = heterogeneity_budget(s, n=10, malicious=0, sampling=0.25)
    assert budget == pytest.approx(2 * 4 + 2 * 0.25**2)
    eta = bias_bound(s, budget, n=10, malicious=0, alpha=0.1, smoothness=1.0, sampling=0.25)
    assert eta == pytest.approx(0.25)
    assert heterogeneity_budget(seen(), n=10, malicious=4) == 0
    assert max_step(seen(), 0.0, smoothness=1.0) == 0
    assert max_step(seen(g=0.0), 0.0, smoothness=2.0) == 0.5
    assert max_step(seen(g=1e-6), 1.0, smoothness=2.0) == 0.5  # 1 / L_max is the other limit


def test_bound_by_hand() -> None:
    """n = 20, b = 4, H = K = 1, |g| = 1, L = 1: C = 16/16 + 2 = 3, alpha_max = 1, eta = sqrt(8 * 4.2) + 2."""
    s = seen(g=1.0, h=1.0, k=1.0, loss=0.02, mean_loss=0.4)
    budget = heterogeneity_budget(s, n=20, malicious=4)
    assert budget == pytest.approx(3.0)
    assert max_step(s, budget, smoothness=1.0) == 1.0
    eta = bias_bound(s, budget, n=20, malicious=4, alpha=0.1, smoothness=1.0)
    assert eta == pytest.approx(math.sqrt(8 * (0.2 + 3 + 0.1)) + 2)
    forged = bias_bound(s, budget, n=20, malicious=4, alpha=0.1, smoothness=1.0, forged_losses=True)
    assert forged == pytest.approx(math.sqrt(8 * (1.2 + 3 + 0.1)) + 2)  # 0.02 + 0.4 * 4 / 16 = 0.12


def test_a_step_beyond_the_theorem_and_too_many_attackers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"alpha must be at most alpha_max = 0\.5"):
        bias_bound(seen(), 1.0, n=10, malicious=2, alpha=0.6, smoothness=1.0)
    with pytest.raises(ValueError, match="malicious must satisfy 2 malicious"):
        heterogeneity_budget(seen(), n=10, malicious=5)
    with pytest.raises(ValueError, match="variance must be a finite number of at least 0"):
        heterogeneity_budget(seen(), n=10, malicious=4, variance=math.nan)


def test_sampling_error_falls_with_the_root_of_the_batch() -> None:
    one, four = (sampling_error(2.0, dimension=100, batch=b, delta=0.05) for b in (1, 4))
    assert one == pytest.approx(math.sqrt(2 * 4 * math.log(200 / 0.05)))
    assert one == pytest.approx(2 * four)
    with pytest.raises(ValueError, match="delta must be a probability"):
        sampling_error(1.0, dimension=1, batch=1, delta=1.0)


def test_angle() -> None:
    assert angle_bound(seen(g=2.0), 2.0) is None
    assert angle_bound(seen(g=2.0), math.sqrt(2)) == pytest.approx(math.pi / 4)
    assert angle_bound(seen(g=2.0), 0.0) == 0


# --- the weights' geometry ---------------------------------------------------------------------------------


@given(cap=st.floats(0.01, 1))
def test_no_two_capped_vectors_are_farther_apart_and_two_are_as_far(cap: float) -> None:
    full = int(1 / cap + 1e-9)
    corner = torch.zeros(2 * full + 2, dtype=torch.float64)
    corner[:full], corner[full] = cap, 1 - full * cap
    assert weights_diameter(cap) == pytest.approx(float((corner - corner.flip(0)).norm()), abs=1e-7)
    order = torch.rand(20, len(corner), generator=torch.Generator().manual_seed(full)).argsort(dim=1)
    others = corner[order]  # corners of the set, in any order: its diameter is between two of them
    assert float((others[:, None] - others[None]).norm(dim=2).max()) <= weights_diameter(cap) + 1e-9


@pytest.mark.parametrize("inverse", [1, 2, 3, 7, 10, 49, 110])
def test_diameter_for_whole_inverses_is_root_of_2t(inverse: int) -> None:
    assert weights_diameter(1 / inverse) == pytest.approx(math.sqrt(2 / inverse), rel=1e-12)


def test_smoothness_of_the_weight_objective() -> None:
    n, alpha, c, big_l, t = 200, 0.01, 3.0, 5.0, 1 / 110
    rho = math.sqrt(2 * t)
    expected = alpha * c**2 * (n**1.5 + n + alpha * n * big_l + alpha * n**2 * big_l * rho / 2)
    assert weight_smoothness(n=n, alpha=alpha, gradient=c, smoothness=big_l, cap=t) == pytest.approx(expected)


@given(seed=st.integers(0, 500), n=st.integers(2, 5))
def test_smoothness_bound_holds_on_quadratic_losses(seed: int, n: int) -> None:
    """h(w) = sum_i w_i f_i(theta - alpha G w), f_i = |A_i x - y_i|^2 / 2 within a ball: gradients as the lemma."""
    source = torch.Generator().manual_seed(seed)
    d, alpha, cap = 3, 0.05, 0.7
    roots = torch.randn(n, d, d, generator=source, dtype=torch.float64)
    targets = torch.randn(n, d, generator=source, dtype=torch.float64)
    theta = torch.randn(d, generator=source, dtype=torch.float64)

    def gradients(x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nij,ni->nj", roots, torch.einsum("nij,j->ni", roots, x) - targets)

    def slope(w: torch.Tensor) -> torch.Tensor:
        x = theta - alpha * gradients(theta).T @ w
        losses = (torch.einsum("nij,j->ni", roots, x) - targets).square().sum(dim=1) / 2
        return losses - alpha * gradients(theta) @ (gradients(x).T @ w)

    points = torch.rand(12, n, generator=source, dtype=torch.float64)
    points = 0.5 / n + 0.5 * points / points.sum(
        dim=1, keepdim=True
    )  # on the simplex, none above cap for n >= 3
    points = points[(points <= cap).all(dim=1)]
    norms = [gradients(theta).norm(dim=1).max()]
    norms += [gradients(theta - alpha * gradients(theta).T @ w).norm(dim=1).max() for w in points]
    bound = weight_smoothness(
        n=n,
        alpha=alpha,
        gradient=float(torch.stack(norms).max()) * 1.5,  # along the segments between the points, too
        smoothness=float(torch.linalg.matrix_norm(roots, ord=2).square().max()),
        cap=cap,
    )
    for v, w in pairwise(points):
        assert float((slope(v) - slope(w)).norm()) <= bound * float((v - w).norm()) + 1e-9


@given(
    n=st.integers(1, 8), d=st.integers(1, 5), seed=st.integers(0, 1000), offset=st.sampled_from([0.0, 100.0])
)
def test_the_quadratic_form_in_distances(n: int, d: int, seed: int, offset: float) -> None:
    rows = random_rows(n, d, seed) + offset
    weights = torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 1e-3
    weights = weights / weights.sum()
    norms, distances = quadratic_parts(rows, weights)
    pairs = sum(
        float(weights[i] * weights[j] * (rows[i] - rows[j]).square().sum())
        for i in range(n)
        for j in range(n)
    )
    assert norms == pytest.approx(sum(float(weights[i] * rows[i] @ rows[i]) for i in range(n)))
    assert distances == pytest.approx(pairs / 2, abs=1e-9)
    assert norms - distances == pytest.approx(float((weights @ rows).square().sum()), rel=1e-9, abs=1e-9)


def test_the_identity_needs_weights_that_add_up_to_one() -> None:
    with pytest.raises(ValueError, match="weights must add up to 1"):
        quadratic_parts(torch.ones(2, 1), torch.tensor([0.5, 0.6]))


# --- detection ---------------------------------------------------------------------------------------------


def test_detection_by_hand() -> None:
    weights = torch.tensor([0.0, 0.0, 0.0, 0.25, 0.25, 0.25, 0.25, 0.0])
    malicious = torch.tensor([True, True, False, True, False, False, False, True])
    found = detection(weights, malicious)
    assert found == Detection(true_positives=3, false_positives=1, true_negatives=3, false_negatives=1)
    assert (found.precision, found.recall, found.f1) == (0.75, 0.75, 0.75)
    assert (found.accuracy, found.false_exclusion_rate) == (0.75, 0.25)
    assert found.as_dict()["true_positives"] == 3
    assert found.as_dict()["f1"] == 0.75


def test_threshold_is_inclusive_and_the_papers_for_200_clients() -> None:
    weights = torch.full((200,), 1 / 198, dtype=torch.float64)
    weights[0], weights[1], weights[2] = 1e-4, 1.01e-4, 0.99e-4
    assert detection(weights, torch.zeros(200, dtype=torch.bool)).false_positives == 2
    assert detection(weights, torch.zeros(200, dtype=torch.bool), threshold=0.0).false_positives == 0


def test_nothing_divided_by_nothing() -> None:
    kept, out = torch.full((4,), 0.25), torch.zeros(4)
    nobody, all_of_them = torch.zeros(4, dtype=torch.bool), torch.ones(4, dtype=torch.bool)
    perfect = detection(kept, nobody)
    assert (perfect.precision, perfect.recall, perfect.f1, perfect.accuracy) == (1, 1, 1, 1)
    missed = detection(kept, all_of_them)
    assert (missed.precision, missed.recall, missed.f1, missed.accuracy) == (0, 0, 0, 0)
    assert missed.false_exclusion_rate == 0
    slander = detection(out, nobody)
    assert (slander.precision, slander.recall, slander.f1, slander.false_exclusion_rate) == (0, 1, 0, 1)
    caught = detection(out, all_of_them)
    assert (caught.precision, caught.recall, caught.f1, caught.accuracy) == (1, 1, 1, 1)


@pytest.mark.parametrize(
    ("attackers", "excluded", "precision", "f1", "accuracy"),
    [  # rows of the paper's table with recall 1.000 +- 0: mean and deviation over five runs
        (60, (0, 0, 0, 0, 3), (0.990, 0.022), (0.995, 0.011), (0.997, 0.007)),
        (20, (0, 0, 0, 0, 2), (0.982, 0.041), (0.990, 0.021), (0.998, 0.005)),
        (20, (0, 0, 0, 1, 2), (0.972, 0.041), (0.986, 0.021), (0.997, 0.005)),
        (40, (0, 0, 0, 0, 9), (0.963, 0.082), (0.980, 0.045), (0.991, 0.020)),
        (80, (0, 0, 0, 0, 1), (0.997, 0.006), (0.998, 0.003), (0.999, 0.003)),
    ],
)
def test_counts_give_the_papers_table(
    attackers: int,
    excluded: tuple[int, ...],
    precision: tuple[float, float],
    f1: tuple[float, float],
    accuracy: tuple[float, float],
) -> None:
    """200 clients, all attackers excluded, and in five runs `excluded` honest ones: the printed figures."""
    runs = []
    for honest_excluded in excluded:
        weights = torch.full((200,), 1 / 200)
        weights[: attackers + honest_excluded] = 0
        runs.append(detection(weights, torch.arange(200) < attackers))
    assert {run.recall for run in runs} == {1.0}
    for printed, values in (
        (precision, [run.precision for run in runs]),
        (f1, [run.f1 for run in runs]),
        (accuracy, [run.accuracy for run in runs]),
    ):
        assert (statistics.mean(values), statistics.stdev(values)) == pytest.approx(printed, abs=1e-3)


@given(data=st.data(), n=st.integers(1, 20))
def test_counts_add_up(data: st.DataObject, n: int) -> None:
    weights = torch.tensor(data.draw(st.lists(st.sampled_from([0.0, 1e-9, 0.5]), min_size=n, max_size=n)))
    malicious = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    found = detection(weights, malicious)
    assert found.true_positives + found.false_negatives == int(malicious.sum())
    assert found.false_positives + found.true_negatives == int((~malicious).sum())
    assert all(0 <= value <= 1 for name, value in found.as_dict().items() if not name.endswith("tives"))
    p, r = found.precision, found.recall
    assert found.f1 == pytest.approx(2 * p * r / (p + r) if p + r else 0)


def test_detection_checks_its_arguments() -> None:
    with pytest.raises(ValueError, match=r"weights and malicious must both be \(n,\)"):
        detection(torch.ones(2), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="malicious must be bool"):
        detection(torch.ones(2), torch.ones(2))
