"""How a sweep is carried out on a terminal: the plan, progress over all of it, and what became of it."""

from __future__ import annotations

import re
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from fedlaw import cli_run, cli_show

if TYPE_CHECKING:
    from fedlaw.experiments.conduct import Conducted, Plan
    from fedlaw.experiments.description import Execution
    from fedlaw.experiments.engines import Engine, Outcome
    from fedlaw.experiments.sweep import Planned, Sweep

_LINES = 20


def carry_out(described: Sweep, given: dict[str, Any]) -> None:
    """Plan, say so, run, say what became of it."""
    from fedlaw.experiments import engines
    from fedlaw.experiments import search as searching
    from fedlaw.experiments.conduct import make_plan

    if given["set_"]:
        described = described.with_base(cli_run._assignments(given["set_"], "--set"))
    if given["only"]:
        described = described.only(_chosen(given["only"]))
    if given["search"] is not None and (given["search"] is False or described.search is False):
        described = replace(described, search={} if given["search"] else False)
    how = execution(given["device"], given["data_dir"], given["backend"], given["precision"])
    engine = engines.create(given["engine"], processes=given["processes"], address=given["ray_address"])
    options = {
        "execution": how,
        "processes": given["processes"],
        "stack": given["stack"],
        "memory": None if given["memory"] is None else bytes_of(given["memory"]),
        "retry": given["retry"],
    }
    print(described.title or described.name)
    if described.note:
        print(f"note: {described.note}")
    store: Path = given["store"]
    arguments = given["context"].obj or []
    planned: list[Planned] | None = None
    if candidates := searching.candidates(described):
        plan = make_plan(described, store, planned=candidates, **options)
        _say_plan(plan, "to choose settings on the validation split")
        if given["plan"]:
            print(f"then {len(described.planned())} runs with what was chosen")
            return
        if plan.stacks:
            _go(_unnoted(plan), store, engine, how, arguments)
        choices, chosen = searching.choose(described, store)
        print(f"chosen on the validation split for {len(choices)} cells, recorded in {store}")
        planned = described.planned(chosen)
    plan = make_plan(described, store, planned=planned, **options)
    _say_plan(plan, "")
    if given["plan"]:
        return
    done = _go(plan, store, engine, how, arguments)
    _say_result(plan, done, store)
    if done.failures:
        raise typer.Exit(1)


def _unnoted(plan: Plan) -> Plan:
    """The plan of a search's candidates; they are not the sweep's own runs, so none of them is noted as such."""
    plan.planned = []
    return plan


def _go(plan: Plan, store: Path, engine: Engine, execution: Execution, arguments: list[str]) -> Conducted:
    from fedlaw.experiments.conduct import conduct

    runs = sum(map(len, plan.stacks))
    progress: Lines = Bar(runs, plan.rounds) if Console().is_terminal else Lines(runs, plan.rounds)
    try:
        with progress:
            return conduct(
                plan,
                store,
                engine=engine,
                execution=execution,
                on_rounds=progress.rounds,
                on_done=progress.runs,
            )
    except KeyboardInterrupt:
        again = shlex.join(["fedlaw", *arguments])
        print(
            f"fedlaw: interrupted after {progress.ended} of {runs} runs; the same command goes on: {again}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None


def _say_plan(plan: Plan, why: str) -> None:
    todo = sum(map(len, plan.stacks))
    counts = plan.counts
    said = [f"{len(plan.status)} runs {why}".strip(), f"{counts['finished']} done already"]
    for status in ("interrupted", "failed", "running"):
        if counts[status]:
            said.append(f"{counts[status]} {status}")
    said.append(f"{todo} to run in {len(plan.stacks)} stacks")
    if plan.seconds and todo:
        said.append(f"about {cli_show._duration(plan.seconds)}")
    print("plan: " + ", ".join(said), flush=True)


def _say_result(plan: Plan, done: Conducted, store: Path) -> None:
    from fedlaw.report.text import summary

    for note in done.notes[:5]:
        print(f"note: {note}")
    if done.failures:
        print(f"{len(done.failures)} runs failed (--retry tries them again):")
        for each in done.failures[:10]:
            print(f"  {each.run[:8]}  {each.message}")
    if elsewhere := sum(each.status == "elsewhere" for each in done.outcomes.values()):
        print(f"{elsewhere} runs are being written by another process")
    summary(store, plan.sweep.name)
    print(f"all of it: fedlaw report {shlex.quote(str(store))}")


def execution(
    device: str | None, data_dir: Path | None, backend: str | None, precision: str | None
) -> Execution:
    """How runs are carried out, of the flags that were given."""
    from fedlaw.experiments.description import Execution

    given = {"device": device, "data_dir": data_dir, "backend": backend, "precision": precision}
    return Execution(**{name: value for name, value in given.items() if value is not None})


def _chosen(only: list[str]) -> dict[str, list[str]]:
    chosen: dict[str, list[str]] = {}
    for each in only:
        axis, equals, labels = each.partition("=")
        if not equals or not labels:
            raise ValueError(f"--only must be AXIS=LABEL,LABEL, such as --only q=0.9, got {each!r}")
        chosen.setdefault(axis.strip(), []).extend(label.strip() for label in labels.split(","))
    return chosen


def bytes_of(text: str) -> float:
    """A size as it is typed, in bytes.

    >>> bytes_of("8GB"), bytes_of("512 MiB")
    (8000000000.0, 536870912.0)
    """
    found = re.fullmatch(r"\s*([\d.]+)\s*([kMGT]?)(i?)B?\s*", text)
    if not found or not float(found[1]):
        raise ValueError(f"--memory must be a size such as 8GB, got {text!r}")
    return float(found[1]) * float(1024 if found[3] else 1000) ** " kMGT".index(found[2] or " ")


# ------------------------------------------------------------------------------------------ progress
class Lines:
    """Progress over a whole sweep in a few plain lines."""

    def __init__(self, runs: int, rounds: int) -> None:
        self.total, self.all_rounds = runs, rounds
        self.ended = self.failed = self.passed = 0
        self._began, self._said = time.monotonic(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing was opened."""

    def rounds(self, count: int) -> None:
        """So many rounds more."""
        self.passed += count
        if self.passed * _LINES // max(1, self.all_rounds) > self._said:
            self._say()

    def runs(self, outcomes: list[Outcome]) -> None:
        """A stack is done."""
        self.ended += len(outcomes)
        self.failed += sum(each.status == "failed" for each in outcomes)
        if self.ended == self.total:
            self._say()

    def _say(self) -> None:
        self._said = self.passed * _LINES // max(1, self.all_rounds)
        took = time.monotonic() - self._began
        left = took / max(1, self.passed) * max(0, self.all_rounds - self.passed)
        failed = f"  {self.failed} failed" if self.failed else ""
        print(
            f"{self.passed}/{self.all_rounds} rounds  {self.ended}/{self.total} runs{failed}  "
            f"{cli_show._duration(took)}, {cli_show._duration(left)} left",
            flush=True,
        )


class Bar(Lines):
    """The same as a live bar."""

    def __enter__(self) -> Self:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:.0f} %"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            expand=True,
        )
        self._task = self._bar.add_task(self._words(), total=max(1, self.all_rounds))
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def rounds(self, count: int) -> None:
        self.passed += count
        self._bar.update(self._task, completed=self.passed)

    def runs(self, outcomes: list[Outcome]) -> None:
        self.ended += len(outcomes)
        self.failed += sum(each.status == "failed" for each in outcomes)
        self._bar.update(self._task, description=self._words())

    def _words(self) -> str:
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.ended}/{self.total} runs{failed}"
