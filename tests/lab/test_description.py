"""Descriptions: equal when they mean the same, different when they do not, and refused in one line."""

from __future__ import annotations

import inspect
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlaw import aggregators, attacks, data
from fedlaw.experiments.description import DescriptionError, Execution, Experiment
from fedlaw.server import BSUM, FedLAW, OnePhase, Oracle


def settings_of_rule(name: str) -> dict[str, Any]:
    """The least that makes `name` a rule for 20 clients."""
    required = {"f": 2, "radius": 1.0, "tau": 1.0, "size": 2}
    taken = aggregators.registry.settings(name)
    return {key: value for key, value in required.items() if key in taken and not defaulted(name, key)}


def defaulted(name: str, key: str) -> bool:
    return (
        inspect.signature(aggregators.registry.factory(name)).parameters[key].default
        is not inspect.Parameter.empty
    )


def every_rule() -> list[Any]:
    specs: list[Any] = ["fedlaw", "bsum", "oracle", {"name": "fedlaw", "preset": "paper"}]
    for name in aggregators.names():
        if name == "chain":
            specs.append([{"name": "bucketing", "size": 2}, {"name": "clip"}, "median"])
            continue
        spec = {"name": name, **settings_of_rule(name)}
        specs.append([spec, "median"] if hands_rows_on(name) else spec)
    return specs


def hands_rows_on(name: str) -> bool:
    factory = aggregators.registry.factory(name)
    return isinstance(factory, type) and issubclass(factory, aggregators.PreAggregator)


# ---------------------------------------------------------------------------------------- one meaning, one id
def test_an_id_is_pinned() -> None:
    """A change here is a change of what ids mean: raise VERSION with it, and say so in the change log."""
    assert Experiment(rule="mean", attack="label_flip", malicious=0.2).id == "09baa323551db01dfef993d3"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"attack": "lie"}, {"attack": {"name": "lie"}}),
        ({"attack": "flip"}, {"attack": "label_flip"}),
        ({"attack": {"name": "ipm", "epsilon": 1}}, {"attack": {"epsilon": 1.0, "name": "ipm"}}),
        (
            {"attack": {"name": "lie", "start": 5}},
            {"attack": {"name": "schedule", "attack": "lie", "start": 5}},
        ),
        ({"attack": attacks.LIE(z=1.0)}, {"attack": {"name": "lie", "z": 1}}),
        ({"clients": 30, "malicious": 0.4}, {"clients": 30, "malicious": 12}),
        ({"malicious": 0}, {"malicious": 0.0}),
        ({"malicious": 0, "malicious_choice": "random"}, {}),
        ({"malicious": [3, 1]}, {"malicious": (1, 3), "malicious_choice": "random"}),
        ({"q": 0.9}, {"partition_settings": {"q": 0.9}}),
        ({"q": 1}, {"q": 1.0}),
        ({"preset": "hardened"}, {"rule": "fedlaw"}),
        ({"preset": "paper"}, {"rule": {"name": "fedlaw", "preset": "paper", "attackers": 0.4}}),
        ({"rule": "fedlaw"}, {"rule": {"name": "fedlaw", "decay": 0.95, "refresh_period": 0}}),
        ({"rule": ["median"]}, {"rule": {"name": "median", "unit": "gradient"}}),
        ({"rule": ["clip", "mean"]}, {"rule": {"name": "chain", "stages": [{"name": "clip"}, "mean"]}}),
        ({"rule": aggregators.Krum(f=3)}, {"rule": {"f": 3, "name": "krum"}}),
        ({"rule": {"name": "krum", "f": 3, "neighbors": "none"}}, {"rule": {"name": "krum", "f": 3}}),
        ({"model_settings": {"hidden": (128, 64)}}, {}),
        ({"split": [0.8, 0.1, 0.1]}, {}),
        ({"lr": 1}, {"lr": 1.0}),
        ({"seed": 0}, {"version": 1}),
    ],
)
def test_equivalent_spellings_have_one_id(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert Experiment(**one).canonical() == Experiment(**other).canonical()
    assert Experiment(**one).id == Experiment(**other).id
    assert Experiment(**one) == Experiment(**other)
    assert hash(Experiment(**one)) == hash(Experiment(**other))


def test_every_setting_is_part_of_the_id() -> None:
    changes: list[dict[str, Any]] = [
        {"dataset": "mnist"}, {"examples": 500}, {"split": (0.7, 0.2, 0.1)}, {"scaling": "unit"},
        {"model": "logistic"}, {"model_settings": {"hidden": [32]}}, {"clients": 21}, {"partition": "iid"},
        {"q": 0.9}, {"attack": "lie"}, {"malicious": 0.2}, {"malicious": [0, 1]}, {"rule": "median"},
        {"preset": "paper"}, {"rule": {"name": "fedlaw", "decay": 0.9}}, {"rule": {"name": "median", "unit":
        "parameter"}}, {"rounds": 99}, {"epochs": 2}, {"batch_size": 8}, {"lr": 0.01},
        {"loss_point": "before"}, {"participation": 0.5}, {"dropout": 0.1}, {"evaluate_every": 2}, {"seed": 1},
        {"malicious": 0.2, "malicious_choice": "random"}, {"malicious": 5},
        {"rule": {"name": "krum", "f": 2, "neighbors": 1}},
        {"rule": {"name": "krum", "f": 2, "neighbors": 1.0}},
    ]  # fmt: skip
    ids = [Experiment(**change).id for change in changes]
    assert len(set(ids)) == len(ids)
    assert Experiment().id not in ids
    touched = {key for change in changes for key in change}
    untouched = set(Experiment.model_fields) - touched - {"dataset_settings", "partition_settings", "attack"}
    assert not untouched


@given(st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_matter(rng: random.Random) -> None:
    canonical = Experiment(clients=30, malicious=0.4, attack="double", preset="paper").canonical()

    def shuffled(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        keys = list(value)
        rng.shuffle(keys)
        return {key: shuffled(value[key]) for key in keys}

    assert Experiment(**shuffled(canonical)).id == Experiment(**canonical).id


@pytest.mark.parametrize("spec", every_rule(), ids=str)
def test_every_rule_survives_its_own_description_and_toml(spec: Any, tmp_path: Path) -> None:
    experiment = Experiment(rule=spec)
    json.dumps(experiment.canonical(), allow_nan=False)
    assert Experiment(**experiment.canonical()).id == experiment.id
    path = tmp_path / "run.toml"
    path.write_text(experiment.to_toml())
    assert Experiment.from_toml(path) == experiment


@pytest.mark.parametrize("name", attacks.names())
def test_every_attack_survives_its_own_description_and_toml(name: str, tmp_path: Path) -> None:
    experiment = Experiment(attack=name, malicious=0.2)
    assert Experiment(**experiment.canonical()).id == experiment.id
    path = tmp_path / "run.toml"
    path.write_text(experiment.to_toml())
    assert Experiment.from_toml(path) == experiment
    assert attacks.parse(experiment.attack) == attacks.parse(name)


@pytest.mark.parametrize("name", data.partitions.names())
def test_every_partition_can_be_described(name: str) -> None:
    experiment = Experiment(partition=name)
    assert Experiment(**experiment.canonical()).id == experiment.id


def test_a_setting_of_none_survives_toml(tmp_path: Path) -> None:
    experiment = Experiment(rule={"name": "fedlaw", "preset": "paper", "weight_rounds": None, "clip": None})
    assert experiment.rule["clip"] is None
    assert experiment.id != Experiment(preset="paper").id
    (tmp_path / "a.toml").write_text(experiment.to_toml())
    assert Experiment.from_toml(tmp_path / "a.toml") == experiment


# ---------------------------------------------------------------------------------------- what it makes
def test_the_server_is_the_one_described() -> None:
    params = torch.zeros(3)
    fedlaw = Experiment(rounds=50, lr=0.1, clients=30, seed=7, participation=0.5).server(params)
    assert isinstance(fedlaw, FedLAW)
    assert (fedlaw.settings.rounds, fedlaw.settings.alpha, fedlaw.settings.seed) == (50, 0.1, 7)
    assert (fedlaw.n, fedlaw.judge.judged_rounds) == (30, 30)
    assert isinstance(Experiment(rule="bsum").server(params), BSUM)
    oracle = Experiment(rule="oracle").server(params, malicious=[0, 2])
    assert isinstance(oracle, Oracle)
    assert oracle.ask().clients[:2] == (1, 3)
    chain = Experiment(rule=["clip", {"name": "krum", "f": 4}]).server(params)
    assert isinstance(chain, OnePhase)
    assert chain.rule == aggregators.parse(["clip", {"name": "krum", "f": 4}])


def test_nothing_in_it_can_be_set() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Experiment().rounds = 3


def test_what_the_caller_does_with_its_dictionaries_does_not_matter() -> None:
    settings = {"hidden": [8]}
    experiment = Experiment(model_settings=settings)
    settings["hidden"].append(9)
    assert experiment.model_settings == {"hidden": [8]}


# ---------------------------------------------------------------------------------------- files and overrides
def test_overrides_go_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'clients = 30\nmalicious = 0.4\nq = 0.6\nattack = {name = "lie", z = 1}\n'
        '[rule]\nname = "krum"\nf = 12\n'
    )
    assert Experiment.from_toml(path).rule["f"] == 12
    changed = Experiment.from_toml(path, q=0.9, rule="median", seed=4)
    assert (changed.partition_settings, changed.rule_name, changed.seed) == ({"q": 0.9}, "median", 4)
    assert Experiment.from_toml(path, preset="paper").rule["preset"] == "paper"
    other = Experiment.from_toml(path, partition="iid", malicious_choice="random")
    assert other.partition_settings == {}


def test_a_file_that_is_not_there_or_not_toml_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DescriptionError, match=r"cannot read .*nowhere\.toml"):
        Experiment.from_toml(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("clients = = 3")
    with pytest.raises(DescriptionError, match=r"bad\.toml is not a TOML file"):
        Experiment.from_toml(tmp_path / "bad.toml")


def test_replace_validates_anew() -> None:
    base = Experiment(clients=30, malicious=0.4)
    assert base.replace(clients=60).malicious_count == 24
    with pytest.raises(DescriptionError, match="epochs"):
        base.replace(epochs=0)


# ---------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clients": 0}, ["clients", "1"]),
        ({"clinets": 3}, ["clinets", "clients"]),
        ({"malicious": 1.2}, ["malicious", "1.2", "under 1"]),
        ({"malicious": 1.0}, ["malicious", "under 1"]),
        ({"malicious": 20}, ["malicious", "19"]),
        ({"malicious": [20]}, ["malicious", "19"]),
        ({"malicious": [1, 1]}, ["malicious", "different"]),
        ({"malicious": list(range(20))}, ["malicious", "honest"]),
        ({"malicious": "half"}, ["malicious", "half"]),
        ({"rule": "krm"}, ["krm", "krum", "fedlaw"]),
        ({"rule": "krum"}, ["'f'", "--rule-set f="]),
        ({"rule": {"name": "krum", "g": 1}}, ["'g'", "f, neighbors"]),
        ({"clients": 10, "rule": {"name": "krum", "f": 4}}, ["krum", "11", "10", "lower f"]),
        ({"rule": {"name": "krum", "f": 8}, "participation": 0.5}, ["19", "10", "participation"]),
        ({"rule": {"name": "fedlaw", "preset": "paper", "cap": 0.01}}, ["sparsity * cap", "0.01", "raise"]),
        ({"rule": {"name": "fedlaw", "preset": "paper", "sparsity": 30}}, ["sparsity", "30"]),
        ({"rule": {"name": "fedlaw", "judged_rounds": 101}}, ["judged_rounds", "100"]),
        ({"rule": {"name": "fedlaw", "judged_rounds": "many"}}, ["judged_rounds", "integer", "many"]),
        ({"rule": {"name": "fedlaw", "beta": 0.1}}, ["beta", "Core"]),
        ({"preset": "papr"}, ["papr", "paper"]),
        ({"preset": "paper", "rule": "mean"}, ["preset", "fedlaw", "mean"]),
        ({"rule": {"name": "mean", "alpha": 0.1}}, ["alpha", "lr"]),
        ({"rule": "clip"}, ["clip", "pre-aggregator"]),
        ({"rule": ["clip", "fedlaw"]}, ["fedlaw", "chain"]),
        ({"rule": {"name": "mean", "minimum_replies": 30}}, ["minimum_replies", "20"]),
        ({"attack": "li"}, ["li", "lie"]),
        ({"attack": {"name": "lie", "zz": 1}}, ["zz", "z, statistics"]),
        ({"attack": {"name": "ipm", "epsilon": "much"}}, ["epsilon", "much"]),
        ({"q": 1.5}, ["q", "1.5"]),
        ({"q": "x"}, ["q must be a number"]),
        ({"q": 0.5, "partition_settings": {"q": 0.6}}, ["q", "twice"]),
        ({"partition": "dirichlet", "malicious": 0.2}, ["malicious_choice", "random"]),
        ({"partition": "x"}, ["partition", "q_groups"]),
        ({"dataset": "minst"}, ["minst", "mnist"]),
        ({"dataset_settings": {"data_dir": "x"}}, ["data_dir", "--data-dir"]),
        ({"model": "cn"}, ["cn", "cnn"]),
        ({"model": "nowhere_at_all:net"}, ["nowhere_at_all", "install"]),
        ({"model_settings": {"hiden": [2]}}, ["hiden", "hidden"]),
        ({"split": (0.8, 0.3, 0.1)}, ["split", "at most 1"]),
        ({"split": (0.8, 0.2, 0.0)}, ["split", "test"]),
        ({"split": (1, 2)}, ["split", "three"]),
        ({"examples": 5}, ["examples", "20"]),
        ({"lr": float("nan")}, ["lr", "nan"]),
        ({"rounds": 2.5}, ["rounds", "2.5"]),
        ({"scaling": "x"}, ["scaling", "standard"]),
        ({"seed": -1}, ["seed", "-1"]),
        ({"dropout": 1.0}, ["dropout", "less than 1"]),
        ({"version": 99}, ["version", "99"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_bad_setting_is_one_line_that_names_it(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DescriptionError) as caught:
        Experiment(**settings)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_counts_of_examples_are_a_split_too() -> None:
    assert Experiment(split=(1500, 0, 297)).canonical()["split"] == [1500, 0, 297]


def test_a_model_by_import_path_is_checked_and_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ownnets.py").write_text("def net(classes, width=4):\n    raise AssertionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert Experiment(model="ownnets:net", model_settings={"width": 8}).model_settings == {"width": 8}
    with pytest.raises(DescriptionError, match="'depth'; it takes: width"):
        Experiment(model="ownnets:net", model_settings={"depth": 8})


def test_execution_is_checked_and_apart() -> None:
    assert Execution(device="cuda:1", data_dir="x").data_dir == Path("x")
    for bad in ({"device": "gpu"}, {"backend": "fast"}, {"threads": 0}, {"checkpoint_seconds": -1}):
        with pytest.raises(DescriptionError, match=next(iter(bad))):
            Execution(**bad)
    with pytest.raises(DescriptionError, match="unknown setting 'backend'"):
        Experiment(backend="auto")
