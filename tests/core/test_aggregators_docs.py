"""What docs/extending-rules.md shows is what happens."""

import importlib.metadata
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fedlaw import aggregators
from fedlaw._registry import Registry

PAGE = Path(__file__).parents[2] / "docs" / "extending-rules.md"


def run_page() -> dict[str, Any]:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    module = ModuleType("extending_rules")
    sys.modules[module.__name__] = module  # where dataclasses look up annotations
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), module.__dict__)
    finally:
        del sys.modules[module.__name__]
        aggregators.registry._factories.pop("norm_trimmed_mean", None)
    return module.__dict__


def test_the_page_runs_and_its_rule_keeps_the_contract() -> None:
    rule = run_page()["NormTrimmedMean"](f=2)
    x = torch.randn(3, 9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    together = rule(x)
    for i in range(3):
        torch.testing.assert_close(together.vector[i], rule(x[i]).vector)
    torch.testing.assert_close((together.weights.unsqueeze(-2) @ x).squeeze(-2), together.vector)
    assert rule.largest_f(3) == 1


def test_entry_points_are_found_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = importlib.metadata.EntryPoint("elsewhere", "fedlaw.aggregators.mean:Mean", "fedlaw.aggregators")
    monkeypatch.setattr(
        "fedlaw._registry.entry_points", lambda group: [entry] if group == entry.group else []
    )
    registry: Registry[aggregators.Rule] = Registry("rule", "aggregators")
    assert registry.create("elsewhere", weighted=False) == aggregators.Mean(weighted=False)
    assert registry.names() == ("elsewhere",)
