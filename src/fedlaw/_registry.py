"""Names to factories: one mechanism for rules, attacks, data sets, models and partitions."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[T]):
    """Factories by name, with the settings each one takes.

    Third parties add to it through an entry point of group ``fedlaw.<group>``: the entry's name is the
    name to create by, its value a factory. Entry points are looked at only when a name is not known yet or
    when everything is listed.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind = kind
        self.group = f"fedlaw.{group}"
        self._factories: dict[str, Callable[..., T]] = {}
        self._aliases: dict[str, str] = {}
        self._loaded = False

    def register(self, name: str, *aliases: str) -> Callable[[F], F]:
        """Decorator that makes a class or function known as `name` (and, unlisted, as each alias)."""

        def add(factory: F) -> F:
            for each in (name, *aliases):
                if each in self._factories or each in self._aliases:
                    raise ValueError(f"{self.kind} {each!r} is registered already")
            self._factories[name] = factory
            self._aliases.update(dict.fromkeys(aliases, name))
            return factory

        return add

    def _load_entry_points(self) -> None:
        if self._loaded:
            return
        self._loaded = True
        for entry in entry_points(group=self.group):
            if entry.name not in self._factories:
                self._factories[entry.name] = entry.load()

    def names(self) -> tuple[str, ...]:
        """Every name, sorted, aliases left out."""
        self._load_entry_points()
        return tuple(sorted(self._factories))

    def factory(self, name: str) -> Callable[..., T]:
        """The factory behind `name`; an unknown one is a ValueError that lists those there are."""
        if not isinstance(name, str):
            raise ValueError(f"{self.kind} must be a name, got {name!r}")
        name = self._aliases.get(name, name)
        if name not in self._factories:
            self._load_entry_points()
        if name not in self._factories:
            near = difflib.get_close_matches(name, self._factories, n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(f"unknown {self.kind} {name!r}{hint}; there are: {', '.join(self.names())}")
        return self._factories[name]

    def settings(self, name: str) -> tuple[str, ...]:
        """Names of the settings that `name` takes."""
        parameters = inspect.signature(self.factory(name)).parameters.values()
        return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))

    def create(self, name: str, /, **settings: Any) -> T:
        """Make `name` with `settings`; an unknown setting is a ValueError that lists the valid ones."""
        factory = self.factory(name)
        valid = self.settings(name)
        for setting in settings:
            if setting not in valid:
                takes = f"it takes: {', '.join(valid)}" if valid else "it takes none"
                raise ValueError(f"{self.kind} {name!r} has no setting {setting!r}; {takes}")
        required = [
            p.name
            for p in inspect.signature(factory).parameters.values()
            if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        ]
        missing = [setting for setting in required if setting not in settings]
        if missing:
            raise ValueError(f"{self.kind} {name!r} needs the setting {missing[0]!r}")
        return factory(**settings)

    def summaries(self) -> dict[str, str]:
        """Name to the first line of its documentation."""
        return {
            name: (inspect.getdoc(self._factories[name]) or "").split("\n")[0].rstrip(".")
            for name in self.names()
        }
