"""The paper's experiments, and a few beyond it, as descriptions that come with the package."""

from __future__ import annotations

import csv
from importlib import resources
from pathlib import Path

from fedlaw.experiments._files import DescriptionError, read_toml
from fedlaw.experiments.sweep import Sweep

SCALES = ("paper", "small")


def _folder(name: str) -> Path:
    return Path(str(resources.files("fedlaw.experiments") / name))


def names() -> dict[str, str]:
    """Every experiment that can be reproduced, and what it is about.

    >>> names()["mnist-accuracy"]
    'Test accuracy on MNIST: twelve methods, five attacks, two degrees of heterogeneity'
    """
    files = sorted(file for file in _folder("paper").glob("*.toml") if not file.name.startswith("_"))
    return {file.stem: str(read_toml(file)["title"]) for file in files}


def load(name: str, scale: str = "paper") -> Sweep:
    """The sweep of this name at a scale: "paper" as published, "small" for minutes on a laptop.

    >>> load("mnist-accuracy", "small").base["dataset"]
    'digits'
    """
    if name not in names():
        raise DescriptionError(f"nothing is called {name!r}; there are: {', '.join(names())}")
    if scale not in SCALES:
        raise DescriptionError(f"scale must be {' or '.join(SCALES)}, got {scale!r}")
    return Sweep.from_toml(_folder("paper") / f"{name}.toml").scaled(scale)


def published(file: str) -> list[dict[str, str]]:
    """The rows of a published table.

    >>> published("beta_sweep.csv")[0]
    {'dataset': 'mnist', 'beta': '0.01', 'accuracy_mean': '87.67', 'accuracy_std': '0.97'}
    """
    path = _folder("published") / file
    if Path(file).name != file or not path.is_file():
        raise DescriptionError(f"there is no published table {file!r}")
    with path.open(newline="", encoding="utf-8") as opened:
        return list(csv.DictReader(opened))
