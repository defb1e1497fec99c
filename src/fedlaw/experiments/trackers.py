"""Runs followed in TensorBoard and MLflow. A callback is a small class: these are two."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedlaw.experiments.description import Experiment
from fedlaw.experiments.runner import Callback, RunResult
from fedlaw.results import RoundRecord, attacker_weight
from fedlaw.results.frames import flatten

_FIGURES = (
    "test_accuracy",
    "test_loss",
    "validation_accuracy",
    "validation_loss",
    "attack_success",
    "epsilon",
)


def figures(record: RoundRecord, malicious: Any = None) -> dict[str, float]:
    """What is worth following of a round: what was measured of it.

    >>> figures(RoundRecord(round=1, phases=2, test_accuracy=0.5))
    {'test_accuracy': 0.5, 'phases': 2.0, 'answered': 0.0, 'seconds': 0.0}
    """
    found = {name: getattr(record, name) for name in (*_FIGURES, "phases", "answered", "seconds")}
    found["attacker_weight"] = attacker_weight(record.weights, malicious)
    return {name: float(value) for name, value in found.items() if value is not None}


class TensorBoard(Callback):
    """Writes every round's figures, and the weights as a histogram, for TensorBoard.

    Args:
        folder: where; each run has a folder of its own in it, named by its id.

    One is needed for each experiment: ``run_together(..., callbacks=lambda e: [TensorBoard("runs")])``. Needs the
    extra `trackers`.
    """

    def __init__(self, folder: str | os.PathLike[str] = "runs") -> None:
        self.folder = Path(folder)
        self._writer: Any = None

    def on_start(
        self, experiment: Experiment, done_rounds: int, total_rounds: int, setup: dict[str, Any]
    ) -> None:
        """Open the run's folder and write its description."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            raise ImportError("TensorBoard is not there: pip install 'fedlaw[trackers]'") from None
        self._malicious = setup.get("malicious")
        # What an interrupted part wrote after its checkpoint is written again, and shown once.
        self._writer = SummaryWriter(str(self.folder / experiment.id), purge_step=done_rounds + 1)
        self._writer.add_text("description", f"```toml\n{experiment.to_toml()}```", done_rounds)

    def on_round(self, record: RoundRecord) -> None:
        """Write the round."""
        for name, value in figures(record, self._malicious).items():
            self._writer.add_scalar(name, value, record.round)
        if record.weights is not None:
            self._writer.add_histogram("weights", record.weights, record.round)

    def on_end(self, result: RunResult) -> None:
        """Close the run's folder."""
        self._writer.close()


class MLflow(Callback):
    """Logs a run to MLflow: its settings as parameters, every round's figures as metrics, the summary at the end.

    Args:
        experiment_name: under which MLflow files the runs.
        tracking_uri: where they go; None: what MLflow is set to.

    One is needed for each experiment. Needs the package mlflow (extra `mlflow`).
    """

    def __init__(self, experiment_name: str = "fedlaw", *, tracking_uri: str | None = None) -> None:
        self.experiment_name, self.tracking_uri = experiment_name, tracking_uri
        self._client: Any = None

    def on_start(
        self, experiment: Experiment, done_rounds: int, total_rounds: int, setup: dict[str, Any]
    ) -> None:
        """Begin the run under its id."""
        try:
            from mlflow.tracking import MlflowClient
        except ModuleNotFoundError:
            raise ImportError("MLflow is not there: pip install 'fedlaw[mlflow]'") from None
        self._malicious = setup.get("malicious")
        self._client = MlflowClient(self.tracking_uri)
        known = self._client.get_experiment_by_name(self.experiment_name)
        number = known.experiment_id if known else self._client.create_experiment(self.experiment_name)
        made = self._client.create_run(number, run_name=experiment.id, tags={"fedlaw.run": experiment.id})
        self._run = made.info.run_id
        for name, value in flatten(experiment.canonical()).items():
            self._client.log_param(self._run, name, value)

    def on_round(self, record: RoundRecord) -> None:
        """Log the round."""
        for name, value in figures(record, self._malicious).items():
            self._client.log_metric(self._run, name, value, step=record.round)

    def on_end(self, result: RunResult) -> None:
        """Log the summary and end the run."""
        for name, value in result.summary.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._client.log_metric(self._run, f"final.{name}", float(value))
        self._client.set_terminated(self._run, "FINISHED")
