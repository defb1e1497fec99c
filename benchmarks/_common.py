"""What every benchmark here needs: fair timing and a line about the machine."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch


def machine() -> str:
    """Processor, cores, operating system and versions, in one line."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line
        ]
        processor = f"{names[0]} ({len(names)} logical cores)" if names else processor
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{processor}{gpu}; {platform.system()}; Python {platform.python_version()}, torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads"
    )


def compare(contestants: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repeat of each contestant, in turns, so that a busy moment of the machine hits all alike."""
    for contestant in contestants.values():
        contestant()  # warm-up: allocations, kernels
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, contestant in contestants.items():
            _synchronize()
            start = time.perf_counter()
            contestant()
            _synchronize()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
