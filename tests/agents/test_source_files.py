"""Files are run again when they, or what they import, have changed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from thrifty.agents._jobs import Studies
from thrifty.cli._train import studies_of
from thrifty.core import UsageError


pytestmark = pytest.mark.slow

STUDY = """
import thrifty as th
from thrifty.testing import LineTask
import imported_by_line

study = th.Study(
    LineTask(), th.Space(lr=imported_by_line.VALUE), algorithm=th.GridSearch(max_epochs=4),
    metric="mse", mode="min", storage="sqlite:///t.db", name="line",
)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "imported_by_line", raising=False)
    Path("imported_by_line.py").write_text("VALUE = 0.1")
    path = tmp_path / "line_study_of_files.py"
    path.write_text(STUDY)
    return path


def test_what_a_file_imports_counts(file):
    studies = Studies([file], load=studies_of)
    first = studies.get("line")[1]
    assert studies.get("line")[1] is first
    Path("imported_by_line.py").write_text("VALUE = 0.25")
    assert studies.get("line")[1].space["lr"] == 0.25


def test_an_import_that_fails_is_tried_again(file):
    Path("imported_by_line.py").write_text("VALUE = 1 / 0")
    studies = Studies([file], load=studies_of)
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        studies.get("line")
    Path("imported_by_line.py").write_text("VALUE = 0.5")
    assert studies.get("line")[1].space["lr"] == 0.5


def test_two_files_with_studies_of_one_name(file):
    other = file.with_name("other_study_of_files.py")
    other.write_text(STUDY)
    with pytest.raises(UsageError, match=r"both define study 'line'; rename one"):
        Studies([file, other], load=studies_of).get("line")


def test_another_database(file):
    studies = Studies([file], load=studies_of, storage="sqlite:///other.db")
    assert studies.get("line")[1].storage.url == "sqlite:///other.db"
    assert studies.urls("sqlite:///thrifty.db") == ["sqlite:///other.db"]


def test_without_files_there_is_one_database():
    assert Studies([], load=studies_of).urls("sqlite:///thrifty.db") == ["sqlite:///thrifty.db"]
