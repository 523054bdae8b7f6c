"""Hooks of the documentation site (mkdocs.yml)."""

from __future__ import annotations

import re
from typing import Any


_SCRIPT = re.compile(
    r"^- (?P<title>[^\n:]+): \[`(?P<name>[^`]+)`\]\(\.\./\.\./(?P<path>examples/[^)]+\.py)\)\n",
    flags=re.MULTILINE,
)
"""A list item that is only a link to an example: the site shows the file in a tab."""


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Colour sessions and copy them without prompts; show linked results and scripts as pages.

    Pages are written so that they also read well where Markdown is plain, as on GitHub.
    """
    markdown = _SCRIPT.sub(_tab, markdown)
    markdown = markdown.replace("](../../examples/port)", "](#models-and-data)")
    markdown = re.sub(r"\]\(\.\./\.\./bench/results[^)]*\)", "](../benchmarks.md)", markdown)
    return re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.MULTILINE)


def _tab(link: re.Match[str]) -> str:
    """Return a tab with the file that an item links to; tabs in a row need blank lines between."""
    return (
        f'=== "{link["title"]}"\n\n    ```python title="{link["name"]}"\n    --8<--\n'
        f"    {link['path']}\n    --8<--\n    ```\n\n"
    )
