"""A study that starts its own Ray cluster recovers if the cluster or the study is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.run.ray_driver import ALGORITHM, everything
from tests.study.helpers import make_study, records
from thrifty.run import Local


pytestmark = pytest.mark.slow


def resume(folder):
    """Resume a study on this machine."""
    study = make_study(folder, algorithm=ALGORITHM)
    study.run(progress=False, executor=Local(workers=1, threads=1, pack="solo"))
    return study


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the records that the same study leaves behind if nothing goes wrong."""
    return everything(resume(tmp_path_factory.mktemp("local")))


def driver(folder, how, count=1):
    command = [sys.executable, "-m", "tests.run.ray_driver", str(folder), how, str(count)]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def test_a_driver_that_is_killed(tmp_path, undisturbed):
    with driver(tmp_path, "kill", 20) as child:
        assert child.wait() == -signal.SIGKILL
    study = resume(tmp_path)
    assert everything(study) == undisturbed


@pytest.mark.thorough
def test_ctrl_c_reaches_the_driver_alone(tmp_path, undisturbed):
    with driver(tmp_path, "interrupt", 20) as child:
        assert child.stdout.readline() == "now\n"
        os.killpg(child.pid, signal.SIGINT)  # as Ctrl-C does for the whole terminal
        assert child.communicate("\n")[0] == "end\n"
        assert child.returncode == 0
    study = make_study(tmp_path, algorithm=ALGORITHM)
    assert records(study)[0] == "stopped"
    resume(tmp_path)
    assert everything(study) == undisturbed


@pytest.mark.thorough
def test_a_cluster_that_is_gone(tmp_path, undisturbed):
    with driver(tmp_path, "lose", 20) as child:
        assert child.wait() == 3
    said = (tmp_path / "error").read_text()
    assert "the Ray cluster is gone" in said
    assert "run the study again: it goes on where it is" in said
    assert everything(resume(tmp_path)) == undisturbed
