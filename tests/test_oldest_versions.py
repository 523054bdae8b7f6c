"""The file of oldest versions: what it takes from ``pyproject.toml``."""

from __future__ import annotations

import runpy
from pathlib import Path


ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "oldest_versions.py"))


def test_the_file_agrees_with_the_lower_bounds_of_the_project():
    committed = (ROOT / "constraints-oldest.txt").read_text(encoding="utf-8")
    assert committed == SCRIPT["page"](), (
        "run: python scripts/oldest_versions.py > constraints-oldest.txt"
    )


def test_the_highest_bound_counts_where_extras_differ():
    groups = {"demo": ["b>=1.9", "unbounded"], "more": ["b[x]>=1.10", "a>=2"]}
    assert SCRIPT["oldest"](groups).splitlines()[1:] == ["a==2", "b==1.10"]
