"""`fedlaw sweep`, `reproduce`, `search`, `report`, and results that come home: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedlaw import cli_conduct, cli_run, cli_show

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
    int | None, _flag("Side by side on this machine; else as many as fill it.", _HOW, "--processes")
]
StackSize = Annotated[int | None, _flag("Runs in one program at most.", _HOW, "--stack")]
Memory = Annotated[
    str | None, _flag("For all of it, such as 8GB; else half of what is free.", _HOW, "--memory")
]
Device = Annotated[str | None, _flag("cpu, cuda or auto.", _HOW, "--device")]
DataDir = Annotated[Path | None, _flag("Folder of data files; else FEDLAW_DATA.", _HOW, "--data-dir")]
Precision = Annotated[
    str | None, _flag("Matrix products on a GPU: float32, tf32 or half.", _HOW, "--precision")
]
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
    precision: Precision = None,
) -> None:
    """Run every experiment of a sweep that is not in the store yet; the same command goes on after a break."""
    from fedlaw.experiments.sweep import Sweep

    cli_conduct.carry_out(Sweep.from_toml(file).scaled(scale), locals())


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
    precision: Precision = None,
) -> None:
    """Run an experiment of the paper (or beyond it) and show its table beside the published one."""
    from fedlaw.experiments import reproduce as paper

    if listed or name is None:
        cli_show.names(paper.names())
        return
    cli_conduct.carry_out(paper.load(name, scale), locals())


def search(
    file: Annotated[Path, typer.Argument(help="TOML file: tables base (an experiment) and space.")],
    trials: Annotated[int, typer.Option(help="Settings to try.")] = 20,
    seeds: Annotated[int, typer.Option(help="Runs of each; their mean decides.")] = 1,
    store: Store = cli_run.STORE,
    device: Device = None,
    data_dir: DataDir = None,
    backend: Backend = None,
    precision: Precision = None,
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
        execution=cli_conduct.execution(device, data_dir, backend, precision),
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
    cosines: Annotated[
        bool, typer.Option("--cosines", help="With --compact: keep the alignment of every judged round.")
    ] = False,
    archive: Annotated[
        bool, typer.Option("--archive", help="Compress it: read like any results file, never added to.")
    ] = False,
) -> None:
    """Copy a results file, small enough to send home."""
    from fedlaw.results.export import export as copy

    done = copy(store, output, compact=compact, weights=weights, cosines=cosines, archive=archive)
    print(f"{output}: {done.added} runs, {cli_show.size(output.stat().st_size)}")
