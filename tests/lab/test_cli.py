"""The command: what it runs, what it prints, and that a mistake is one line and exit code 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlaw import __version__, aggregators, attacks, cli, cli_run, cli_show, data, models
from fedlaw.experiments import _specs, demo, runner
from fedlaw.experiments.description import Execution, Experiment
from fedlaw.results import RoundRecord, RunInfo, Store, load
from fedlaw.server import PRESETS

SMALL = ["--rounds", "3", "--examples", "300", "--clients", "6", "--rule", "mean", "--epochs", "1"]


class Told:
    """Exit code and what was printed."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def fedlaw(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command, called in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLAW_DATA", raising=False)

    def call(*arguments: str) -> Told:
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        printed = capsys.readouterr()
        return Told(int(ended.value.code or 0), printed.out, printed.err)

    return call


# ---------------------------------------------------------------------------------------- runs
def test_a_run_is_recorded_shown_listed_and_drawn(fedlaw: Any, tmp_path: Path) -> None:
    told = fedlaw("run", *SMALL, "--malicious", "2", "--attack", "label_flip")
    assert (told.code, told.err) == (0, "")
    assert "round 3/3" in told.out
    assert "weight on attackers" in told.out
    for words in ("test accuracy", "communication rounds", "sent by clients"):
        assert words in told.out
    frame = load(tmp_path / "fedlaw.sqlite")
    assert frame["round"].tolist() == [1, 2, 3]
    assert set(frame["attack"]) == {"label_flip"}
    run = frame["run"].iloc[0]
    listed = fedlaw("results").out
    assert run[:8] in listed
    assert "2/6 label_flip" in listed
    shown = fedlaw("results", "show", run[:6]).out
    assert run in shown
    assert f"{frame['test_accuracy'].iloc[-1]:.1%}" in shown
    assert fedlaw("plot", "last", "-o", "a.png").code == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_is_shown_and_not_run_again(
    fedlaw: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fedlaw("run", *SMALL)
    before = load(tmp_path / "fedlaw.sqlite")["seconds"].tolist()
    told = fedlaw("run", *SMALL)
    assert told.code == 0
    assert "finished already" in told.out
    assert "test accuracy" in told.out
    assert load(tmp_path / "fedlaw.sqlite")["seconds"].tolist() == before


def test_flags_a_file_and_python_mean_the_same_run(fedlaw: Any, tmp_path: Path) -> None:
    flags = [
        *("--clients", "30", "--malicious", "0.4", "--attack", "lie", "--attack-set", "z=1.0", "--q", "0.9"),
        *("--rule", "krum", "--rule-set", "f=12", "--model-set", "hidden=32,16", "--split", "0.7,0.1,0.2"),
    ]
    one = Experiment(
        clients=30,
        malicious=0.4,
        attack={"name": "lie", "z": 1.0},
        q=0.9,
        rule={"name": "krum", "f": 12},
        model_settings={"hidden": [32, 16]},
        split=(0.7, 0.1, 0.2),
    )
    described = fedlaw("run", *flags, "--describe")
    assert described.code == 0
    assert one.id in described.out
    (tmp_path / "run.toml").write_text(described.out)
    assert Experiment.from_toml(tmp_path / "run.toml") == one
    assert fedlaw("run", "run.toml", "--describe").out == described.out
    changed = fedlaw("run", "run.toml", "--seed", "3", "--rule-set", "f=10", "--describe").out
    assert one.replace(seed=3, rule={"name": "krum", "f": 10}).id in changed
    assert list(tmp_path.glob("*.sqlite")) == []


@pytest.mark.parametrize(
    ("base", "flags", "expected"),
    [
        ('preset = "paper"', {"rule_set": ["beta=0.1"]},
         {"rule": {"name": "fedlaw", "preset": "paper", "beta": 0.1}}),
        ('rule = "mean"', {"preset": "paper"}, {"preset": "paper"}),
        ('rule = {name = "krum", f = 3}', {"rule": "median"}, {"rule": "median"}),
        ("q = 0.9", {"partition": "dirichlet", "partition_set": ["alpha=1"]},
         {"partition": "dirichlet", "partition_settings": {"alpha": 1.0}}),
        ("", {"rule_set": ["judged_rounds=7"]}, {"rule": {"name": "fedlaw", "judged_rounds": 7}}),
        ("", {"rule": '[{name = "bucketing", size = 2}, "median"]'},
         {"rule": [{"name": "bucketing", "size": 2}, "median"]}),
        ("", {"malicious": "0,3,5"}, {"malicious": [0, 3, 5]}),
        ("", {"attack": "sleeper", "attack_set": ["rounds=5", "attack=lie"], "malicious": "2"},
         {"attack": {"name": "sleeper", "rounds": 5, "attack": "lie"}, "malicious": 2}),
        ("", {"preset": "paper", "rule_set": ["weight_rounds=none"]},
         {"rule": {"name": "fedlaw", "preset": "paper", "weight_rounds": None}}),
    ],
)  # fmt: skip
def test_flags_go_before_the_file(
    tmp_path: Path, base: str, flags: dict[str, Any], expected: dict[str, Any]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(base)
    assert cli_run.experiment_from(path, flags) == Experiment(**expected)


def test_what_the_run_is_told_besides_its_description(
    fedlaw: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: dict[str, Any] = {}

    def stand_in(experiment: Experiment, **given: Any) -> runner.RunResult:
        seen.update(given, experiment=experiment)
        return runner.RunResult(experiment.id, experiment, "finished", [], {}, {"test_accuracy": 0.5})

    monkeypatch.setattr(runner, "run", stand_in)
    told = fedlaw(
        *("run", "--resume", "--data-dir", "here", "--backend", "vmap", "--threads", "1", "--device", "auto"),
        *("--store", "mine.sqlite", "--checkpoint-seconds", "2"),
    )
    assert told.code == 0
    assert "50.0%" in told.out
    assert seen["resume"] is True
    assert seen["store"] == Path("mine.sqlite")
    assert seen["execution"] == Execution(
        data_dir="here", backend="vmap", threads=1, device="auto", checkpoint_seconds=2.0
    )
    assert seen["experiment"] == Experiment()


def stopped(folder: Path, flags: list[str], by: signal.Signals) -> tuple[int, str]:
    """A run in a process of its own, sent a signal as soon as it shows a round; exit code and stderr."""
    process = subprocess.Popen(
        [sys.executable, "-m", "fedlaw", "run", *flags],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # Whatever started the tests in the background may have had them ignore it, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    while not process.stdout.readline().startswith("round"):
        assert process.poll() is None
    process.send_signal(by)
    _, err = process.communicate()
    return process.returncode, err


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_killed_and_interrupted_a_run_resumes_to_the_same_result(fedlaw: Any, tmp_path: Path) -> None:
    # Long enough that it is still going when a busy machine gets to reading its first line.
    flags = ["--rounds", "900", "--examples", "300", "--clients", "6", "--rule", "mean", "--epochs", "1"]
    flags += ["--checkpoint-seconds", "0"]

    def left() -> RunInfo:
        with Store(tmp_path / "fedlaw.sqlite", read_only=True) as store:
            return store.resolve("last")

    code, err = stopped(tmp_path, flags, signal.SIGKILL)
    assert (code, err, left().status) == (-signal.SIGKILL, "", "interrupted")
    killed = left().done
    code, err = stopped(tmp_path, [*flags, "--resume"], signal.SIGINT)
    assert code == 130
    assert err.startswith("fedlaw: interrupted after round")
    assert err.rstrip().endswith(" ".join(["fedlaw run", *flags, "--resume"]))
    assert left().status == "interrupted"
    assert 0 < killed < left().done < 900
    again = left().done + 1
    told = fedlaw("run", *flags, "--resume")
    assert told.code == 0
    assert f"from round {again} on" in told.out
    assert fedlaw("run", *flags, "--store", "whole.sqlite").code == 0
    a, b = (load(tmp_path / name) for name in ("fedlaw.sqlite", "whole.sqlite"))
    same = ["round", "test_accuracy", "test_loss", "validation_loss", "epsilon", "bytes_up"]
    assert a[same].equals(b[same])


# ---------------------------------------------------------------------------------------- lists and others
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("rules", [*_specs.SERVERS, *aggregators.names()]),
        ("attacks", attacks.names()),
        ("datasets", data.datasets.names()),
        ("models", models.registry.names()),
        ("partitions", data.partitions.names()),
        ("presets", PRESETS),
    ],
)
def test_lists_have_one_line_each(fedlaw: Any, kind: str, names: Any) -> None:
    lines = fedlaw("list", kind).out.splitlines()
    assert sorted(line.split()[0] for line in lines) == sorted(names)
    assert all(len(line.split()) > 2 for line in lines)


def test_version_and_help(fedlaw: Any) -> None:
    assert fedlaw("--version").out.strip() == f"fedlaw {__version__}"
    told = fedlaw("--help")
    assert told.code == 0
    for command in ("run", "list", "data", "results", "plot", "demo"):
        assert command in told.out
    assert "Usage" in fedlaw().out


def test_every_setting_has_a_flag() -> None:
    import inspect

    flags = set(inspect.signature(cli_run.run).parameters)
    settings = {name.replace("_settings", "_set") for name in Experiment.model_fields}
    assert settings | {"q", "preset", "rule_set", "attack_set"} <= flags
    assert set(Execution.model_fields) <= flags


def test_a_download_is_passed_on(fedlaw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, data_dir: Path | None, progress: Any) -> Path:
        progress("a.gz", 0, 2_000_000)
        progress("a.gz", 2_000_000, 2_000_000)
        assert (name, data_dir) == ("mnist", Path("x"))
        return Path("x/MNIST")

    monkeypatch.setattr(data, "download", download)
    told = fedlaw("data", "get", "mnist", "--data-dir", "x")
    assert told.out.splitlines() == ["a.gz: 2.0 MB", "mnist is in x/MNIST"]


def test_bytes_for_people() -> None:
    assert [cli_show.size(n) for n in (0, 999, 1000, 10**9, 10**13)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.0 GB",
        "10.0 TB",
    ]


# ---------------------------------------------------------------------------------------- mistakes
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--clients", "0"], ["clients", "0"]),
        (["run", "--malicious", "1.5"], ["malicious", "1.5", "under 1"]),
        (["run", "--rule", "krm"], ["krm", "krum"]),
        (["run", "--rule", "krum"], ["'f'", "--rule-set f="]),
        (["run", "--rule-set", "f"], ["--rule-set", "NAME=VALUE"]),
        (["run", "--preset", "paper", "--rule-set", "cap=0.001"], ["sparsity * cap", "0.001", "raise cap"]),
        (["run", "--dataset", "mnist"], ["mnist", "--data-dir", "fedlaw data get"]),
        (["run", "--dataset", "mnist", "--data-dir", "empty"], ["mnist", "empty", "--data-dir"]),
        (["run", "--store", "nowhere/a.sqlite", "--rounds", "1"], ["--store", "nowhere"]),
        (["run", "--store", "not_ours.txt", "--rounds", "1"], ["--store", "not_ours.txt", "another file"]),
        (["run", "--rounds", "many"], ["--rounds", "many"]),
        (["run", "--examples", "2000", "--rounds", "1"], ["examples", "1438", "2000"]),
        (["run", "nofile.toml"], ["nofile.toml"]),
        (["run", "--frob"], ["--frob"]),
        (["run", "--device", "gpu"], ["device", "cuda"]),
        (["run", "--model", "nowhere_at_all:net"], ["nowhere_at_all"]),
        (["frob"], ["frob", "--help"]),
        (["list", "frob"], ["frob", "rules"]),
        (["results"], ["fedlaw.sqlite", "fedlaw run"]),
        (["results", "show", "last", "--store", "not_ours.txt"], ["not_ours.txt"]),
        (["plot", "last"], ["fedlaw.sqlite"]),
        (["data", "get", "digits"], ["digits", "scikit-learn"]),
        (["demo", "--clients", "0"], ["clients", "0"]),
        (["demo", "--attack", "frob"], ["frob"]),
    ],
    ids=lambda value: " ".join(value[:4]),
)
def test_a_mistake_is_one_line_and_leaves_nothing(
    fedlaw: Any, tmp_path: Path, arguments: list[str], words: list[str]
) -> None:
    (tmp_path / "not_ours.txt").write_text("mine")
    told = fedlaw(*arguments)
    assert told.code == 2
    assert told.out == ""
    assert told.err.startswith("fedlaw: ")
    assert told.err.count("\n") == 1
    for word in words:
        assert word in told.err
    assert [path.name for path in tmp_path.iterdir()] == ["not_ours.txt"]
    assert (tmp_path / "not_ours.txt").read_text() == "mine"


def test_debug_shows_where_a_mistake_came_from(fedlaw: Any) -> None:
    with pytest.raises(ValueError, match="clients"):
        cli.main(["run", "--clients", "0", "--debug"])


def test_a_warning_is_one_line(fedlaw: Any) -> None:
    told = fedlaw("run", "--clients", "6", "--rounds", "1", "--examples", "200")
    assert told.code == 0
    assert told.err.startswith("fedlaw: note: core judging was measured with 20 clients or more")
    assert told.err.count("\n") == 1


def test_what_the_command_needs_is_named(fedlaw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fedlaw.cli_app", None)
    monkeypatch.delitem(sys.modules, "fedlaw.cli_app")
    monkeypatch.setitem(sys.modules, "typer", None)
    told = fedlaw("--version")
    assert told.code == 2
    assert "pip install 'fedlaw[lab]'" in told.err


# ---------------------------------------------------------------------------------------- the demonstration
def test_the_demonstration_runs_prints_and_draws(fedlaw: Any, tmp_path: Path) -> None:
    told = fedlaw("demo", "--rounds", "4", "--clients", "20", "--output", "out")
    assert told.code == 0
    for name in ("FedAvg", "Krum", "FedLAW"):
        assert name in told.out
    assert "With 8 of 20 clients attacking" in told.out
    assert (tmp_path / "out" / demo.PICTURE).read_bytes().startswith(b"\x89PNG")


def test_side_by_side_is_what_each_run_is_alone() -> None:
    described = demo.experiments(seed=1, rounds=3, clients=20)
    together = demo.side_by_side(described)
    alone = runner.run(described["Krum"])
    assert together["Krum"].summary["test_accuracy"] == alone.summary["test_accuracy"]
    for a, b in zip(together["Krum"].records, alone.records, strict=True):
        assert (a.test_loss, a.validation_loss) == (b.test_loss, b.validation_loss)
    malicious = [result.setup["malicious"] for result in together.values()]
    assert all((each == malicious[0]).all() for each in malicious)


def fake(accuracy: float, found: tuple[int, int] | None = None) -> runner.RunResult:
    experiment = Experiment(clients=30, malicious=0.4, attack="lie", rounds=9)
    counts = {} if found is None else {"true_positives": found[0], "false_positives": found[1]}
    record = RoundRecord(round=9, phases=1, **counts)
    setup = {"malicious": np.arange(30) < 12}
    return runner.RunResult("x", experiment, "finished", [record], setup, {"test_accuracy": accuracy})


def test_the_verdict_says_what_the_figures_say() -> None:
    good = demo.verdict({"FedAvg": fake(0.4), "FedLAW": fake(0.9, (11, 2))})
    assert "With 12 of 30 clients attacking (lie), after 9 rounds: FedLAW 90.0%, FedAvg 40.0%." in good
    assert "FedLAW is ahead of FedAvg by 50 points." in good
    assert "FedLAW shut out 11 of the 12 attackers and 2 of the 18 honest clients." in good
    bad = demo.verdict({"FedAvg": fake(0.9), "FedLAW": fake(0.4, (0, 9))})
    assert "FedAvg is ahead of FedLAW by 50 points." in bad
    assert "0 of the 12 attackers and 9 of the 18" in bad
    assert "within a point" in demo.verdict({"A": fake(0.9), "B": fake(0.901)})


def test_the_same_command_goes_on_after_an_interruption(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --resume too: nothing that was saved is thrown away by typing the command again."""

    class Stop(runner.Callback):
        def on_round(self, record: RoundRecord) -> None:
            if record.round == 3:
                raise KeyboardInterrupt

    store = tmp_path / "s.sqlite"
    with pytest.raises(KeyboardInterrupt):
        runner.run(Experiment(rounds=5, examples=300, rule="mean"), store=store, callbacks=[Stop()])
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "--rounds", "5", "--examples", "300", "--rule", "mean", "--store", str(store)])
    assert end.value.code == 0
    said = capsys.readouterr()
    assert "going on where it was saved" in said.err
    assert f"--store {store}" in said.out
    with pytest.raises(SystemExit):
        cli.main(["results", "--store", str(store), "show", "last"])
    assert "finished" in capsys.readouterr().out


def test_what_is_hardly_meant_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = str(tmp_path / "s.sqlite")
    common = ["run", "--rounds", "1", "--examples", "300", "--store", store]
    with pytest.raises(SystemExit):
        cli.main([*common, "--attack", "label_flip"])
    said = capsys.readouterr()
    assert "no attackers" in said.err
    assert "attackers found" not in said.out
    with pytest.raises(SystemExit):
        cli.main([*common, "--malicious", "0.4"])
    assert "no attack" in capsys.readouterr().err
