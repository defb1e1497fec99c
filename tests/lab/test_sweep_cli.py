"""The commands of sweeps: what they print, their exit codes, and mistakes in one line."""

import pytest

from fedlaw.cli import main
from fedlaw.cli_conduct import bytes_of
from fedlaw.results import Store, notes

FILE = """
title = "Two rules"
note = "a note"
seeds = 2
[base]
clients = 20
rounds = 2
examples = 300
[axes.method.FedAvg]
rule = "mean"
[axes.method.CClip]
rule = { name = "centered_clipping", tau = 1.0 }
search = { "rule.tau" = [0.000001, 100.0] }
[[show]]
kind = "table"
title = "Accuracy"
rows = "method"
value = "test_accuracy"
"""


@pytest.fixture
def fedlaw(tmp_path, monkeypatch, capsys):
    """Run the command in an empty folder: exit code, what was printed, what was said on stderr."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        out = capsys.readouterr()
        return ended.value.code or 0, out.out, out.err

    (tmp_path / "s.toml").write_text(FILE)
    return call


def test_plan_run_and_nothing_left(fedlaw, tmp_path):
    code, out, _ = fedlaw("sweep", "s.toml", "--plan", "--processes", "1")
    assert code == 0
    assert "Two rules\nnote: a note\nplan: 4 runs, 0 done already, 4 to run in" in out
    assert not (tmp_path / "fedlaw.sqlite").exists()  # a plan writes nothing
    code, out, _ = fedlaw("sweep", "s.toml", "--processes", "1")
    assert code == 0
    assert "8/8 rounds  4/4 runs" in out
    assert "FedAvg" in out
    code, out, _ = fedlaw("sweep", "s.toml", "--processes", "1")
    assert "4 runs, 4 done already, 0 to run" in out
    code, out, _ = fedlaw(
        "sweep", "s.toml", "--processes", "1", "--only", "method=cclip", "--set", "rounds=3"
    )
    assert "plan: 2 runs, 0 done already, 2 to run" in out
    code, out, _ = fedlaw("report", "fedlaw.sqlite", "-o", "page")
    assert code == 0
    assert (tmp_path / "page" / "index.html").is_file()


def test_search_first_then_the_runs_with_what_was_chosen(fedlaw, tmp_path):
    code, out, _ = fedlaw("sweep", "s.toml", "--search", "--processes", "1")
    assert code == 0
    assert "2 runs to choose settings on the validation split" in out
    assert "chosen on the validation split for 1 cells" in out
    (choice,) = notes.read(tmp_path / "fedlaw.sqlite", notes.CHOICE).values()
    assert choice["chosen"] == {"rule.tau": 100.0}
    code, out, _ = fedlaw("report", "fedlaw.sqlite", "-o", "page")
    page = (tmp_path / "page" / "index.html").read_text("utf-8")
    assert "settings chosen on the validation split for 1 cells" in page
    assert "rule.tau = 100.0" in page


def test_a_failure_is_listed_and_the_exit_code_says_so(fedlaw):
    code, out, _ = fedlaw("sweep", "s.toml", "--processes", "1", "--set", "examples=5000")
    assert code == 1
    assert "4 runs failed (--retry tries them again):" in out
    assert "examples must be at most" in out


def test_merge_and_export(fedlaw, tmp_path):
    fedlaw("sweep", "s.toml", "--processes", "1", "--store", "a.sqlite")
    code, out, _ = fedlaw("results", "export", "--compact", "--store", "a.sqlite", "-o", "small.sqlite")
    assert code == 0
    assert out.startswith("small.sqlite: 4 runs, ")
    code, out, _ = fedlaw("results", "merge", "small.sqlite", "a.sqlite", "--into", "home.sqlite")
    assert "4 runs added, 0 replaced" in out or "4 runs added, 4 replaced by more" in out
    with Store(tmp_path / "home.sqlite", read_only=True) as store:
        assert len(store.runs()) == 4
    assert "s" in notes.read(tmp_path / "home.sqlite", notes.SWEEP)


def test_reproduce_lists_what_there_is(fedlaw):
    code, out, _ = fedlaw("reproduce", "--list")
    assert code == 0
    assert {"mnist-accuracy", "detection", "weight-dynamics", "sleeper"} <= {
        line.split()[0] for line in out.splitlines()
    }
    code, out, _ = fedlaw("reproduce", "mnist-accuracy", "--scale", "small", "--plan", "--only", "q=0.6")
    assert "digits (8x8) stand in for MNIST" in out
    assert "plan: 554 runs, 0 done already, 554 to run in" in out
    assert ", about " in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep", "none.toml"], "cannot read none.toml"),
        (["sweep", "s.toml", "--only", "method"], "--only must be AXIS=LABEL"),
        (["sweep", "s.toml", "--only", "rule=x"], "axes of s are method, seed"),
        (["sweep", "s.toml", "--engine", "slurm"], "engine must be local or ray"),
        (["sweep", "s.toml", "--memory", "lots"], "--memory must be a size"),
        (["sweep", "s.toml", "--scale", "big"], "scale 'big' is not described"),
        (["reproduce", "nothing"], "nothing is called 'nothing'"),
        (["report", "none.sqlite"], "there are no results"),
        (["search", "s.toml"], "no table space"),
    ],
)
def test_mistakes_are_one_line(fedlaw, arguments, said):
    code, _, err = fedlaw(*arguments)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_sizes_as_they_are_typed():
    assert bytes_of("1.5GB") == 1.5e9
    assert bytes_of("2GiB") == 2**31
    assert bytes_of("1000") == 1000
