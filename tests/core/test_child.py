"""Processes of our own: their messages, their ends, and what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from thrifty.core import _child
from thrifty.core._child import Child, ChildEndedError, wait_for


LONG_S = 60.0


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Makes a program that a child can run."""
    monkeypatch.setenv(
        "PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    started = []

    def start(code: str) -> Child:
        name = f"program{len(started)}"
        begin = "import os, sys, time\nfrom thrifty.core._child import parent_of\nc = parent_of(sys.argv[1:])\n"
        (tmp_path / f"{name}.py").write_text(begin + code)
        started.append(Child(name))
        return started[-1]

    yield start
    for child in started:
        child.end()


def said(child: Child) -> list[object]:
    assert wait_for([child], LONG_S) == [child], "it has nothing to say"
    return child.receive()


def all_said(child: Child) -> tuple[list[object], str]:
    """Everything up to its end, and how it ended."""
    messages: list[object] = []
    try:
        while True:
            messages += said(child)
    except ChildEndedError as error:
        return messages, str(error)


def test_messages_come_whole_and_in_order(programs):
    child = programs("while True: c.send(c.recv())")
    sent = [0, "text", b"x" * 3_000_000, [1, 2], None]
    got: list[object] = []
    for message in sent:
        child.send(message)
        want = len(got) + 1
        while len(got) < want:
            got += said(child)
    assert got == sent


def test_what_was_said_before_the_end_is_heard(programs):
    child = programs("[c.send(i) for i in range(100)]\nos._exit(7)")
    assert all_said(child) == (list(range(100)), "exit status 7")


def test_how_it_ended(programs):
    child = programs("import signal\nos.kill(os.getpid(), signal.SIGKILL)")
    assert all_said(child) == ([], "killed by signal 9")
    assert not child.alive


def test_messages_to_the_dead_are_no_error(programs):
    child = programs("os._exit(0)")
    assert all_said(child) == ([], "exit status 0")
    child.send("anybody there?")
    child.send_bytes(b"x" * 10_000_000)


FORKS = """
forked = os.fork()
if not forked:
    time.sleep(1000)
c.send(forked)
"""


@pytest.mark.parametrize("pidfd", [True, False], ids=["pidfd", "thread"])
def test_an_end_is_noticed_though_a_fork_keeps_the_socket_open(programs, monkeypatch, pidfd):
    if not pidfd:
        monkeypatch.delattr(os, "pidfd_open", raising=False)
    child = programs(FORKS + "time.sleep(1000)")
    (forked,) = said(child)
    os.kill(child.pid, signal.SIGKILL)
    assert all_said(child) == ([], "killed by signal 9")
    os.kill(forked, signal.SIGKILL)


def test_half_a_message_of_the_dead_is_no_message(programs):
    """A fork keeps the socket open, so that waiting for the other half would never end."""
    code = "import struct\nos.write(c.fileno(), struct.pack('!i', 1000) + b'half')\nos._exit(1)"
    child = programs(FORKS + code)
    (forked,), how = all_said(child)
    assert how == "exit status 1"
    os.kill(forked, signal.SIGKILL)


def test_who_closes_its_socket_and_does_not_end_is_ended(programs, monkeypatch):
    monkeypatch.setattr(_child, "LAST_WORDS_S", 0.01)
    child = programs("c.close()\ntime.sleep(1000)")
    assert all_said(child) == ([], "killed by signal 9")


PARENT = """
import sys
from thrifty.core._child import Child, wait_for
children = [Child(name) for name in sys.argv[1:]]
for child in children:
    wait_for([child], None)
    print(child.pid, flush=True)
sys.stdin.read()
"""
BUSY = "c.send('up')\nimport threading\n{}\n"


@pytest.mark.parametrize(
    "work",
    [
        "while True: pass",
        # holds Python's lock in C: no thread of this process ever runs again
        "import re; re.match('(a?){60}a{60}', 'a' * 60)",
        "threading.Event().wait()",
    ],
    ids=["python", "lock", "waits"],
)
def test_children_end_with_their_parent(tmp_path, monkeypatch, work):
    """Even if it is killed, whatever they are doing."""
    monkeypatch.setenv(
        "PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    begin = (
        "import sys\nfrom thrifty.core._child import parent_of\nc = parent_of(sys.argv[1:])\n"
    )
    (tmp_path / "busy.py").write_text(begin + BUSY.format(work))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, "busy"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs([child], timeout=LONG_S)
    assert not alive


def test_the_watching_thread_is_enough(tmp_path, monkeypatch):
    """A parent that starts children in another thread cannot use the kernel's way."""
    monkeypatch.setenv(
        "PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    )
    begin = (
        "import sys\nfrom thrifty.core._child import parent_of\nc = parent_of(sys.argv[1:])\n"
    )
    (tmp_path / "busy.py").write_text(begin + BUSY.format("while True: pass"))
    in_thread = PARENT.replace(
        "children = [Child(name) for name in sys.argv[1:]]",
        "import threading\nchildren = []\n"
        "t = threading.Thread(target=lambda: children.append(Child(sys.argv[1])))\nt.start()\nt.join()",
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", in_thread, "busy"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running(), "it ended with the thread that started it"
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs([child], timeout=LONG_S)
    assert not alive


def test_nothing_is_left_open(programs):
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0  # noqa: PTH208
    threads = threading.active_count()
    for _ in range(3):
        programs("time.sleep(1000)").end()
    if before:
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert threading.active_count() == threads
