"""Small arithmetic in descriptions: `"= (1 - malicious) * clients - 2"`. Numbers, names, nothing else."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

from fedlaw.experiments._files import DescriptionError

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
}


def is_expression(value: Any) -> bool:
    """Whether a setting is to be computed: text that begins with an equals sign."""
    return isinstance(value, str) and value.lstrip().startswith("=")


def evaluate(text: str, names: Mapping[str, float]) -> int | float:
    """The number that an expression stands for. Nothing is executed: the syntax tree is walked.

    A value that is a whole number but for rounding is one: `(1 - 0.4) * 200 - 2` is 118.

    >>> evaluate("= (1 - malicious) * clients - 2", {"malicious": 0.4, "clients": 200})
    118
    >>> evaluate("= max(1, clients // 3) / 4", {"clients": 10})
    0.75
    >>> evaluate("= open('x')", {})
    Traceback (most recent call last):
    fedlaw.experiments._files.DescriptionError: expression "= open('x')": 'open' is no function; there are: ...
    """
    try:
        tree = ast.parse(text.lstrip().removeprefix("=").strip(), mode="eval")
        found = _walk(tree.body, names)
    except (SyntaxError, ZeroDivisionError, OverflowError, TypeError, ValueError) as error:
        said = "it is not arithmetic" if isinstance(error, SyntaxError) else str(error)
        raise DescriptionError(f'expression "{text}": {said}') from None
    if isinstance(found, float) and math.isfinite(found) and abs(found - round(found)) < 1e-9:
        return round(found)
    return found


def _walk(node: ast.AST, names: Mapping[str, float]) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.Name):
        if node.id not in names:
            raise ValueError(f"{node.id!r} is no number here; there are: {', '.join(sorted(names))}")
        return names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        found: int | float = _BINARY[type(node.op)](_walk(node.left, names), _walk(node.right, names))
        return found
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_walk(node.operand, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        if node.func.id not in _FUNCTIONS:
            raise ValueError(f"{node.func.id!r} is no function; there are: {', '.join(_FUNCTIONS)}")
        value: int | float = _FUNCTIONS[node.func.id](*(_walk(each, names) for each in node.args))
        return value
    raise ValueError("only numbers, names, + - * / // % and min, max, round, floor, ceil are allowed")
