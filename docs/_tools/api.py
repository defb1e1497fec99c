"""Which names the API pages show: those a package exports."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import griffe

SOURCE = Path(__file__).parents[2] / "src"


@cache
def _package() -> griffe.Module:
    found = griffe.load("fedlaw", search_paths=[SOURCE], allow_inspection=False)
    assert isinstance(found, griffe.Module)
    return found


def public_names(module: str) -> list[str]:
    """Names in the module's `__all__`; where it has none, the documented public ones that are its own."""
    found = _package() if module == "fedlaw" else _package()[module.removeprefix("fedlaw.")]
    if found.exports is not None:
        return [str(name) for name in found.exports]
    return [
        name
        for name, member in found.members.items()
        if not name.startswith("_") and not member.is_alias and member.has_docstring
    ]


def api(module: str, *only: str) -> str:
    """A directive for each public name of `module`, in alphabetical order."""
    names = only or sorted(public_names(module), key=lambda name: (name.startswith("_"), name.lower()))
    return "\n\n".join(f"::: {module}.{name}" for name in names)
