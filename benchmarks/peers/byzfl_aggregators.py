"""ByzFL's aggregators and pre-aggregators on one matrix: milliseconds by rule. Runs in ByzFL's environment.

python byzfl_aggregators.py N F D THREADS REPEATS RULE ...
"""

from __future__ import annotations

import json
import sys
import time
from types import ModuleType
from unittest.mock import MagicMock

import torch

_IN_PLACE = (
    "clip",
    "arc",
)  # they write into the rows they are given, and the next call would find nothing to do


def main() -> None:
    n, f, d, threads, repeats = map(int, sys.argv[1:6])
    stub = ModuleType("torchvision")  # which only its data sets use
    stub.datasets, stub.transforms = MagicMock(), MagicMock()  # type: ignore[attr-defined]
    sys.modules["torchvision"] = stub
    import byzfl

    torch.set_num_threads(threads)
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(0))
    rules = {
        "mean": byzfl.Average,
        "median": byzfl.Median,
        "trimmed_mean": lambda: byzfl.TrMean(f),
        "meamed": lambda: byzfl.Meamed(f),
        "krum": lambda: byzfl.Krum(f),
        "multi_krum": lambda: byzfl.MultiKrum(f),
        "geometric_median": lambda: byzfl.GeometricMedian(nu=1e-6, T=3),
        "centered_clipping": lambda: byzfl.CenteredClipping(L=1, tau=10.0),
        "monna": lambda: byzfl.MoNNA(f),
        "caf": lambda: byzfl.CAF(f),
        "mda": lambda: byzfl.MDA(1),
        "bucketing": lambda: byzfl.Bucketing(2),
        "clip": lambda: byzfl.Clipping(1.0),
        "arc": lambda: byzfl.ARC(f),
        "nearest_neighbor_mixing": lambda: byzfl.NNM(f),
    }
    for name in sys.argv[6:]:
        if name not in rules:
            continue
        rule, best, spent = rules[name](), float("inf"), 0.0
        for _ in range(repeats + 1):
            start = time.perf_counter()
            rule(x.clone() if name in _IN_PLACE else x)
            took = time.perf_counter() - start
            best, spent = min(best, took), spent + took
            if spent > 2:
                break
        print(json.dumps({"rule": name, "ms": 1e3 * best}), flush=True)


if __name__ == "__main__":
    main()
