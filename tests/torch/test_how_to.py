"""The examples of docs/how-to/schedules.md, as they stand."""

import doctest
from pathlib import Path


PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "schedules.md"


def test_all_examples_run(tmp_path):
    found = doctest.testfile(str(PAGE), module_relative=False, globs={"folder": tmp_path})
    assert found.attempted > 10
    assert not found.failed
