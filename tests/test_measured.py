"""``make coverage``: what it measures in the processes that tests start."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import warnings
from pathlib import Path

import coverage

from thrifty.core._child import parent_of


ROOT = Path(__file__).parents[1]

STUDY = """\
from thrifty.core._child import Child, wait_for
worker = Child("worker")
wait_for([worker], 60)
worker.end()
"""

WORKER = """\
import sys
from thrifty.core._child import parent_of
connection = parent_of(sys.argv[1:])
connection.send("ready")
connection.recv()
"""


def test_what_a_killed_worker_ran_is_measured(tmp_path):
    (tmp_path / "study.py").write_text(STUDY)
    (tmp_path / "worker.py").write_text(WORKER)
    path = [tmp_path, ROOT / "scripts" / "measured", ROOT / "src"]
    environment = {
        **os.environ,
        "COVERAGE_FILE": str(tmp_path / ".coverage"),
        "PYTHONPATH": os.pathsep.join(map(str, path)),
    }
    environment.pop("COVERAGE_PROCESS_CONFIG", None)
    settings = f"--rcfile={ROOT / 'pyproject.toml'}"
    command = [sys.executable, "-m", "coverage", "run", settings, "study.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    measured = coverage.Coverage(data_file=tmp_path / ".coverage", config_file=False)
    with warnings.catch_warnings():
        # The study kills its fork server, which may be writing its own file.
        warnings.simplefilter("ignore", coverage.exceptions.CoverageWarning)
        measured.combine([str(tmp_path)])
    source = inspect.getsourcefile(parent_of)
    lines, first = inspect.getsourcelines(parent_of)
    assert first + len(lines) - 1 in (measured.get_data().lines(source) or [])
