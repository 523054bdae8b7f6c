"""The tutorial runs exactly as it is printed."""

from __future__ import annotations

import sys

import pytest

from ._pages import DOCS, Reader, blocks


pytestmark = pytest.mark.slow


def test_the_tutorial_works_from_the_first_line_to_the_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.delitem(sys.modules, "digits", raising=False)
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    reader = Reader(tmp_path, page="tutorial.md")
    try:
        for block in blocks(page):
            reader.read(block)
    finally:
        sys.modules.pop("digits", None)
    # Otherwise the test would pass if the blocks were no longer found.
    assert reader.num_run >= 14
