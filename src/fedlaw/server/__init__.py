"""The round protocol: a server learns whom to trust, and whoever drives it carries the messages.

server = FedLAW(initial_params, clients=ids, judge="hardened", settings=Settings(rounds=200, alpha=0.01))
while not server.done:
    request = server.ask()
    ...                                # send request.params to request.clients, collect what comes back
    server.tell(reply)                 # any number of times
    report = server.end_phase()
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from fedlaw.server.base import Server
from fedlaw.server.core import Core
from fedlaw.server.judge import Exclusion, Status
from fedlaw.server.one_phase import OnePhase, Oracle
from fedlaw.server.protocol import ClientId, Refusal, Replies, Reply, Request, RoundReport, Settings
from fedlaw.server.published import LinearProgram, Published
from fedlaw.server.two_phase import BSUM, PRESETS, FedLAW, preset

__all__ = [
    "BSUM",
    "PRESETS",
    "ClientId",
    "Core",
    "Exclusion",
    "FedLAW",
    "LinearProgram",
    "OnePhase",
    "Oracle",
    "Published",
    "Refusal",
    "Replies",
    "Reply",
    "Request",
    "RoundReport",
    "Server",
    "Settings",
    "Status",
    "create",
    "preset",
]


def create(name: str, initial_params: Tensor, clients: Iterable[ClientId], /, **given: Any) -> Server:
    """Make a server by name: "fedlaw", "bsum", "oracle", or any rule of `fedlaw.aggregators`.

    Keywords are the server settings (rounds, alpha, ...), and for
    - "fedlaw": `preset` ("hardened" by default, or "paper") and any setting of its judge;
    - "bsum": any setting of `LinearProgram`;
    - "oracle": `malicious`;
    - a rule: `unit` and any setting of the rule.
    An unknown keyword is a ValueError that lists the valid ones.

    >>> import torch
    >>> create("fedlaw", torch.zeros(4), range(30), preset="paper", attackers=0.2, rounds=50).judge.sparsity
    24
    """
    common = {field.name for field in fields(Settings)}
    settings = Settings(**{key: value for key, value in given.items() if key in common})
    rest = {key: value for key, value in given.items() if key not in common}
    if name == "fedlaw":
        judge = _adjusted(preset(rest.pop("preset", "hardened")), rest, name, common)
        return FedLAW(initial_params, clients, judge, settings)
    if name == "bsum":
        program = _adjusted(LinearProgram(), rest, name, common)
        return BSUM(initial_params, clients, program, settings)
    if name == "oracle":
        malicious = rest.pop("malicious", ())
        if rest:
            raise ValueError(f"server 'oracle' has no setting {next(iter(rest))!r}; it takes: malicious, ...")
        return Oracle(initial_params, clients, malicious, settings)
    from fedlaw import aggregators

    unit = rest.pop("unit", "gradient")
    reference = rest.pop("reference", None)
    rule = aggregators.create(name, **rest)
    return OnePhase(initial_params, clients, rule, settings, unit=unit, reference=reference)


def _adjusted(judge: Any, given: dict[str, Any], name: str, common: set[str]) -> Any:
    """`judge` with other settings; one it does not have is an error that lists those it has."""
    valid = [field.name for field in fields(judge)]
    for key in given:
        if key not in valid:
            raise ValueError(
                f"server {name!r} judging by {type(judge).__name__} has no setting {key!r}; it takes: "
                f"{', '.join([*valid, *sorted(common)])}"
            )
    return replace(judge, **given)
