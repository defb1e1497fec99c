"""Running an experiment: build the federation, step it, record every round, survive an interruption."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fedlaw._detection import Detection
from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.lab import Lab, Shelf, stacked
from fedlaw.results import RoundRecord, RunWriter, Store
from fedlaw.server import RoundReport


class Callback:
    """Something that watches a run. Override what you need."""

    def on_start(
        self, experiment: Experiment, done_rounds: int, total_rounds: int, setup: dict[str, Any]
    ) -> None:
        """Before the first round; `done_rounds` were done before, by an interrupted run."""

    def on_round(self, record: RoundRecord) -> None:
        """After every round."""

    def on_end(self, result: RunResult) -> None:
        """After the last round."""


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Attributes:
        id: of the run in the store: the digest of its description.
        experiment: the description.
        status: "finished", or "diverged" where the model's training was no longer finite at the end.
        records: one a round.
        setup: what was fixed before round 1 (who is malicious, client sizes, parameters).
        summary: final accuracy, detection, communication: what the summary table shows.
    """

    id: str
    experiment: Experiment
    status: str
    records: list[RoundRecord]
    setup: dict[str, Any]
    summary: dict[str, Any] = field(default_factory=dict)


def run(
    experiment: Experiment | None = None,
    /,
    *,
    store: str | os.PathLike[str] | None = None,
    execution: Execution | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] = (),
    **settings: Any,
) -> RunResult:
    """Run one experiment.

    Args:
        experiment: its description; without one, `settings` are the description's.
        store: SQLite file to record in; None: nothing is written.
        execution: where the data is, device, backend.
        resume: go on where an interrupted run of the same description stands in the store.
        callbacks: who watches.

    Returns:
        RunResult with a record for every round, those of an earlier, interrupted part included.

    Raises:
        ValueError: a setting that cannot be; AlreadyFinished if the store has the run.
        KeyboardInterrupt: after the run was saved, ready to be resumed.

    >>> result = run(clients=20, rounds=3, rule="median", examples=400)
    >>> result.status, len(result.records)
    ('finished', 3)
    """
    if experiment is None:
        experiment = Experiment(**settings)
    elif settings:
        experiment = experiment.replace(**settings)
    return run_together([experiment], store=store, execution=execution, resume=resume, callbacks=callbacks)[0]


def run_together(
    experiments: Sequence[Experiment],
    *,
    store: str | os.PathLike[str] | None = None,
    execution: Execution | None = None,
    resume: bool = False,
    callbacks: Sequence[Callback] | Callable[[Experiment], Sequence[Callback]] = (),
) -> list[RunResult]:
    """Run experiments of one shape (model, local training) stacked into one program.

    Each ends as it would alone (on a CPU to the last bit). Arguments are those of `run`, but `callbacks` may also
    be a function that gives each experiment callbacks of its own.
    """
    execution = execution or Execution()
    with ExitStack() as opened:
        opened.enter_context(_matmul_precision(execution.precision))
        shelf = Shelf()
        labs = [Lab(each, execution, shelf) for each in experiments]  # what cannot be built leaves no trace
        file = None if store is None else opened.enter_context(Store(store))
        runs = [_Run(lab, file, resume) for lab in labs]
        stack = stacked(labs, execution)
        try:
            for run in runs:
                run.begin(callbacks(run.lab.experiment) if callable(callbacks) else callbacks)
            by_federation = {id(run.lab.federation): run for run in runs}
            while stepped := stack.step():
                for federation, report in stepped:
                    if report is not None:
                        by_federation[id(federation)].note(report)
        except KeyboardInterrupt:
            for run in runs:
                run.interrupt()
            raise
        except Exception as error:
            for run in runs:
                run.fail(error)
            raise
        return [run.finish() for run in runs]


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    """torch's process-wide precision of float32 matrix products, as it was afterwards. CPUs take no notice."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Run:
    """A lab and where its rounds are written down."""

    def __init__(self, lab: Lab, file: Store | None, resume: bool) -> None:
        self.lab = lab
        self.records: list[RoundRecord] = []
        self._saved = time.monotonic()
        self._writer: RunWriter | None = None if file is None else file.begin(lab.experiment, resume=resume)
        if file is None or self._writer is None:
            return
        if self._writer.checkpoint is None:
            self._writer.setup(**lab.setup())
        else:
            lab.federation.server.load(self._writer.checkpoint)
            self.records = file.records(lab.experiment.id)

    def begin(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        experiment = self.lab.experiment
        for each in callbacks:
            each.on_start(experiment, len(self.records), experiment.rounds, self.lab.setup())

    def note(self, report: RoundReport) -> None:
        record = self.lab.record(report)
        self.records.append(record)
        if self._writer is not None:
            self._writer.append(record)
            if time.monotonic() - self._saved >= self.lab.execution.checkpoint_seconds:
                self._writer.save(report.round, self.lab.federation.server.dump())
                self._saved = time.monotonic()
        for each in self._callbacks:
            each.on_round(record)

    def interrupt(self) -> None:
        if self._writer is not None and not self._writer.ended:
            # What was recorded may be one round behind the server: an interruption can come between the two.
            done = len(self.records)
            server = self.lab.federation.server
            if server.round == done + 1:
                self._writer.interrupt(done, server.dump())
            else:
                self._writer.interrupt()

    def fail(self, error: Exception) -> None:
        if self._writer is not None and not self._writer.ended:
            self._writer.fail(f"{type(error).__name__}: {error}")

    def finish(self) -> RunResult:
        summary = summarize(self.lab, self.records)
        if self._writer is not None:
            self._writer.finish(summary)
        experiment = self.lab.experiment
        status = "diverged" if summary["diverged"] else "finished"
        result = RunResult(experiment.id, experiment, status, self.records, self.lab.setup(), summary)
        for each in self._callbacks:
            each.on_end(result)
        return result


def summarize(lab: Lab, records: list[RoundRecord]) -> dict[str, Any]:
    """The figures of a whole run."""
    last = records[-1]
    evaluated = [r for r in records if r.test_accuracy is not None]
    best = max((r.validation_accuracy for r in evaluated if r.validation_accuracy is not None), default=None)
    summary: dict[str, Any] = {
        "test_accuracy": evaluated[-1].test_accuracy,
        "validation_accuracy": evaluated[-1].validation_accuracy,
        "best_validation_accuracy": best,
        "attack_success": evaluated[-1].attack_success,
        "communication_rounds": sum(r.phases for r in records),
        "bytes_up": sum(r.bytes_up for r in records),
        "bytes_down": sum(r.bytes_down for r in records),
        "skipped_rounds": sum(r.skipped is not None for r in records),
        "skipped_why": next((r.skipped for r in reversed(records) if r.skipped), None),
        "refusals": sum(len(r.refusals) for r in records),
        "diverged": lab.federation.diverged,
        "seconds": sum(r.seconds for r in records),
        "notes": [note for r in records for note in r.notes if not note.startswith("training diverged")],
    }
    if last.true_positives is not None:
        found = Detection(
            *(int(getattr(last, f"{a}_{b}") or 0) for a, b in _COUNTS),
        )
        attackers = found.true_positives + found.false_negatives
        summary |= {
            # Without attackers there is nothing to find: no figure rather than a perfect one.
            "recall": found.recall if attackers else None,
            "precision": found.precision if attackers else None,
            "honest_excluded": found.false_exclusion_rate,
            "minority_excluded": last.minority_excluded,
        }
    return summary


_COUNTS = (("true", "positives"), ("false", "positives"), ("true", "negatives"), ("false", "negatives"))
