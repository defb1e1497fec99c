"""Attacks as plain data, the form they have in an experiment's description, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from fedlaw.attacks.base import Attack, registry

Spec = Attack | str | Mapping[str, Any]

_SCHEDULE = ("start", "stop", "every", "share")


def parse(spec: Spec) -> Attack:
    """Make an attack from a name, a mapping with a name and settings, or an attack (given back as it is).

    In a mapping, `start`, `stop`, `every` and `share` put the attack on a `Schedule`, and `loss` (the
    settings of `ForgeLoss`) makes it forge its losses, unless the attack has a setting of that name itself.

    >>> parse("flip")
    LabelFlip()
    >>> parse({"name": "ipm", "epsilon": 0.5, "start": 20})
    Schedule(attack=IPM(epsilon=0.5), start=20, stop=None, every=1, share=1.0)
    """
    if isinstance(spec, Attack):
        return spec
    if isinstance(spec, str):
        return registry.create(spec)
    if not isinstance(spec, Mapping) or "name" not in spec:
        raise ValueError(
            f"attack must be a name or a mapping with a name, such as {{'name': 'lie'}}, got {spec!r}"
        )
    settings = {key: _setting(value) for key, value in spec.items() if key != "name"}
    name = spec["name"]
    taken = registry.settings(name)
    schedule = {key: settings.pop(key) for key in _SCHEDULE if key in settings and key not in taken}
    loss = settings.pop("loss", None) if "loss" not in taken else None
    attack = registry.create(name, **settings)
    if loss is not None:
        if not isinstance(loss, Mapping):
            raise ValueError(f"loss must be a mapping of settings, such as {{'rho': 0.3}}, got {loss!r}")
        attack = registry.create("forge_loss", attack=attack, **loss)
    return registry.create("schedule", attack=attack, **schedule) if schedule else attack


def describe(attack: Attack) -> dict[str, Any]:
    """The mapping, plain enough for JSON and TOML but for None, that `parse` makes the same attack from.

    >>> describe(parse("ipm"))
    {'name': 'ipm', 'epsilon': 0.1}
    """
    name = next((each for each in registry.names() if registry.factory(each) is type(attack)), None)
    if name is None or "__dataclass_fields__" not in vars(type(attack)):
        raise ValueError(
            f"{attack!r} cannot be described; register its class, a dataclass, in fedlaw.attacks.registry"
        )
    return {"name": name, **{field.name: _plain(getattr(attack, field.name)) for field in fields(attack)}}


def _setting(value: Any) -> Any:
    """Lists become tuples, all the way down: settings are values that can be compared and hashed."""
    return tuple(_setting(each) for each in value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Attack):
        return describe(value)
    return [_plain(each) for each in value] if isinstance(value, (tuple, list)) else value
