"""Objects by import path, ``package.module:name``: how users hand in a model or a data set of their own."""

from __future__ import annotations

import importlib
import re
from typing import Any

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_import_path(name: object) -> bool:
    """Whether `name` is meant as an import path: registered names have no colon."""
    return isinstance(name, str) and ":" in name


def import_object(path: str, setting: str) -> Any:
    """The object at ``package.module:name``; `setting` names, in errors, where the path was given.

    Importing runs the module's code: call it with paths that the user typed, never with one from a message
    or a file of unknown origin.

    >>> import_object("math:sqrt", "model")(4.0)
    2.0
    """
    if not _PATH.fullmatch(path):
        raise ValueError(f"{setting} {path!r} is not an import path; write it as package.module:name")
    module_name, _, attribute = path.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(error.name + ".")):
            raise  # the module is there, and what it imports is not: the traceback says more than we could
        raise ValueError(
            f"{setting} {path!r}: there is no module {error.name!r}; install it, or put its folder on PYTHONPATH"
        ) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{setting} {path!r}: module {module_name!r} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{setting} {path!r} is a {type(found).__name__}; it must be something to call")
    return found
