"""The page on own data and models does what it says."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "own-data.md"


def test_the_code_on_the_page_runs(tmp_path, monkeypatch, capsys):
    if not PAGE.is_file():
        pytest.skip("the documentation is not part of this installation")
    monkeypatch.syspath_prepend(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    namespace = {}
    for block in blocks:
        file = re.match(r"# (\w+\.py)\n", block)
        if file:
            (tmp_path / file[1]).write_text(block)
        else:
            exec(compile(block, str(PAGE), "exec"), namespace)
    said = re.findall(r"print\((.*)\)  # (.*)", "".join(blocks))
    printed = capsys.readouterr().out
    assert len(said) == 3
    for _, output in said:
        assert output.split(" = ")[-1] in printed
    assert namespace["attackers"].sum() == 3
    assert namespace["accuracy"] > 0.9
