"""Exit codes of commands that a signal stops, each in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from thrifty.store import Store


pytestmark = pytest.mark.slow

MANY = """
import thrifty as th
from thrifty.testing import LineTask

study = th.Study(
    LineTask(), th.Space(lr=th.Float(0.01, 0.1)),
    algorithm=th.RandomSearch(max_epochs=4, num_trials=300),
    metric="mse", mode="min", storage="sqlite:///t.db", name="line",
)
"""

# Says when the first epoch is trained, and goes on when its reader says so.
PAUSING = """
import sys
import thrifty as th
from thrifty.cli import main
from thrifty.core import EpochDone

class Pause:
    was_there = False

    def on_event(self, event):
        if isinstance(event, EpochDone) and not self.was_there:
            self.was_there = True
            print("training", flush=True)
            sys.stdin.readline()

def run(study, *, observers=(), **options):
    return plain_run(study, observers=[*observers, Pause()], **options)

plain_run, th.Study.run = th.Study.run, run
main()
"""

# Never ends to load.
LOADING = """
import time
print("loading", flush=True)
while True:
    time.sleep(0.1)
"""


@contextlib.contextmanager
def command(folder: Path, *arguments: str, script: str = "") -> Iterator[subprocess.Popen[str]]:
    code = script or "from thrifty.cli import main; main()"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        try:
            yield child
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)


def read_until(stream, word: str) -> None:
    assert any(word in line for line in stream), f"the process ended without {word!r}"


def interrupted(folder: Path, *arguments: str, by=signal.SIGINT, script: str = PAUSING):
    """Interrupt a command in its first epoch; return its exit code and what it printed last."""
    with command(folder, *arguments, script=script) as child:
        read_until(child.stdout, "training")
        os.killpg(child.pid, by)  # as Ctrl-C does for the whole terminal
        read_until(child.stderr, "stopping at the end of the epoch")
        out, err = child.communicate("\n")
        return child.returncode, out, err


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "many.py").write_text(MANY)
    (tmp_path / "loading.py").write_text(LOADING)
    return tmp_path


def state(folder: Path, name: str, *, file: str = "t.db") -> str:
    with Store.open(f"sqlite:///{folder / file}", create=False) as store:
        return store.studies.get(name).state


@pytest.mark.sample(1)
@pytest.mark.parametrize(("by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_run_stops_cleanly_and_exits_with_the_code_of_the_signal(folder, by, code):
    found, out, err = interrupted(folder, "run", "many.py", by=by)
    assert (found, state(folder, "line")) == (code, "stopped")
    assert "study 'line' was stopped; run it again to go on" in err
    assert "study 'line': no trial has reported yet" in out  # it shows what there is


@pytest.mark.thorough
def test_resume_exits_with_130_after_ctrl_c(folder):
    with command(folder, "run", "many.py", "--stop-epochs", "1") as child:
        assert child.communicate()[0]
        assert child.returncode == 0  # the user's own condition is no interruption
    arguments = "resume", "line", "--storage", "sqlite:///t.db"
    code, _, err = interrupted(folder, *arguments)
    assert (code, state(folder, "line")) == (130, "stopped")
    assert "run it again to go on" in err


@pytest.mark.thorough
def test_demo_exits_with_130_after_ctrl_c_and_draws_nothing(folder):
    code, _, err = interrupted(folder, "demo", "--folder", "d")
    assert (code, state(folder, "digits", file="d/demo.db")) == (130, "stopped")
    assert "run it again to go on" in err
    assert not list((folder / "d").glob("*.png"))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["run", "plan", "rent"])
def test_ctrl_c_while_a_file_is_loaded(folder, name):
    with command(folder, name, "loading.py") as child:
        read_until(child.stdout, "loading")
        os.killpg(child.pid, signal.SIGINT)
        assert "Traceback" not in child.communicate()[1]
        assert child.returncode == 130


@pytest.mark.thorough
def test_dashboard_exits_with_130_after_ctrl_c(folder):
    Store.open(f"sqlite:///{folder / 't.db'}").close()
    with command(folder, "dashboard", "sqlite:///t.db", "--port", "0") as child:
        address = child.stdout.readline().split()[-1]
        with urllib.request.urlopen(address) as answer:  # it serves: not its start is interrupted
            assert answer.status == 200
        os.killpg(child.pid, signal.SIGINT)
        assert "Traceback" not in child.communicate()[1]
        assert child.returncode == 130


FAILING = MANY.replace("LineTask", "FaultyTask").replace("0.1)", "0.1), fault='raise'")


def test_an_interrupted_run_in_which_all_fails_says_so_and_exits_with_130(folder):
    (folder / "many.py").write_text(FAILING)
    pause = PAUSING.replace("EpochDone", "StageFailed")
    code, _, err = interrupted(folder, "run", "many.py", script=pause)
    assert code == 130
    assert "error: study 'line'" in err
    assert "the task's own error" in err
