"""What MkDocs does beside its settings: references in docstrings, written for Sphinx, are shown as plain code, and the
reference gets the tables of recipe keys."""

from __future__ import annotations

import re
from typing import Any

KEYS = "<!-- keys of a recipe -->"
_ROLE = re.compile(r":(?:func|class|meth|mod|data|attr):(<code>)~?")


def on_page_markdown(markdown: str, **_: Any) -> str:
    if KEYS not in markdown:
        return markdown
    from bcnet.run.recipe_comments import tables

    return markdown.replace(KEYS, tables())


def on_page_content(html: str, **_: Any) -> str:
    return _ROLE.sub(r"\1", html)
