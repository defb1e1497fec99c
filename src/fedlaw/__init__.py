"""Federated learning that keeps working when some participants lie.

`fedlaw.run(...)` runs one experiment; `fedlaw.server` is the server that learns whom to trust, for any transport;
`fedlaw.aggregators` and `fedlaw.attacks` are the rules and attacks around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedlaw.experiments.description import Execution, Experiment
    from fedlaw.experiments.runner import run

__version__ = "0.1.0"
__all__ = ["Execution", "Experiment", "__version__", "run"]

_HOMES = {"run": "runner", "Experiment": "description", "Execution": "description"}


def __getattr__(name: str) -> Any:
    """Names of the laboratory, imported when they are first used: the core needs torch and numpy only."""
    if name not in _HOMES:
        raise AttributeError(f"module 'fedlaw' has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(f"fedlaw.experiments.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("fedlaw"):
            raise
        raise ImportError(
            f"fedlaw.{name} needs the laboratory, and {error.name!r} is missing: pip install 'fedlaw[lab]'"
        ) from error
    return getattr(module, name)
