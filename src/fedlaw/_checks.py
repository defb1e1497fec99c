"""Checks of settings: each a ValueError of one line that names the setting, what was given and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def check_number(
    setting: str, value: Any, *, low: float = -math.inf, high: float = math.inf, open_low: bool = False
) -> None:
    """Refuse what is not a finite number from `low` to `high` (above `low` if `open_low`)."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if number and low <= value <= high and not (open_low and value == low):
        return
    bounds = [f"above {low:g}" if open_low else f"at least {low:g}"] if low > -math.inf else []
    bounds += [f"at most {high:g}"] if high < math.inf else []
    raise ValueError(
        f"{setting} must be a finite number {' and '.join(bounds)}".rstrip() + f", got {value!r}"
    )


def check_positive(setting: str, value: Any) -> None:
    """Refuse what is not a finite number above 0."""
    check_number(setting, value, low=0, open_low=True)


def check_integer(setting: str, value: Any, low: int = 0) -> None:
    """Refuse what is not an integer of `low` or more."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise ValueError(f"{setting} must be an integer of at least {low}, got {value!r}")


def check_choice(setting: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse what is not one of `choices`."""
    if not any(value == choice and type(value) is type(choice) for choice in choices):
        raise ValueError(f"{setting} must be one of {', '.join(map(repr, choices))}, got {value!r}")
