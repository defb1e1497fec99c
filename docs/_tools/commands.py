"""The command line as a page, from the commands themselves."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

import click
import typer
from docstrings import typeset

from fedlaw.cli_app import app


def commands() -> str:
    """A section for each command: what it does, its arguments and options."""
    return "\n\n".join(_sections(typer.main.get_command(app), ["fedlaw"]))


def _sections(command: Any, path: list[str]) -> list[str]:
    out = []
    children = getattr(command, "commands", {})
    options = [p for p in command.params if p.name not in ("help", "version", "debug") and not _hidden(p)]
    if not children or (options and len(path) > 1):
        usage = " ".join(
            [*path, *(p.make_metavar(click.Context(command)) for p in options if _is_argument(p))]
        )
        shown = f"{usage} [OPTIONS]" if any(not _is_argument(p) for p in options) else usage
        said = typeset((command.help or "").strip().split("\n\n")[0])
        out.append(
            "\n\n".join([f"## {' '.join(path)}", said, f"```text\n{shown}\n```", _table(command, options)])
        )
    for name, child in children.items():
        out += _sections(child, [*path, name])
    return out


def _table(command: Any, options: list[Any]) -> str:
    if not options:
        return ""
    lines = ["| | default | |", "|---|---|---|"]
    context = click.Context(command)
    for each in options:
        names = [each.make_metavar(context)] if _is_argument(each) else each.opts
        plain = each.default is None or callable(each.default) or getattr(each, "is_flag", False)
        words = typeset(getattr(each, "help", None) or _said(command, each.name)).replace("|", "&#124;")
        shown = ", ".join(f"`{name}`" for name in names)
        lines.append(f"| {shown} | {'' if plain else f'`{each.default}`'} | {words} |")
    return "\n".join(lines)


def _said(command: Any, name: str) -> str:
    """What the command's function says about an argument."""
    hints = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
    return next((each.help for each in getattr(hints.get(name), "__metadata__", ()) if each.help), "")


def _is_argument(parameter: Any) -> bool:
    return parameter.param_type_name == "argument"


def _hidden(parameter: Any) -> bool:
    return bool(getattr(parameter, "hidden", False))
