"""`fedlaw run`: flags and a TOML file become one description; the run is shown as it goes."""

from __future__ import annotations

import shlex
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedlaw import cli_show

if TYPE_CHECKING:
    from fedlaw.experiments.description import Experiment

STORE = Path("fedlaw.sqlite")
_DATA, _CLIENTS, _TRAINING, _RUN = "Data and model", "Clients and attack", "Rule and training", "This run"


def _flag(words: str, panel: str, *names: str) -> Any:
    return typer.Option(*names, help=words, rich_help_panel=panel)


def run(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(help="TOML file with settings; flags go before it.")] = None,
    dataset: Annotated[str | None, _flag("Name, or package.module:factory.", _DATA)] = None,
    dataset_set: Annotated[list[str] | None, _flag("Its settings, NAME=VALUE.", _DATA)] = None,
    examples: Annotated[int | None, _flag("At most so many training examples.", _DATA)] = None,
    split: Annotated[str | None, _flag("Train, validation, test: 0.8,0.1,0.1.", _DATA)] = None,
    scaling: Annotated[str | None, _flag("standard, unit or none.", _DATA)] = None,
    model: Annotated[str | None, _flag("Name, or package.module:factory.", _DATA)] = None,
    model_set: Annotated[list[str] | None, _flag("Its settings, such as hidden=32,16.", _DATA)] = None,
    clients: Annotated[int | None, _flag("How many.", _CLIENTS)] = None,
    partition: Annotated[str | None, _flag("Who holds which example.", _CLIENTS)] = None,
    partition_set: Annotated[list[str] | None, _flag("Its settings, such as alpha=0.5.", _CLIENTS)] = None,
    q: Annotated[float | None, _flag("Of the partition q_groups.", _CLIENTS)] = None,
    attack: Annotated[str | None, _flag("Name, or a TOML table.", _CLIENTS)] = None,
    attack_set: Annotated[list[str] | None, _flag("Its settings, such as z=1.0.", _CLIENTS)] = None,
    malicious: Annotated[str | None, _flag("Share (0.4), number (12) or list (0,3,5).", _CLIENTS)] = None,
    malicious_choice: Annotated[str | None, _flag("groups or random.", _CLIENTS)] = None,
    participation: Annotated[float | None, _flag("Share of the clients asked a round.", _CLIENTS)] = None,
    dropout: Annotated[float | None, _flag("Share of those asked who do not answer.", _CLIENTS)] = None,
    rule: Annotated[str | None, _flag("Name, or a TOML table or list (a chain).", _TRAINING)] = None,
    rule_set: Annotated[list[str] | None, _flag("Its settings, such as f=8.", _TRAINING)] = None,
    preset: Annotated[str | None, _flag("Of fedlaw: hardened or paper.", _TRAINING)] = None,
    rounds: Annotated[int | None, _flag("Model updates.", _TRAINING)] = None,
    epochs: Annotated[int | None, _flag("Of local training.", _TRAINING)] = None,
    batch_size: Annotated[int | None, _flag("Of local training.", _TRAINING)] = None,
    lr: Annotated[float | None, _flag("Of local training.", _TRAINING)] = None,
    loss_point: Annotated[str | None, _flag("before or after local training.", _TRAINING)] = None,
    evaluate_every: Annotated[int | None, _flag("Rounds between evaluations.", _TRAINING)] = None,
    seed: Annotated[int | None, _flag("Of everything that is drawn.", _TRAINING)] = None,
    store: Annotated[Path, _flag("Results file.", _RUN)] = STORE,
    resume: Annotated[bool, _flag("Go on with an interrupted run.", _RUN, "--resume")] = False,
    describe: Annotated[
        bool, _flag("Print every setting with its value, and stop.", _RUN, "--describe")
    ] = False,
    data_dir: Annotated[Path | None, _flag("Folder of data files; else FEDLAW_DATA.", _RUN)] = None,
    backend: Annotated[str | None, _flag("auto, batched, vmap or sequential.", _RUN)] = None,
    device: Annotated[str | None, _flag("cpu, cuda or auto.", _RUN)] = None,
    precision: Annotated[str | None, _flag("Matrix products on a GPU: float32, tf32 or half.", _RUN)] = None,
    threads: Annotated[int | None, _flag("Threads on a CPU.", _RUN)] = None,
    checkpoint_seconds: Annotated[float | None, _flag("Time between checkpoints.", _RUN)] = None,
) -> None:
    """Run one experiment, described by flags, a TOML file, or both; Ctrl-C leaves it resumable."""
    given = locals()
    own = (
        "context",
        "file",
        "store",
        "resume",
        "describe",
        "data_dir",
        "backend",
        "device",
        "precision",
        "threads",
    )
    flags = {k: v for k, v in given.items() if v is not None and k not in (*own, "checkpoint_seconds")}
    experiment = experiment_from(file, flags)
    if describe:
        print(f"# run {experiment.id}\n{experiment.to_toml()}", end="")
        return
    from fedlaw.experiments.description import Execution

    how = ("data_dir", "backend", "device", "precision", "threads", "checkpoint_seconds")
    execution = Execution(**{name: given[name] for name in how if given[name] is not None})
    _run(experiment, store, execution, resume, context.obj or [])


def _run(experiment: Experiment, store: Path, execution: Any, resume: bool, arguments: list[str]) -> None:
    from fedlaw.experiments import runner
    from fedlaw.results import AlreadyFinished, Store

    for note in _oddities(experiment):
        print(f"fedlaw: note: {note}", file=sys.stderr)
    if not resume and store.exists():
        with Store(store, read_only=True) as opened:
            info = opened.find(experiment.id)
        if info is not None and info.status == "interrupted" and info.done:
            resume = True
            print(
                f"fedlaw: note: run {experiment.id[:8]} was interrupted: going on where it was saved",
                file=sys.stderr,
            )
    progress: Any = cli_show.progress()
    try:
        with progress:
            result = runner.run(
                experiment, store=store, execution=execution, resume=resume, callbacks=[progress]
            )
    except AlreadyFinished as finished:
        print(
            f"run {experiment.id[:8]} is finished already, in {store}; change a setting (--seed) for another"
        )
        with Store(store, read_only=True) as opened:
            cli_show.summary(opened.resolve(finished.run_id).summary)
        return
    except KeyboardInterrupt:
        again = [each for each in arguments if each != "--resume"]
        print(
            f"fedlaw: interrupted after round {progress.done} of {experiment.rounds}; go on with: "
            f"{shlex.join(['fedlaw', *again, '--resume'])}",
            file=sys.stderr,
        )
        raise typer.Exit(130) from None
    cli_show.summary(result.summary)
    where = [] if store == STORE else ["--store", str(store)]
    draw = shlex.join(["fedlaw", "plot", result.id[:8], *where])
    print(f"run {result.id[:8]} is in {store}: `{draw}` draws it")


def _oddities(experiment: Experiment) -> list[str]:
    """What is allowed and hardly meant."""
    attack, attackers = experiment.attack["name"], experiment.malicious_count
    if attack != "none" and not attackers:
        return [f"attack {attack!r} and no attackers: --malicious 0.4 makes 40 % of the clients malicious"]
    if attack == "none" and attackers:
        return [f"{attackers} malicious clients and no attack: they behave honestly; --attack names one"]
    return []


# ------------------------------------------------------------------------------------------ settings
def experiment_from(file: Path | None, flags: Mapping[str, Any]) -> Experiment:
    """The experiment of a file with flags over it.

    >>> experiment_from(None, {"rule": "krum", "rule_set": ["f=3"], "malicious": "0.2"}).rule["f"]
    3
    """
    from fedlaw.experiments._files import read_toml
    from fedlaw.experiments.description import Experiment

    base = {} if file is None else read_toml(file)
    changes = {key: value for key, value in flags.items() if not key.endswith("_set")}
    for name in ("rule", "attack"):
        given = _assignments(flags.get(f"{name}_set"), f"--{name}-set")
        if name in changes:
            changes[name] = _table(changes[name], given, name)
        elif given:
            changes[name] = _table(base.get(name, {"rule": "fedlaw", "attack": "none"}[name]), given, name)
            if name == "rule" and "preset" in base:
                changes.setdefault("preset", base["preset"])
    for name in ("dataset", "model", "partition"):
        given = _assignments(flags.get(f"{name}_set"), f"--{name}-set")
        kept = base.get(f"{name}_settings", {}) if changes.get(name, base.get(name)) == base.get(name) else {}
        if given:
            changes[f"{name}_settings"] = {**kept, **given}
    for name in ("malicious", "split"):
        if name in changes:
            changes[name] = value(changes[name])
    if file is None:
        return Experiment(**changes)
    return Experiment.from_toml(file, **changes)


def value(text: str) -> Any:
    """A setting as it is typed: a TOML value, a list without its brackets, or a word.

    >>> value("0.4"), value("12"), value("32,16"), value("median"), value("true")
    (0.4, 12, [32, 16], 'median', True)
    """
    for attempt in (text, f"[{text}]" if "," in text else text):
        try:
            return tomllib.loads(f"x = {attempt}")["x"]
        except tomllib.TOMLDecodeError:
            continue
    return text


def _assignments(given: list[str] | None, flag: str) -> dict[str, Any]:
    """NAME=VALUE, several times."""
    settings = {}
    for each in given or []:
        name, equals, text = each.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"{flag} must be NAME=VALUE, such as {flag} f=8, got {each!r}")
        settings[name.strip()] = value(text.strip())
    return settings


def _table(spec: Any, settings: dict[str, Any], name: str) -> Any:
    """A rule or an attack with further settings."""
    if isinstance(spec, str):
        spec = value(spec) if spec[:1] in ("[", "{") else {"name": spec}
    if not settings:
        return spec
    if not isinstance(spec, Mapping):
        raise ValueError(f"--{name}-set sets nothing in a list: write the settings into the list's tables")
    return {**spec, **settings}
