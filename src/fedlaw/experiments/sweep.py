"""A sweep: one file that stands for many experiments. Lists over any setting, named variants, seeds, conditions."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedlaw.data import malicious_count
from fedlaw.experiments._expressions import evaluate, is_expression
from fedlaw.experiments._files import DescriptionError, merged, read_toml
from fedlaw.experiments.description import Experiment

_KEYS = ("name", "title", "note", "include", "seeds", "base", "axes", "when", "search", "show", "scale")
_SEARCH_KEYS = ("by", "rounds", "seeds", "per")
_SEARCHED = "search"  # within a variant: settings to be chosen, each with its candidates


@dataclass(frozen=True)
class Planned:
    """One experiment of a sweep and its place there.

    Attributes:
        labels: axis to label, in the order of the axes; `seed` comes last.
        experiment: the description.
    """

    labels: dict[str, Any]
    experiment: Experiment


@dataclass(frozen=True)
class Cell:
    """One combination of the axes, all seeds together.

    Attributes:
        labels: axis to label.
        settings: of the experiment, expressions not computed yet.
        candidates: what a search may change in them; [{}] where nothing is searched.
    """

    labels: dict[str, Any]
    settings: dict[str, Any]
    candidates: list[dict[str, Any]]

    def experiment(
        self, seed: int, choice: Mapping[str, Any] | None = None, rounds: int | None = None
    ) -> Experiment:
        """The experiment with this seed, searched settings as in `choice`, and perhaps fewer rounds."""
        settings = copy.deepcopy(self.settings)
        for path, value in (choice or {}).items():
            assign(settings, path, value)
        settings["seed"] = seed
        if rounds is not None:
            settings["rounds"] = rounds
        try:
            return Experiment(**computed(settings))
        except DescriptionError as error:
            where = ", ".join(f"{axis} {label}" for axis, label in self.labels.items())
            raise DescriptionError(f"{error} (in {where})" if where else str(error)) from None


@dataclass(frozen=True)
class Sweep:
    """Many experiments: a base, axes along which settings change, seeds, and conditions.

    Attributes:
        name, title, note: what it is called, is about, and what a reader should know.
        base: settings of `Experiment` shared by all.
        axes: name to a list of values of that setting (a dotted path reaches inside: ``rule.beta``), or to a
            table of variants, label to settings. A variant's own table `search` lists candidates by setting.
        seeds: of the repetitions.
        when: conditions in order, each a table `match` (axis or setting to a value or a list of values) and
            either `set` (settings) or `skip = true`.
        search: how candidates are chosen: `by`, `rounds`, `seeds`, `per`; False: not at all.
        show: what the report shows, a table each.
        scale: named changes of all this, such as `small`.

    A text setting that begins with "=" is arithmetic over the experiment's numbers and `attackers`, the number
    of malicious clients.

    >>> sweep = Sweep.parse({
    ...     "name": "two-rules", "seeds": 2, "base": {"clients": 20, "malicious": 0.3, "attack": "lie"},
    ...     "axes": {"q": [0.6, 0.9], "method": {"Krum": {"rule": {"name": "krum", "f": "= attackers"}},
    ...                                          "FedAvg": {"rule": "mean"}}}})
    >>> len(sweep.planned()), sweep.planned()[0].labels, sweep.planned()[0].experiment.rule["f"]
    (8, {'q': 0.6, 'method': 'Krum', 'seed': 0}, 6)
    """

    name: str
    title: str = ""
    note: str = ""
    base: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    when: tuple[Mapping[str, Any], ...] = ()
    search: Mapping[str, Any] | bool = False
    show: tuple[Mapping[str, Any], ...] = ()
    scale: Mapping[str, Any] = field(default_factory=dict)

    # -------------------------------------------------------------------------------------- from files
    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Sweep:
        """The sweep in a TOML file; its name is the file's unless it says otherwise."""
        file = Path(path)
        return cls.parse(_with_included(file), name=file.stem)

    @classmethod
    def parse(cls, given: Mapping[str, Any], name: str = "sweep") -> Sweep:
        """The sweep that plain data describes; a mistake is a DescriptionError of one line."""
        for key in given:
            if key not in _KEYS:
                raise DescriptionError(f"unknown key {key!r} in the sweep; there are: {', '.join(_KEYS)}")
        axes = given.get("axes", {})
        for axis, values in axes.items():
            if axis == "seed" or not values or not isinstance(values, list | Mapping):
                raise DescriptionError(
                    f"axes.{axis} must be a list of values or a table of variants, and not be seed "
                    f"(use seeds), got {values!r}"
                )
            if isinstance(values, Mapping) and not all(isinstance(v, Mapping) for v in values.values()):
                raise DescriptionError(f"axes.{axis} must have a table of settings for each label")
        for condition in given.get("when", []):
            if not isinstance(condition.get("match"), Mapping) or not ({"set", "skip"} & set(condition)):
                raise DescriptionError(f"when needs a table match and set or skip, got {dict(condition)!r}")
        search = given.get("search", False)
        if search is True:
            search = {}
        if isinstance(search, Mapping) and (unknown := [k for k in search if k not in _SEARCH_KEYS]):
            raise DescriptionError(
                f"unknown key {unknown[0]!r} in search; there are: {', '.join(_SEARCH_KEYS)}"
            )
        return cls(
            name=str(given.get("name", name)),
            title=str(given.get("title", "")),
            note=str(given.get("note", "")),
            base=dict(given.get("base", {})),
            axes=dict(axes),
            seeds=_seeds(given.get("seeds", [0])),
            when=tuple(given.get("when", ())),
            search=search,
            show=tuple(given.get("show", ())),
            scale=dict(given.get("scale", {})),
        )

    def plain(self) -> dict[str, Any]:
        """Plain data that `parse` makes the same sweep of."""
        return {
            "name": self.name,
            "title": self.title,
            "note": self.note,
            "base": dict(self.base),
            "axes": dict(self.axes),
            "seeds": list(self.seeds),
            "when": list(self.when),
            "search": self.search if isinstance(self.search, bool) else dict(self.search),
            "show": list(self.show),
        }

    @property
    def id(self) -> str:
        """Digest of what is to be run: 12 hexadecimal digits."""
        text = json.dumps({k: v for k, v in self.plain().items() if k not in ("show", "title", "note")})
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()

    # -------------------------------------------------------------------------------------- variations
    def scaled(self, name: str) -> Sweep:
        """The sweep at another scale: what the file's `scale.NAME` says goes before the rest."""
        if name not in self.scale:
            if name == "paper":
                return self
            known = ", ".join(["paper", *self.scale])
            raise DescriptionError(f"scale {name!r} is not described in {self.name}; there are: {known}")
        changes, plain = self.scale[name], self.plain()
        for key, value in changes.items():
            if key in ("base", "axes"):
                for each, new in value.items():
                    old = plain[key].get(each)
                    both = isinstance(old, Mapping) and isinstance(new, Mapping) and key == "axes"
                    plain[key][each] = _deep(old, new) if both else new
                    if new is False:
                        del plain[key][each]
            elif key == "when":
                plain["when"] = [*plain["when"], *value]
            else:
                plain[key] = value
        return replace(Sweep.parse(plain), name=f"{self.name}@{name}")

    def only(self, chosen: Mapping[str, Sequence[str]]) -> Sweep:
        """The part of the sweep with these labels: axis (or `seed`) to labels.

        >>> Sweep.parse({"axes": {"q": [0.6, 0.9]}}).only({"q": ["0.9"]}).axes
        {'q': [0.9]}
        """
        axes, seeds = dict(self.axes), self.seeds
        for axis, pieces in chosen.items():
            there = self.seeds if axis == "seed" else axes.get(axis)
            if there is None:
                raise DescriptionError(f"--only {axis}: axes of {self.name} are {', '.join([*axes, 'seed'])}")
            known = {str(label).lower() for label in there}
            labels = _whole(pieces, known)
            wanted = {label.lower() for label in labels}

            def keep(label: Any, wanted: set[str] = wanted) -> bool:
                return str(label).lower() in wanted

            if missing := [label for label in labels if label.lower() not in known]:
                raise DescriptionError(
                    f"--only {axis}={missing[0]}: there are {'; '.join(str(label) for label in there)}"
                )
            if axis == "seed":
                seeds = tuple(filter(keep, seeds))
            elif isinstance(there, Mapping):
                axes[axis] = {label: each for label, each in there.items() if keep(label)}
            else:
                axes[axis] = [label for label in there if keep(label)]
        return replace(self, axes=axes, seeds=seeds)

    def with_base(self, changes: Mapping[str, Any]) -> Sweep:
        """The sweep with other settings in its base; an axis of the same name goes."""
        axes = {axis: values for axis, values in self.axes.items() if axis not in changes}
        return replace(self, base=merged(self.base, changes), axes=axes)

    # -------------------------------------------------------------------------------------- what it stands for
    def cells(self) -> list[Cell]:
        """Every combination of the axes that no condition skips."""
        return list(self._cells())

    def _cells(self) -> Iterator[Cell]:
        for combination in itertools.product(*self.axes.values()):
            labels = dict(zip(self.axes, combination, strict=True))
            settings: dict[str, Any] = copy.deepcopy(dict(self.base))
            searched: dict[str, list[Any]] = {}
            for axis, label in labels.items():
                values = self.axes[axis]
                changes = dict(values[label]) if isinstance(values, Mapping) else {axis: label}
                searched |= changes.pop(_SEARCHED, {}) if isinstance(values, Mapping) else {}
                settings = _changed(settings, changes)
            for condition in self.when:
                if all(_matches(labels, settings, key, want) for key, want in condition["match"].items()):
                    if condition.get("skip"):
                        break
                    settings = _changed(settings, condition["set"])
            else:
                searching = self.search is not False and searched
                candidates = [
                    dict(zip(searched, values, strict=True))
                    for values in itertools.product(*searched.values())
                ]
                yield Cell(labels, settings, candidates if searching else [{}])

    def planned(self, choose: Callable[[Cell], Mapping[str, Any]] | None = None) -> list[Planned]:
        """Every experiment of the sweep; two places may stand for the same one.

        `choose` says what a search chose for a cell; without it the first candidate is taken.
        """
        found = []
        for cell in self._cells():
            choice = choose(cell) if choose else cell.candidates[0]
            for seed in self.seeds:
                found.append(Planned({**cell.labels, "seed": seed}, cell.experiment(seed, choice)))
        return found


# ------------------------------------------------------------------------------------------ settings
def assign(settings: dict[str, Any], path: str, value: Any) -> None:
    """Set what a dotted path names, in place: ``rule.beta``, ``rule.1.tau`` in a chain, ``rounds``.

    >>> settings = {"rule": "fedlaw"}
    >>> assign(settings, "rule.beta", 0.1)
    >>> settings
    {'rule': {'name': 'fedlaw', 'beta': 0.1}}
    """
    first, *rest = path.split(".")
    if not rest:
        settings[first] = value
        return
    if isinstance(settings.get(first), str):
        settings[first] = {"name": settings[first]}
    place: Any = settings.setdefault(first, {})
    try:
        for step in rest[:-1]:
            index: Any = int(step) if isinstance(place, list) else step
            if isinstance(place[index], str):
                place[index] = {"name": place[index]}
            place = place[index]
        place[int(rest[-1]) if isinstance(place, list) else rest[-1]] = value
    except (KeyError, IndexError, ValueError, TypeError):
        raise DescriptionError(f"setting {path!r} names nothing in {first} = {settings[first]!r}") from None


def computed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with every expression replaced by its number."""
    defaults = {name: f.default for name, f in Experiment.model_fields.items()}
    names = {k: v for k, v in {**defaults, **settings}.items() if type(v) in (int, float)}
    done = dict(settings)
    for key, value in settings.items():
        if is_expression(value):
            done[key] = names[key] = evaluate(value, names)
    who = done.get("malicious", 0.0)
    n = done.get("clients", defaults["clients"])
    if isinstance(who, list | tuple):
        names["attackers"] = len(who)
    elif type(who) in (int, float) and type(n) is int and 0 <= who < n:
        names["attackers"] = malicious_count(n, who)

    def walk(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: walk(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [walk(each) for each in value]
        return evaluate(value, names) if is_expression(value) else value

    return {key: walk(value) for key, value in done.items()}


def _changed(settings: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    whole = {key: value for key, value in changes.items() if "." not in key}
    settings = copy.deepcopy(merged(settings, whole))
    for path, value in changes.items():
        if "." in path:
            assign(settings, path, copy.deepcopy(value))
    return settings


def _matches(labels: Mapping[str, Any], settings: Mapping[str, Any], key: str, want: Any) -> bool:
    have = labels[key] if key in labels else _look(settings, key)
    return have in want if isinstance(want, list) else have == want


def _whole(pieces: Sequence[str], known: Container[str]) -> list[str]:
    """Labels that were split at their own commas, whole again."""
    labels, left = [], list(pieces)
    while left:
        ends = (end for end in range(len(left), 1, -1) if ", ".join(left[:end]).lower() in known)
        end = next(ends, 1)
        labels.append(", ".join(left[:end]))
        left = left[end:]
    return labels


def _look(settings: Any, path: str) -> Any:
    for step in path.split("."):
        settings = settings.get(step) if isinstance(settings, Mapping) else None
    return settings


def _deep(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    both = dict(old)
    for key, value in new.items():
        nested = isinstance(value, Mapping) and isinstance(both.get(key), Mapping)
        both[key] = _deep(both[key], value) if nested else value
        if value is False:
            del both[key]
    return both


def _seeds(given: Any) -> tuple[int, ...]:
    seeds = range(given) if type(given) is int else given
    if not isinstance(seeds, range | list | tuple) or not seeds or any(type(s) is not int for s in seeds):
        raise DescriptionError(f"seeds must be a number of seeds or a list of integers, got {given!r}")
    return tuple(dict.fromkeys(seeds))


def _with_included(file: Path) -> dict[str, Any]:
    """A file's table over those of the files that it includes, which lie beside it."""
    given = read_toml(file)
    whole: dict[str, Any] = {}
    for name in given.pop("include", []):
        whole = _deep(whole, _with_included(file.parent / name))
    return _deep(whole, given)
