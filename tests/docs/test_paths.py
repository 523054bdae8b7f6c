"""Pages for developers name files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ._pages import DOCS


ROOT = DOCS.parent
PAGES = [ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((DOCS / "design").glob("*.md"))]
SOURCES = [
    each.as_posix()
    for folder in ("src", "tests", "bench", "scripts", "examples")
    for each in (ROOT / folder).rglob("*.py")
]
NAMED = re.compile(r"`((?:\w+/)+\w+\.py|_\w+\.py)`")
OTHERS = {"run/_told.py", "store/migrations/versions/mNNNN_what.py"}
"""An earlier name in a table of old and new ones, and a pattern for new files."""


def missing(text: str) -> list[str]:
    """Return the files that a text names and that are not there."""
    named = set(NAMED.findall(text)) - OTHERS
    return sorted(name for name in named if not any(s.endswith(f"/{name}") for s in SOURCES))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path):
    assert not missing(page.read_text())


def test_a_file_that_is_gone_is_found():
    assert missing("see `study/_study.py` and `pack/_gone.py`") == ["pack/_gone.py"]
