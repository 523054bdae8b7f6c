from __future__ import annotations

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow


ROOT = Path(__file__).resolve().parents[1]
README = re.search(
    r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S
)  # fmt: skip

# Skip other packages, because reading them takes a minute.
SETTINGS = """\
[mypy]
check_untyped_defs = true
follow_imports = skip
[mypy-sklearn.*]
ignore_missing_imports = true
[mypy-thrifty.*]
follow_imports = silent
"""
# Definitions that the README's lines leave to the reader.
GIVEN = """\
import torch
import torch.nn.functional as F
x, y, vx, vy = torch.rand(4, 64), torch.zeros(4), torch.rand(4, 64), torch.zeros(4)
"""
MORE = """\
th.Step(th.Float(0.01, 0.1, log=True), [th.Int(10, 40)])
th.MultiStep([0.1, 0.01], milestones=[30])
th.Warmup(5, th.Cosine(0.1, sample=[0.5, 0.75]))
wrong: str = study.best_trial.value
th.Hyperbend
th.Study(Digits(), space, algorithm=th.ASHA(max_epochs=9), metric="accuracy")
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return what mypy says to a user's program: error codes by line.

    Lines count from the first of ``MORE`` on.
    """
    assert README is not None
    path = tmp_path_factory.mktemp("user") / "program.py"
    head = GIVEN + README[1]
    path.write_text(head + MORE, encoding="utf-8")
    (path.parent / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "mypy", path.name],
        capture_output=True,
        text=True,
        cwd=path.parent,
        check=False,
    )
    found = re.findall(r"program\.py:(\d+): error: .*\[([\w-]+)\]", run.stdout)
    assert found, run.stdout + run.stderr
    before = head.count("\n")
    return [(int(line) - before, code) for line, code in found]


@pytest.mark.thorough
def test_the_readme_is_typed(said):
    assert [entry for entry in said if entry[0] <= 0] == []


def test_schedules_take_lists_and_domains(said):
    assert [entry for entry in said if 1 <= entry[0] <= 3] == []


def test_what_is_wrong_is_found(said):
    assert {entry for entry in said if entry[0] > 3} == {
        (4, "assignment"),
        (5, "attr-defined"),
        (6, "call-arg"),
    }


def test_the_package_says_that_it_is_typed():
    assert (files("thrifty") / "py.typed").is_file()
