"""Hooks of the documentation site (mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Colour sessions and copy them without prompts; show raw results as the page made of them."""
    markdown = re.sub(r"\]\(\.\./\.\./bench/results[^)]*\)", "](../benchmarks.md)", markdown)
    return re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.MULTILINE)
