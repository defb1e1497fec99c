"""`fedlaw sweep`, `reproduce`, `search`, `report`, and results that come home: parse, call, print."""

from __future__ import annotations

import re
import shlex
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Self

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
_WHAT, _HOW = "What is run", "How it is run"


def _flag(words: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=words, rich_help_panel=panel)


Store = Annotated[Path, _flag("Results file.", _HOW, "--store")]
Only = Annotated[list[str] | None, _flag("A part: AXIS=LABEL,LABEL; may be repeated.", _WHAT, "--only")]
Set = Annotated[list[str] | None, _flag("Another setting for all: NAME=VALUE.", _WHAT, "--set")]
Scale = Annotated[str, _flag("paper, small, or what the file describes.", _WHAT, "--scale")]
Search = Annotated[bool | None, _flag("Choose settings on the validation split first.", _WHAT)]
Retry = Annotated[bool, _flag("Try runs again that failed.", _HOW, "--retry")]
Show = Annotated[bool, _flag("Show the plan and stop.", _HOW, "--plan")]
EngineName = Annotated[str, _flag("local or ray.", _HOW, "--engine")]
Address = Annotated[str | None, _flag("Of the Ray cluster; else one is started here.", _HOW, "--ray-address")]
Processes = Annotated[
    int | None, _flag("Side by side on this machine; else one a core.", _HOW, "--processes")
]
StackSize = Annotated[int | None, _flag("Runs in one program at most.", _HOW, "--stack")]
Memory = Annotated[
    str | None, _flag("For all of it, such as 8GB; else half of what is free.", _HOW, "--memory")
]
Device = Annotated[str | None, _flag("cpu, cuda or auto.", _HOW, "--device")]
DataDir = Annotated[Path | None, _flag("Folder of data files; else FEDLAW_DATA.", _HOW, "--data-dir")]
Backend = Annotated[str | None, _flag("auto, batched, vmap or sequential.", _HOW, "--backend")]


def add_to(app: typer.Typer, results_app: typer.Typer) -> None:
    """Hang the commands into the program."""
    app.command("sweep")(sweep)
    app.command("reproduce")(reproduce)
    app.command("search")(search)
    app.command("report")(report)
    results_app.command("merge")(merge)
    results_app.command("export")(export)


# ------------------------------------------------------------------------------------------ commands
def sweep(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="TOML file of the sweep.")],
    only: Only = None,
    set_: Set = None,
    scale: Scale = "paper",
    search: Search = None,
    store: Store = cli_run.STORE,
    retry: Retry = False,
    plan: Show = False,
    engine: EngineName = "local",
    ray_address: Address = None,
    processes: Processes = None,
    stack: StackSize = None,
    memory: Memory = None,
    device: Device = None,
    data_dir: DataDir = None,
    backend: Backend = None,
) -> None:
    """Run every experiment of a sweep that is not in the store yet; the same command goes on after a break."""
    from fedlaw.experiments.sweep import Sweep

    _carry_out(Sweep.from_toml(file).scaled(scale), locals())


def reproduce(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="Which; --list shows them.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="List what can be reproduced.")] = False,
    only: Only = None,
    set_: Set = None,
    scale: Scale = "paper",
    search: Search = None,
    store: Store = cli_run.STORE,
    retry: Retry = False,
    plan: Show = False,
    engine: EngineName = "local",
    ray_address: Address = None,
    processes: Processes = None,
    stack: StackSize = None,
    memory: Memory = None,
    device: Device = None,
    data_dir: DataDir = None,
    backend: Backend = None,
) -> None:
    """Run an experiment of the paper (or beyond it) and show its table beside the published one."""
    from fedlaw.experiments import reproduce as paper

    if listed or name is None:
        cli_show.names(paper.names())
        return
    _carry_out(paper.load(name, scale), locals())


def search(
    file: Annotated[Path, typer.Argument(help="TOML file: tables base (an experiment) and space.")],
    trials: Annotated[int, typer.Option(help="Settings to try.")] = 20,
    seeds: Annotated[int, typer.Option(help="Runs of each; their mean decides.")] = 1,
    store: Store = cli_run.STORE,
    device: Device = None,
    data_dir: DataDir = None,
    backend: Backend = None,
) -> None:
    """Search settings with Optuna by validation accuracy; every trial is a run in the store."""
    from fedlaw.experiments._files import DescriptionError, read_toml
    from fedlaw.experiments.description import Experiment
    from fedlaw.experiments.search import optimize
    from fedlaw.experiments.sweep import computed

    given = read_toml(file)
    if not given.get("space") or (unknown := set(given) - {"base", "space"}):
        said = f"unknown key {min(unknown)!r}" if given.get("space") else "no table space"
        raise DescriptionError(f"{file}: {said}; a search has the tables base and space")
    choice = optimize(
        Experiment(**computed(given.get("base", {}))),
        given["space"],
        trials=trials,
        store=store,
        execution=_execution(device, data_dir, backend),
        seeds=range(seeds),
    )
    ranked = sorted(choice.candidates, key=lambda each: -each["validation_accuracy"])
    rows = [
        (f"{each['validation_accuracy']:.2%}", str(each["settings"]), each["runs"][0][:8]) for each in ranked
    ]
    cli_show.table(("validation", "settings", "run"), rows[:10])
    print("chosen: " + ", ".join(f"{path} = {value}" for path, value in choice.chosen.items()))


def report(
    store: Annotated[Path, typer.Argument(help="Results file.")] = cli_run.STORE,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write.")] = Path("report"),
) -> None:
    """Write a page with every table and figure of a results file, and the figures and tables as files."""
    from fedlaw.report.html import write

    page = write(store, output)
    print(f"report: {page}, with its tables and figures beside it")


def merge(
    sources: Annotated[list[Path], typer.Argument(help="Results files.")],
    into: Annotated[Path, typer.Option("--into", help="Results file to add to.")],
) -> None:
    """Bring runs of several results files together in one."""
    from fedlaw.results.merge import merge as bring

    done = bring(sources, into)
    print(f"{into}: {done.added} runs added, {done.replaced} replaced by more, {done.kept} kept as they were")
    if done.running:
        print(f"{done.running} are still running over there and were left out")
    for run in done.different:
        print(f"run {run[:12]} is finished in both files with other figures: what was here first is kept")


def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")],
    store: Annotated[Path, typer.Option("--store", help="Results file.")] = cli_run.STORE,
    compact: Annotated[
        bool, typer.Option("--compact", help="Of the clients the last round only; no checkpoints.")
    ] = False,
    weights: Annotated[
        bool, typer.Option("--weights", help="With --compact: keep the weights of every round.")
    ] = False,
) -> None:
    """Copy a results file, small enough to send home."""
    from fedlaw.results.export import export as copy

    done = copy(store, output, compact=compact, weights=weights)
    print(f"{output}: {done.added} runs, {cli_show.size(output.stat().st_size)}")


# ------------------------------------------------------------------------------------------ a sweep
def _carry_out(described: Sweep, given: dict[str, Any]) -> None:
    """Plan, say so, run, say what became of it."""
    from dataclasses import replace

    from fedlaw.experiments import engines
    from fedlaw.experiments import search as searching
    from fedlaw.experiments.conduct import make_plan

    if given["set_"]:
        described = described.with_base(cli_run._assignments(given["set_"], "--set"))
    if given["only"]:
        described = described.only(_chosen(given["only"]))
    if given["search"] is not None and (given["search"] is False or described.search is False):
        described = replace(described, search={} if given["search"] else False)
    execution = _execution(given["device"], given["data_dir"], given["backend"])
    engine = engines.create(given["engine"], processes=given["processes"], address=given["ray_address"])
    options = {
        "execution": execution,
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
            _go(_unnoted(plan), store, engine, execution, arguments)
        choices, chosen = searching.choose(described, store)
        print(f"chosen on the validation split for {len(choices)} cells, recorded in {store}")
        planned = described.planned(chosen)
    plan = make_plan(described, store, planned=planned, **options)
    _say_plan(plan, "")
    if given["plan"]:
        return
    done = _go(plan, store, engine, execution, arguments)
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


def _execution(device: str | None, data_dir: Path | None, backend: str | None) -> Execution:
    from fedlaw.experiments.description import Execution

    given = {"device": device, "data_dir": data_dir, "backend": backend}
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
