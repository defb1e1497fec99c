"""Whatever one client says, for every rule: no exception, no non-finite model, and it is said what was refused."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from fedlaw import aggregators
from fedlaw import server as servers
from fedlaw.server import Core, FedLAW, OnePhase, Oracle, Published, Replies, Reply, Settings

N, D = 24, 12
RULES = [name for name in aggregators.names() if name not in ("chain", "mda")]
SETTINGS = {"f": 4, "radius": 1.0}


def make(name, rounds=12):
    """A server of each kind, small enough to run many."""
    zero = torch.zeros(D)
    settings = Settings(rounds=rounds, alpha=0.1)
    if name == "published":
        return FedLAW(zero, range(N), Published(attackers=0.3, clip="median", weight_rounds=8), settings)
    if name == "core":
        return FedLAW(zero, range(N), Core(judged_rounds=min(8, rounds), window=2), settings)
    if name == "bsum":
        return servers.create("bsum", zero, range(N), rounds=rounds, alpha=0.1, weight_rounds=8)
    if name == "oracle":
        return Oracle(zero, range(N), malicious=[1, 2], settings=settings)
    valid = aggregators.registry.settings(name)
    rule = aggregators.create(name, **{k: v for k, v in SETTINGS.items() if k in valid})
    if isinstance(rule, aggregators.PreAggregator):
        rule = aggregators.Chain(rule, aggregators.Mean())
    reference = (lambda k, params: torch.ones(D)) if name == "fltrust" else None
    return OnePhase(zero, range(N), rule, settings, reference=reference)


KINDS = ["published", "core", "bsum", "oracle", *RULES]


def honest(server, seed=0):
    request = server.ask()
    rng = np.random.default_rng([seed, request.round, request.phase])
    rows = {i: torch.tensor(1 + 0.3 * rng.normal(size=D), dtype=torch.float32) for i in range(N)}
    return request, {i: Reply(i, rows[i], 1.0 + 0.01 * i, 10) for i in request.clients}


NAN = torch.full((D,), float("nan"))
FAULTS = {
    "nan": (lambda i: Reply(i, NAN, 1.0, 10), "not finite"),
    "inf": (lambda i: Reply(i, torch.full((D,), float("inf")), 1.0, 10), "not finite"),
    "one nan": (lambda i: Reply(i, torch.cat([torch.ones(D - 1), NAN[:1]]), 1.0, 10), "not finite"),
    "overflowing": (lambda i: Reply(i, torch.full((D,), 1e38), 1.0, 10), "not finite"),
    "float64 beyond float32": (lambda i: Reply(i, np.full(D, 1e200), 1.0, 10), "not finite"),
    "short": (lambda i: Reply(i, torch.ones(D - 1), 1.0, 10), "wrong shape"),
    "broadcastable": (lambda i: Reply(i, torch.ones(1), 1.0, 10), "wrong shape"),
    "scalar": (lambda i: Reply(i, torch.tensor(1.0), 1.0, 10), "wrong shape"),
    "matrix": (lambda i: Reply(i, torch.ones(1, D), 1.0, 10), "wrong shape"),
    "integers": (lambda i: Reply(i, torch.ones(D, dtype=torch.int64), 1.0, 10), "not floating point"),
    "objects": (lambda i: Reply(i, np.array([None] * D), 1.0, 10), "not floating point"),
    "text": (lambda i: Reply(i, "gradient", 1.0, 10), "not an array"),
    "nothing": (lambda i: Reply(i, None, 1.0, 10), "not an array"),
    "sparse": (lambda i: Reply(i, torch.ones(D).to_sparse(), 1.0, 10), "not an array"),
    "list of text": (lambda i: Reply(i, ["x"] * D, 1.0, 10), "not an array"),
    "zero examples": (lambda i: Reply(i, torch.ones(D), 1.0, 0), "example count"),
    "negative examples": (lambda i: Reply(i, torch.ones(D), 1.0, -5), "example count"),
    "absurd examples": (lambda i: Reply(i, torch.ones(D), 1.0, 10**400), "example count"),
    "text for examples": (lambda i: Reply(i, torch.ones(D), 1.0, "many"), "example count"),
    "late": (lambda i: Reply(i, torch.ones(D), 1.0, 10, round=99), "another round"),
    "wrong phase": (lambda i: Reply(i, torch.ones(D), 1.0, 10, phase=3), "another round or phase"),
    "stranger": (lambda i: Reply("stranger", torch.ones(D), 1.0, 10), "not asked"),
    "unhashable name": (lambda i: Reply([i], torch.ones(D), 1.0, 10), "not asked"),
    "boolean name": (lambda i: Reply(True, torch.ones(D), 1.0, 10), "not asked"),
    "absent": (lambda i: None, None),
}
LOSS_FAULTS = {
    "no loss": (lambda i: Reply(i, torch.ones(D), None, 10), "loss is missing"),
    "nan loss": (lambda i: Reply(i, torch.ones(D), float("nan"), 10), "loss is negative"),
    "negative loss": (lambda i: Reply(i, torch.ones(D), -1.0, 10), "loss is negative"),
    "infinite loss": (lambda i: Reply(i, torch.ones(D), torch.tensor(float("inf")), 10), "loss is negative"),
    "vector loss": (lambda i: Reply(i, torch.ones(D), torch.ones(3), 10), "loss is negative"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_in_every_phase(kind):
    """Client 5 commits every fault, one a phase, for as many rounds as it takes."""
    two_phases = kind in ("published", "core", "bsum")
    faults = list(FAULTS.items()) + (list(LOSS_FAULTS.items()) if two_phases else [])
    server = make(kind, rounds=len(faults) + 2)
    for name, (fault, words) in faults:
        over = None
        while over is None:
            request, replies = honest(server)
            if 5 in replies:
                bad = fault(5)
                expected = words
                if name in LOSS_FAULTS and request.phase == 1:
                    bad, expected = replies[5], None  # losses are looked at in phase 2 only
                replies[5] = bad
                before = len(server.refusals)
                for reply in replies.values():
                    if reply is not None:
                        server.tell(reply)
                refused = server.refusals[before:]
                assert [r.reason for r in refused if expected and expected in r.reason] or expected is None, (
                    name
                )
                assert len(refused) == (expected is not None)
                assert all(r.round == server.round and r.phase == server.phase for r in refused)
            else:
                for reply in replies.values():
                    server.tell(reply)
            over = server.end_phase()
        assert bool(torch.isfinite(server.params).all()), name
        assert over.skipped is None, (name, over.skipped)


@pytest.mark.parametrize("kind", KINDS)
def test_duplicates_and_huge_but_finite(kind):
    server = make(kind, rounds=4)
    while not server.done:
        _, replies = honest(server)
        for i, reply in replies.items():
            huge = i == 5 and server.round == 3
            server.tell(Reply(i, reply.update * 1e17, 1.0, 10) if huge else reply)
            server.tell(reply)
        report = server.end_phase()
        assert len([r for r in server.refusals if "second reply" in r.reason]) >= len(replies)
    assert report.refusals
    assert bool(torch.isfinite(server.params).all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("there", [0, 1, 3])
def test_too_few_replies_keep_the_model_and_say_so(kind, there):
    server = make(kind)
    before = server.params.clone()
    _, replies = honest(server)
    for reply in list(replies.values())[:there]:
        server.tell(reply)
    report = server.end_phase()
    if report is None:
        report = server.end_phase()
    if report.skipped is not None:
        assert torch.equal(server.params, before)
        assert len(report.skipped) > 10
    else:  # rules that can work with a single update do
        assert there > 0
    assert there > 0 or report.skipped
    assert bool(torch.isfinite(server.params).all())
    request, _ = honest(server)
    assert request.round == 2


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_ever_answering_ends_with_the_first_model(kind):
    server = make(kind, rounds=3)
    rounds = 0
    while not server.done:
        server.ask()
        report = server.end_phase()
        rounds += report is not None
        assert report is None or report.skipped
    assert rounds == 3
    assert torch.equal(server.params, torch.zeros(D))


def test_a_block_is_screened_row_by_row():
    server = make("mean")
    rows = torch.ones(N, D)
    rows[3, 2], rows[7] = float("nan"), float("inf")
    counts = torch.full((N,), 10.0)
    counts[9] = float("nan")
    server.tell(Replies([*range(N)], rows, None, counts))
    report = server.end_phase()
    assert [(r.client, r.reason.split()[0]) for r in report.refusals] == [
        (3, "update"),
        (7, "update"),
        (9, "example"),
    ]
    assert torch.allclose(server.params, torch.full((D,), -0.1))


def test_a_block_of_the_wrong_kind_is_refused_whole():
    server = make("mean")
    for bad in (torch.ones(N, D + 1), torch.ones(N, D, dtype=torch.int32), np.ones((N, D))):
        server.tell(Replies([*range(N)], bad))
    assert len(server.refusals) == 3 * N
    assert server.end_phase().skipped


def test_asking_twice_is_the_same_and_the_end_is_an_error():
    server = make("mean", rounds=1)
    assert server.ask().clients == server.ask().clients
    server.end_phase()
    assert server.done
    for call in (server.ask, server.end_phase, lambda: server.tell(Reply(0, torch.ones(D)))):
        with pytest.raises(RuntimeError, match="over"):
            call()


@pytest.mark.parametrize(
    ("clients", "params", "says"),
    [
        ([], torch.zeros(2), "at least one"),
        ([1, 1], torch.zeros(2), "twice"),
        ([1.5], torch.zeros(2), "strings or integers"),
        ([1], torch.zeros(2, 2), "flat"),
        ([1], torch.zeros(2, dtype=torch.int64), "floating"),
        ([1], torch.tensor([float("nan")]), "finite"),
    ],
)
def test_bad_rosters_and_models_are_refused(clients, params, says):
    with pytest.raises(ValueError, match=says):
        OnePhase(params, clients, aggregators.Mean())


# ---------------------------------------------------------------------------------------- save and restore


def play(server, until, faults=True):
    while not server.done and server.round < until:
        _, replies = honest(server)
        for i, reply in replies.items():
            if not (faults and (i * 7 + server.round) % 11 == 0):
                server.tell(reply)
        server.end_phase()
    return server


@pytest.mark.parametrize("kind", KINDS)
def test_restored_at_any_round_boundary_goes_on_with_the_same_bits(kind, tmp_path):
    reference = play(make(kind), 99)
    for stop in range(1, 13):
        first = play(make(kind), stop)
        first.save(tmp_path / "server.npz")
        second = make(kind)
        second.restore(tmp_path / "server.npz")
        play(second, 99)
        assert torch.equal(second.params, reference.params), stop
        assert second.statuses() == reference.statuses()
        if isinstance(second, FedLAW):
            assert torch.equal(second.weights, reference.weights)
            assert json.dumps(second.explain(3)) == json.dumps(reference.explain(3))


@pytest.mark.parametrize("kind", ["published", "core"])
def test_interrupted_between_phases_starts_the_round_again(kind, tmp_path):
    reference = play(make(kind), 99)
    first = play(make(kind), 4)
    for reply in honest(first)[1].values():
        first.tell(reply)
    first.end_phase()
    assert first.phase == 2
    first.save(tmp_path / "server.npz")
    second = make(kind)
    second.restore(tmp_path / "server.npz")
    assert (second.round, second.phase) == (4, 1)
    assert torch.equal(play(second, 99).params, reference.params)


def test_another_roster_judge_or_rule_is_refused(tmp_path):
    path = tmp_path / "server.npz"
    make("core").save(path)
    for other in (
        FedLAW(
            torch.zeros(D), range(1, N + 1), Core(judged_rounds=8, window=2), Settings(rounds=12, alpha=0.1)
        ),
        FedLAW(torch.zeros(D), range(N), Core(judged_rounds=8, window=3), Settings(rounds=12, alpha=0.1)),
        FedLAW(torch.zeros(D), range(N), Core(judged_rounds=8, window=2), Settings(rounds=13, alpha=0.1)),
        FedLAW(torch.zeros(D + 1), range(N), Core(judged_rounds=8, window=2), Settings(rounds=12, alpha=0.1)),
        make("published"),
        make("mean"),
    ):
        with pytest.raises(ValueError, match="checkpoint"):
            other.restore(path)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"PK\x03\x04broken", b"\x80\x04N."])
def test_what_is_not_a_checkpoint_is_refused(content, tmp_path):
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(ValueError, match="not a fedlaw checkpoint"):
        make("core").restore(tmp_path / "x.npz")


def test_pickles_in_a_checkpoint_are_never_loaded(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    np.savez(tmp_path / "x.npz", description=np.array([Evil()], dtype=object))
    with pytest.raises(ValueError, match="not a fedlaw checkpoint"):
        make("core").restore(tmp_path / "x.npz")
    assert not (tmp_path / "owned").exists()


def test_killed_while_saving_leaves_a_whole_checkpoint(tmp_path):
    """A process that saves as fast as it can is killed; what lies there loads."""
    path = tmp_path / "server.npz"
    script = (
        "import sys, torch\n"
        "from fedlaw.server import FedLAW, Core, Settings\n"
        "s = FedLAW(torch.zeros(200_000), range(24), Core(judged_rounds=8), Settings(rounds=12))\n"
        "s.save(sys.argv[1]); print('ready', flush=True)\n"
        "while True: s.save(sys.argv[1])\n"
    )
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE)
        assert process.stdout.readline().strip() == b"ready"
        for _ in range(20):
            FedLAW(torch.zeros(200_000), range(24), Core(judged_rounds=8), Settings(rounds=12)).restore(path)
        process.kill()
        process.wait()
        FedLAW(torch.zeros(200_000), range(24), Core(judged_rounds=8), Settings(rounds=12)).restore(path)
