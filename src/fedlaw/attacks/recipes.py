"""Attacks that are others put together, under the names they are known by."""

from __future__ import annotations

from typing import Any

from fedlaw._checks import check_integer
from fedlaw.attacks.base import registry
from fedlaw.attacks.compose import ForgeLoss, Schedule, Split
from fedlaw.attacks.own import Misaligned
from fedlaw.attacks.spec import Spec, parse


@registry.register("mimic_misaligned")
def mimic_misaligned(eta: float = 0.1, rho: float = 0.3, ddof: int = 0) -> ForgeLoss:
    """Misaligned update under a plausible loss: -g_j + eta u_j, and mean - rho std of the honest losses.

    Settings:
        eta: length of the random vector added.
        rho: how far below the honest mean the loss is reported (the paper tries 0, 0.1, 0.3 and 1).
        ddof: of the standard deviation of losses: 0 or 1.

    Reference: the FedLAW paper (ICLR 2026), empirical study of the mimic-misaligned attack.

    >>> mimic_misaligned(rho=1)
    ForgeLoss(attack=Misaligned(eta=0.1), rho=1, ddof=0, noise=0.0)
    """
    return ForgeLoss(Misaligned(eta), rho=rho, ddof=ddof)


@registry.register("double")
def double(
    first: Spec = "inverse_gradient",
    second: Spec = "global_parameter",
    rounds: tuple[int, int] = (2, 5),
    persistent: bool | tuple[bool, bool] = (False, True),
) -> Split:
    """Two attacks in turn: half the attackers invert at round 2, the other half send noise at round 5.

    Settings:
        first, second: the attacks of the two halves.
        rounds: when each begins.
        persistent: whether each goes on from its round to the end or lasts one round; one value for both, or
            one each. The paper says "during" its round and means one round or more: of the readings, a first
            attack once and a second that goes on comes nearest to its figures, and is the default.

    Reference: the FedLAW paper (ICLR 2026).

    >>> import torch
    >>> halves = double()
    >>> fleet = torch.tensor([True, True, True, True, False])
    >>> [halves.acting(k, fleet).tolist().count(True) for k in (1, 2, 3, 5, 9)]
    [0, 2, 0, 2, 2]
    """
    _check_pair("rounds", rounds)
    goes_on = (persistent, persistent) if isinstance(persistent, bool) else persistent
    _check_pair("persistent", goes_on)
    return Split(
        tuple(
            Schedule(parse(attack), start=start, stop=None if on else start)
            for attack, start, on in zip((first, second), rounds, goes_on, strict=True)
        )
    )


@registry.register("sleeper")
def sleeper(attack: Spec = "inverse_gradient", rounds: int = 20) -> Schedule:
    """Honest for K rounds, then any attack: what weights frozen early do not see coming.

    Settings:
        attack: what it does once awake.
        rounds: K.

    >>> sleeper("lie", rounds=30).start
    31
    """
    check_integer("rounds", rounds, low=0)
    return Schedule(parse(attack), start=rounds + 1)


def _check_pair(setting: str, value: Any) -> None:
    """Refuse what is not two of something."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{setting} must be two values, one for each half, got {value!r}")
