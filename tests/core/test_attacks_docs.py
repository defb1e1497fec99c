"""The guide to writing attacks: its code runs and prints what it says; an entry point makes a name known."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

from fedlaw import attacks
from fedlaw._registry import Registry

GUIDE = Path(__file__).parents[2] / "docs" / "extending-attacks.md"


def test_the_guides_code_runs_and_prints_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attacks.registry, "_factories", dict(attacks.registry._factories)
    )  # names made here go
    blocks = re.findall(r"```(python|text)\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    assert [kind for kind, _ in blocks].count("python") >= 4
    names: dict[str, Any] = {"__name__": "guide"}
    printed = ""
    for kind, text in blocks:
        if kind == "text":
            assert printed == text
            printed = ""
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(text, str(GUIDE), "exec"), names)
        printed += out.getvalue()
    assert printed == ""


def test_an_entry_point_of_the_group_makes_a_name_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "someones_attacks.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedlaw.attacks import Attack\n"
        "@dataclass(frozen=True)\n"
        "class Idle(Attack):\n"
        "    '''Do nothing, at length.'''\n"
        "    hours: int = 8\n"
    )
    info = tmp_path / "someones_attacks-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someones-attacks\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedlaw.attacks]\nidle = someones_attacks:Idle\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry: Registry[attacks.Attack] = Registry("attack", "attacks")
    assert "idle" in registry.names()
    assert repr(registry.create("idle", hours=3)) == "Idle(hours=3)"
    assert registry.summaries()["idle"] == "Do nothing, at length"
