"""Rules as plain data: what a configuration file says, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from fedlaw.aggregators.base import Rule, registry
from fedlaw.aggregators.chain import Chain

Spec = str | Mapping[str, Any] | Sequence[Any]


def parse(spec: Spec | Rule) -> Rule:
    """A rule from a name, a mapping with `name` and settings, or a list of those (a chain).

    >>> parse("median")
    Median()
    >>> parse({"name": "krum", "f": 2})
    Krum(f=2, neighbors=None)
    >>> parse([{"name": "bucketing", "size": 2}, "median"])
    Chain(Bucketing(size=2), Median())
    """
    if isinstance(spec, Rule):
        return spec
    if isinstance(spec, str):
        return registry.create(spec)
    if isinstance(spec, Mapping):
        settings = dict(spec)
        if "name" not in settings:
            raise ValueError(f"a rule's description needs a name, got {settings!r}")
        return registry.create(settings.pop("name"), **settings)
    if isinstance(spec, Sequence) and spec:
        return Chain(*map(parse, spec)) if len(spec) > 1 else parse(spec[0])
    raise ValueError(f"a rule is a name, a mapping with a name, or a non-empty list of those, got {spec!r}")


def describe(rule: Rule) -> dict[str, Any] | list[Any]:
    """The description from which `parse` makes an equal rule: plain data, every setting spelled out.

    >>> describe(parse({"name": "trimmed_mean", "f": 2}))
    {'name': 'trimmed_mean', 'f': 2}
    """
    if isinstance(rule, Chain):
        return [describe(stage) for stage in rule.stages]
    for name in registry.names():
        if registry.factory(name) is type(rule):
            settings: list[str] = [field.name for field in fields(rule)] if is_dataclass(rule) else []
            return {"name": name, **{setting: getattr(rule, setting) for setting in settings}}
    raise ValueError(f"{rule!r} is not registered: decorate its class with aggregators.register(name)")


@registry.register("chain")
def _chain(stages: Sequence[Spec | Rule]) -> Rule:
    """Pre-aggregators one after the other, then a rule."""
    return Chain(*map(parse, stages))
