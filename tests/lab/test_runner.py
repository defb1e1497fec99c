"""Whole runs: alone and stacked, interrupted and resumed, sampled, dropped out, diverged."""

import os
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import fedlaw
from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.lab import Lab
from fedlaw.experiments.runner import Callback, run, run_together
from fedlaw.results import AlreadyFinished, Store

SMALL = {"clients": 20, "rounds": 6, "examples": 500, "model_settings": {"hidden": [16]}}


def small(**changes):
    return Experiment(**SMALL | {"malicious": 0.3, "attack": "inverse_gradient"} | changes)


def same(a, b):
    """Whether two runs recorded the same, to the last bit; times apart."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        for name in vars(x):
            p, q = getattr(x, name), getattr(y, name)
            if name == "seconds":
                continue
            if isinstance(p, np.ndarray):
                assert np.array_equal(p, q, equal_nan=p.dtype.kind == "f"), (x.round, name)
            elif isinstance(p, float):
                assert p == q or (p != p and q != q), (x.round, name)
            elif isinstance(p, list):
                assert repr(p) == repr(q), (x.round, name)
            else:
                assert p == q, (x.round, name)
    return True


def test_readme_example():
    result = fedlaw.run(
        dataset="digits", clients=30, q=0.6, attack="label_flip", malicious=0.4, rule="median", rounds=2
    )
    assert result.status == "finished"
    assert 0 <= result.summary["test_accuracy"] <= 1


RULES = ["mean", {"name": "krum", "f": 6}, "fedlaw", {"name": "fedlaw", "preset": "paper"}, "bsum", "oracle"]


def test_stacked_is_bitwise_what_it_is_alone():
    """Other seeds, rules, attacks, q and fractions in one program change nothing."""
    experiments = [small(rule=rule, seed=i) for i, rule in enumerate(RULES)]
    experiments += [
        small(rule="median", q=0.9, attack="label_flip"),
        small(rule="mean", malicious=0.0, participation=0.5),
        small(rule="fedlaw", attack="lie", dropout=0.2),
    ]
    together = run_together(experiments)
    for experiment, stacked in zip(experiments, together, strict=True):
        assert same(run(experiment).records, stacked.records)


def test_threads_change_nothing():
    experiment = small(rule="fedlaw")
    one = run(experiment, execution=Execution(threads=1))
    assert same(one.records, run(experiment, execution=Execution(threads=3)).records)


ATTACKS = [
    "none",
    "label_flip",
    "random_labels",
    {"name": "backdoor", "size": 3},
    {"name": "targeted_backdoor", "size": 3, "target": 1},
    "inverse_gradient",
    "global_parameter",
    {"name": "global_parameter", "statistics": "layer"},
    "double",
    "lie",
    "noisy_lie",
    {"name": "mimic_misaligned", "rho": 0.3},
    "ipm",
    "min_max",
    "min_sum",
    "mimic",
    "gaussian",
    "optimized_lie",
    "optimized_ipm",
    {"name": "sleeper", "attack": "inverse_gradient", "rounds": 2},
    {"name": "label_flip", "start": 2, "stop": 3, "share": 0.5},
]


@pytest.mark.parametrize("attack", ATTACKS, ids=str)
def test_every_attack_runs_against_rules_of_every_kind(attack):
    experiments = [
        small(attack=attack, rule=rule, rounds=4)
        for rule in ("mean", {"name": "multi_krum", "f": 6}, {"name": "fedlaw", "judged_rounds": 3})
    ]
    for result in run_together(experiments):
        accuracies = [r.test_accuracy for r in result.records]
        assert all(0 <= a <= 1 for a in accuracies)
        assert len(accuracies) == 4


def test_targeted_backdoor_success_is_measured():
    attack = {"name": "targeted_backdoor", "size": 3, "target": 1}
    hit = run(small(attack=attack, rule="mean", rounds=15, malicious=0.4, q=0.3, lr=0.1))
    assert hit.records[-1].attack_success > 0.5
    assert run(small(rule="mean")).records[-1].attack_success is None


@pytest.mark.parametrize(
    "rule", ["fltrust", "foolsgold", "dnc", "signguard", "monna", "caf", "meamed", "arc"]
)
def test_rules_beyond_the_paper_run(rule):
    spec = rule
    if rule in ("dnc", "monna", "caf", "meamed"):
        spec = {"name": rule, "f": 6}
    if rule == "arc":
        spec = [
            {"name": "arc", "f": 6},
            {"name": "nearest_neighbor_mixing", "f": 6},
            {"name": "trimmed_mean", "f": 6},
        ]
    result = run(small(rule=spec, rounds=3))
    assert all(r.skipped is None for r in result.records)


def test_what_is_recorded_of_a_round():
    result = run(small(rule={"name": "fedlaw", "judged_rounds": 4, "window": 2}, rounds=6))
    d, first, last = result.setup["parameters"], result.records[0], result.records[-1]
    assert [r.phases for r in result.records] == [2, 2, 2, 2, 1, 1]
    assert first.bytes_down == 2 * 20 * 4 * d
    assert first.bytes_up == 2 * 20 * (4 * d + 16)
    assert first.alignment.shape == first.weights.shape == (20,)
    assert last.alignment is None
    assert len(last.per_class) == 10
    assert first.true_positives == 0  # weight 0 while on trial accuses nobody
    assert last.true_positives + last.false_negatives == 6
    assert last.epsilon > 0
    assert result.summary["communication_rounds"] == 10


def test_sampling_and_dropout_are_recorded_as_they_are():
    result = run(small(rule="mean", participation=0.5, dropout=0.3))
    assert {r.asked for r in result.records} == {10}
    assert 0 < sum(r.answered for r in result.records) < 60
    assert all(r.bytes_up < r.bytes_down for r in result.records)


def test_divergence_is_recorded_and_scored_as_chance():
    result = run(small(rule="mean", attack="none", malicious=0.0, lr=1e20, rounds=4))
    last = result.records[-1]
    assert result.status == "diverged"
    assert last.test_accuracy == pytest.approx(0.1)
    assert "diverged" in last.notes[-1]
    assert last.skipped


def test_too_little_overlap_is_said_in_words():
    """Digits at q = 0.9: a client has five images of other labels."""
    result = run(
        clients=30,
        q=0.9,
        rounds=100,
        split=(1500, 0, 297),
        model_settings={"hidden": [32]},
        evaluate_every=100,
    )
    assert any("overlap too little" in note for note in result.summary["notes"])


# ---------------------------------------------------------------------------------------- interruption


class Stop(Callback):
    def __init__(self, at):
        self.at = at

    def on_round(self, record):
        if record.round == self.at:
            raise KeyboardInterrupt


@pytest.mark.parametrize("rule", ["fedlaw", {"name": "centered_clipping", "tau": 1.0}], ids=str)
def test_interrupted_and_resumed_is_bitwise_the_same(tmp_path, rule):
    experiment, store = small(rule=rule, rounds=8), tmp_path / "s.sqlite"
    whole = run(experiment)
    for at in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            run(experiment, store=store, resume=True, callbacks=[Stop(at)])
        with Store(store) as opened:
            assert opened.find(experiment.id).status == "interrupted"
            assert opened.find(experiment.id).done == at
    resumed = run(experiment, store=store, resume=True)
    assert same(whole.records, resumed.records)
    with Store(store) as opened:
        assert same(whole.records, opened.records(experiment.id))
    with pytest.raises(AlreadyFinished):
        run(experiment, store=store)


def test_killed_and_resumed_is_bitwise_the_same(tmp_path):
    """kill -9 in the middle of a run, several times; the end is that of an undisturbed one."""
    store = tmp_path / "s.sqlite"
    settings = {**SMALL, "rounds": 60, "malicious": 0.3, "attack": "label_flip", "rule": "fedlaw"}
    experiment = Experiment(**settings)
    script = (
        "import fedlaw\n"
        f"e = fedlaw.Experiment(**{settings!r})\n"
        f"fedlaw.run(e, store={str(store)!r}, resume=True, execution=fedlaw.Execution(checkpoint_seconds=0.05))\n"
    )
    reached = 0
    for target in (8, 25):
        process = subprocess.Popen([sys.executable, "-c", script], env={**os.environ, "OMP_NUM_THREADS": "1"})
        deadline = time.monotonic() + 120
        while reached < target:
            assert process.poll() is None, "ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)
            if store.exists():
                try:
                    with Store(store, read_only=True) as opened:
                        info = opened.find(experiment.id)
                        reached = 0 if info is None else info.done
                except (ValueError, sqlite3.Error):
                    continue
        process.send_signal(signal.SIGKILL)
        process.wait()
    with Store(store) as opened:
        assert opened.find(experiment.id).status == "interrupted"
    assert same(run(experiment).records, run(experiment, store=store, resume=True).records)


def test_failures_before_the_first_round_leave_no_trace(tmp_path):
    store = tmp_path / "s.sqlite"
    with pytest.raises(ValueError, match="data"):
        run(
            small(dataset="mnist", examples=None),
            store=store,
            execution=Execution(data_dir=tmp_path / "nowhere"),
        )
    assert not store.exists()


def test_a_broken_run_is_marked_failed(tmp_path):
    class Broken(Callback):
        def on_round(self, record):
            raise RuntimeError("the disk is full")

    experiment, store = small(rule="mean"), tmp_path / "s.sqlite"
    with pytest.raises(RuntimeError):
        run(experiment, store=store, callbacks=[Broken()])
    with Store(store) as opened:
        info = opened.find(experiment.id)
        assert (info.status, info.message) == ("failed", "RuntimeError: the disk is full")


def test_settings_that_need_the_data_are_one_line():
    with pytest.raises(ValueError, match="examples must be at most the 1438"):
        run(small(examples=2000))
    with (
        pytest.raises(ValueError, match="there is no GPU")
        if not torch.cuda.is_available()
        else pytest.warns(None)
    ):
        run(small(), execution=Execution(device="cuda"))


def test_malicious_clients_fill_label_groups_and_minorities_are_counted():
    lab = Lab(small(clients=30, malicious=14, q=0.9), Execution())
    people = lab.population
    groups = people.groups
    full = [g for g in range(10) if people.malicious[groups == g].all()]
    partly = [g for g in range(10) if people.malicious[groups == g].any() and g not in full]
    assert (len(full), len(partly)) == (4, 1)
    assert int(people.malicious.sum()) == 14
    assert people.minority.nonzero().flatten().tolist() == [
        i for i in range(30) if groups[i] in partly and not people.malicious[i]
    ]


def test_poisoned_data_replaces_only_what_acting_attackers_train_on():
    lab = Lab(small(attack={"name": "label_flip", "start": 3}), Execution())
    people, federation = lab.population, lab.federation
    assert torch.equal(people.clean[~people.malicious], people.poisoned[~people.malicious])
    bad = int(people.malicious.nonzero()[0])
    size = int(people.sizes[bad])
    labels = torch.cat([people.labels, people.poisoned_labels])
    before, after = (labels[x[bad, :size]] for x in (people.clean, people.poisoned))
    assert torch.equal(after, 9 - before)
    assert not federation.begin().acting.any()  # round 1: nobody acts, nobody trains on a poisoned copy
