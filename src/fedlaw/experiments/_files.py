"""Descriptions as files: TOML in and out, and settings given over those of a file."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class DescriptionError(ValueError):
    """A setting that cannot be: one line that names it, what was given and what is allowed."""


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` over `base`; a part that is changed loses the settings that `base` gave the old one."""
    merged = dict(base)
    for part in ("dataset", "model", "partition"):
        if changes.get(part, base.get(part)) != base.get(part):
            merged.pop(f"{part}_settings", None)
            if part == "partition":
                merged.pop("q", None)
    if "q" in changes:
        settings = merged.get("partition_settings") or {}
        merged["partition_settings"] = {key: value for key, value in settings.items() if key != "q"}
    if "rule" in changes or "preset" in changes:
        merged.pop("preset", None)
        if "rule" not in changes:
            merged["rule"] = "fedlaw"
    return {**merged, **changes}


def read_toml(path: Path) -> dict[str, Any]:
    """What a TOML file says; a DescriptionError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DescriptionError(f"{path} is not a TOML file: {error}") from None
    except OSError as error:
        raise DescriptionError(f"cannot read {path}: {error.strerror or error}; name a TOML file") from None


def toml_value(value: Any, none: str | None) -> str:
    """A TOML value. None has no spelling there: left out of tables, or the word `none`."""
    if isinstance(value, Mapping):
        kept = {key: none if each is None else each for key, each in value.items()}
        pairs = (f"{_toml_key(k)} = {toml_value(v, None)}" for k, v in kept.items() if v is not None)
        return "{ " + ", ".join(pairs) + " }" if kept else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(toml_value(each, None) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key, None)
