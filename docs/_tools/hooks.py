"""What MkDocs calls while it builds the site.

A line `<!-- generated: NAME ARGUMENT -->` in a page is replaced by what the function of that name makes of the
code. Formulas become MathML. Nothing in the pages is loaded from anywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import api
import commands
import pages
import reproduced
from mathml import replace_formulas

GENERATED: dict[str, Callable[..., str]] = {
    "rules": pages.rules,
    "attacks": pages.all_attacks,
    "named": pages.named,
    "settings": pages.settings,
    "presets": pages.presets,
    "measured": pages.measured,
    "timed": pages.timed,
    "reproduced": reproduced.shown,
    "distances": reproduced.distances,
    "nearness": reproduced.nearness,
    "told_apart": reproduced.told_apart,
    "behind": reproduced.behind,
    "by_round": reproduced.by_round,
    "commands": commands.commands,
    "api": api.api,
}
_PLACE = re.compile(r"^<!-- generated: (\w+)((?: [\w.@-]+)*) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the generated parts into a page."""
    return _PLACE.sub(lambda match: GENERATED[match[1]](*match[2].split()), markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Turn formulas into MathML."""
    return replace_formulas(html)
