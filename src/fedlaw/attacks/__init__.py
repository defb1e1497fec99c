"""Attacks: on data, on updates, on losses, and their schedules."""

from fedlaw.attacks.base import Attack, Forged, View, create, ranks, registry
from fedlaw.attacks.compose import ForgeLoss, Scale, Schedule, Split, Turns
from fedlaw.attacks.crowd import IPM, LIE, Mimic, noisy_lie, stealth_bound
from fedlaw.attacks.data import Backdoor, Honest, LabelFlip, RandomLabels, TargetedBackdoor, success_rate
from fedlaw.attacks.optimized import OptimizedIPM, OptimizedLIE
from fedlaw.attacks.own import Gaussian, GlobalParameter, InverseGradient, Misaligned
from fedlaw.attacks.recipes import double, mimic_misaligned, sleeper
from fedlaw.attacks.spec import describe, parse
from fedlaw.attacks.spread import MinMax, MinSum

names = registry.names

__all__ = [
    "IPM",
    "LIE",
    "Attack",
    "Backdoor",
    "ForgeLoss",
    "Forged",
    "Gaussian",
    "GlobalParameter",
    "Honest",
    "InverseGradient",
    "LabelFlip",
    "Mimic",
    "MinMax",
    "MinSum",
    "Misaligned",
    "OptimizedIPM",
    "OptimizedLIE",
    "RandomLabels",
    "Scale",
    "Schedule",
    "Split",
    "TargetedBackdoor",
    "Turns",
    "View",
    "create",
    "describe",
    "double",
    "mimic_misaligned",
    "names",
    "noisy_lie",
    "parse",
    "ranks",
    "registry",
    "sleeper",
    "stealth_bound",
    "success_rate",
]
