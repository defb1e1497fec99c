"""Core judging through ask and tell: recorded sittings, and what attackers might try."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlaw.server import Core, FedLAW, Replies, Reply, Settings, Status

RECORDED = json.loads(
    gzip.decompress((Path(__file__).parents[1] / "golden" / "core_judging.json.gz").read_bytes())
)


def drive(server, updates, lookahead, losses, *, one_by_one=False, silent=((), ())):
    """One judged round: every asked client says what was recorded, except those silent in a phase."""
    for rows, missing in ((updates, silent[0]), (lookahead, silent[1])):
        request = server.ask()
        ids = [i for i in request.clients if i not in missing]
        if one_by_one:
            for i in ids:
                server.tell(Reply(i, rows[i], float(losses[i]), 10))
        else:
            server.tell(Replies(ids, rows[ids], losses[ids], torch.full((len(ids),), 10.0)))
        report = server.end_phase()
        if report is not None:
            return report
    return report


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: case["kind"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)], ids=["f64", "f32"]
)
@pytest.mark.parametrize("one_by_one", [False, True], ids=["block", "single"])
def test_agrees_with_every_recorded_value(case, dtype, tolerance, one_by_one):
    n, rounds = case["clients"], case["judged_rounds"]
    server = FedLAW(
        torch.zeros(case["dimension"], dtype=dtype),
        clients=range(n),
        judge=Core(judged_rounds=rounds, window=case["window"]),
        settings=Settings(rounds=rounds, alpha=0.1),
    )

    def close(ours, theirs, among):
        theirs = torch.tensor(theirs, dtype=torch.float64)
        assert (ours.to(torch.float64) - theirs)[among].abs().max() <= tolerance

    theta = server.params.clone()
    for recorded in case["rounds"]:
        expect = recorded["expect"]
        updates, lookahead = (
            torch.tensor(recorded[k], dtype=dtype) for k in ("updates", "lookahead_updates")
        )
        losses = torch.tensor(recorded["losses"], dtype=torch.float64)
        report = drive(server, updates, lookahead, losses, one_by_one=one_by_one)
        assert report.skipped is None
        state = server.state
        gone = {int(i) for i in expect["excluded"]}
        codes = {i: e.words for i, (_, e) in server.statuses().items() if e}
        assert codes == {int(i): reason for i, reason in expect["excluded"].items()}
        alive = torch.tensor([i not in gone for i in range(n)])
        asked = report.asked & report.answered & alive
        assert abs(float(server._examined.radius) - expect["median_norm"]) <= tolerance * 10
        close(server._examined.weights, expect["lookahead_weights"], slice(None))
        close(report.reasons["alignment"], expect["cosine"], asked)
        close(-report.reasons["loss"] / 0.03, expect["loss_score"], asked)
        close(state.total, expect["score"], alive)
        assert state.core.nonzero().flatten().tolist() == sorted(expect["core"])
        close(report.weights, expect["step_weights"], slice(None))
        clip = torch.clamp(expect["median_norm"] / updates.norm(dim=1), max=1).unsqueeze(1)
        theta = theta - 0.1 * (torch.tensor(expect["step_weights"], dtype=dtype) @ (updates * clip))
        assert (server.params - theta).abs().max() <= tolerance * 10
    final = case["final"]
    from fedlaw.server.core_math import windowed_mean

    close(windowed_mean(server.state.cosines, case["window"]), final["window_cosine"], alive)
    assert server.frozen
    assert [i for i, (s, _) in server.statuses().items() if s is Status.MEMBER] == final["members"]


class Crowd:
    """A toy federation with a common direction: honest clients near it, others as told."""

    def __init__(self, n=30, d=40, seed=0):
        self.rng = np.random.default_rng(seed)
        self.n, self.d = n, d
        self.signal = self.rng.normal(size=d)
        self.own = self.rng.normal(size=(n, d)) * 0.8

    def round(self, forge=None):
        def phase():
            rows = self.signal + self.own + 0.5 * self.rng.normal(size=(self.n, self.d))
            if forge:
                forge(rows)
            return torch.tensor(rows)

        return phase(), phase(), torch.tensor(1 + 0.1 * self.rng.random(self.n))


def sit(server, crowd, forge=None, silent=lambda k: ((), ())):
    reports = []
    while not server.done:
        updates, lookahead, losses = crowd.round(forge)
        reports.append(drive(server, updates, lookahead, losses, silent=silent(server.round)))
    return reports


def make(crowd, rounds=24, **settings):
    judge = Core(**{"judged_rounds": 20, "window": 8} | settings)
    return FedLAW(torch.zeros(crowd.d, dtype=torch.float64), range(crowd.n), judge, Settings(rounds=rounds))


def inverse(attackers):
    def forge(rows):
        rows[attackers] *= -1

    return forge


def test_inverters_are_left_out_and_honest_clients_are_members():
    crowd, bad = Crowd(), list(range(10))
    server = make(crowd)
    sit(server, crowd, inverse(bad))
    statuses = server.statuses()
    assert {statuses[i][0] for i in bad} == {Status.LEFT_OUT}
    assert {statuses[i][0] for i in range(10, 30)} == {Status.MEMBER}
    assert torch.equal(server.weights[:10], torch.zeros(10, dtype=torch.float64))
    assert float(server.weights.sum()) == pytest.approx(1)


def test_nobody_attacking_loses_nobody():
    crowd = Crowd()
    server = make(crowd)
    sit(server, crowd)
    assert all(status is Status.MEMBER for status, _ in server.statuses().values())


def test_copying_an_honest_client_does_not_get_it_excluded():
    crowd = Crowd()
    server = make(crowd)

    def forge(rows):
        rows[3] = rows[17]

    sit(server, crowd, forge)
    assert server.statuses()[17][0] is Status.MEMBER
    assert not any(reason for _, reason in server.statuses().values())


def test_a_cluster_of_copies_is_excluded_the_second_time():
    crowd = Crowd()
    server = make(crowd)

    def forge(rows):
        rows[:5] = rows[5:].mean(0)

    sit(server, crowd, forge)
    assert {server.statuses()[i][1].words for i in range(5)} == {"copies"}
    assert server.statuses()[5][0] is Status.MEMBER


def test_identical_data_is_no_evidence_of_copying():
    crowd = Crowd()
    server = make(crowd)

    def forge(rows):
        rows[:] = rows[0]

    reports = sit(server, crowd, forge)
    assert not any(reason for _, reason in server.statuses().values())
    assert all(report.skipped is None for report in reports)
    assert bool(torch.isfinite(server.params).all())


def too_good(rows):
    """Attackers that send the common direction with little noise: better aligned than any honest client."""
    rows[:6] = rows[6:].mean(0) + 0.35 * np.random.default_rng(int(abs(rows[0, 0]) * 1e6)).normal(
        size=rows[:6].shape
    )


@pytest.mark.parametrize(("level", "wide"), [(1.0, 2.0), (1.0, 0.13), (0.0, 2.0)])
def test_who_stands_above_the_others_is_too_good_from_a_level_on_or_by_a_wide_gap(level, wide):
    crowd = Crowd()
    server = make(crowd, too_good_level=level, too_good_wide=wide)
    sit(server, crowd, too_good)
    excluded = {server.statuses()[i][0] is Status.EXCLUDED for i in range(6)}
    assert excluded == {wide < 1 or level == 0.0}


def test_too_good_to_be_true_is_excluded_at_round_ten():
    crowd = Crowd()
    server = make(crowd)
    reports = sit(server, crowd, too_good)
    assert not any(e for _, e in reports[8].statuses)
    assert [i for i, (_, e) in enumerate(reports[9].statuses) if e.words == "too good"] == list(range(6))


def test_staying_away_in_rounds_4_to_10_does_not_avoid_the_check():
    crowd = Crowd()
    server = make(crowd)
    away = tuple(range(6))
    sit(server, crowd, too_good, silent=lambda k: (away, away) if 4 <= k <= 10 else ((), ()))
    assert [i for i, (_, e) in server.statuses().items() if e.words == "too good"] == list(range(6))


@pytest.mark.parametrize("phase", [1, 2])
def test_skipping_the_judged_phases_ends_with_weight_zero(phase):
    crowd, bad = Crowd(), tuple(range(10))
    server = make(crowd)
    silent = ((bad, bad) if phase == 1 else ((), bad)) if phase else ((), ())
    sit(server, crowd, silent=lambda k: silent if k <= 20 else ((), ()))
    assert float(server.weights[:10].sum()) == 0
    assert {server.statuses()[i][0] for i in bad} == {Status.LEFT_OUT}
    assert not any(reason for _, reason in server.statuses().values())


def test_answering_now_and_then_is_judged_like_answering_always():
    crowd, bad = Crowd(), list(range(10))
    server = make(crowd)
    lazy = tuple(range(10))
    sit(server, crowd, inverse(bad), silent=lambda k: (lazy, lazy) if k % 2 else ((), ()))
    assert float(server.weights[:10].sum()) == 0


@pytest.mark.parametrize("seed", range(5))
def test_never_more_than_the_assumed_share_is_shut_out(seed):
    """Norms, copies and too-good groups together, aimed at getting as many as possible thrown out."""
    crowd = Crowd(seed=seed)
    server = make(crowd)

    def forge(rows):
        rows[0:8] *= 1000
        rows[8:13] = rows[13:].mean(0)
        rows[13:18] = rows[18] + 1e-9
        rows[18:24] = -rows[18:24]

    reports = sit(server, crowd, forge)
    for report in reports:
        assert sum(bool(e) for _, e in report.statuses) <= 13  # floor(0.45 * 30)
    outside = sum(s in (Status.EXCLUDED, Status.LEFT_OUT) for s, _ in server.statuses().values())
    assert outside <= 13
    assert float(server.weights.sum()) == pytest.approx(1)


def test_huge_norms_are_two_strikes():
    crowd = Crowd()
    server = make(crowd)

    def forge(rows):
        rows[4] *= 1e6

    reports = sit(server, crowd, forge)
    assert not reports[0].statuses[4][1]
    assert reports[1].statuses[4] == (Status.EXCLUDED, 1)
    assert 4 not in server.roster or server.weights[4] == 0


def test_a_round_without_half_of_the_core_is_skipped_and_not_counted():
    crowd = Crowd()
    server = make(crowd)
    before = server.params.clone()
    updates, lookahead, losses = crowd.round()
    report = drive(server, updates, lookahead, losses, silent=(tuple(range(16)), ()))
    assert "answered" in report.skipped
    assert torch.equal(server.params, before)
    assert int(server.state.judged) == 0
    assert server.round == 2
    report = drive(server, updates, lookahead, losses, silent=((), tuple(range(16))))
    assert "phase 2" in report.skipped
    assert int(server.state.judged) == 0


def test_absent_mass_is_lost_not_spread():
    crowd = Crowd(n=20)
    server = make(crowd, rounds=30)
    sit_rounds = 21
    while server.round < sit_rounds:
        drive(server, *crowd.round())
    members = [i for i, (s, _) in server.statuses().items() if s is Status.MEMBER]
    before, weights = server.params.clone(), server.weights
    updates, _, losses = crowd.round()
    request = server.ask()
    assert list(request.clients) == members
    there = members[: len(members) // 2 + 1]
    server.tell(Replies(there, updates[there], losses[there], None))
    server.end_phase()
    norms = updates[there].norm(dim=1)
    clipped = (
        updates[there]
        * torch.clamp(norms.median().clone().fill_(float(np.median(norms))) / norms, max=1)[:, None]
    )
    expected = before - 0.01 * (weights[there] @ clipped)
    assert torch.allclose(server.params, expected, atol=1e-12)


def test_sampled_clients_are_neither_absent_nor_favoured():
    crowd, bad = Crowd(), list(range(10))
    judge = Core(judged_rounds=40, window=8)
    settings = Settings(rounds=45, participation=0.5, seed=3)
    server = FedLAW(torch.zeros(crowd.d, dtype=torch.float64), range(30), judge, settings)
    sit(server, crowd, inverse(bad))
    assert float(server.weights[:10].sum()) == 0
    assert float(server.weights.sum()) == pytest.approx(1)
    assert int(server.state.asked.max()) < 40
    assert torch.equal(server.state.asked, server.state.scored)


def test_refresh_throws_out_a_sleeper_and_takes_back_the_reformed():
    crowd = Crowd()
    server = make(crowd, rounds=60, refresh_period=10, refresh_rounds=3)
    woken = list(range(6))
    while not server.done:
        k = server.round

        def forge(rows, k=k):
            if k > 20:
                rows[woken] *= -1
            if k <= 25:
                rows[10:14] *= -1

        updates, lookahead, losses = crowd.round(forge)
        drive(server, updates, lookahead, losses)
        statuses = server.statuses()
        if k == 20:
            assert statuses[0][0] is Status.MEMBER
            assert statuses[10][0] is Status.LEFT_OUT
        if k == 31:
            assert {statuses[i][0] for i in woken} == {Status.LEFT_OUT}
    assert {statuses[i][0] for i in woken} == {Status.LEFT_OUT}
    assert {statuses[i][0] for i in range(10, 14)} == {Status.MEMBER}


def test_too_little_overlap_is_said_in_words():
    rng = np.random.default_rng(0)
    server = make(Crowd(d=5000), rounds=21)
    reports = []
    while not server.done:
        noise = [torch.tensor(rng.normal(size=(30, 5000))) for _ in range(2)]
        reports.append(drive(server, *noise, torch.tensor(rng.random(30))))
    assert "overlap too little" in reports[19].notes[0]
    assert not any(report.notes for report in reports[:19])


def test_explains_every_weight_round():
    crowd, bad = Crowd(), [0]
    server = make(crowd)
    sit(server, crowd, inverse(bad))
    why = server.explain(0)
    assert [row["round"] for row in why] == list(range(1, 21))
    assert all(row["alignment"] < 0 for row in why[2:])
    assert all(row["alignment"] > 0 for row in server.explain(20))
    with pytest.raises(ValueError, match="roster"):
        server.explain("nobody")


def test_few_clients_warn():
    with pytest.warns(UserWarning, match="20 clients or more"):
        FedLAW(torch.zeros(2), range(5), "hardened")
