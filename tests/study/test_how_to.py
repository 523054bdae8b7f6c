"""The examples of the page about studies are run as they stand there."""

from __future__ import annotations

import doctest
from pathlib import Path


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "studies.md"


def test_every_example_gives_what_the_page_says(request):
    results = doctest.testfile(
        str(PAGE),
        module_relative=False,
        globs={"getfixture": request.getfixturevalue},
        optionflags=doctest.NORMALIZE_WHITESPACE,
    )
    assert results.attempted > 10
    assert results.failed == 0
