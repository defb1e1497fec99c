"""Parts of a description as plain data in one normal form: defaults spelled out, numbers of the declared kind.

Whatever means the same has the same normal form: a name alone and a mapping with its defaults, 1 and 1.0 where
a setting is a float, an alias and the name it stands for.
"""

from __future__ import annotations

import inspect
import math
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedlaw import aggregators, attacks, data, models
from fedlaw._imports import import_object, is_import_path
from fedlaw._registry import Registry
from fedlaw.server import PRESETS, LinearProgram, Settings, preset

LEARNED = ("fedlaw", "bsum")  # rules with a judge
SERVERS = {
    "fedlaw": "FedLAW: weights learned together with the model, in two exchanges a round",
    "bsum": "FedLAW-BSUM, the paper's baseline: weights from a linear program in the losses alone",
    "oracle": "Told who is malicious: the mean of the honest updates; the ceiling",
}
PRESET_WORDS = {
    "hardened": "Judging by a core, with its measured defaults; it is not told how many attack (the default)",
    "paper": "As published: the weight step of Algorithm 2; it is told the share of attackers (attackers=0.4)",
}
_OF_THE_EXPERIMENT = {"alpha": "lr", **{f.name: f.name for f in fields(Settings) if f.name != "alpha"}}
del _OF_THE_EXPERIMENT["minimum_replies"]  # the one server setting that goes with the rule


# ------------------------------------------------------------------------------------------ rules
def rule_names() -> dict[str, str]:
    """Every rule's name and one line about it: the servers and the aggregation rules."""
    return {**SERVERS, **aggregators.registry.summaries()}


def normal_rule(spec: Any, preset_name: str | None = None) -> dict[str, Any]:
    """The normal form of a rule: a mapping with `name`, every setting, `minimum_replies` (and `unit`).

    >>> normal_rule("median")
    {'name': 'median', 'unit': 'gradient', 'minimum_replies': 1}
    >>> normal_rule({"name": "fedlaw", "attackers": 0.3}, "paper")["beta"]
    0.01
    """
    given = _rule_mapping(spec)
    name = given.pop("name")
    for key, experiment_key in _OF_THE_EXPERIMENT.items():
        if key in given:
            raise ValueError(
                f"{key} is no setting of the rule: give it to the experiment, as {experiment_key}"
            )
    given = {key: None if value == "none" else value for key, value in given.items()}
    least = given.pop("minimum_replies", 1)
    if type(least) is not int:
        raise ValueError(f"minimum_replies must be an integer of at least 1, got {least!r}")
    Settings(minimum_replies=least)
    if preset_name is not None and name != "fedlaw":
        raise ValueError(f"preset {preset_name!r} goes with the rule 'fedlaw' only, the rule is {name!r}")
    if name in LEARNED:
        if preset_name is not None and given.setdefault("preset", preset_name) != preset_name:
            raise ValueError(f"preset is given twice: {preset_name!r} and, in the rule, {given['preset']!r}")
        return {"name": name, **_judge(name, given), "minimum_replies": least}
    if name == "oracle":
        if given:
            raise ValueError(f"rule 'oracle' has no setting {next(iter(given))!r}; it takes: minimum_replies")
        return {"name": name, "minimum_replies": least}
    unit = given.pop("unit", "gradient")
    if unit not in ("gradient", "parameter"):
        raise ValueError(f"unit must be 'gradient' or 'parameter', got {unit!r}")
    rule = _made(aggregators.registry, "rule", name, given, aggregators.parse)
    if isinstance(rule, aggregators.PreAggregator):
        raise ValueError(
            f"rule {name!r} is a pre-aggregator and gives no single vector: put a rule behind it, "
            f"as in rule = ['{name}', 'median']"
        )
    described = aggregators.describe(rule)
    if isinstance(described, list):
        described = {"name": "chain", "stages": described}
    return {**_plain(_declared(described, aggregators.registry)), "unit": unit, "minimum_replies": least}


def _rule_mapping(spec: Any) -> dict[str, Any]:
    if isinstance(spec, aggregators.Rule):
        spec = aggregators.describe(spec)
    if isinstance(spec, str):
        return {"name": spec}
    if isinstance(spec, Mapping):
        if not isinstance(spec.get("name"), str):
            raise ValueError(
                f"rule as a mapping needs a name, such as {{name = 'krum', f = 8}}, got {dict(spec)!r}"
            )
        return dict(spec)
    if isinstance(spec, Sequence) and spec:
        inner = [stage for stage in spec if _name(stage) in SERVERS]
        if inner and len(spec) > 1:
            raise ValueError(f"rule {_name(inner[0])!r} is a server of its own and cannot be part of a chain")
        return _rule_mapping(spec[0]) if len(spec) == 1 else {"name": "chain", "stages": list(spec)}
    raise ValueError(
        f"rule must be a name, a mapping with a name, or a non-empty list of those, got {spec!r}"
    )


def _name(spec: Any) -> Any:
    return spec.get("name") if isinstance(spec, Mapping) else spec


def _judge(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Every setting of the judge of "fedlaw" or "bsum"; for fedlaw also the preset that it is a change of."""
    start: Any = LinearProgram()
    if name == "fedlaw":
        start = preset(given.pop("preset", "hardened"))
    hints = get_type_hints(type(start))
    for key, value in given.items():
        if key not in hints:
            takes = ", ".join(["preset", *hints] if name == "fedlaw" else hints)
            raise ValueError(
                f"rule {name!r} ({type(start).__name__}) has no setting {key!r}; it takes: {takes}"
            )
        given[key] = _checked(key, value, hints[key])
    settings = asdict(replace(start, **given))
    if name == "fedlaw":  # every setting is spelled out, so the preset only says which judge they belong to
        kind = next(each for each, judge in PRESETS.items() if type(judge) is type(start))
        settings = {"preset": kind, **settings}
    return settings


# ------------------------------------------------------------------------------------------ the other parts
def normal_attack(spec: Any) -> dict[str, Any]:
    """The normal form of an attack: a mapping with `name` and every setting, nested attacks likewise.

    >>> normal_attack({"name": "ipm", "epsilon": 1})
    {'name': 'ipm', 'epsilon': 1.0}
    """
    given = {"name": spec} if isinstance(spec, str) else spec
    if isinstance(given, Mapping) and isinstance(given.get("name"), str):
        settings = {key: value for key, value in given.items() if key != "name"}
        attack = _made(attacks.registry, "attack", given["name"], settings, attacks.parse)
    else:
        attack = attacks.parse(given)
    return _plain(_declared(attacks.describe(attack), attacks.registry))  # type: ignore[no-any-return]


def normal_partition(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Every setting of a partition.

    >>> normal_partition("dirichlet", {"alpha": 1})
    {'alpha': 1.0, 'minimum': 1, 'tries': 100}
    """
    hints = get_type_hints(data.partitions.factory(name))
    given = {key: _checked(key, each, hints[key]) if key in hints else each for key, each in settings.items()}
    made = _made(data.partitions, "partition", name, given)
    full = {f.name: getattr(made, f.name) for f in fields(made)} if is_dataclass(made) else given
    return _plain(full)  # type: ignore[no-any-return]


def normal_dataset(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a data set, its name and theirs checked; nothing is read."""
    if "data_dir" in settings:
        raise ValueError(
            "data_dir is no setting of the experiment: name the folder with --data-dir (Execution)"
        )
    return _by_name(data.datasets, "dataset", name, settings, hidden=("data_dir",))


def normal_model(name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model, its name and theirs checked; nothing is built.

    >>> normal_model("mlp", {})
    {'hidden': [128, 64]}
    """
    return _by_name(models.registry, "model", name, settings, hidden=("input_shape", "classes"))


def _by_name(
    registry: Registry[Any], kind: str, name: str, settings: Mapping[str, Any], hidden: tuple[str, ...]
) -> dict[str, Any]:
    """Settings of a registered factory with its defaults, or of one by import path as they were given."""
    if is_import_path(name):
        parameters = inspect.signature(import_object(name, kind)).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        offered = {}
    else:
        parameters = inspect.signature(registry.factory(name)).parameters
        open_ended = False
        offered = {key: p.default for key, p in parameters.items() if p.default is not p.empty}
    takes = [key for key in parameters if key not in hidden]
    for key in settings:
        if key not in takes and not open_ended:
            listed = f"it takes: {', '.join(takes)}" if takes else "it takes none"
            raise ValueError(f"{kind} {name!r} has no setting {key!r}; {listed}")
    full = {**{key: value for key, value in offered.items() if key in takes}, **settings}
    return _plain(full)  # type: ignore[no-any-return]


def _made(registry: Registry[Any], kind: str, name: str, settings: dict[str, Any], parse: Any = None) -> Any:
    """What the registry makes of a name and settings; every mistake is a ValueError of one line."""
    try:
        return parse({"name": name, **settings}) if parse else registry.create(name, **settings)
    except TypeError as error:
        raise ValueError(f"{kind} {name!r}: a setting is of the wrong kind ({error})") from None
    except ValueError as error:
        if "unknown" in str(error) and kind == "rule":
            raise ValueError(f"{error}, {', '.join(SERVERS)}") from None
        if missing := re.search(r"needs the setting '(\w+)'", str(error)):
            key = missing[1]
            raise ValueError(f"{error}: add {key} = ... to its table, or --{kind}-set {key}=...") from None
        raise


# ------------------------------------------------------------------------------------------ values
def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _checked(setting: str, value: Any, hint: Any) -> Any:
    """`value` if it is of one of the scalar kinds that `hint` names, an int made a float where one is meant."""
    options = _options(hint)
    words = [v for option in options if get_origin(option) is Literal for v in get_args(option)]
    if (value is None and type(None) in options) or (isinstance(value, str) and value in words):
        return value
    if type(value) in options and value is not None:
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{setting} must be finite, got {value}")
        return value
    if type(value) is int and float in options:
        return float(value)
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a word", type(None): "none"}
    allowed = " or ".join([repr(word) for word in words] + [names[o] for o in options if o in names])
    raise ValueError(f"{setting} must be {allowed}, got {value!r}")


def _declared(spec: Any, registry: Registry[Any]) -> Any:
    """A description with ints made floats wherever the class that it describes declares a float."""
    if isinstance(spec, list):
        return [_declared(each, registry) for each in spec]
    if not isinstance(spec, Mapping) or "name" not in spec:
        return spec
    hints = get_type_hints(registry.factory(spec["name"]))
    return {key: _as(_declared(value, registry), hints.get(key)) for key, value in spec.items()}


def _as(value: Any, hint: Any) -> Any:
    options = _options(hint)
    if type(value) is int and float in options and int not in options:
        return float(value)
    if isinstance(value, list | tuple):
        inner = next((get_args(option)[0] for option in options if get_origin(option) is tuple), None)
        return [_as(each, inner) for each in value]
    return value


def _plain(value: Any) -> Any:
    """`value` as JSON and TOML have it: lists for tuples, string keys, finite numbers, nothing else."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"settings must be finite numbers, got {value}")
        return value + 0.0  # -0.0 and 0.0 are one number
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "item"):  # a numpy or torch scalar
        return _plain(value.item())
    raise ValueError(f"settings must be plain data (numbers, words, lists, tables), got {value!r}")
