"""Formulas as MathML, made when the site is built: browsers draw it themselves, nothing is loaded."""

from __future__ import annotations

import html
import re

from latex2mathml.converter import convert

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">'
    r"(?:\\\((?P<inline>.*?)\\\)|\\\[(?P<block>.*?)\\\])</(?P=tag)>",
    re.DOTALL,
)


def mathml(tex: str, *, block: bool = True) -> str:
    """TeX as a <math> element, the TeX itself as its description.

    Raises:
        ValueError: a command that the converter does not know; it would stand in the page as it is.
    """
    plain = " ".join(tex.split())
    for limit in ("min", "max"):
        plain = plain.replace(rf"\arg\{limit}", rf"\operatorname{{arg{limit}}}")
    element: str = convert(plain, display="block" if block else "inline")
    if "\\" in element:
        raise ValueError(f"formula {tex!r} has a command that cannot be turned into MathML: {element}")
    return element.replace("<math ", f'<math alttext="{html.escape(tex, quote=True)}" ', 1)


def displayed(tex: str, name: str = "") -> str:
    """A formula on its own line. What `qquad` separates is moved to another line where there is little room."""
    parts = [part.strip() for part in tex.split(r"\qquad")]
    label = f' data-name="{html.escape(name)}"' if name else ""
    return f'<div class="formula"{label}>{"".join(map(mathml, parts))}</div>'


def replace_formulas(page: str) -> str:
    """HTML in which every formula that Markdown marked is MathML."""

    def one(match: re.Match[str]) -> str:
        block = match["block"] is not None
        tex = html.unescape(match["block"] if block else match["inline"]).strip()
        return displayed(tex) if block else mathml(tex, block=False)

    return _FORMULA.sub(one, page)
