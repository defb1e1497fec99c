"""Attacks on updates, against their definitions written out a second time."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlaw.attacks import (
    IPM,
    LIE,
    Gaussian,
    GlobalParameter,
    InverseGradient,
    Mimic,
    MinMax,
    MinSum,
    Misaligned,
    OptimizedIPM,
    OptimizedLIE,
    View,
    create,
    stealth_bound,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_view(n: int = 9, m: int = 3, d: int = 6, seed: int = 0, **more: Any) -> View:
    numbers = torch.randn(n + 1, d, generator=seeded(seed), dtype=torch.float64)
    losses = torch.rand(n, generator=seeded(seed + 1), dtype=torch.float64)
    malicious = torch.zeros(n, dtype=torch.bool)
    malicious[torch.randperm(n, generator=seeded(seed + 2))[:m]] = True
    return View(numbers[:n] + 1, losses, malicious, numbers[n], generator=seeded(5), **more)


def test_inverse_gradient_negates_each_attackers_own_update() -> None:
    view = random_view()
    forged = InverseGradient().forge(view)
    assert torch.equal(forged.updates, -view.updates[view.malicious])
    assert torch.equal(forged.losses, view.losses[view.malicious])


def test_misaligned_is_the_inverse_plus_a_vector_of_given_length_in_no_fixed_direction() -> None:
    view = random_view(d=50)
    added = Misaligned(eta=0.1).forge(view).updates + view.own_updates
    torch.testing.assert_close(added.norm(dim=1), torch.full((3,), 0.1, dtype=torch.float64))
    directions = added / 0.1
    assert float((directions @ directions.T - torch.eye(3)).abs().max()) < 0.7


def test_gaussian_has_the_moments_asked_for() -> None:
    view = random_view(n=20, m=10, d=5000)
    rows = Gaussian(mean=-2.0, std=3.0).forge(view).updates
    assert float(rows.mean()) == pytest.approx(-2.0, abs=0.05)
    assert float(rows.std()) == pytest.approx(3.0, abs=0.05)


def test_global_parameter_noise_in_parameters_and_as_update() -> None:
    """psi = theta - alpha g must be theta + N(nu1 mu, nu2 sigma^2): nu2 scales the variance, not the deviation."""
    theta = 0.3 + 0.2 * torch.randn(4000, generator=seeded(1), dtype=torch.float64)
    view = replace(random_view(n=20, m=10, d=4000), params=theta, alpha=0.05)
    submitted = theta - view.alpha * GlobalParameter(nu1=-5.0, nu2=1.5).forge(view).updates
    noise = submitted - theta
    assert float(noise.mean()) == pytest.approx(-5 * float(theta.mean()), abs=0.01)
    assert float(noise.var()) == pytest.approx(1.5 * float(theta.var()), rel=0.05)


def test_global_parameter_per_layer() -> None:
    theta = torch.cat([torch.full((3000,), 2.0), -1 + 0.5 * torch.randn(3000, generator=seeded(1))]).double()
    view = replace(random_view(n=4, m=2, d=6000), params=theta, layers=(3000, 3000))
    noise = -GlobalParameter(nu1=1.0, nu2=4.0, statistics="layer").forge(view).updates
    torch.testing.assert_close(noise[:, :3000], torch.full((2, 3000), 2.0, dtype=torch.float64))  # no spread
    assert float(noise[:, 3000:].mean()) == pytest.approx(-1, abs=0.05)
    assert float(noise[:, 3000:].std()) == pytest.approx(1.0, abs=0.05)
    with pytest.raises(ValueError, match=r"View\.layers"):
        GlobalParameter(statistics="layer").forge(replace(view, layers=(3000, 1)))


@pytest.mark.parametrize(("m", "z"), [(20, 0.1257), (40, 0.3022), (60, 0.5451), (80, 0.9346)])
def test_stealth_bound_of_200_clients(m: int, z: float) -> None:
    assert stealth_bound(200, m) == pytest.approx(z, abs=5e-5)
    view = random_view(n=200, m=m, d=3)
    mean, std = view.updates.mean(dim=0), view.updates.std(dim=0, correction=0)
    shift = (LIE().forge(view).updates - mean) / std
    torch.testing.assert_close(shift, torch.full((m, 3), z, dtype=torch.float64), atol=5e-5, rtol=0)


@given(n=st.integers(1, 400), data=st.data())
def test_stealth_bound_is_finite_and_leaves_enough_supporters(n: int, data: st.DataObject) -> None:
    m = data.draw(st.integers(0, n))
    z = stealth_bound(n, m)
    assert math.isfinite(z)
    supporters, honest = math.floor(n / 2 + 1) - m, n - m
    if 1 <= supporters <= honest - 1:
        beyond = 0.5 * math.erfc(z / math.sqrt(2))  # share of honest clients past z
        assert beyond * honest == pytest.approx(supporters, rel=1e-9)


@pytest.mark.parametrize("statistics", ["all", "honest", "malicious"])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("ddof", [0, 1])
def test_lie_settings(statistics: str, sign: int, ddof: int) -> None:
    view = random_view()
    rows = {
        "all": view.updates,
        "honest": view.updates[~view.malicious],
        "malicious": view.updates[view.malicious],
    }
    x = rows[statistics].numpy()
    expected = x.mean(axis=0) + sign * 0.7 * x.std(axis=0, ddof=ddof)
    forged = create("lie", z=0.7, statistics=statistics, sign=sign, ddof=ddof).forge(view).updates
    np.testing.assert_allclose(forged.numpy(), np.tile(expected, (3, 1)), rtol=1e-12)


def test_lie_of_one_honest_client_has_no_deviation() -> None:
    view = random_view(n=4, m=3)
    forged = LIE(z=2.0, statistics="honest", ddof=1).forge(view).updates
    torch.testing.assert_close(forged, view.honest_updates.expand(3, -1))


def test_noisy_lie_spreads_its_copies_by_the_deviation_of_each_coordinate() -> None:
    view = random_view(n=400, m=300, d=3)
    view = replace(view, updates=view.updates * torch.tensor([1.0, 10.0, 0.0]))
    std = view.updates.std(dim=0, correction=0)
    forged = create("noisy_lie", noise=0.3, z=1.0).forge(view).updates
    spread = forged.std(dim=0)
    torch.testing.assert_close(spread, 0.3 * std, rtol=0.15, atol=1e-12)
    torch.testing.assert_close(forged.mean(dim=0), view.updates.mean(dim=0) + std, rtol=0.1, atol=0.05)


def test_ipm_turns_the_mean_round_when_epsilon_is_large_enough() -> None:
    view = random_view(n=10, m=4)
    mean = view.honest_updates.mean(dim=0)

    def aggregate(epsilon: float) -> Tensor:
        sent = view.updates.clone()
        sent[view.malicious] = IPM(epsilon=epsilon).forge(view).updates
        return sent.mean(dim=0)

    torch.testing.assert_close(aggregate(1.5), torch.zeros_like(mean), atol=1e-12, rtol=0)  # (n - m) / m
    assert float(aggregate(1.4) @ mean) > 0 > float(aggregate(1.6) @ mean)


def test_mimic_copies_update_and_loss() -> None:
    view = random_view()
    for client in (0, 4, 6):  # six are honest: 6 is the first again
        forged = Mimic(client=client).forge(view)
        torch.testing.assert_close(forged.updates, view.honest_updates[client % 6].expand(3, -1))
        torch.testing.assert_close(forged.losses, view.honest_losses[client % 6].expand(3))
    outlier = view.updates.clone()
    place = int((~view.malicious).nonzero()[2])
    outlier[place] += 100
    forged = Mimic(client="farthest").forge(replace(view, updates=outlier))
    torch.testing.assert_close(forged.updates, outlier[place].expand(3, -1))


def direction_of(rows: Tensor, direction: str) -> Tensor:
    mean = rows.mean(dim=0)
    return {"unit": -mean / mean.norm(), "sign": -torch.sign(mean), "std": -rows.std(dim=0, correction=0)}[
        direction
    ]


@given(
    seed=st.integers(0, 10_000),
    honest=st.integers(2, 8),
    d=st.integers(1, 5),
    scale=st.sampled_from([1e-3, 1, 1e3]),
)
@pytest.mark.parametrize("direction", ["unit", "sign", "std"])
def test_min_max_constraint_holds_and_is_tight(
    direction: str, seed: int, honest: int, d: int, scale: float
) -> None:
    view = random_view(n=honest + 2, m=2, d=d, seed=seed)
    view = replace(view, updates=scale * view.updates + 3)
    rows = view.honest_updates
    forged = MinMax(direction=direction).forge(view).updates  # type: ignore[arg-type]
    assert torch.equal(forged[0], forged[1])
    bound = float(torch.cdist(rows, rows).max())

    def farthest(row: Tensor) -> float:
        return float((row - rows).norm(dim=1).max())

    assert farthest(forged[0]) <= bound * (1 + 1e-6)
    p = direction_of(rows, direction)
    step = forged[0] - rows.mean(dim=0)
    assert float(step @ p) >= 0
    torch.testing.assert_close(step, (step @ p) / (p @ p) * p, atol=1e-6 * bound, rtol=0)  # along p
    assert farthest(forged[0] + 1e-3 * bound * p / p.norm()) > bound  # and no farther


@given(seed=st.integers(0, 10_000), honest=st.integers(2, 8), d=st.integers(1, 5))
@pytest.mark.parametrize("direction", ["unit", "sign", "std"])
def test_min_sum_constraint_holds_and_is_tight(direction: str, seed: int, honest: int, d: int) -> None:
    view = random_view(n=honest + 1, m=1, d=d, seed=seed)
    rows = view.honest_updates
    forged = MinSum(direction=direction).forge(view).updates[0]  # type: ignore[arg-type]
    bound = float(torch.cdist(rows, rows).square().sum(dim=1).max())
    reached = float((forged - rows).square().sum())
    assert reached == pytest.approx(bound, rel=1e-6)  # the largest gamma: equality
    assert float((forged - rows.mean(dim=0)) @ direction_of(rows, direction)) >= 0


def test_min_max_survives_a_large_common_offset_in_single_precision() -> None:
    view = random_view(n=20, m=5, d=40)
    far = replace(view, updates=(view.updates + 1000).float())
    forged = MinMax().forge(far).updates[0].double()
    rows = far.honest_updates.double()
    assert float((forged - rows).norm(dim=1).max()) == pytest.approx(
        float(torch.cdist(rows, rows).max()), rel=1e-3
    )


def trimmed(updates: Tensor) -> Tensor:
    """Mean without the three largest and smallest of each coordinate."""
    return updates.sort(dim=0).values[3:-3].mean(dim=0)


def test_optimized_attacks_beat_every_fixed_number_on_a_grid() -> None:
    view = random_view(n=13, m=3, d=4, rule=trimmed)
    mean = view.honest_updates.mean(dim=0)

    def harm(rows: Tensor) -> float:
        sent = view.updates.clone()
        sent[view.malicious] = rows
        return float((trimmed(sent) - mean).norm())

    ipm = harm(OptimizedIPM(low=0.1, high=10, evaluations=40).forge(view).updates)
    assert ipm >= max(harm(IPM(epsilon=0.1 * 100 ** (i / 30)).forge(view).updates) for i in range(31)) * 0.98
    lie = harm(OptimizedLIE(low=0.1, high=10, evaluations=40).forge(view).updates)
    fixed = (LIE(z=0.1 * 100 ** (i / 30), statistics="honest") for i in range(31))
    assert lie >= max(harm(attack.forge(view).updates) for attack in fixed) * 0.98


def test_search_counts_its_evaluations_and_finds_an_inner_maximum() -> None:
    """A rule that refuses what is far: harm rises, then drops to nothing; the best is inside the interval."""
    calls = []

    def distrustful(updates: Tensor) -> Tensor:
        calls.append(1)
        centre = updates.median(dim=0).values
        near = (updates - centre).norm(dim=1) < 3.0
        return updates[near].mean(dim=0)

    view = replace(random_view(n=13, m=3, d=1, seed=4), rule=distrustful)
    before = view.updates.clone()
    forged = OptimizedLIE(evaluations=16).forge(view).updates
    assert len(calls) == 16
    assert torch.equal(view.updates, before)
    rows = view.honest_updates
    z = float((forged[0] - rows.mean(dim=0)) / rows.std(dim=0, correction=0))
    assert 0.1 < z < 9.9


@pytest.mark.parametrize("peak", [0.13, 1.0, 7.7])
def test_search_closes_in_on_the_peak(peak: float) -> None:
    """A rule that moves by how near z is to the peak: 16 evaluations find z to a tenth of its size."""
    view = random_view(n=8, m=2, d=1)
    rows = view.honest_updates
    mean, std = rows.mean(dim=0), rows.std(dim=0, correction=0)

    def rule(updates: Tensor) -> Tensor:
        z = (updates[view.malicious][0] - mean) / std
        return mean + 1 / (1 + (z / peak).log().abs())

    forged = OptimizedLIE(evaluations=16).forge(replace(view, rule=rule)).updates
    assert float((forged[0] - mean) / std) == pytest.approx(peak, rel=0.1)


def test_search_needs_a_rule() -> None:
    with pytest.raises(ValueError, match=r"View\.rule must be given"):
        OptimizedIPM().forge(random_view())


@pytest.mark.parametrize("name", ["gaussian", "misaligned", "global_parameter", "noisy_lie"])
def test_drawing_without_a_generator_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"generator=None; give it a torch\.Generator"):
        create(name).forge(replace(random_view(), generator=None))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("lie", {"z": "much"}, "z must be a finite number, got 'much'"),
        ("lie", {"statistics": "some"}, "statistics must be one of 'all', 'honest', 'malicious', got 'some'"),
        ("lie", {"sign": 2}, "sign must be one of 1, -1, got 2"),
        ("lie", {"ddof": True}, "ddof must be one of 0, 1, got True"),
        ("lie", {"noise": -1}, "noise must be a finite number at least 0, got -1"),
        ("ipm", {"epsilon": math.nan}, "epsilon must be a finite number, got nan"),
        ("mimic", {"client": -1}, "client must be an integer of at least 0, got -1"),
        ("min_max", {"direction": "up"}, "direction must be one of 'unit', 'sign', 'std', got 'up'"),
        ("optimized_lie", {"low": 0}, "low must be a finite number above 0, got 0"),
        ("optimized_ipm", {"low": 2, "high": 1}, "high must be a finite number at least 2, got 1"),
        ("global_parameter", {"nu2": -1}, "nu2 must be a finite number at least 0, got -1"),
        ("gaussian", {"std": None}, "std must be a finite number at least 0, got None"),
    ],
)
def test_settings_are_checked(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        create(name, **settings)
    assert str(error.value) == message
