"""The documentation site: it builds, hangs together, loads nothing from elsewhere, and says what the code says."""

from __future__ import annotations

import ast
import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from fedlaw import aggregators, attacks

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TESTED_ELSEWHERE = (
    "extending-rules.md",
    "extending-attacks.md",
    "own-data.md",
    "deployment.md",
    "architecture.md",
)
MINUTES = ("tutorial.md", "quick-start.md", "how-to/results.md")  # with real training: not on every change

if not (ROOT / "mkdocs.yml").is_file():
    pytest.skip("the documentation is not part of this installation", allow_module_level=True)
PAGES = sorted(DOCS.rglob("*.md"))


class Page(HTMLParser):
    """What a page points to, what in it can be pointed to, and what it would load."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.formulas: set[str] = set()
        self.text = path.read_text("utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        else:
            names = ("src", "href", "srcset", "data", "poster", "action", "xlink:href")
            self.loaded += [given[name] for name in names if name in given]
        if tag == "div" and "data-name" in given:
            self.formulas.add(given["data-name"])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    """Every page of the built site by its path."""
    pytest.importorskip("mkdocs", reason="pip install 'fedlaw[docs]' to test the documentation")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr[-4000:]
    pages = {path.relative_to(folder).as_posix(): Page(path) for path in folder.rglob("*.html")}
    assert len(pages) >= len(PAGES)
    for sheet in folder.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*[\"']?(https?:)?//", sheet.read_text("utf-8")), sheet
    return pages


def test_every_link_leads_somewhere(site: dict[str, Page]) -> None:
    broken = []
    for name, page in site.items():
        if name == "404.html":  # its links start at the root of a server
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https", "mailto"):
                continue
            target = os.path.normpath(os.path.join(os.path.dirname(name), unquote(parts.path)))
            target = name if not parts.path else target
            if parts.path.endswith("/") or parts.path in (".", ".."):
                target = os.path.join(target, "index.html")
            there = site.get(target)
            if there is None or (parts.fragment and unquote(parts.fragment) not in there.ids):
                broken.append(f"{name}: {link}")
    assert not broken


def test_nothing_is_loaded_from_elsewhere(site: dict[str, Page]) -> None:
    for name, page in site.items():
        assert page.loaded, f"{name} has no style sheet"
        assert not [each for each in page.loaded if re.match(r"(https?:)?//", each)], name
        assert 'class="mermaid"' not in page.text, f"{name}: diagrams are drawn by a script from elsewhere"
        assert str(ROOT) not in page.text, f"{name} names a folder of the machine it was built on"


@pytest.mark.parametrize(
    ("kind", "registry"), [("rules", aggregators.registry), ("attacks", attacks.registry)]
)
def test_every_rule_and_attack_is_there_with_its_formula(
    site: dict[str, Page], kind: str, registry: Any
) -> None:
    page = site[f"{kind}.html"]
    ours = {name for name in registry.names() if registry.factory(name).__module__.startswith("fedlaw.")}
    assert ours <= page.ids
    assert ours <= page.formulas
    assert page.text.count("<math ") >= len(ours)
    written = tomllib.loads((DOCS / "_tools" / "formulas.toml").read_text("utf-8"))[kind]
    assert set(written) == ours, "formulas.toml and the registry name different things"


def test_every_setting_of_a_judge_is_explained(site: dict[str, Page]) -> None:
    from dataclasses import fields

    from fedlaw.experiments.description import Execution, Experiment
    from fedlaw.server import Core, Published, Settings

    names = [field.name for each in (Core, Published, Settings) for field in fields(each)]
    for name in [*names, *Experiment.model_fields, *Execution.model_fields]:
        row = re.search(
            rf"<tr>\s*<td><code>{name}</code></td>(.*?)</tr>", site["settings.html"].text, re.DOTALL
        )
        assert row, f"{name} is not on the page"
        assert not row[1].rstrip().endswith("<td></td>"), f"{name} has no explanation"


def exported() -> list[tuple[str, str]]:
    """(module, name) of every `__all__` of the package, read without importing anything."""
    found = []
    for path in sorted((ROOT / "src" / "fedlaw").rglob("*.py")):
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if any(part.startswith("_") for part in module.split(".")):
            continue
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.Assign) and any(getattr(t, "id", "") == "__all__" for t in node.targets):
                found += [(module, name) for name in ast.literal_eval(node.value)]
    return found


def test_every_public_name_is_in_the_api(site: dict[str, Page]) -> None:
    ids = set().union(*(page.ids for name, page in site.items() if name.startswith("api/")))
    names = exported()
    assert len(names) > 100
    missing = [f"{module}.{name}" for module, name in names if f"{module}.{name}" not in ids]
    assert not missing, f"put `<!-- generated: api MODULE -->` on a page of docs/api for {missing}"


# ------------------------------------------------------------------------------------------ code on the pages
def blocks(page: Path, *kinds: str) -> list[tuple[str, str]]:
    pattern = rf"^```({'|'.join(kinds)})\n(.*?)^```"
    return re.findall(pattern, page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def runnable() -> list[Any]:
    found = []
    for page in PAGES:
        name = page.relative_to(DOCS).as_posix()
        if name not in TESTED_ELSEWHERE and blocks(page, "python"):
            found.append(pytest.param(page, id=name, marks=[pytest.mark.slow] if name in MINUTES else []))
    return found


@pytest.mark.parametrize("page", runnable())
def test_the_code_on_a_page_runs_and_prints_what_it_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that begin with a file's name are that file; a text block after code is what the code prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    names: dict[str, Any] = {"__name__": "page"}
    printed = None
    for kind, text in blocks(page, "python", "text", "toml", "sh"):
        file = re.match(r"# (\w+\.(?:py|toml))\n", text)
        if file:
            Path(file[1]).write_text(text, "utf-8")
        elif kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, str(page), "exec"), names)
            printed = out.getvalue()
        else:
            if kind == "text" and printed is not None:
                assert printed == text
            printed = None


def commands() -> list[str]:
    """Every line of the pages that calls the command."""
    lines = [line for page in PAGES for _, text in blocks(page, "sh") for line in text.splitlines()]
    return sorted({line.split("  #")[0].strip() for line in lines if line.startswith("fedlaw ")})


def test_the_commands_on_the_pages_exist() -> None:
    import typer

    from fedlaw.cli_app import app

    assert len(commands()) > 15
    for line in commands():
        command: Any = typer.main.get_command(app)
        context, arguments = None, shlex.split(line)[1:]
        while hasattr(command, "commands"):
            context = command.make_context("fedlaw", list(arguments), parent=context)
            rest = [*context._protected_args, *context.args]
            if not rest:
                break
            name, command, arguments = command.resolve_command(context, rest)
        else:
            command.make_context(name, list(arguments), parent=context)  # an unknown option raises


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=lambda page: page.stem)
def test_toml_on_the_pages_is_toml(page: Path) -> None:
    for _, text in blocks(page, "toml"):
        assert tomllib.loads(text)
