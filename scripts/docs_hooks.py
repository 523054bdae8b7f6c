"""Hooks of the documentation site (mkdocs.yml)."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
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


_PRIVATE = re.compile(r"thrifty(?:\.\w+)*?\._(?!_)\w+(?:\.\w+)*")
"""A dotted path through a private module."""
_TITLE = re.compile(r'title="[^"]*"')
_IN_BRACKETS = re.compile(rf"\s*\(({_PRIVATE.pattern})\)")


def on_post_page(output: str, **_: Any) -> str:
    """Show the paths from which names are imported in tooltips, not those of private modules."""
    return _TITLE.sub(lambda found: _with_public_paths(found[0]), output)


def _with_public_paths(title: str) -> str:
    title = _IN_BRACKETS.sub(lambda found: _bracketed(public_path(found[1])), title)
    return _PRIVATE.sub(lambda found: public_path(found[0]) or found[0].rpartition(".")[2], title)


def _bracketed(path: str) -> str:
    return f" ({path})" if path else ""


@cache
def public_path(path: str) -> str:
    """Return the path from which a name of a private module is imported; empty if none is.

    >>> public_path("thrifty.study._study.Study.run"), public_path("thrifty.store._plans.Plans")
    ('thrifty.Study.run', '')
    """
    parts = path.split(".")
    private = [index for index, part in enumerate(parts[:-1]) if part.startswith("_")]
    if not private:
        return ""
    last = private[-1]
    module, (name, *rest) = ".".join(parts[: last + 1]), parts[last + 1 :]
    try:
        thing = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return ""
    homes = ["thrifty", *(".".join(parts[:end]) for end in range(2, last + 1))]
    for home in homes:
        public = import_module(home)
        if name in getattr(public, "__all__", ()) and getattr(public, name) is thing:
            return ".".join([home, name, *rest])
    return ""
