"""What made a result: versions, the machine, and whether the process that writes a run is still there."""

from __future__ import annotations

import os
import platform
import socket
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_SILENCE_SECONDS = 120.0  # a writer of another machine that wrote nothing for so long is taken to be gone


def versions() -> dict[str, str]:
    """Versions of fedlaw, torch, numpy and Python."""
    found = {"python": platform.python_version()}
    for package in ("fedlaw", "torch", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def machine() -> dict[str, Any]:
    """Name of the processor and of the GPU (None: none), number of cores, operating system."""
    torch = sys.modules.get("torch")  # what has not been imported has not been used
    gpu = torch.cuda.get_device_name() if torch and torch.cuda.is_available() else None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": _processor(), "cores": cores, "gpu": gpu, "system": platform.platform()}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def this_writer() -> dict[str, Any]:
    """Who writes: host, process, and when the process began, because its number may be used again."""
    return {"host": socket.gethostname(), "pid": os.getpid(), "began": _began(os.getpid())}


def is_writing(writer: dict[str, Any], updated: float) -> bool:
    """Whether the process that began to write is still there; `updated`: when it last wrote, Unix time."""
    if writer["host"] != socket.gethostname() or os.name != "posix":
        return time.time() - updated < _SILENCE_SECONDS
    try:
        os.kill(writer["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return bool(_began(writer["pid"]) == writer["began"])


def _began(pid: int) -> str | None:
    """When a process began, in ticks since the machine did; None where that cannot be read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # its name, in parentheses, may hold spaces
    return None if fields[0] in "ZX" else fields[19]
