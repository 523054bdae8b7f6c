"""Durations are differences of a clock that never runs backwards."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import thrifty


pytestmark = pytest.mark.slow


DATES = {
    "integrations/fine_tuning/_bases.py": "whether a file was written a moment ago",
    "core/_determinism.py": "the machine's date, behind the interface",
    "integrations/_trackers.py": "a date that MLflow asks for",
    "pack/fused/_activations.py": "the age of a file, whose date is the machine's",
}
"""Files that may read the wall clock directly, with the reason."""


def calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_the_wall_clock_is_read_where_a_date_is_wanted_only():
    root = Path(thrifty.__file__).parent
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "time.time" in calls(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == DATES.keys()
