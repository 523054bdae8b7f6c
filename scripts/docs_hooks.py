"""Hooks of the documentation site (mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Sessions are coloured as such, and copied without prompts; raw results are shown as the page made of them."""
    markdown = re.sub(r"\]\(\.\./\.\./bench/results[^)]*\)", "](../benchmarks.md)", markdown)
    return re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.MULTILINE)
