"""Sweeps: what a file stands for, that nothing runs twice, and that a broken run harms no other."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from fedlaw.experiments import conduct
from fedlaw.experiments._expressions import evaluate
from fedlaw.experiments._files import DescriptionError
from fedlaw.experiments.conduct import make_plan, note_sweep, run_sweep
from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.engines import run_stack
from fedlaw.experiments.runner import run, run_together
from fedlaw.experiments.sweep import Sweep
from fedlaw.results import Store, StoreError, notes
from tests.lab.test_runner import same

TINY = {"clients": 20, "rounds": 4, "examples": 400, "model_settings": {"hidden": [8]}, "malicious": 0.3}
METHODS = {
    "Krum": {"rule": {"name": "krum", "f": "= attackers"}},
    "FedLAW": {"rule": {"name": "fedlaw", "preset": "paper", "sparsity": "= clients - attackers"}},
    "FedAvg": {"rule": "mean"},
}


def tiny(**more):
    return Sweep.parse(
        {
            "name": "tiny",
            "seeds": 2,
            "base": TINY,
            "axes": {"attack": ["label_flip", "lie"], "method": METHODS},
            **more,
        }
    )


# ------------------------------------------------------------------------------------------ descriptions
def test_a_sweep_stands_for_every_combination_once():
    planned = tiny().planned()
    assert len(planned) == 2 * 3 * 2
    assert len({each.experiment.id for each in planned}) == 12
    krum = next(p for p in planned if p.labels == {"attack": "lie", "method": "Krum", "seed": 1})
    assert krum.experiment == Experiment(**TINY, attack="lie", rule={"name": "krum", "f": 6}, seed=1)


def test_conditions_set_and_skip():
    sweep = tiny(
        when=[
            {"match": {"method": "FedLAW", "attack": "lie"}, "set": {"rule.beta": 0.5, "rounds": 9}},
            {"match": {"method": ["Krum", "FedAvg"], "attack": "lie"}, "skip": True},
        ]
    )
    found = {(c.labels["attack"], c.labels["method"]): c.experiment(0) for c in sweep.cells()}
    assert ("lie", "Krum") not in found
    assert ("lie", "FedAvg") not in found
    assert found["lie", "FedLAW"].rule["beta"] == 0.5
    assert found["lie", "FedLAW"].rounds == 9
    assert found["label_flip", "FedLAW"].rule["beta"] == 0.01


def test_dotted_axes_reach_into_chains():
    sweep = Sweep.parse(
        {
            "base": {**TINY, "rule": ["bucketing", "centered_clipping"]},
            "axes": {"rule.1.tau": [1.0, 2.0], "rule.0.size": [3]},
        }
    )
    stages = [each.experiment.rule["stages"] for each in sweep.planned()]
    assert [s[1]["tau"] for s in stages] == [1.0, 2.0]
    assert [s[0]["size"] for s in stages] == [3, 3]


def test_scales_only_and_files(tmp_path):
    (tmp_path / "_shared.toml").write_text('[axes]\nattack = ["lie", "label_flip"]\n')
    (tmp_path / "mine.toml").write_text(
        'include = ["_shared.toml"]\nseeds = [3]\n[base]\nclients = 20\n[axes]\nq = [0.6, 0.9]\n'
        "[scale.small.base]\nrounds = 2\n[scale.small.axes]\nq = [0.9]\n"
    )
    sweep = Sweep.from_toml(tmp_path / "mine.toml")
    assert sweep.name == "mine"
    assert len(sweep.planned()) == 4
    small = sweep.scaled("small")
    assert [p.experiment.rounds for p in small.planned()] == [2, 2]
    assert small.name == "mine@small"
    assert [p.labels for p in sweep.only({"attack": ["LIE"], "q": ["0.9"]}).planned()] == [
        {"attack": "lie", "q": 0.9, "seed": 3}
    ]
    with pytest.raises(DescriptionError, match="there are lie; label_flip"):
        sweep.only({"attack": ["typo"]})
    commas = Sweep.parse(
        {"axes": {"attack": {"LIE, best z": {"attack": "lie"}, "LIE": {"attack": "lie"}, "flip": {}}}}
    )
    assert list(commas.only({"attack": ["lie", "best z", "flip"]}).axes["attack"]) == ["LIE, best z", "flip"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"axis": {}}, "unknown key 'axis'"),
        ({"axes": {"q": 0.6}}, "axes.q must be a list"),
        ({"axes": {"seed": [1]}}, "use seeds"),
        ({"seeds": "three"}, "seeds must be"),
        ({"when": [{"set": {}}]}, "when needs a table match"),
        ({"search": {"by_test": 1}}, "unknown key 'by_test' in search"),
        ({"scale": {"huge": {}}}, None),
    ],
)
def test_mistakes_in_a_sweep_are_one_line(given, message):
    if message is None:
        with pytest.raises(DescriptionError, match="scale 'small' is not described"):
            Sweep.parse(given).scaled("small")
        return
    with pytest.raises(DescriptionError, match=message) as caught:
        Sweep.parse(given)
    assert "\n" not in str(caught.value)


def test_a_mistake_in_a_cell_says_where():
    with pytest.raises(DescriptionError, match=r"in attack lie, rule\.f"):
        Sweep.parse(
            {"base": {**TINY, "rule": "krum"}, "axes": {"attack": ["lie"], "rule.f": ["x"]}}
        ).planned()


@pytest.mark.parametrize(
    "text",
    [
        "= __import__('os')",
        "= (1).real",
        "= 'a'",
        "= [1]",
        "= clients if 1 else 2",
        "= 2 ** 99",
        "= 1 / 0",
        "= x",
    ],
)
def test_expressions_are_arithmetic_only(text):
    with pytest.raises(DescriptionError, match="expression"):
        evaluate(text, {"clients": 3})


# ------------------------------------------------------------------------------------------ carrying out
def test_results_are_those_of_single_runs_and_nothing_runs_twice(tmp_path):
    """Stacked in two processes, every run has the bits that it has alone; the second time nothing is to do."""
    sweep, store = tiny(), tmp_path / "a.sqlite"
    done = run_sweep(sweep, store, processes=2, stack=3)
    assert {each.status for each in done.outcomes.values()} == {"finished"}
    with Store(store, read_only=True) as opened:
        for each in sweep.planned():
            assert same(run(each.experiment).records, opened.records(each.experiment.id))
    again = make_plan(sweep, store)
    assert again.stacks == []
    assert again.counts["finished"] == 12
    more = make_plan(tiny(seeds=3), store, measure=False)
    assert sum(map(len, more.stacks)) == 6
    assert {each.seed for stack in more.stacks for each in stack} == {2}


def test_a_broken_run_fails_alone(tmp_path):
    """One experiment of the stack cannot be built and one breaks down in training: the others finish."""
    store = tmp_path / "a.sqlite"
    good = [Experiment(**TINY, rule=rule) for rule in ("mean", "median")]
    absent = Experiment(**TINY | {"examples": 5000}, rule="mean")
    broken = Experiment(**TINY, rule="mean", dataset="tests.lab.test_sweep:broken")
    outcomes = run_stack([good[0], absent, broken, good[1]], store=store, execution=Execution())
    assert [each.status for each in outcomes] == ["finished", "failed", "failed", "finished"]
    assert "examples must be at most" in outcomes[1].message
    with Store(store, read_only=True) as opened:
        assert opened.find(absent.id).status == "failed"
        assert "on purpose" in opened.find(broken.id).message
        assert same(run(good[1]).records, opened.records(good[1].id))


def test_too_little_memory_for_a_stack_mends_itself(tmp_path, monkeypatch):
    """A stack that does not fit is halved until it does; nothing is lost, nothing fails."""
    sizes = []

    def scarce(experiments, **settings):
        sizes.append(len(experiments))
        if len(experiments) > 2:
            raise MemoryError
        return run_together(experiments, **settings)

    monkeypatch.setattr("fedlaw.experiments.engines.base.run_together", scarce)
    experiments = [Experiment(**TINY, rule="mean", seed=seed) for seed in range(5)]
    outcomes = run_stack(experiments, store=tmp_path / "a.sqlite", execution=Execution())
    assert [(each.run, each.status) for each in outcomes] == [(e.id, "finished") for e in experiments]
    assert sizes == [5, 2, 3, 1, 2]


def broken():
    """A data set that cannot be read."""
    raise RuntimeError("broken on purpose")


def test_failures_are_kept_apart_until_asked_for(tmp_path):
    store = tmp_path / "a.sqlite"
    sweep = Sweep.parse({"base": TINY | {"rounds": 2}, "axes": {"examples": [300, 5000]}})
    done = run_sweep(sweep, store, processes=1)
    assert [each.message for each in done.failures] == [done.failures[0].message]
    assert make_plan(sweep, store).stacks == []
    assert make_plan(sweep, store).counts["failed"] == 1
    assert sum(map(len, make_plan(sweep, store, retry=True, measure=False).stacks)) == 1


def test_memory_bounds_the_stacks(tmp_path):
    sweep, store = tiny(), tmp_path / "a.sqlite"
    assert max(map(len, make_plan(sweep, store, processes=1).stacks)) > 1
    tight = make_plan(sweep, store, processes=1, memory=1.0)
    assert {len(stack) for stack in tight.stacks} == {1}
    assert tight.seconds > 0


@pytest.mark.parametrize(("patience", "tried"), [(0.0, [[320]]), (1e9, [[320], [400, 400, 400]])])
def test_a_plan_is_not_made_by_training_for_minutes(monkeypatch, patience, tried):
    """What takes long is tried with one batch a client, which is reckoned up."""
    seen = []

    def measured(labs, execution, each):
        seen.append([int(lab.population.sizes.sum()) for lab in labs])
        return 0.01

    monkeypatch.setattr(conduct, "_PATIENCE", patience)
    monkeypatch.setattr(conduct, "_seconds_a_round", measured)
    experiments = [each.experiment for each in tiny().with_base({"batch_size": 16}).planned()]
    took = conduct.try_out(experiments, Execution(device="cpu")).round
    assert seen == tried
    whole = [
        each.replace(
            partition="shards",
            partition_settings={"per_client": 20},
            attack="none",
            malicious=0.0,
            rule="mean",
        )
        for each in experiments
    ]
    conduct.try_out(whole, Execution(device="cpu"))
    assert seen[len(tried) :] == [[400, 400, 400]]  # 400 shards cannot be cut of fewer examples
    assert took == pytest.approx(0.01 if len(tried) > 1 else 0.0125)


def test_parts_of_a_sweep_are_noted_as_one(tmp_path):
    store = tmp_path / "a.sqlite"
    sweep = tiny(seeds=1).with_base({"rounds": 1})
    run_sweep(sweep.only({"method": ["Krum"]}), store, processes=1, measure=False)
    run_sweep(sweep.only({"method": ["FedAvg"], "attack": ["lie"]}), store, processes=1, measure=False)
    noted = notes.read(store, notes.SWEEP)["tiny"]
    assert len(noted["runs"]) == 3
    assert set(noted["sweep"]["axes"]["method"]) == {"Krum", "FedAvg"}
    note_sweep(store, sweep, sweep.planned())
    assert list(notes.read(store, notes.SWEEP)["tiny"]["sweep"]["axes"]["method"]) == list(
        sweep.axes["method"]
    )


def test_a_part_without_search_joins_the_searched_sweep(tmp_path):
    """`--no-search` once replaced what was noted of the whole sweep."""
    store = tmp_path / "a.sqlite"
    searched = tiny(seeds=1, search={"by": "val_accuracy", "seeds": 1})
    note_sweep(store, searched, searched.planned())
    part = replace(searched, search=False).only({"method": ["Krum"]})
    note_sweep(store, part, part.planned())
    noted = notes.read(store, notes.SWEEP)["tiny"]
    assert len(noted["runs"]) == len(searched.planned())
    assert noted["sweep"]["search"] == {"by": "val_accuracy", "seeds": 1}
    other = replace(searched, search={"by": "val_accuracy", "seeds": 2}).only({"method": ["Krum"]})
    note_sweep(store, other, other.planned())
    assert len(notes.read(store, notes.SWEEP)["tiny"]["runs"]) == len(other.planned())


FILE = """
seeds = 2
[base]
clients = 20
rounds = 40
examples = 600
malicious = 0.3
attack = "label_flip"
[axes]
rule = ["mean", "median", "fedlaw", "geometric_median"]
"""


def look(path):
    """The runs of a store that may be just being made."""
    try:
        with Store(path, read_only=True) as store:
            return store.runs()
    except StoreError:
        return []


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_killed_and_told_again_ends_with_the_same_bits(tmp_path, processes):
    """kill -9 in the middle, the same command: only what was missing runs, and every number is the same."""
    (tmp_path / "s.toml").write_text(FILE)
    command = [
        sys.executable,
        "-m",
        "fedlaw",
        "sweep",
        "s.toml",
        "--stack",
        "2",
        "--processes",
        str(processes),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    killed = subprocess.Popen(
        [*command, "--store", "a.sqlite"], cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL
    )
    ended: list[str] = []
    while killed.poll() is None:
        time.sleep(0.02)
        runs = look(tmp_path / "a.sqlite")
        ended = [info.id for info in runs if info.status == "finished"]
        if ended and any(info.status == "running" and info.done > 3 for info in runs):
            killed.send_signal(signal.SIGKILL)
            break
    assert killed.wait() == -signal.SIGKILL
    time.sleep(0.5)  # its processes end with it
    for name in ("a", "b"):
        out = subprocess.run(
            [*command, "--store", f"{name}.sqlite"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        if name == "a":
            done = int(re.search(r"8 runs, (\d+) done already", out.stdout)[1])
            assert len(ended) <= done < 8
    with Store(tmp_path / "a.sqlite") as a, Store(tmp_path / "b.sqlite") as b:
        assert {i.id for i in a.runs()} == {i.id for i in b.runs()}
        for info in a.runs():
            assert info.status == "finished"
            assert same(a.records(info.id), b.records(info.id))


@pytest.mark.slow
def test_ctrl_c_saves_everything_and_says_how_to_go_on(tmp_path):
    (tmp_path / "s.toml").write_text(FILE.replace("rounds = 40", "rounds = 4000"))
    process = subprocess.Popen(
        [sys.executable, "-m", "fedlaw", "sweep", "s.toml", "--store", "a.sqlite", "--processes", "2"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Whatever started the tests in the background may have had them ignore it, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    began = False
    while not began:
        time.sleep(0.1)
        assert process.poll() is None
        began = any(info.done > 2 for info in look(tmp_path / "a.sqlite"))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "the same command goes on: fedlaw sweep s.toml" in said
    assert "Traceback" not in said
    with Store(tmp_path / "a.sqlite") as store:
        statuses = {info.status for info in store.runs()}
        assert statuses == {"interrupted"}
        checkpoints = store._connection.execute("SELECT count(*) FROM checkpoints").fetchone()[0]
        assert checkpoints >= 1
