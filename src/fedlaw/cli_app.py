"""The commands: parse, call, print."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fedlaw import cli_run, cli_show, cli_sweep

app = typer.Typer(
    name="fedlaw",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Federated learning that keeps working when some participants lie.",
)
data_app = typer.Typer(no_args_is_help=True, help="Data sets on disk.")
results_app = typer.Typer(invoke_without_command=True, help="Runs in a results file.")
app.add_typer(data_app, name="data")
app.add_typer(results_app, name="results")
app.command("run")(cli_run.run)
cli_sweep.add_to(app, results_app)

StoreOption = Annotated[Path, typer.Option("--store", help="Results file.")]
RunArgument = Annotated[str, typer.Argument(help="A run's id, its beginning, or 'last'.")]


class Kind(StrEnum):
    """What can be listed."""

    rules = "rules"
    attacks = "attacks"
    datasets = "datasets"
    models = "models"
    partitions = "partitions"
    presets = "presets"


def _version(wanted: bool) -> None:
    if wanted:
        from fedlaw import __version__

        print(f"fedlaw {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback instead of one line.")] = False,
) -> None:
    """Options of every command; `main` reads --debug itself."""


@app.command("list")
def list_names(kind: Annotated[Kind, typer.Argument(help="What to list.")]) -> None:
    """List what there is, one line each."""
    from fedlaw import attacks, data, models
    from fedlaw.experiments import _specs

    named: dict[Kind, Callable[[], dict[str, str]]] = {
        Kind.rules: _specs.rule_names,
        Kind.attacks: attacks.registry.summaries,
        Kind.datasets: data.datasets.summaries,
        Kind.models: models.registry.summaries,
        Kind.partitions: data.partitions.summaries,
        Kind.presets: _specs.PRESET_WORDS.copy,
    }
    cli_show.names(named[kind]())


@data_app.command("get")
def get_data(
    name: Annotated[str, typer.Argument(help="mnist, fashion_mnist, cifar10 or cifar100.")],
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", help="Folder to fill; else FEDLAW_DATA.")
    ] = None,
) -> None:
    """Download a data set, checked against known digests; a broken download goes on where it broke."""
    from fedlaw.data import download

    with cli_show.download_progress() as progress:
        folder = download(name, data_dir, progress=progress)
    print(f"{name} is in {folder}")


@results_app.callback()
def list_results(context: typer.Context, store: StoreOption = cli_run.STORE) -> None:
    """List the runs of a results file."""
    if context.invoked_subcommand is None:
        from fedlaw.results import Store

        with Store(store, read_only=True) as opened:
            cli_show.runs(opened.runs())


@results_app.command("show")
def show_result(context: typer.Context, run: RunArgument, store: StoreOption = cli_run.STORE) -> None:
    """Show one run: its settings, what made it, what it came to."""
    from fedlaw.results import Store

    if store == cli_run.STORE and context.parent is not None:  # given before the word `show`
        store = context.parent.params.get("store", store)
    with Store(store, read_only=True) as opened:
        cli_show.run(opened.resolve(run))


@app.command("plot")
def plot(
    run: RunArgument = "last",
    store: StoreOption = cli_run.STORE,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="A .png, .pdf or .svg file; else RUN.png.")
    ] = None,
) -> None:
    """Draw a run: accuracy, the weight of every client, who was told apart."""
    from fedlaw.report.run import plot as draw

    print(f"drawn into {draw(run, store=store, output=output)}")


@app.command("demo")
def demo(
    seed: Annotated[int, typer.Option(help="Of everything that is drawn.")] = 0,
    rounds: Annotated[int, typer.Option(help="Model updates.")] = 100,
    clients: Annotated[int, typer.Option(help="How many there are; 40 % of them attack.")] = 30,
    attack: Annotated[str | None, typer.Option(help="What the attackers do (`fedlaw list attacks`).")] = None,
    output: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo"),
) -> None:
    """FedAvg, Krum and FedLAW side by side under attack, live; under a minute."""
    from fedlaw import cli_demo
    from fedlaw.experiments.demo import ATTACK

    cli_demo.show(seed=seed, rounds=rounds, clients=clients, attack=attack or ATTACK, output=output)
