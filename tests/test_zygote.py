"""Forked programs behave as new interpreters do."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests import zygote
from thrifty.core._fork_server import may_fork


pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("forked_starts"),
    pytest.mark.skipif(not may_fork(), reason="programs are not forked here"),
    pytest.mark.skipif(
        "COVERAGE_PROCESS_CONFIG" in os.environ, reason="programs are not forked while measured"
    ),
]

IS_FORKED = "import sys; print('torch' in sys.modules)"


def run(*arguments, **options):
    options = {"capture_output": True, "text": True, **options}
    return subprocess.run([sys.executable, *arguments], **options)


@pytest.fixture(params=["forked_starts", "real_starts"])
def both(request):
    """Run the test with forks, and then with new interpreters: it must find the same."""
    request.getfixturevalue(request.param)
    return request.param


def test_programs_are_forked_and_have_not_imported_thrifty():
    assert run("-c", IS_FORKED).stdout == "True\n"
    assert run("-c", "import sys; print('thrifty' in sys.modules)").stdout == "False\n"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {IS_FORKED!r}])"
    assert run("-c", nested).stdout == "True\n"


@pytest.mark.usefixtures("real_starts")
def test_a_test_may_ask_for_real_starts():
    assert run("-c", IS_FORKED).stdout == "False\n"


@pytest.mark.parametrize(
    "options",
    [
        {"env": {**os.environ, "PYTHONHASHSEED": "1"}},
        {"env": {**os.environ, "OMP_NUM_THREADS": "3"}},
        {"umask": 0o77},
        {"executable": sys.executable},
    ],
    ids=["hashes", "threads", "umask", "executable"],
)
def test_what_a_fork_cannot_follow_is_a_real_start(options):
    assert run("-c", IS_FORKED, **options).stdout == "False\n"
    assert run("-W", "error", "-c", IS_FORKED).stdout == "False\n"


@pytest.mark.parametrize(
    ("code", "status", "told"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no')", 1, "no\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
        ("import os; os._exit(5)", 5, ""),
        ("import atexit; atexit.register(print, 'end', file=sys.stderr)", 0, "end\n"),
        ("import threading as t; t.Timer(0.01, lambda: os.write(2, b'late')).start()", 0, "late"),
    ],
)
def test_an_end_is_that_of_an_interpreter(both, code, status, told):
    done = run("-c", "import os, sys; " + code)
    assert done.returncode == status
    assert told in done.stderr
    assert bool(told) == bool(done.stderr)


LOOK = """
import json, os, sys
print(json.dumps([
    sys.argv, sys.path, __name__, globals().get("__file__"), os.getcwd(), dict(os.environ),
    sorted(os.sched_getaffinity(0)), sys.stdin.read(), sys.stdin.encoding, sys.stdout.encoding,
    sys.stderr.line_buffering, sys.orig_argv[1:], os.getppid(), os.getpgid(0) == os.getpid(),
    os.getsid(0) == os.getpid(), signal_of(2), signal_of(15), os.stat(sys.argv[-1]).st_ino,
]))
"""
LOOK = "import signal\nsignal_of = lambda n: str(signal.getsignal(n))\n" + LOOK


@pytest.mark.parametrize("how", ["-c", "-m", "script"])
@pytest.mark.parametrize("is_session", [False, True])
def test_a_program_finds_what_a_new_interpreter_finds(tmp_path, monkeypatch, how, is_session):
    (tmp_path / "look.py").write_text(LOOK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'more'}{os.pathsep}relative")
    monkeypatch.setenv("COLOUR", "green")
    words = {"-c": ["-c", LOOK], "-m": ["-m", "look"], "script": ["look.py"]}[how]
    reading, writing = os.pipe()
    found = []
    for by in (zygote.Popen, zygote.RealPopen):
        with zygote.forked_starts(by=by):
            done = run(
                *words, "one", f"/dev/fd/{reading}", cwd=tmp_path, input="line\n",
                pass_fds=[reading], start_new_session=is_session, check=True, env=dict(os.environ),
            )  # fmt: skip
        found.append(json.loads(done.stdout))
    os.close(reading)
    os.close(writing)
    for forked, real in zip(*found, strict=True):
        assert forked == real
    assert str(tmp_path) in found[0]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_group_ends_the_program_and_what_it_started(both, number):
    code = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', "
        "'import time; print(1, flush=True); time.sleep(1000)']); child.wait()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert child.stdout.readline() == b"1\n"
    os.killpg(child.pid, number)
    child.communicate()  # ends when all that have the pipes have ended
    assert child.returncode == -number


def test_a_program_that_is_killed_leaves_no_zygote():
    code = "import os, psutil; print(psutil.Process().children()[0].pid, flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    (inner,) = [psutil.Process(int(child.stdout.readline()))]
    child.kill()
    child.communicate()
    with contextlib.suppress(psutil.NoSuchProcess):
        while inner.status() != psutil.STATUS_ZOMBIE:  # if the system's first process waits late
            threading.Event().wait(0.01)


def test_no_file_is_left_open_and_a_program_is_a_child():
    run("-c", "pass")
    before = os.listdir("/proc/self/fd")  # noqa: PTH208 (not a path)
    assert run("-c", "import os; print(os.getppid())").stdout == f"{os.getpid()}\n"
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208


FILES = """
import os
names = [f"/proc/self/fd/{number}" for number in range(3, 2000)]
print([os.readlink(name).split(":")[0] for name in names if os.path.exists(name)])
"""


def test_programs_have_no_file_of_a_zygote_but_the_socket_of_their_own():
    """Otherwise a request to a zygote that has died would wait for ever."""
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {FILES!r}])"
    assert run("-c", FILES).stdout == run("-c", nested).stdout == "['socket']\n"


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(FileNotFoundError):
        run("-c", "pass", cwd=tmp_path / "none")


def test_a_zygote_that_dies_is_an_error_and_then_another_one_is_started():
    run("-c", "pass")
    current = zygote._zygotes[0]
    os.kill(current._pid, signal.SIGSTOP)
    threading.Timer(0.05, os.kill, (current._pid, signal.SIGKILL)).start()
    with pytest.raises(zygote.ZygoteError, match="died before the program began"):
        run("-c", "pass")
    os.waitid(os.P_PID, current._pid, os.WEXITED | os.WNOWAIT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zygote.Zygote, "is_alive", lambda self: True)
        with pytest.raises(zygote.ZygoteError, match="is dead"):
            run("-c", "pass")
    assert run("-c", IS_FORKED).stdout == "True\n"
    assert zygote._zygotes[0] is not current


def test_a_program_that_cannot_begin_says_why(monkeypatch):
    monkeypatch.setattr(zygote.os, "getpgrp", lambda: 1)  # nobody may join this group
    with pytest.raises(zygote.ZygoteError, match="could not begin: PermissionError"):
        run("-c", "pass")


def test_a_script_on_disk_that_is_missing_is_said(both):
    done = run(str(Path("/none/at/all.py")))
    assert done.returncode == (2 if both == "real_starts" else 1)
    assert "all.py" in done.stderr
