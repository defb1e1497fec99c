"""An environment for each peer, made on first use and kept: a virtual environment under .local/peers.

Everything is installed by name with pip as it is set up on this machine, under the project's constraints.txt.
What cannot be installed raises `NotInstalled` with pip's own last word, and the benchmark prints that.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
_MINUTES = 15  # for one call of pip

# What pip is called with, one call after the other. ByzFL imports torchvision for its data sets alone, BlazeFL
# asks for a newer Python than its code needs: both are installed without their dependencies, which go first.
ENVIRONMENTS: dict[str, list[list[str]]] = {
    "pfl": [["pfl[pytorch]==0.6.*"]],
    "jax": [["jax>=0.4.30"]],
    "fedjax": [["fedjax==0.0.17"]],
    "flower": [["flwr[simulation]>=1.41,<1.43", "torch"]],
    "blazefl": [["torch", "numpy"], ["--no-deps", "--ignore-requires-python", "blazefl==2.0.3"]],
    "byzfl": [
        ["torch", "numpy>=1.26.4", "scipy>=1.12", "matplotlib>=3.8.3", "seaborn>=0.13.2"],
        ["--no-deps", "byzfl==0.0.11"],
    ],
}


class NotInstalled(Exception):
    """Why a peer's environment could not be made, in one line."""


def folder() -> Path:
    """Where the environments lie: FEDLAW_PEERS, or .local/peers of the checkout, which git ignores."""
    return Path(os.environ.get("FEDLAW_PEERS") or ROOT / ".local" / "peers")


def python(name: str) -> Path:
    """The interpreter of the environment `name`, made now if it is not there yet or was made of something else."""
    made_of = json.dumps([ENVIRONMENTS[name], CONSTRAINTS.read_text(), sys.version_info[:2]])
    mark = hashlib.sha256(made_of.encode()).hexdigest()
    place = folder() / name
    interpreter, stamp = place / "bin" / "python", place / "made-of"
    if stamp.exists() and stamp.read_text() == mark:
        return interpreter
    print(f"making the environment of {name} in {place}", file=sys.stderr, flush=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    _call([sys.executable, "-m", "venv", "--clear", str(place)])
    for wanted in ENVIRONMENTS[name]:
        print(f"  pip install {' '.join(wanted)}", file=sys.stderr, flush=True)
        pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _call([*pip, "--constraint", str(CONSTRAINTS), *wanted])
    stamp.write_text(mark)
    return interpreter


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 * _MINUTES)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"pip took more than {_MINUTES} minutes") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise NotInstalled((said or done.stderr.splitlines() or ["pip failed"])[-1].removeprefix("ERROR: "))
