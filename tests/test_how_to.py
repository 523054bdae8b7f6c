"""The examples of the how-to pages run exactly as they are printed."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow


PAGES = sorted((Path(__file__).parents[1] / "docs" / "how-to").glob("*.md"))

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@every_page
def test_every_example_gives_what_the_page_says(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # as a reader would: a session in an empty folder
    results = doctest.testfile(
        str(page),
        module_relative=False,
        globs={},
        optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS,
    )
    assert results.failed == 0
    # Otherwise the test would pass if a page's examples were no longer found.
    assert results.attempted >= page.read_text().count(">>> ")


@every_page
def test_no_example_needs_the_test_suite(page):
    assert "getfixture" not in page.read_text()
