"""Lets the API pages read our docstrings: typeset formulas, one line a setting, examples as code."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
from docstrings import markdown

_HEADINGS = {"Settings": "Parameters"}


class Docstrings(griffe.Extension):
    """Rewrites every docstring of the package as it is loaded."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """After all modules are loaded, when inherited settings are known too."""
        self._visit(pkg)

    def _visit(self, thing: griffe.Object) -> None:
        if thing.docstring is not None:
            thing.docstring.value = markdown(thing.docstring.value, _names(thing), _section)
        for member in thing.members.values():
            if not member.is_alias:
                self._visit(member)


def _names(thing: griffe.Object) -> set[str]:
    """What a section of this docstring may name: arguments and attributes."""
    names = {p.name for p in getattr(thing, "parameters", ())}
    if thing.is_class:
        names |= {name for name, member in thing.all_members.items() if not name.startswith("_")}
    return names


def _section(title: str, text: str) -> str:
    indented = "\n".join(f"    {line}" for line in text.splitlines())
    return f"{_HEADINGS.get(title, title)}:\n{indented}"
