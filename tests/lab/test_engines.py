"""Engines: the same table from processes, from a Ray cluster, and after a worker was killed."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from fedlaw.experiments.conduct import conduct, make_plan
from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.engines import create
from fedlaw.experiments.engines.local import Local
from fedlaw.experiments.sweep import Sweep
from fedlaw.results import Store
from tests.lab.test_runner import same

SWEEP = Sweep.parse(
    {
        "name": "engines",
        "seeds": 2,
        "base": {"clients": 20, "rounds": 30, "examples": 600, "malicious": 0.3, "attack": "lie"},
        "axes": {"rule": ["mean", "median", "fedlaw", "geometric_median"]},
    }
)


def test_unknown_engines_and_process_numbers_are_refused():
    with pytest.raises(ValueError, match="engine must be local or ray"):
        create("slurm")
    with pytest.raises(ValueError, match="processes must be at least 1"):
        create("local", processes=0)


def children():
    """Processes whose line of parents leads to this one."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    mine = {os.getpid()}
    while True:
        more = {pid for pid, parent in parents.items() if parent in mine} - mine
        if not more:
            return mine - {os.getpid()}
        mine |= more


def command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def kill_one(name, killed, enough=lambda: True):
    """Kill the first process below this one whose command line has `name` in it, when there is `enough`."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        victims = [pid for pid in children() if name in command(pid)]
        if victims and enough():
            time.sleep(1.0)
            os.kill(victims[0], signal.SIGKILL)
            killed.append(victims[0])
            return
        time.sleep(0.02)


def table(path):
    with Store(path, read_only=True) as store:
        return {info.id: store.records(info.id) for info in store.runs() if info.status == "finished"}


def assert_same_table(a, b):
    a, b = table(a), table(b)
    assert set(a) == set(b)
    assert len(a) == 8
    for run in a:
        assert same(a[run], b[run])


@pytest.mark.slow
def test_a_killed_process_loses_nothing(tmp_path):
    killed = []
    thread = threading.Thread(target=kill_one, args=("spawn_main", killed))
    plan = make_plan(SWEEP, tmp_path / "a.sqlite", stack=2, measure=False)
    thread.start()
    done = conduct(plan, tmp_path / "a.sqlite", engine=Local(2))
    thread.join()
    assert killed
    assert {each.status for each in done.outcomes.values()} == {"finished"}
    conduct(make_plan(SWEEP, tmp_path / "b.sqlite", measure=False), tmp_path / "b.sqlite", engine=Local(1))
    assert_same_table(tmp_path / "a.sqlite", tmp_path / "b.sqlite")


@pytest.mark.slow
def test_ray_gives_the_same_table_and_loses_nothing_with_a_worker(tmp_path):
    """A local cluster of two workers, one of them killed while it works."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'fedlaw[ray]'")
    from fedlaw.experiments.engines.ray import Ray

    killed = []
    thread = threading.Thread(target=kill_one, args=("ray::_work", killed))
    plan = make_plan(SWEEP, tmp_path / "a.sqlite", stack=2, measure=False)
    thread.start()
    done = conduct(plan, tmp_path / "a.sqlite", engine=Ray(cpus=2))
    thread.join()
    assert killed, "no worker was seen at work"
    assert {each.status for each in done.outcomes.values()} == {"finished"}
    local = make_plan(SWEEP, tmp_path / "b.sqlite", measure=False)
    conduct(local, tmp_path / "b.sqlite", engine=Local(1))
    assert_same_table(tmp_path / "a.sqlite", tmp_path / "b.sqlite")


def test_rays_work_is_a_whole_store(tmp_path):
    """What a task sends home, without a cluster: the outcomes and a file that merges."""
    from fedlaw.experiments.engines.ray import _work
    from fedlaw.results.merge import merge

    experiment = Experiment(clients=20, rounds=2, examples=300, rule="mean")
    outcomes, data = _work([experiment], Execution())
    (tmp_path / "home.sqlite").write_bytes(data)
    assert merge([tmp_path / "home.sqlite"], tmp_path / "a.sqlite").added == 1
    assert [each.status for each in outcomes] == ["finished"]
    with Store(tmp_path / "a.sqlite", read_only=True) as store:
        assert store.find(experiment.id).status == "finished"
