# ruff: noqa: RUF001 (Greek letters and minus signs are meant)
"""Docstrings as Markdown: formulas typeset, examples fenced, settings taken apart name by name."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

_GREEK = dict(
    alpha="α", beta="β", gamma="γ", delta="δ", epsilon="ε", eta="η", theta="θ", kappa="κ", mu="μ", nu="ν",
    rho="ρ", sigma="σ", tau="τ", phi="φ", psi="ψ", Phi="Φ",
    **{"lambda": "λ"},
)  # fmt: skip
_NAMES = "|".join(_GREEK)
_SIGNS = (("&lt;-", "←"), ("&gt;=", "≥"), ("&lt;=", "≤"), ("+-", "±"), (" . ", " · "), ("sqrt(", "√("))
_SUBSCRIPT = r"(?:ij|avg|[ijkfwSs])(?![A-Za-z0-9_])"
_TAKEN = ("Settings", "Args", "Attributes")
_TITLE = re.compile(r"(Settings|Args|Attributes|Returns|Raises|Yields):\s*")


def typeset(text: str) -> str:
    """Prose with the formulas of a docstring, as Markdown with HTML: `sum_i w_i g~_i` becomes Σᵢ wᵢ g̃ᵢ.

    What stands between backticks is left as it is.
    """
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else _typeset(part) for part in parts)


def _typeset(text: str) -> str:
    text = html.escape(text, quote=False)
    for plain, sign in _SIGNS:
        text = text.replace(plain, sign)
    text = re.sub(rf"(?<![A-Za-z_.])({_NAMES})(?=[0-9]?(?![A-Za-z0-9=]))", lambda m: _GREEK[m[1]], text)
    text = re.sub(r"(?<![A-Za-z])([A-Za-zα-ω])~", lambda m: m[1] + "\u0303", text)
    text = re.sub(r"([α-ω])([0-9])", r"\1<sub>\2</sub>", text)
    text = re.sub(r"(?<![A-Za-z])sum(?= over |_)", "Σ", text)
    text = re.sub(
        rf"((?<![A-Za-z])(?:[A-Za-zα-ωΣ]\u0303?|cs|TS|max|min|mean|score))_({_SUBSCRIPT})", _sub, text
    )
    text = re.sub(r"\^(-?(?:\d+|[a-z]))(?![A-Za-z])", lambda m: f"<sup>{m[1].replace('-', '−')}</sup>", text)
    text = re.sub(r"(?<=\w)\*(?=\w)| \* ", lambda m: m[0].replace("*", "·"), text)
    return text.replace("*|", r"\*|")


def _sub(match: re.Match[str]) -> str:
    return f"{match[1]}<sub>{match[2]}</sub>"


@dataclass
class Parsed:
    """A docstring taken apart. `blocks`: what is in it in its order, as (kind, text).

    Kinds: "text" (Markdown), "example" (a doctest), "math" (TeX), "table" (plain text), "reference", and the titles
    of sections, whose text is lines of `name: words`.
    """

    summary: str
    blocks: list[tuple[str, str]] = field(default_factory=list)

    def entries(self, title: str) -> dict[str, str]:
        """Name to Markdown of the section `title`."""
        lines = [line for kind, text in self.blocks if kind == title for line in text.splitlines()]
        return dict(line.split(": ", 1) for line in lines)


def parse(doc: str, names: Collection[str] = ()) -> Parsed:
    """Take a docstring apart. `names` are the settings (arguments, attributes) that its sections may speak of."""
    paragraphs = re.split(r"\n\s*\n", doc.strip("\n"))
    summary = typeset(" ".join(paragraphs[0].split()))
    parsed = Parsed(summary)
    for paragraph in paragraphs[1:]:
        parsed.blocks.extend(_blocks(paragraph, names))
    return parsed


def _blocks(paragraph: str, names: Collection[str]) -> Iterator[tuple[str, str]]:
    lines = paragraph.splitlines()
    title = _TITLE.fullmatch(lines[0])
    if title and title[1] in _TAKEN:
        yield title[1], "\n".join(f"{name}: {typeset(words)}" for name, words in entries(lines[1:], names))
    elif title:
        yield title[1], textwrap.dedent("\n".join(typeset(line) for line in lines[1:]))
    elif lines[0].lstrip().startswith(">>>"):
        yield "example", paragraph
    elif lines[0].startswith(".. math::"):
        yield "math", " ".join([lines[0].removeprefix(".. math::"), *lines[1:]]).strip()
    elif re.fullmatch(r"=+( +=+)*", lines[0].strip()):
        yield "table", paragraph
    elif lines[0].startswith("Reference:"):
        yield "reference", typeset(" ".join(paragraph.removeprefix("Reference:").split()))
    else:
        text = re.sub(r"(?m)(?<!\n)^(- )", r"\n\1", typeset(paragraph), count=1)
        yield "text", text


def entries(lines: list[str], names: Collection[str]) -> Iterator[tuple[str, str]]:
    """(name, words) of a section; `a, b: words` says them of both, and several may share a line."""
    text = " ".join(" ".join(lines).split())
    if not names:
        return
    known = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    one = rf"`?(?:{known})`?"
    pattern = re.compile(rf"(?:^|(?<=[.;)] ))({one}(?:, {one})*): ")
    found = list(pattern.finditer(text))
    ends = [match.start() for match in found[1:]] + [len(text)]
    for match, end in zip(found, ends, strict=False):
        words = text[match.end() : end].strip().rstrip(";")
        for name in match[1].replace("`", "").split(", "):
            yield name, words


def markdown(doc: str, names: Collection[str], section: Callable[[str, str], str]) -> str:
    """The docstring as Markdown; `section` turns a section's title and text into Markdown."""
    parsed = parse(doc, names)
    out = [parsed.summary]
    for kind, text in parsed.blocks:
        out.append(_plain(kind, text) or section(kind, text))
    return "\n\n".join(out)


def _plain(kind: str, text: str) -> str | None:
    if kind == "text":
        return text
    if kind == "math":
        return f"$$\n{text}\n$$"
    if kind == "reference":
        return f"*Reference.* {text}"
    if kind in ("example", "table"):
        return f"```{'pycon' if kind == 'example' else 'text'}\n{text}\n```"
    return None
