"""Trackers: what TensorBoard's files hold, and what MLflow is told."""

import sys
import types

import pytest

from fedlaw.experiments.runner import run
from fedlaw.experiments.trackers import MLflow, TensorBoard

TINY = {"clients": 20, "rounds": 3, "examples": 300, "model_settings": {"hidden": [8]}, "malicious": 0.3}


def test_tensorboard_files_hold_every_round(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install 'fedlaw[trackers]'")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = run(callbacks=[TensorBoard(tmp_path)], rule="fedlaw", attack="lie", **TINY)
    seen = EventAccumulator(str(tmp_path / result.id))
    seen.Reload()
    accuracy = [(event.step, event.value) for event in seen.Scalars("test_accuracy")]
    assert [step for step, _ in accuracy] == [1, 2, 3]
    assert accuracy[-1][1] == pytest.approx(result.summary["test_accuracy"])
    assert "attacker_weight" in seen.Tags()["scalars"]
    assert "weights" in seen.Tags()["histograms"]


class Client:
    """Takes down what an MLflow client is told."""

    said: list = []  # noqa: RUF012

    def __init__(self, uri):
        self.said.append(("uri", uri))

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        self.said.append(("experiment", name))
        return "7"

    def create_run(self, number, run_name, tags):
        assert number == "7"
        self.said.append(("run", run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="r"))

    def log_param(self, run, name, value):
        self.said.append(("param", name, value))

    def log_metric(self, run, name, value, step=None):
        self.said.append(("metric", name, value, step))

    def set_terminated(self, run, status):
        self.said.append(("end", status))


def test_mlflow_is_told_settings_rounds_and_the_end(monkeypatch):
    tracking = types.ModuleType("mlflow.tracking")
    tracking.MlflowClient = Client
    monkeypatch.setitem(sys.modules, "mlflow", types.ModuleType("mlflow"))
    monkeypatch.setitem(sys.modules, "mlflow.tracking", tracking)
    Client.said.clear()
    result = run(callbacks=[MLflow("mine", tracking_uri="file:x")], rule="median", **TINY)
    assert ("uri", "file:x") in Client.said
    assert ("experiment", "mine") in Client.said
    assert ("run", result.id) in Client.said
    assert ("param", "rule", "median") in Client.said
    steps = [each[3] for each in Client.said if each[:2] == ("metric", "test_accuracy")]
    assert steps == [1, 2, 3]
    assert ("metric", "final.test_accuracy", result.summary["test_accuracy"], None) in Client.said
    assert Client.said[-1] == ("end", "FINISHED")
