"""Tables and sections that are made from the code itself: rules, attacks, settings, commands, the API."""

from __future__ import annotations

import csv
import dataclasses
import inspect
import math
import sys
import tomllib
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from docstrings import Parsed, parse
from mathml import displayed

from fedlaw import aggregators, attacks, data, models
from fedlaw._registry import Registry

FORMULAS = Path(__file__).with_name("formulas.toml")
RESULTS = Path(__file__).parents[2] / "results"
_PROMISES = {
    "permutation": "the order of the rows does not matter",
    "translation": "shifting every row shifts the aggregate",
    "scale": "scaling every row scales the aggregate",
    "identical": "identical rows give that row",
    "bounded": "f arbitrary rows cannot push it arbitrarily far",
    "robust": "(f, κ)-robust with a known κ",
}


def formulas(kind: str) -> dict[str, str]:
    """Name to TeX of every rule or attack."""
    found: dict[str, str] = tomllib.loads(FORMULAS.read_text("utf-8"))[kind]
    return found


# ------------------------------------------------------------------------------------------ registries
def rules() -> str:
    """A section for each rule, then for each pre-aggregator."""
    registry = aggregators.registry
    before = [name for name in registry.names() if _is_pre_aggregator(registry, name)]
    ending = [name for name in registry.names() if name not in before]
    first = _sections(registry, "rules", ending)
    return f"## Aggregation rules\n\n{first}\n\n## Pre-aggregators\n\n{_sections(registry, 'rules', before)}"


def all_attacks() -> str:
    """A section for each attack: on data, on updates, made of others."""
    registry = attacks.registry
    kinds: dict[str, list[str]] = {"On data": [], "On updates": [], "Made of other attacks": []}
    for name in registry.names():
        kinds[_attack_kind(registry, name)].append(name)
    return "\n\n".join(
        f"## {title}\n\n{_sections(registry, 'attacks', names)}" for title, names in kinds.items()
    )


def _attack_kind(registry: Registry[attacks.Attack], name: str) -> str:
    made = registry.create(name)
    if any(isinstance(value, attacks.Attack | tuple) for value in vars(made).values()):
        return "Made of other attacks"
    return "On data" if made.poisons_data or name == "none" else "On updates"


def _is_pre_aggregator(registry: Registry[aggregators.Rule], name: str) -> bool:
    factory = registry.factory(name)
    return isinstance(factory, type) and issubclass(factory, aggregators.PreAggregator)


def _sections(registry: Registry[Any], kind: str, names: list[str]) -> str:
    known = formulas(kind)
    out = []
    for name in names:
        if name not in known:
            raise ValueError(
                f"{FORMULAS.name} has no formula for {registry.kind} {name!r} in [{kind}]: add one"
            )
        out.append(_section(registry, name, known[name]))
    return "\n\n".join(out)


def _section(registry: Registry[Any], name: str, tex: str | None = None, level: int = 3) -> str:
    factory = registry.factory(name)
    parsed = parse(inspect.getdoc(factory) or "", registry.settings(name))
    aliases = [f"`{alias}`" for alias, known in registry._aliases.items() if known == name]
    lines = [f"{'#' * level} {name} {{ #{name} data-toc-label='{name}' }}", f"**{parsed.summary}**"]
    if tex:
        lines.append(displayed(tex, name))
    lines += [text for kind, text in parsed.blocks if kind in ("text", "math")]
    if table := _table(_settings(factory, parsed)):
        lines.append(table)
    facts = []
    if isinstance(factory, type) and (kept := sorted(getattr(factory, "invariants", ()))):
        facts.append("*Keeps:* " + "; ".join(_PROMISES[each] for each in kept) + ".")
    if aliases:
        facts.append(f"*Also known as* {', '.join(aliases)}.")
    facts += [f"*Reference:* {text}" for kind, text in parsed.blocks if kind == "reference"]
    shown = factory if not factory.__qualname__.startswith("_") else get_type_hints(factory)["return"]
    facts.append(f"*In Python:* [`{shown.__qualname__}`][{_public_path(shown)}].")
    lines.append("\n".join(f"- {fact}" for fact in facts))
    lines += [f"```pycon\n{text}\n```" for kind, text in parsed.blocks if kind == "example"]
    return "\n\n".join(lines)


def _public_path(factory: Any) -> str:
    package = ".".join(factory.__module__.split(".")[:2])
    module = __import__(package, fromlist=["_"])
    return (
        f"{package if hasattr(module, factory.__qualname__) else factory.__module__}.{factory.__qualname__}"
    )


def named(kind: str) -> str:
    """A section for each of another registry: partitions, models or datasets."""
    registry: Registry[Any] = {
        "partitions": data.partitions, "models": models.registry, "datasets": data.datasets,
    }[kind]  # fmt: skip
    if kind == "datasets":
        rows = [f"| `{name}` | {words} |" for name, words in registry.summaries().items()]
        return "\n".join(["| name | what it is |", "|---|---|", *rows])
    return "\n\n".join(_section_of(registry, name) for name in registry.names())


def _section_of(registry: Registry[Any], name: str) -> str:
    factory = registry.factory(name)
    parsed = parse(inspect.getdoc(factory) or "", registry.settings(name))
    lines = [f"### {name} {{ #{name} }}", parsed.summary]
    for kind, text in parsed.blocks:
        if kind in ("text", "math"):
            lines.append(text)
        elif kind == "table":
            lines.append(f"```text\n{text}\n```")
        elif kind == "reference":
            lines.append(f"*Reference:* {text}")
    lines.append(_table(_settings(factory, parsed, hidden=("input_shape", "classes"))))
    return "\n\n".join(line for line in lines if line)


# ------------------------------------------------------------------------------------------ settings
def settings(path: str) -> str:
    """The settings of a dataclass or description, by import path, with types, defaults and meaning."""
    module, _, name = path.rpartition(".")
    made = getattr(__import__(module, fromlist=["_"]), name)
    declared = list(_declared(made))
    words: dict[str, str] = {}
    for base in reversed(made.__mro__):
        if base.__module__.startswith("fedlaw") and base.__doc__:
            words |= parse(inspect.cleandoc(base.__doc__), [each[0] for each in declared]).entries(
                "Attributes"
            )
    return _table([(*each, words.get(each[0], "")) for each in declared])


def _declared(made: Any) -> Iterator[tuple[str, str, str]]:
    """(name, type, default) of each field of a dataclass or a validated description."""
    hints = get_type_hints(made)
    if dataclasses.is_dataclass(made):
        for each in dataclasses.fields(made):
            yield each.name, _shown(hints[each.name]), _default(each.default)
        return
    for name, each in made.model_fields.items():
        default = each.get_default(call_default_factory=True)
        yield name, _shown(each.annotation), _default(default)


def _settings(factory: Any, parsed: Parsed, hidden: tuple[str, ...] = ()) -> list[tuple[str, str, str, str]]:
    words = parsed.entries("Settings")
    hints = get_type_hints(factory.__init__ if isinstance(factory, type) else factory)
    return [
        (p.name, _shown(hints.get(p.name, Any)), _default(p.default), words.get(p.name, ""))
        for p in inspect.signature(factory).parameters.values()
        if p.name not in hidden
    ]


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    if not rows:
        return ""
    lines = ["| setting | type | default | |", "|---|---|---|---|"]
    for name, shown, default, words in rows:
        cell = words.replace("|", "&#124;")
        lines.append(f"| `{name}` | {shown} | {default} | {cell} |")
    return "\n".join(lines)


def _default(value: Any) -> str:
    if value is dataclasses.MISSING or value is inspect.Parameter.empty:
        return "*required*"
    if callable(value):
        return ""
    return f"`{value!r}`".replace("|", "&#124;")


def _shown(hint: Any) -> str:
    """A type in words a user of the settings needs."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_shown(each) for each in args))
    if origin is Literal:
        return ", ".join(f"`{each!r}`" for each in args)
    if hint is type(None):
        return "`None`"
    if origin in (tuple, list):
        inner = ", ".join("..." if each is Ellipsis else _shown(each) for each in args)
        return f"{origin.__name__} of {inner}"
    if origin is not None and getattr(origin, "__name__", "") == "Sequence":
        return f"list of {', '.join(map(_shown, args))}"
    if origin is dict:
        return "table"
    if hint is Any:
        return "any"
    if hasattr(hint, "__metadata__"):
        return _shown(hint.__origin__)
    words = {"int": "integer", "float": "number", "str": "text", "bool": "true or false", "Mapping": "table"}
    name = getattr(origin or hint, "__name__", str(hint))
    return words.get(name, name)


def presets() -> str:
    """The presets side by side with their judge's own defaults, resolved for the paper's 200 clients."""
    from fedlaw.experiments._specs import PRESET_WORDS
    from fedlaw.server import PRESETS

    lines = [
        "| preset | judge | other than the judge's defaults | for 200 clients and 200 rounds |",
        "|---|---|---|---|",
    ]
    for name, judge in PRESETS.items():
        plain, bound = type(judge)(), judge.bind(200, 200)
        changed = _differences(plain, judge) or "none"
        lines.append(f"| `{name}` | `{type(judge).__name__}` | {changed} | {_differences(judge, bound)} |")
    words = [f"- `{name}`: {said}." for name, said in PRESET_WORDS.items()]
    return "\n".join(lines) + "\n\n" + "\n".join(words)


def _differences(old: Any, new: Any) -> str:
    return ", ".join(
        f"`{each.name}={getattr(new, each.name)!r}`"
        for each in dataclasses.fields(new)
        if getattr(new, each.name) != getattr(old, each.name)
    )


# ------------------------------------------------------------------------------------------ measurements
def measured(name: str) -> str:
    """Recall, honest clients lost and accuracy per attack, from a file of `results/`."""
    with (RESULTS / f"{name.replace('_', '-')}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    groups: dict[tuple[str, str, str], list[dict[str, str]]] = {}
    for row in sorted(rows, key=lambda row: -float(row["q"])):
        groups.setdefault((row["rule"], row["attack"], row["q"]), []).append(row)
    lines = [
        "| rule | attack | q | runs | recall, mean (worst) | lost, mean (worst) | accuracy |",
        "|---|---|---|---|---|---|---|",
    ]
    for (rule, attack, q), runs in groups.items():
        cells = [rule, attack, f"{float(q):g}", str(len(runs))]
        cells.append(_spread(runs, "recall", min) if rule == "hardened" and attack != "none" else "")
        cells.append(_spread(runs, "honest_excluded", max) if rule == "hardened" else "")
        cells.append(f"{100 * _mean(runs, 'test_accuracy'):.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def timed() -> str:
    """Where each rule for the end of judging would have led, on the recordings in `results/`."""
    sys.path.insert(0, str(RESULTS.parent / "benchmarks"))
    try:
        import timing
    finally:
        sys.path.pop(0)
    earlier = ["cifar10.sqlite", "mnist.sqlite", "mnist-hardened.csv", "mnist-fresh-seeds.csv"]
    files = [*sorted(RESULTS.glob("timing-*.csv")), *(RESULTS / name for name in earlier)]
    table = timing.tried([run for file in files for run in timing.read(file)])
    rules = list(dict.fromkeys(rule for _, rule in table.index))
    lines = ["| recordings | runs | " + " | ".join(rules) + " |", "|---|---" + "|---" * len(rules) + "|"]
    for group in dict.fromkeys(group for group, _ in table.index):
        cells = []
        for _, row in table.loc[group].iterrows():
            parts = [
                "-" if math.isnan(row[name]) else f"{row[name]:.2f}" for name in ("found", "flippers", "lost")
            ]
            cells.append(f"{' / '.join(parts)} ({row['ends'].replace(' to ', '-')})")
        lines.append(f"| {group} | {table.loc[group].runs.iloc[0]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _mean(runs: list[dict[str, str]], column: str) -> float:
    return sum(float(run[column]) for run in runs) / len(runs)


def _spread(runs: list[dict[str, str]], column: str, worst: Any) -> str:
    return f"{_mean(runs, column):.2f} ({worst(float(run[column]) for run in runs):.2f})"
