"""Choosing settings on the validation split: grids per rule as in the paper, and wider searches with Optuna."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedlaw.experiments._files import DescriptionError
from fedlaw.experiments.description import Execution, Experiment
from fedlaw.experiments.runner import run
from fedlaw.experiments.sweep import Cell, Planned, Sweep, assign
from fedlaw.results import AlreadyFinished, Store, notes

_BY = ("validation_accuracy", "best_validation_accuracy")  # never what was tested on


@dataclass(frozen=True)
class Choice:
    """What was chosen for a group of cells, and from what.

    Attributes:
        group: axis to label, of the axes with a choice of their own.
        chosen: setting to value.
        candidates: settings, mean validation accuracy (None: no run finished) and run ids of each.
    """

    group: dict[str, Any]
    chosen: dict[str, Any]
    candidates: list[dict[str, Any]]


def candidates(sweep: Sweep) -> list[Planned]:
    """The experiments whose validation accuracy decides; none where nothing is searched."""
    seeds, rounds, _, _ = _how(sweep)
    return [
        Planned({**cell.labels, "candidate": number, "seed": seed}, cell.experiment(seed, settings, rounds))
        for cell in sweep.cells()
        if len(cell.candidates) > 1
        for number, settings in enumerate(cell.candidates)
        for seed in seeds
    ]


def choose(sweep: Sweep, store: str | os.PathLike[str]) -> tuple[list[Choice], Callable[[Cell], Any]]:
    """What is best on the validation split among the candidates that are in the store; recorded there.

    Of equals the first is taken, and the first of all where no candidate's run was finished.

    Returns:
        The choices, and a function from a cell to its settings, for `Sweep.planned`.
    """
    seeds, rounds, by, per = _how(sweep)
    with Store(store, read_only=True) as opened:
        summaries = {info.id: info.summary for info in opened.runs() if info.status == "finished"}
    groups: dict[str, list[Cell]] = {}
    for cell in sweep.cells():
        if len(cell.candidates) > 1:
            groups.setdefault(_key(cell, per), []).append(cell)
    choices: dict[str, Choice] = {}
    for key, cells in groups.items():
        tried: list[dict[str, Any]] = []
        for settings in cells[0].candidates:
            ids = [cell.experiment(seed, settings, rounds).id for cell in cells for seed in seeds]
            scores = [summaries[run].get(by) for run in ids if run in summaries]
            known = [score for score in scores if score is not None]
            mean = math.fsum(known) / len(known) if known else None
            tried.append({"settings": settings, by: mean, "runs": ids})
        best = max(tried, key=lambda each: -1.0 if each[by] is None else each[by])
        choices[key] = Choice(json.loads(key), best["settings"], tried)
    with Store(store) as opened:
        recorded = {
            (notes.CHOICE, f"{sweep.name} {key}"): {"sweep": sweep.name, "by": by, **vars(choice)}
            for key, choice in choices.items()
        }
        notes.put(opened._connection, recorded)

    def chosen(cell: Cell) -> Mapping[str, Any]:
        return choices[_key(cell, per)].chosen if len(cell.candidates) > 1 else cell.candidates[0]

    return list(choices.values()), chosen


def _how(sweep: Sweep) -> tuple[Sequence[int], int | None, str, list[str]]:
    search: Mapping[str, Any] = sweep.search if isinstance(sweep.search, Mapping) else {}
    by = search.get("by", _BY[0])
    if by not in _BY:
        raise DescriptionError(f"search.by must be {' or '.join(_BY)}: nothing else may decide, got {by!r}")
    per = search.get("per", list(sweep.axes))
    if unknown := [axis for axis in per if axis not in sweep.axes]:
        raise DescriptionError(f"search.per names {unknown[0]!r}; axes are {', '.join(sweep.axes)}")
    varied = [
        axis
        for axis, values in sweep.axes.items()
        if isinstance(values, Mapping) and any("search" in each for each in values.values())
    ]
    return (
        search.get("seeds", list(sweep.seeds[:1])),
        search.get("rounds"),
        by,
        [*dict.fromkeys([*per, *varied])],
    )


def _key(cell: Cell, per: Sequence[str]) -> str:
    return json.dumps({axis: label for axis, label in cell.labels.items() if axis in per})


# ------------------------------------------------------------------------------------------ wider searches
def optimize(
    experiment: Experiment,
    space: Mapping[str, Any],
    *,
    trials: int,
    store: str | os.PathLike[str],
    execution: Execution | None = None,
    seeds: Sequence[int] = (0,),
    by: str = "validation_accuracy",
    sampler_seed: int = 0,
) -> Choice:
    """Search a space of settings with Optuna's TPE sampler; every trial is a run in the store.

    Args:
        experiment: where the search starts from.
        space: setting (a dotted path) to a list of values, or a table `low`, `high`, and `log = true` if its
            logarithm is uniform; whole numbers where both ends are.
        trials: how many are tried.
        store: results file; trials that are in it already are not run again.
        seeds: of the runs of a trial; their mean decides. by: what is maximised, on the validation split.
        sampler_seed: of the sampler: the same search tries the same things.

    Needs the extra `search`.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise ImportError("searching needs optuna: pip install 'fedlaw[search]'") from None
    if by not in _BY:
        raise DescriptionError(f"by must be {' or '.join(_BY)}, got {by!r}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    tried: list[dict[str, Any]] = []

    def objective(trial: optuna.Trial) -> float:
        settings = {path: _suggest(trial, path, values) for path, values in space.items()}
        scores, ids = [], []
        for seed in seeds:
            plain = {k: v for k, v in experiment.canonical().items() if k != "version"}
            for path, value in settings.items():
                assign(plain, path, value)
            each = Experiment(**plain | {"seed": seed})
            scores.append(_score(each, Path(store), execution, by))
            ids.append(each.id)
        tried.append({"settings": settings, by: math.fsum(scores) / len(scores), "runs": ids})
        return float(tried[-1][by])

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=sampler_seed))
    study.optimize(objective, n_trials=trials)
    best = max(tried, key=lambda each: each[by])
    choice = Choice({"experiment": experiment.id}, best["settings"], tried)
    notes.write(store, notes.CHOICE, f"optuna {experiment.id}", {"sweep": "optuna", "by": by, **vars(choice)})
    return choice


def _suggest(trial: Any, path: str, values: Any) -> Any:
    if isinstance(values, Sequence) and not isinstance(values, str) and values:
        return trial.suggest_categorical(path, list(values))
    if not isinstance(values, Mapping) or not {"low", "high"} <= set(values):
        raise DescriptionError(
            f"space {path!r} must be a list of values or a table low, high, got {values!r}"
        )
    whole = all(type(values[end]) is int for end in ("low", "high"))
    suggest = trial.suggest_int if whole else trial.suggest_float
    return suggest(path, values["low"], values["high"], log=bool(values.get("log", False)))


def _score(experiment: Experiment, store: Path, execution: Execution | None, by: str) -> float:
    try:
        summary = run(experiment, store=store, execution=execution, resume=True).summary
    except AlreadyFinished:
        with Store(store, read_only=True) as opened:
            found = opened.find(experiment.id)
        summary = {} if found is None else found.summary
    value = summary.get(by)
    if value is None:
        raise DescriptionError("there is no validation data to choose by: give the split a validation share")
    return float(value)
