"""What attackers that know the server might try, each once found to pay."""

import numpy as np
import pytest
import torch

from fedlaw import aggregators
from fedlaw.screening import loss_scores
from fedlaw.server import Core, FedLAW, LinearProgram, OnePhase, Published, Replies, Reply, Settings, Status
from fedlaw.server.judge import Arrived, Evidence
from fedlaw.simplex import project_sparse_capped_simplex
from tests.core.test_core_judging import Crowd, drive, make, sit


def test_skipping_phase_2_of_the_rounds_one_poisons_does_not_move_the_model():
    """Poison sent in phase 1 and not judged in phase 2 is not part of the step."""
    crowd = Crowd()
    server, bad = make(crowd, rounds=20), tuple(range(10))
    while not server.done:
        even = server.round % 2 == 0

        def forge(rows, even=even):
            if even:
                rows[:10] *= -1

        before = server.params.clone()
        updates, lookahead, losses = crowd.round(forge)
        report = drive(server, updates, lookahead, losses, silent=((), bad if even else ()))
        if even:
            norms = updates.norm(dim=1)
            clip = torch.clamp(norms.median().new_tensor(np.median(norms)) / norms, max=1)
            honest = report.weights.clone()
            honest[:10] = 0
            expected = before - 0.01 * ((honest * clip) @ updates)
            assert torch.allclose(server.params, expected, atol=1e-12)


@pytest.mark.parametrize("rule", ["mean", "geometric_median", "huber", "trimmed_mean"])
def test_a_claimed_number_of_examples_captures_nothing(rule):
    settings = {"f": 5} if rule == "trimmed_mean" else {}
    made = aggregators.create(rule, **settings)
    server = OnePhase(torch.zeros(8), range(30), made, Settings(rounds=1, alpha=1.0))
    rng = np.random.default_rng(0)
    for i in server.ask().clients:
        update = np.full(8, 100.0) if i == 0 else -1 + 0.01 * rng.normal(size=8)
        server.tell(Reply(i, update, count=1e9 if i == 0 else 100))
    server.end_phase()
    assert float(server.params.abs().max()) < (30 if rule == "mean" else 1.2)


def test_counts_that_were_not_told_are_the_median():
    server = OnePhase(torch.zeros(1), range(3), aggregators.Mean(), Settings(rounds=1, alpha=1.0))
    for i, (value, count) in enumerate([(3.0, 10), (6.0, 10), (9.0, None)]):
        server.tell(Reply(i, [value], count=count))
    server.end_phase()
    assert float(server.params) == pytest.approx(-6.0)


class Raising(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError("gotcha")


HOSTILE = [
    Reply(5, [10**400] + [1.0] * 5, 1.0, 10),
    Reply(5, torch.ones(6), 1.0, 10, round=np.array([1, 2])),
    Reply(5, torch.ones(6), 1.0, 10, phase=torch.ones(2)),
    Reply(5, torch.ones(6), 1.0, 10, round=True),
    Reply(5, torch.ones(6, device="meta"), 1.0, 10),
    Reply(5, torch.nested.nested_tensor([torch.ones(2), torch.ones(4)]), 1.0, 10),
    Reply(5, torch.ones(6).as_subclass(Raising), 1.0, 10),
    Reply(5, np.ma.masked_array(np.ones(6), mask=[1, 0, 0, 0, 0, 0]), 1.0, 10),
    Reply(5, torch.ones(6), 1.0, np.str_("10")),
    Reply(5, torch.ones(6), 1.0, torch.nested.nested_tensor([torch.ones(2)])),
    Reply(5, torch.ones(6, dtype=torch.complex64), 1.0, 10),
    None,
    "hello",
    {},
    Replies([5], torch.ones(1, 6).to_sparse(), torch.ones(1), None),
    Replies([5], torch.ones(1, 6, device="meta"), torch.ones(1), None),
    Replies([5], torch.ones(1, 6), [1.0], None),
    Replies([5], torch.ones(1, 6), torch.ones(2), None),
    Replies([5], torch.ones(1, 6), torch.ones(1), torch.ones(3)),
]


@pytest.mark.parametrize("reply", HOSTILE, ids=lambda reply: type(getattr(reply, "update", reply)).__name__)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nothing_that_is_told_raises(reply):
    for server in (
        OnePhase(torch.zeros(6), range(24), aggregators.Median(), Settings(rounds=2)),
        FedLAW(torch.zeros(6), range(24), Core(judged_rounds=2), Settings(rounds=2)),
    ):
        server.ask()
        server.tell(reply)
        assert len(server.refusals) == 1
        server.end_phase()


def test_the_model_that_is_handed_out_is_a_copy():
    server = OnePhase(torch.zeros(3), range(3), aggregators.Mean())
    server.ask().params.fill_(7)
    assert torch.equal(server.params, torch.zeros(3))


# ------------------------------------------------------------------------------------------ losses


def test_a_block_of_equal_losses_counts_once():
    honest = torch.linspace(1.0, 2.0, 18, dtype=torch.float64)
    losses = torch.cat([honest, torch.full((12,), 1.45, dtype=torch.float64)])
    everybody = torch.ones(30, dtype=torch.bool)
    plain = loss_scores(losses, everybody)
    once = loss_scores(losses, everybody, block=(3, 13))
    assert float(plain.abs().max()) > 2 * float(once.abs().max())
    alone = loss_scores(torch.cat([honest, losses[-1:]]), everybody[:19])
    assert torch.allclose(once[:19], alone)


def test_rounded_losses_and_losses_of_a_majority_count_as_they_are():
    everybody = torch.ones(30, dtype=torch.bool)
    rounded = torch.tensor([0.3, 0.4, 0.5] * 6 + [0.30 + 0.001 * i for i in range(12)], dtype=torch.float64)
    converged = torch.cat([torch.zeros(28), torch.tensor([0.1, 0.11])]).double()
    for losses in (rounded, converged):
        assert torch.equal(loss_scores(losses, everybody, block=(3, 13)), loss_scores(losses, everybody))


# ------------------------------------------------------------------------------------------ copies


def test_copiers_that_take_turns_do_not_get_their_victim_excluded():
    crowd = Crowd()
    server = make(crowd)
    while not server.done:
        pair = {1: (0, 1), 2: (2, 3), 3: (4, 5)}.get(server.round, ())

        def forge(rows, pair=pair):
            for i in pair:
                rows[i] = rows[20]

        drive(server, *crowd.round(forge))
    assert server.statuses()[20][0] is Status.MEMBER
    assert not any(reason for _, reason in server.statuses().values())


# ------------------------------------------------------------------------------------------ schedules


def test_absences_spread_over_everybody_do_not_keep_the_core_from_freezing():
    crowd = Crowd(n=20)
    server = make(crowd, rounds=24, judged_rounds=10, window=4, presence=1.0)
    while not server.done:
        away = (2 * server.round % 20, (2 * server.round + 1) % 20)
        drive(server, *crowd.round(), silent=(away, away))
    assert server.frozen
    assert float(server.weights.sum()) == pytest.approx(1)


@pytest.mark.parametrize("participation", [0.05, 0.1, 0.3])
def test_few_asked_at_a_time_are_judged_all_the_same(participation):
    crowd = Crowd()
    judge = Core(judged_rounds=60, window=10)
    settings = Settings(rounds=70, participation=participation, seed=1)
    server = FedLAW(torch.zeros(crowd.d, dtype=torch.float64), range(30), judge, settings)
    sit(server, crowd)
    assert server.frozen
    assert int(server.state.judged) == 60  # a round whose clients have no weight moves nothing, but judges


def test_a_vanishing_update_does_not_stop_fltrust():
    rule = aggregators.FLTrust()
    server = OnePhase(
        torch.zeros(8), range(5), rule, Settings(rounds=1), reference=lambda k, p: torch.ones(8)
    )
    for i in range(5):
        server.tell(Reply(i, torch.full((8,), 1e-25 if i == 0 else 1.0)))
    assert server.end_phase().skipped is None


@pytest.mark.parametrize(
    ("name", "settings"),
    [("fltrust", {}), ("monna", {"f": 1, "pivot": "reference"}), ("mda", {"f": 12, "limit": 10})],
)
def test_rules_that_cannot_work_are_refused_before_training(name, settings):
    with pytest.raises(ValueError, match=r"reference|limit"):
        OnePhase(torch.zeros(2), range(30), aggregators.create(name, **settings))


def test_foolsgold_remembers_clients_over_an_absence():
    rng = np.random.default_rng(0)

    def play(absent):
        server = OnePhase(torch.zeros(6), range(6), aggregators.FoolsGold(), Settings(rounds=4, alpha=0.1))
        while not server.done:
            for i in range(6):
                if not (i == absent and server.round == 3):
                    server.tell(Reply(i, np.eye(6)[i] + 0.01 * rng.normal(size=6)))
            server.end_phase()
        return next(iter(server._state.values()))

    whole, once_absent = play(None), play(4)
    assert whole.shape == once_absent.shape == (6, 6)
    assert float(once_absent[4, 4]) == pytest.approx(float(whole[4, 4]) * 3 / 4, abs=0.2)
    assert float(once_absent[2, 2]) == pytest.approx(float(whole[2, 2]), abs=0.2)


# ------------------------------------------------------------------------------------------ stacked judges


@pytest.mark.parametrize(
    "judge", [Core(judged_rounds=12, window=5), Published(weight_rounds=8), LinearProgram()]
)
def test_many_experiments_are_judged_at_once(judge):
    """Pure functions over (R, n, d): each experiment ends as it does alone."""
    from dataclasses import fields

    n, d, rounds, many = 21, 15, 14, 3
    judge = judge.bind(n, rounds)
    rng = np.random.default_rng(0)
    base = rng.normal(size=(many, 1, d))
    alone = [judge.start(n, torch.zeros(1)) for _ in range(many)]
    kind = type(alone[0])
    stacked = kind(**{f.name: torch.stack([getattr(s, f.name) for s in alone]) for f in fields(kind)})
    for _ in range(rounds):
        g, g2 = (torch.tensor(base + rng.normal(size=(many, n, d))) for _ in range(2))
        g[:, :6] *= -1
        losses = torch.tensor(rng.random((many, n)))
        there = torch.tensor(rng.random((many, n)) < 0.9)

        def one(state, g, g2, losses, there):
            asked = judge.eligible(state)
            arrived = Arrived(
                g * there[..., None], g.norm(dim=-1) * there, asked, there & asked, torch.ones_like(losses)
            )
            examined = judge.examine(state, arrived)
            if judge.phases(state) == 1:
                return judge.settle(state, examined), examined.weights
            clipped = g2 * torch.clamp(examined.radius[..., None] / g2.norm(dim=-1), max=1)[..., None]
            z = (examined.weights * there).unsqueeze(-2).matmul(clipped).squeeze(-2)
            own = g * examined.factors[..., None]
            evidence = Evidence(
                along=(own * z.unsqueeze(-2)).sum(-1),
                own=(own * clipped).sum(-1),
                norms=own.norm(dim=-1),
                length=z.norm(dim=-1),
                losses=losses,
                asked=asked,
                scored=there & asked & examined.usable,
                counts=torch.ones_like(losses),
                alpha=0.1,
            )
            verdict = judge.weigh(examined.state, examined, evidence)
            return verdict.state, verdict.weights

        results = [one(s, g[r], g2[r], losses[r], there[r]) for r, s in enumerate(alone)]
        alone = [state for state, _ in results]
        stacked, weights = one(stacked, g, g2, losses, there)
        for r, (state, expected) in enumerate(results):
            assert torch.allclose(weights[r], expected, atol=1e-12)
            for f in fields(kind):
                assert torch.allclose(
                    getattr(stacked, f.name)[r].double(),
                    getattr(state, f.name).double(),
                    atol=1e-10,
                    equal_nan=True,
                ), f.name
    assert judge.frozen(stacked)


# ------------------------------------------------------------------------------------------ projection


@pytest.mark.parametrize(
    ("y", "s", "cap"),
    [([3e38, -3e38, 1.0], 2, 0.6), ([1e18, 1.0, 0.5, -1e18], 3, 0.4), ([1e15, 0.0, -1e15, 5.0], 4, 0.25)],
)
def test_projection_of_entries_any_distance_apart_sums_to_one(y, s, cap):
    for dtype in (torch.float32, torch.float64):
        w = project_sparse_capped_simplex(torch.tensor(y, dtype=dtype), s, cap)
        assert float(w.double().sum()) == pytest.approx(1, abs=1e-6)
        assert float(w.max()) <= cap + 1e-6
    assert torch.equal(
        project_sparse_capped_simplex(torch.tensor(y), s, float("inf")).sum(), torch.tensor(1.0)
    )
