"""FedLAW's published step against a transcription of Algorithm 2, and BSUM against a linear program."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from fedlaw import server as servers
from fedlaw.server import BSUM, FedLAW, LinearProgram, Published, Replies, Settings, Status
from tests.core.test_simplex import bisection


class Clients:
    """n quadratic clients f_i(theta) = |theta - a_i|^2 / 2 + b_i; one exact gradient is the update."""

    def __init__(self, n, d, seed):
        rng = np.random.default_rng(seed)
        self.targets = rng.normal(size=(n, d)) + rng.normal(size=d)
        self.offsets = rng.random(n)

    def __call__(self, theta):
        gaps = theta - self.targets
        return gaps, (gaps**2).sum(1) / 2 + self.offsets


def algorithm_2(clients, theta, rounds, alpha, beta, s, t, clip=False):
    """Algorithm 2 in float64, word by word, errata applied (support by index, the projection by bisection)."""
    n = len(clients.targets)
    w = np.full(n, 1 / n)
    for k in range(1, rounds + 1):
        g, _ = clients(theta)
        norms = np.linalg.norm(g, axis=1)
        radius = np.median(norms)
        if clip:
            g = g * np.minimum(1, radius / norms)[:, None]
        ahead = theta - alpha * (w @ g)
        g2, f2 = clients(ahead)
        if clip:
            g2 = g2 * np.minimum(1, radius / np.linalg.norm(g2, axis=1))[:, None]
        h = w + alpha * beta(k) * (g @ (g2.T @ w)) - beta(k) * f2
        w = bisection(h, s(k), t(k))
        theta = theta - alpha * (w @ g)
    return theta, w


def drive(server, clients, shuffle=None):
    reports = []
    while not server.done:
        request = server.ask()
        g, f = clients(request.params.numpy())
        ids = list(request.clients)
        if shuffle is not None:
            shuffle.shuffle(ids)
        server.tell(Replies(ids, torch.tensor(g[ids]), torch.tensor(f[ids]), None))
        report = server.end_phase()
        if report is not None:
            reports.append(report)
    return reports


@given(
    st.integers(0, 10_000), st.integers(4, 14), st.sampled_from([None, "median"]), st.sampled_from([0.0, 1.0])
)
def test_step_is_algorithm_2(seed, n, clip, power):
    clients, rounds, alpha, beta = Clients(n, 6, seed), 7, 0.05, 0.02
    judge = Published(attackers=0.3, clip=clip, beta=beta, beta_power=power, weight_rounds=None)
    server = FedLAW(
        torch.zeros(6, dtype=torch.float64), range(n), judge, Settings(rounds=rounds, alpha=alpha)
    )
    drive(server, clients, np.random.default_rng(seed))
    s = n - int(np.floor(0.3 * n + 1e-9))
    t = 1 / max(1, s - max(1, n // 20))
    theta, w = algorithm_2(
        clients,
        np.zeros(6),
        rounds,
        alpha,
        lambda k: beta / k**power,
        lambda k: s,
        lambda k: t,
        clip == "median",
    )
    assert np.abs(server.weights.numpy() - w).max() < 1e-10
    assert np.abs(server.params.numpy() - theta).max() < 1e-10


def test_annealed_sparsity_recomputes_the_cap():
    n, rounds, alpha, beta = 40, 12, 0.05, 0.05
    clients = Clients(n, 5, 1)
    judge = Published(attackers=0.4, beta=beta, anneal_rounds=8, weight_rounds=None)
    server = FedLAW(
        torch.zeros(5, dtype=torch.float64), range(n), judge, Settings(rounds=rounds, alpha=alpha)
    )
    reports = drive(server, clients)

    def s(k):
        return n - round(16 * min(1, k / 8))

    theta, w = algorithm_2(clients, np.zeros(5), rounds, alpha, lambda k: beta, s, lambda k: 1 / (s(k) - 2))
    assert np.abs(server.weights.numpy() - w).max() < 1e-10
    assert np.abs(server.params.numpy() - theta).max() < 1e-10
    for k, report in enumerate(reports, 1):
        assert int((report.weights > 0).sum()) <= s(k)


@given(st.integers(0, 10_000), st.integers(3, 12))
def test_bsum_solves_its_linear_program(seed, n):
    clients = Clients(n, 4, seed)
    judge = LinearProgram(attackers=0.3, weight_rounds=None)
    server = BSUM(torch.zeros(4, dtype=torch.float64), range(n), judge, Settings(rounds=3, alpha=0.1))
    s = server.judge.sparsity
    t = 1 / max(1, s - 1)
    theta, w = np.zeros(4), np.full(n, 1 / n)
    for report in drive(server, clients):
        g, _ = clients(theta)
        _, f = clients(theta - 0.1 * (w @ g))
        solution = linprog(f, A_eq=np.ones((1, n)), b_eq=[1], bounds=[(0, t)] * n)
        w = report.weights.numpy()
        assert f @ w == pytest.approx(solution.fun, abs=1e-9)
        assert w.sum() == pytest.approx(1)
        assert (w > 0).sum() <= s
        theta = theta - 0.1 * (w @ g)
    assert np.abs(server.params.numpy() - theta).max() < 1e-10


def test_weights_freeze_and_only_members_are_asked_afterwards():
    clients = Clients(10, 4, 0)
    clients.offsets[:4] += 50
    server = FedLAW(
        torch.zeros(4, dtype=torch.float64),
        range(10),
        Published(attackers=0.4),
        Settings(rounds=25, alpha=0.05),
    )
    reports = drive(server, clients)
    assert [report.phases for report in reports] == [2] * 20 + [1] * 5
    assert torch.equal(reports[-1].weights, reports[19].weights)
    assert {i for i, (status, _) in server.statuses().items() if status is Status.LEFT_OUT} == {0, 1, 2, 3}
    assert reports[-1].asked.tolist() == [False] * 4 + [True] * 6


def test_absent_in_weight_rounds_is_scored_as_the_worst():
    clients = Clients(10, 4, 0)
    server = FedLAW(
        torch.zeros(4, dtype=torch.float64),
        range(10),
        Published(attackers=0.2),
        Settings(rounds=22, alpha=0.05),
    )
    while not server.done:
        request = server.ask()
        ids = [i for i in request.clients if i not in (0, 1) or server.round > 20]
        g, f = clients(request.params.numpy())
        server.tell(Replies(ids, torch.tensor(g[ids]), torch.tensor(f[ids]), None))
        report = server.end_phase()
        if report is not None and server.round <= 20:
            score = report.reasons["score"]
            least = score[2:].min()
            assert float(score[0]) == float(torch.nextafter(least, least - 1))  # and behind it
    assert float(server.weights[:2].sum()) == 0
    assert float(server.weights.sum()) == pytest.approx(1)


def test_filters_drop_copies_and_low_losses():
    n = 20
    clients = Clients(n, 30, 3)
    judge = Published(attackers=0.2, clip="median", copy_filter=0.05, loss_filter=4.0)
    server = FedLAW(torch.zeros(30, dtype=torch.float64), range(n), judge, Settings(rounds=1, alpha=0.01))
    for _ in range(2):
        g, f = clients(server.ask().params.numpy())
        g[1] = g[2] = g[0]
        g[8] = g[7]  # a pair proves nothing
        f[5] = 0.0
        server.tell(Replies(range(n), torch.tensor(g), torch.tensor(f), None))
        report = server.end_phase()
    assert float(report.weights[[0, 1, 2, 5]].sum()) == 0
    assert int((report.weights > 0).sum()) >= 12


def test_refresh_learns_again():
    clients = Clients(20, 4, 0)
    clients.offsets[:4] += 50
    judge = Published(attackers=0.2, weight_rounds=5, refresh_period=5, refresh_rounds=2)
    server = FedLAW(torch.zeros(4, dtype=torch.float64), range(20), judge, Settings(rounds=20, alpha=0.05))
    phases = []
    while not server.done:
        if server.round == 7:
            clients.offsets[:4] -= 50
            clients.offsets[10:14] += 50
        request = server.ask()
        g, f = clients(request.params.numpy())
        ids = list(request.clients)
        server.tell(Replies(ids, torch.tensor(g[ids]), torch.tensor(f[ids]), None))
        report = server.end_phase()
        if report is not None:
            phases.append(report.phases)
    assert phases == [2] * 5 + [1, 1, 1, 2, 2] * 3
    assert float(server.weights[10:14].sum()) == 0
    assert float(server.weights[:4].sum()) > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cap": 0.01}, r"sparsity \* cap"),
        ({"sparsity": 31}, "from 1 to n"),
        ({"attackers": 1.0}, "attackers"),
        ({"beta": 0.0}, "beta"),
        ({"beta_power": 0.3}, "beta_power"),
        ({"clip": "mean"}, "clip"),
        ({"weight_rounds": 0}, "weight_rounds"),
        ({"refresh_period": 3, "refresh_rounds": 4}, "refresh_rounds"),
        ({"loss_weight": 0.1}, "it takes: attackers"),
        ({"roundz": 3}, "it takes: attackers"),
    ],
)
def test_bad_settings_say_what_and_how(given, says):
    with pytest.raises(ValueError, match=says):
        servers.create("fedlaw", torch.zeros(2), range(30), preset="paper", **given)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"beta": 0.1}, "it takes: attackers_below"),
        ({"attackers_below": 0.5}, "attackers_below"),
        ({"decay": 0.0}, "decay"),
        ({"judged_rounds": 300}, "judged_rounds"),
        ({"rounds": 0}, "rounds"),
        ({"alpha": -1.0}, "alpha"),
        ({"participation": 0.0}, "participation"),
        ({"loss_point": "during"}, "loss_point"),
        ({"preset": "best"}, "there are: paper, hardened"),
        ({"too_good_from": 11}, "too_good_from"),
        ({"strike_ratio": 0.5}, "strike_ratio"),
    ],
)
def test_bad_core_settings_say_what_and_how(given, says):
    with pytest.raises(ValueError, match=says):
        servers.create("fedlaw", torch.zeros(2), range(30), **given)
