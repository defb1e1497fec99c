"""One experiment, built: data handed out, attackers chosen, the server set up, and every round written down."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlaw import aggregators, attacks, data, models
from fedlaw._detection import Detection, detection
from fedlaw.data import Examples
from fedlaw.experiments._specs import SERVERS
from fedlaw.experiments.description import Execution, Experiment
from fedlaw.results import RoundRecord
from fedlaw.server import FedLAW, RoundReport, Status
from fedlaw.simulation import Jobs, LocalWork, evaluate, train
from fedlaw.simulation.federation import Federation, Population, Stack, populate

_ROOT_EXAMPLES = 100  # validation examples that a server with trusted data of its own trains on
_STATUS_CODE = {status: code for code, status in enumerate(Status)}
_PARTITION_STREAM, _MALICIOUS_STREAM = 1, 2


class Shelf:
    """Data sets that were read, and what was prepared of them: experiments of one seed share their examples."""

    def __init__(self) -> None:
        self._loaded: dict[str, data.Dataset] = {}
        self._prepared: dict[str, tuple[data.Prepared, tuple[Examples, Examples]]] = {}

    def prepared(
        self, experiment: Experiment, execution: Execution, device: torch.device
    ) -> tuple[data.Prepared, tuple[Examples, Examples]]:
        """The data of an experiment, its training part cut to size, and (validation, test) on the device."""
        source = repr((experiment.dataset, sorted(experiment.dataset_settings.items())))
        if source not in self._loaded:
            settings = experiment.dataset_settings
            self._loaded[source] = data.load(experiment.dataset, data_dir=execution.data_dir, **settings)
        key = repr(
            (source, experiment.seed, experiment.split, experiment.scaling, experiment.examples, device)
        )
        if key not in self._prepared:
            made = data.prepare(
                self._loaded[source],
                seed=experiment.seed,
                fractions=experiment.split,
                scaling=experiment.scaling,
            )
            made = _cut(made, experiment)
            self._prepared[key] = made, (_moved(made.validation, device), _moved(made.test, device))
        return self._prepared[key]


def _cut(prepared: data.Prepared, experiment: Experiment) -> data.Prepared:
    count, there = experiment.examples, len(prepared.train.labels)
    if count is None:
        return prepared
    if count > there:
        raise ValueError(
            f"examples must be at most the {there} training examples of "
            f"{experiment.dataset!r} (split {experiment.split}), got {count}"
        )
    some = Examples(*(x[:count] for x in prepared.train))  # a random order already
    return replace(prepared, train=some, keys=None if prepared.keys is None else prepared.keys[:count])


def _moved(examples: Examples, device: torch.device) -> Examples:
    return Examples(examples.inputs.to(device), examples.labels.to(device))


def stacked(labs: Sequence[Lab], execution: Execution) -> Stack:
    """The labs' federations, to be trained together as `execution` says."""
    return Stack(
        [lab.federation for lab in labs],
        backend=execution.backend,
        threads=execution.threads,
        half=execution.precision == "half",
    )


class Lab:
    """One experiment, built: the federation, what it is evaluated on, and the records of its rounds."""

    def __init__(self, experiment: Experiment, execution: Execution, shelf: Shelf | None = None) -> None:
        """`shelf` keeps data sets from one lab to the next."""
        self.experiment, self.execution = experiment, execution
        self.device = _device(execution.device)
        shelf = shelf or Shelf()
        prepared, (self._validation, self._test) = shelf.prepared(experiment, execution, self.device)
        train_data, keys = prepared.train, prepared.keys
        self.classes = prepared.classes
        attack = attacks.parse(experiment.attack)
        partition = data.partition(
            experiment.partition,
            train_data.labels.numpy(),
            experiment.clients,
            generator=np.random.default_rng([experiment.seed, _PARTITION_STREAM]),
            classes=prepared.classes,
            keys=keys,
            **experiment.partition_settings,
        )
        listed = isinstance(experiment.malicious, tuple)
        malicious = torch.from_numpy(
            data.choose_malicious(
                partition,
                0 if listed else experiment.malicious_count,
                how=experiment.malicious
                if isinstance(experiment.malicious, tuple)
                else experiment.malicious_choice,
                generator=np.random.default_rng([experiment.seed, _MALICIOUS_STREAM]),
            )
        )
        self.population: Population = populate(
            train_data,
            partition,
            malicious,
            attack,
            classes=prepared.classes,
            black=prepared.black,
            seed=experiment.seed,
        )
        self.model = models.create(
            experiment.model,
            prepared.input_shape,
            prepared.classes,
            seed=experiment.seed,
            **experiment.model_settings,
        )
        self.work = LocalWork(experiment.epochs, experiment.batch_size, experiment.lr, experiment.loss_point)
        self._triggered = self._trigger(attack, prepared)
        params = models.flatten(self.model).to(self.device)
        server = experiment.server(
            params, malicious.nonzero().flatten().tolist(), reference=self._reference()
        )
        self.federation = Federation(
            server,
            self.population,
            self.model,
            attack,
            self.work,
            dropout=experiment.dropout,
            seed=experiment.seed,
        )
        self._began = time.perf_counter()

    def _trigger(self, attack: attacks.Attack, prepared: data.Prepared) -> Examples | None:
        """Stamped test inputs whose true label is not the target, labelled with the target."""
        crew = int(self.population.malicious.sum())
        part = attack.member(0, crew) if crew else attack
        while not isinstance(part, attacks.TargetedBackdoor) and isinstance(
            getattr(part, "attack", None), attacks.Attack
        ):
            part = part.attack  # type: ignore[attr-defined]
        if not isinstance(part, attacks.TargetedBackdoor):
            return None
        others = prepared.test.labels != part.target
        stamped = part.trigger(prepared.test.inputs[others], black=prepared.black)
        return _moved(Examples(stamped, torch.full((int(others.sum()),), part.target)), self.device)

    def _reference(self) -> Any:
        """For rules with trusted data of the server's own: an update trained on a few validation examples."""
        root = min(_ROOT_EXAMPLES, len(self._validation.labels))
        if not root or not _may_compare(self.experiment.rule):
            return None
        order = torch.arange(root, device=self.device).expand(1, self.work.epochs, root).contiguous()
        jobs = Jobs(
            torch.zeros(1, dtype=torch.int64, device=self.device),
            order,
            torch.tensor([root], device=self.device),
        )

        def update(round: int, params: Tensor) -> Tensor:
            inputs, labels = self._validation
            return train(self.model, params.unsqueeze(0), inputs, labels, jobs, self.work).updates[0]

        return update

    def setup(self) -> dict[str, Any]:
        """What is fixed before round 1."""
        people = self.population
        fixed: dict[str, Any] = {
            "malicious": people.malicious.numpy(),
            "sizes": people.sizes.numpy(),
            "parameters": len(self.federation.server.params),
            "classes": self.classes,
            "device": f"{self.device} {self.execution.precision}" if self.device.type == "cuda" else "cpu",
        }
        return fixed if people.groups is None else fixed | {"groups": people.groups}

    # -------------------------------------------------------------------------------------- records
    def record(self, report: RoundReport) -> RoundRecord:
        """The round that `report` ended, evaluated if it is time to."""
        federation, people = self.federation, self.population
        last = report.round == self.experiment.rounds
        figures = self._evaluate() if last or report.round % self.experiment.evaluate_every == 0 else {}
        found, wrong = self._detection(report)
        counts: dict[str, Any] = {}
        if found is not None:
            counts = {
                "true_positives": found.true_positives,
                "false_positives": found.false_positives,
                "true_negatives": found.true_negatives,
                "false_negatives": found.false_negatives,
                "minority_excluded": int((wrong & people.minority).sum()),
            }
        notes = list(report.notes)
        if federation.diverged:
            notes.append(
                "training diverged: most honest updates are not finite; accuracy is scored as chance"
            )
        now = time.perf_counter()
        seconds, self._began = now - self._began, now
        honest = federation.honest_losses
        return RoundRecord(
            round=report.round,
            phases=report.phases,
            weights=_floats(report.weights),
            statuses=np.array([_STATUS_CODE[status] for status, _ in report.statuses], np.int8),
            exclusions=np.array([int(code) for _, code in report.statuses], np.int8),
            alignment=_floats(report.reasons.get("alignment")),
            loss_part=_floats(report.reasons.get("loss")),
            score=_floats(report.reasons.get("score")),
            losses=_floats(report.losses),
            epsilon=None
            if honest is None or not len(honest)
            else float((honest - honest.mean()).abs().mean()),
            asked=int(report.asked.sum()),
            answered=int(report.answered.sum()),
            bytes_up=federation.bytes_up,
            bytes_down=federation.bytes_down,
            skipped=report.skipped,
            notes=notes,
            refusals=[[r.client, r.phase, r.reason] for r in report.refusals],
            seconds=seconds,
            **figures,
            **counts,
        )

    def _evaluate(self) -> dict[str, Any]:
        params, chance = self.federation.server.params, 1 / self.classes

        def figures(examples: Examples) -> tuple[float, float, list[float]]:
            seen = evaluate(self.model, params, *examples, self.classes, threads=self.execution.threads)
            if self.federation.diverged or not bool(seen.finite):
                return chance, float("nan"), [chance] * self.classes
            return float(seen.accuracy), float(seen.loss), seen.per_class.tolist()

        accuracy, loss, per_class = figures(self._test)
        found: dict[str, Any] = {"test_accuracy": accuracy, "test_loss": loss, "per_class": per_class}
        if len(self._validation.labels):
            found["validation_accuracy"], found["validation_loss"], _ = figures(self._validation)
        if self._triggered is not None and len(self._triggered.labels):
            found["attack_success"] = figures(self._triggered)[0]
        return found

    def _detection(self, report: RoundReport) -> tuple[Detection | None, Tensor]:
        """Who is taken for malicious: after the freeze by weight, before it the excluded only."""
        server, malicious = self.federation.server, self.population.malicious
        if not isinstance(server, FedLAW):
            return None, torch.zeros_like(malicious)
        if server.frozen:
            shown = server.weights.cpu()
        else:
            shown = torch.tensor([float(not code) for _, code in report.statuses], dtype=torch.float64)
        return detection(shown, malicious), (shown <= 0.02 / len(shown)) & ~malicious


def _may_compare(rule: Mapping[str, Any]) -> bool:
    """Whether a rule may look at an update that the server trusts. Training one costs: most of ours never do."""
    if "stages" in rule:
        return any(_may_compare(stage) for stage in rule["stages"])
    if rule["name"] in SERVERS:
        return False
    made = aggregators.registry.factory(rule["name"])
    if not made.__module__.startswith("fedlaw.aggregators"):
        return True
    return rule["name"] == "fltrust" or rule.get("pivot") == "reference"


def _floats(values: Tensor | None) -> Any:
    return None if values is None else values.detach().cpu().numpy().astype(np.float32)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(
            "device is 'cuda' and there is no GPU that torch can use: take device 'cpu' or 'auto'"
        )
    return torch.device(name)
