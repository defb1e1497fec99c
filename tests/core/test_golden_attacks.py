"""Attacks against an independent implementation's recorded outputs."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedlaw.attacks import IPM, LIE, Attack, View

GOLDEN = Path(__file__).parent.parent / "golden" / "byzfl.json.gz"
with gzip.open(GOLDEN, "rt") as file:
    CASES = [case for case in json.load(file)["cases"] if case["rule"].startswith("attack_")]


def attack_of(rule: str, settings: dict[str, Any]) -> Attack:
    return {"attack_ipm": IPM, "attack_alie": lambda **s: LIE(statistics="honest", **s)}[rule](**settings)


@pytest.mark.parametrize("index", range(len(CASES)))
@pytest.mark.parametrize("attackers", [1, 3])
def test_golden(index: int, attackers: int) -> None:
    case = CASES[index]
    honest = torch.tensor(case["input"], dtype=torch.float64)
    n, d = len(honest) + attackers, honest.shape[1]
    malicious = torch.arange(n) < attackers
    updates = torch.full((n, d), 1e3, dtype=torch.float64)  # the attackers' own rows must not matter
    updates[~malicious] = honest
    view = View(updates, torch.zeros(n), malicious, torch.zeros(d))
    forged = attack_of(case["rule"], case["settings"]).forge(view).updates
    expected = torch.tensor(case["output"], dtype=torch.float64).expand(attackers, d)
    torch.testing.assert_close(forged, expected, rtol=1e-6, atol=1e-6)


def test_there_are_cases_of_both() -> None:
    assert {case["rule"] for case in CASES} == {"attack_ipm", "attack_alie"}
    assert len(CASES) >= 20
