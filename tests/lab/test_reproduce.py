"""The paper's experiments as descriptions: their size, their hyper-parameters, and that the small ones run."""

import pytest

from fedlaw.experiments import reproduce, search
from fedlaw.experiments._files import DescriptionError
from fedlaw.experiments.conduct import conduct, make_plan, run_sweep
from fedlaw.experiments.engines.local import Local
from fedlaw.experiments.sweep import Planned, Sweep
from fedlaw.report.cells import collect, published_values
from fedlaw.report.html import write
from fedlaw.report.tables import tables
from fedlaw.results import Store, notes


@pytest.mark.parametrize("name", reproduce.names())
@pytest.mark.parametrize("scale", reproduce.SCALES)
def test_every_description_is_valid_and_shows_something(name, scale):
    sweep = reproduce.load(name, scale)
    first = sweep.only({"seed": [str(sweep.seeds[0])]}).planned()
    assert first
    assert sweep.show
    if scale == "small":
        assert {each.experiment.dataset for each in first} == {"digits"}
        assert max(each.experiment.clients for each in first) <= 30
        assert sweep.note


def test_the_accuracy_tables_have_the_papers_size_and_cells():
    for dataset in ("mnist", "cifar10", "cifar100"):
        sweep = reproduce.load(f"{dataset}-accuracy")
        beyond = ("FedLAW hardened", "Oracle")
        ours = [
            cell.labels
            for cell in sweep.cells()
            if cell.labels["method"] not in beyond and cell.labels["malicious"]
        ]
        assert len(ours) == 12 * 5 * 2 * 4
        assert len(sweep.seeds) == 5
        look = published_values(sweep.show[0])
        assert all(look(labels, "test_accuracy") is not None for labels in ours)


def test_what_does_not_depend_on_the_attack_is_run_once():
    planned = reproduce.load("mnist-accuracy").planned()
    oracle = [each for each in planned if each.labels["method"] == "Oracle"]
    calm = [each for each in planned if not each.labels["malicious"]]
    assert len(oracle) == 5 * 2 * 4 * 5
    assert len({each.experiment.id for each in oracle}) == 2 * 4 * 5
    assert {each.experiment.attack["name"] for each in calm} == {"none"}
    assert len({each.experiment.id for each in calm}) == 13 * 2 * 5


def test_hyper_parameters_are_the_papers():
    cells = {
        cell.labels["method"]: cell.experiment(0)
        for cell in reproduce.load("mnist-accuracy").cells()
        if cell.labels["malicious"] == 0.4 and cell.labels["q"] == 0.9 and cell.labels["attack"] == "Backdoor"
    }
    fedlaw = cells["FedLAW"]
    assert (fedlaw.clients, fedlaw.rounds, fedlaw.epochs, fedlaw.batch_size, fedlaw.lr) == (
        200,
        200,
        3,
        64,
        0.01,
    )
    assert fedlaw.rule["sparsity"] == 120
    assert fedlaw.rule["weight_rounds"] == 20
    assert cells["Krum"].rule["f"] == 80
    assert cells["Trimmed Mean"].rule["f"] == 80
    bulyan = cells["Bulyan"].rule
    assert (bulyan["selected"], bulyan["neighbors"]) == (40, 118)
    assert cells["RFA"].rule["nu"] == 1e-6
    assert cells["RFA"].rule["iterations"] == 3
    assert cells["CClip-Bucketing"].rule["stages"][0] == {"name": "bucketing", "size": 2}
    cifar = reproduce.load("cifar10-accuracy").cells()[0].experiment(0)
    assert (cifar.rounds, cifar.batch_size) == (400, 16)


def test_the_papers_grids_are_searched():
    sweep = reproduce.load("mnist-accuracy").only({"method": ["Bulyan", "CClip", "Krum"], "q": ["0.9"]})
    sweep = sweep.only({"malicious": ["0.4"], "attack": ["Backdoor"]})
    grids = {cell.labels["method"]: cell for cell in sweep.cells()}
    pools = [grids["Bulyan"].experiment(0, c).rule["selected"] for c in grids["Bulyan"].candidates]
    assert pools == [20, 40, 50]
    assert [grids["CClip"].experiment(0, c).rule["tau"] for c in grids["CClip"].candidates] == [10.0, 0.1]
    assert grids["Krum"].candidates == [{}]
    assert len(search.candidates(sweep)) == 5


def test_unknown_names_and_tables():
    with pytest.raises(DescriptionError, match="nothing is called 'mnist'; there are: ablation, adaptive"):
        reproduce.load("mnist")
    with pytest.raises(DescriptionError, match="scale must be paper or small"):
        reproduce.load("mnist-accuracy", "tiny")
    with pytest.raises(DescriptionError, match="no published table"):
        reproduce.published("../paper/_mnist.toml")


# ------------------------------------------------------------------------------------------ choosing
CHOOSE = {
    "name": "choose",
    "seeds": [0, 1],
    "base": {"clients": 20, "rounds": 4, "examples": 400, "model_settings": {"hidden": [8]}},
    "search": {"rounds": 2, "seeds": [5]},
    "axes": {
        "method": {
            "searched": {"rule": {"name": "centered_clipping"}, "search": {"rule.tau": [1e-6, 100.0]}},
            "fixed": {"rule": "mean"},
        },
        "q": [0.6, 0.9],
    },
}


def test_settings_are_chosen_on_the_validation_split_and_recorded(tmp_path):
    """A radius of nothing learns nothing: the other is chosen, after the set number of rounds, by validation."""
    sweep, store = Sweep.parse(CHOOSE), tmp_path / "a.sqlite"
    tried = search.candidates(sweep)
    assert {(each.experiment.rounds, each.experiment.seed) for each in tried} == {(2, 5)}
    assert len(tried) == 4
    only_search = Sweep.parse({**CHOOSE, "name": "candidates"})
    conduct(make_plan(only_search, store, planned=tried, measure=False), store)
    choices, chosen = search.choose(sweep, store)
    assert [choice.chosen for choice in choices] == [{"rule.tau": 100.0}] * 2
    with Store(store, read_only=True) as opened:
        for choice in choices:
            for each in choice.candidates:
                summary = opened.find(each["runs"][0]).summary
                assert each["validation_accuracy"] == summary["validation_accuracy"]
    final = sweep.planned(chosen)
    taus = [each.experiment.rule.get("tau") for each in final if each.labels["method"] == "searched"]
    assert taus == [100.0] * 4
    recorded = notes.read(store, notes.CHOICE)
    assert len(recorded) == 2
    assert all(each["chosen"] == {"rule.tau": 100.0} for each in recorded.values())


def test_nothing_but_validation_may_decide():
    with pytest.raises(DescriptionError, match=r"search\.by must be validation_accuracy"):
        search.candidates(Sweep.parse({**CHOOSE, "search": {"by": "test_accuracy"}}))


def test_one_choice_for_several_cells(tmp_path):
    sweep = Sweep.parse({**CHOOSE, "search": {"per": ["method"], "rounds": 1, "seeds": [5]}})
    run_sweep(Sweep.parse({"base": {"rounds": 1, "examples": 200}}), tmp_path / "a.sqlite", measure=False)
    choices, _ = search.choose(sweep, tmp_path / "a.sqlite")
    assert [choice.group for choice in choices] == [{"method": "searched"}]
    assert choices[0].chosen == {"rule.tau": 1e-6}  # nothing was run: the first


def test_optuna_finds_what_learns(tmp_path):
    pytest.importorskip("optuna", reason="optuna is not installed: pip install 'fedlaw[search]'")
    from fedlaw.experiments.description import Experiment

    base = Experiment(clients=20, rounds=3, examples=400, rule="centered_clipping")
    space = {"rule.tau": {"low": 1e-6, "high": 100.0, "log": True}, "epochs": [1, 3]}
    settings = {"trials": 4, "store": tmp_path / "a.sqlite"}
    choice = search.optimize(base, space, **settings)
    best = max(each["validation_accuracy"] for each in choice.candidates)
    assert choice.chosen in [e["settings"] for e in choice.candidates if e["validation_accuracy"] == best]
    with Store(tmp_path / "a.sqlite", read_only=True) as opened:
        runs = len(opened.runs())
    assert search.optimize(base, space, **settings).chosen == choice.chosen
    with Store(tmp_path / "a.sqlite", read_only=True) as opened:
        assert len(opened.runs()) == runs  # the same search runs nothing again


# ------------------------------------------------------------------------------------------ whole
def test_a_part_of_the_small_table_end_to_end(tmp_path):
    sweep = reproduce.load("mnist-accuracy", "small").with_base({"rounds": 2})
    sweep = sweep.only({"method": ["FedLAW", "Krum", "Bulyan-Bucketing"], "q": ["0.6"], "malicious": ["0.4"]})
    done = run_sweep(sweep, tmp_path / "a.sqlite", processes=1, measure=False)
    assert not done.failures
    assert any("f is cut" in note for note in done.notes)
    (found,) = collect(tmp_path / "a.sqlite")
    made = tables(found, found.sweep.show[0])
    assert [table.title.split(": ")[1] for table in made] == [*sweep.axes["attack"], "worst over attacks"]
    assert all(entry.mean is not None and entry.published for t in made for _, row in t.rows for entry in row)


@pytest.mark.slow
def test_every_small_description_runs(tmp_path):
    """Three rounds of a few cells of each: every attack, rule and condition that it names is sound."""
    for name in reproduce.names():
        sweep = reproduce.load(name, "small")
        planned = sweep.only({"seed": [str(sweep.seeds[0])]}).planned()
        some = [
            Planned(each.labels, each.experiment.replace(rounds=3))
            for each in planned[:: max(1, len(planned) // 15)]
        ]
        plan = make_plan(sweep, tmp_path / "a.sqlite", planned=some, measure=False)
        assert conduct(plan, tmp_path / "a.sqlite", engine=Local(1)).failures == [], name
    assert len(collect(tmp_path / "a.sqlite")) == len(reproduce.names())
    page = write(tmp_path / "a.sqlite", tmp_path / "report").read_text("utf-8")
    assert page.count("<section") == len(reproduce.names())
