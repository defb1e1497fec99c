"""Rules against recorded outputs of an independent implementation (ByzFL 0.0.11, NumPy path)."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedlaw.aggregators import create

GOLDEN = Path(__file__).parents[1] / "golden" / "byzfl.json.gz"
CASES: list[dict[str, Any]] = [
    case
    for case in json.loads(gzip.decompress(GOLDEN.read_bytes()))["cases"]
    if not case["rule"].startswith("attack_")
]


def test_all_rule_cases_are_there() -> None:
    assert len(CASES) == 217
    assert {case["rule"] for case in CASES} == {
        "arc", "centered_clipping", "clip", "geometric_median", "krum", "mda", "mean", "meamed", "median",
        "multi_krum", "nearest_neighbor_mixing", "trimmed_mean",
    }  # fmt: skip


@pytest.mark.parametrize("rule", sorted({case["rule"] for case in CASES}))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 2e-4)])
def test_agrees_with_byzfl(rule: str, dtype: torch.dtype, tolerance: float) -> None:
    for case in CASES:
        if case["rule"] != rule:
            continue
        if dtype == torch.float32 and case["kind"] == "offset" and rule in ("krum", "multi_krum"):
            continue  # rows that differ less than float32 can tell: another row is as right
        x = torch.tensor(case["input"], dtype=dtype)
        ours = create(rule, **case["settings"])(x).vector.double().numpy()
        scale = max(1.0, float(np.abs(case["input"]).max()))
        np.testing.assert_allclose(
            ours, case["output"], rtol=0, atol=tolerance * scale, err_msg=f"{case['settings']} {case['kind']}"
        )
