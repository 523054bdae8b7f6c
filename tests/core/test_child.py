"""Child processes: their messages, their ends, and what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from thrifty.core import _child, _fork_server
from thrifty.core._child import Child, ChildEndedError, wait_for


pytestmark = pytest.mark.slow


LONG_S = 60.0


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Return a function that makes a program for a child to run."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    started: list[Child] = []

    def start(code: str, **options) -> Child:
        name = f"program{len(started)}"
        begin = (
            "import os, sys, time\nfrom thrifty.core._child import parent_of\n"
            "c = parent_of(sys.argv[1:])\n"
        )
        (tmp_path / f"{name}.py").write_text(begin + code)
        started.append(Child(name, **options))
        return started[-1]

    yield start
    for child in started:
        child.end()


def said(child: Child) -> list[object]:
    assert wait_for([child], LONG_S) == [child], "it has nothing to say"
    return child.receive()


def all_said(child: Child) -> tuple[list[object], str]:
    """Return all messages of a child up to its end, and how it ended."""
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


def test_an_end_is_noticed_though_a_fork_keeps_the_socket_open(programs):
    child = programs(FORKS + "time.sleep(1000)")
    (forked,) = said(child)
    os.kill(child.pid, signal.SIGKILL)
    assert all_said(child) == ([], "killed by signal 9")
    os.kill(forked, signal.SIGKILL)


def test_half_a_message_of_the_dead_is_no_message(programs):
    """A partial message of a killed child is dropped.

    A fork keeps the socket open, so that waiting for the other half would never end.
    """
    code = "import struct\nos.write(c.fileno(), struct.pack('!i', 1000) + b'half')\nos._exit(1)"
    child = programs(FORKS + code)
    (forked,), how = all_said(child)
    assert how == "exit status 1"
    os.kill(forked, signal.SIGKILL)


def test_who_closes_its_socket_and_does_not_end_is_ended(programs, monkeypatch):
    monkeypatch.setattr(_child, "EXIT_GRACE_S", 0.01)
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
        # Holds Python's lock in C: no thread of this process ever runs again.
        "import re; re.match('(a?){60}a{60}', 'a' * 60)",
        "threading.Event().wait()",
    ],
    ids=["python", "lock", "waits"],
)
def test_children_end_with_their_parent(tmp_path, monkeypatch, work):
    """Children end even if their parent is killed, whatever they are doing."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    begin = "import sys\nfrom thrifty.core._child import parent_of\nc = parent_of(sys.argv[1:])\n"
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
    """A child of a thread ends with its parent by the watching thread alone.

    A parent that starts children in another thread cannot use the kernel's way.
    """
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    begin = "import sys\nfrom thrifty.core._child import parent_of\nc = parent_of(sys.argv[1:])\n"
    (tmp_path / "busy.py").write_text(begin + BUSY.format("while True: pass"))
    in_thread = PARENT.replace(
        "children = [Child(name) for name in sys.argv[1:]]",
        "import threading\nchildren = []\n"
        "t = threading.Thread(target=lambda: "
        "children.append(Child(sys.argv[1])))\nt.start()\nt.join()",
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", in_thread, "busy"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running(), "it ended with the thread that started it"
    parent.kill()
    parent.communicate()
    _, alive = psutil.wait_procs([child], timeout=LONG_S)
    assert not alive


def test_nothing_is_left_open(programs):
    programs("time.sleep(1000)").end()  # the server stays
    before = (
        len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        if Path("/proc/self/fd").exists()
        else 0
    )
    threads = threading.active_count()
    for _ in range(3):
        programs("time.sleep(1000)").end()
    if before:
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert threading.active_count() == threads


SAYS = "c.send({})\ntime.sleep(1000)"


def answer(child: Child) -> object:
    (message,) = said(child)
    return message


def test_children_share_what_was_imported_before(programs, tmp_path):
    (tmp_path / "heavy.py").write_text("import os\nmade_in = os.getpid()\n")
    program = SAYS.format("(os.getpid(), __import__('heavy').made_in)")
    programs("", preload=["heavy"]).end()
    (one, made_in), (other, also_in) = (answer(programs(program)) for _ in range(2))
    assert made_in == also_in
    assert len({one, other, made_in, os.getpid()}) == 4


def test_what_cannot_be_imported_is_said_by_the_child_that_needs_it(programs, capfd):
    child = programs("import not_there", preload=["not_there"])
    assert all_said(child) == ([], "exit status 1")
    assert "No module named 'not_there'" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("sys.exit(3)", "exit status 3"),
        ("sys.exit()", "exit status 0"),
        ("sys.exit('no')", "exit status 1"),
        ("pass", "exit status 0"),
        ("raise KeyboardInterrupt", "exit status 1"),
    ],
)
def test_an_end_is_that_of_a_program(programs, end, how):
    assert all_said(programs(end)) == ([], how)


def test_streams_and_folder_are_those_of_now(programs, monkeypatch, tmp_path, capfd):
    programs("").end()
    monkeypatch.chdir(tmp_path)
    child = programs("print(os.getcwd(), sys.path[0])\nprint('wrong', file=sys.stderr)")
    all_said(child)
    out, err = capfd.readouterr()
    assert out.split() == [str(tmp_path)] * 2
    assert err == "wrong\n"


def test_a_folder_that_is_gone_is_no_obstacle(programs, monkeypatch, tmp_path):
    programs("").end()  # Python itself does not always start there
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert answer(programs(SAYS.format(1))) == 1


def test_a_stream_that_is_closed_is_empty():
    reading, writing = os.pipe()
    os.close(writing)
    os.close(reading)
    with open(_child._copy_of_stream(reading), "rb") as file:  # noqa: PTH123 (a descriptor)
        assert file.read() == b""


def test_the_environment_and_cores_are_those_of_now(programs, monkeypatch):
    program = SAYS.format("(os.environ.get('COLOUR'), len(os.sched_getaffinity(0)))")
    cores = os.sched_getaffinity(0)
    assert answer(programs(program)) == (None, len(cores))
    monkeypatch.setenv("COLOUR", "green")
    first = programs(program)
    assert answer(first) == ("green", len(cores))
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert answer(programs(program)) == ("green", 1)
    finally:
        os.sched_setaffinity(0, cores)
    assert first.alive, "it ended with the server of other surroundings"


def test_children_draw_other_numbers_than_each_other(programs, tmp_path):
    """Unseeded children draw different numbers, as processes that are started from scratch."""
    program = SAYS.format("(__import__('random').random(), __import__('numpy').random.random())")
    drawn = [answer(programs(program, preload=["numpy", "random"])) for _ in range(2)]
    assert len({number for pair in drawn for number in pair}) == 4


def test_with_the_server_end_its_children_and_another_is_started(programs):
    child = programs(SAYS.format("os.getppid()"))
    os.kill(answer(child), signal.SIGKILL)
    assert all_said(child) == ([], "together with its fork server")
    child.end()
    assert answer(programs(SAYS.format("1"))) == 1


def test_a_child_that_was_never_started_has_no_number(programs):
    child = programs("time.sleep(1000)")
    server = child._server._process
    server.send_signal(signal.SIGSTOP)
    late = programs("time.sleep(1000)")
    server.kill()
    with pytest.raises(ChildEndedError, match="died before"):
        late.pid  # noqa: B018
    assert all_said(late) == ([], "together with its fork server")


def test_a_fork_of_the_parent_has_a_server_of_its_own(programs):
    child = programs("while True: c.send(c.recv())")
    reading, writing = os.pipe()
    forked = os.fork()
    if not forked:
        try:
            mine = programs(SAYS.format("os.getppid()"))
            os.write(writing, str(answer(mine)).encode())
            mine.end()
        finally:
            os._exit(0)
    os.waitpid(forked, 0)
    assert int(os.read(reading, 100)) != child._server._process.pid
    os.close(reading)
    os.close(writing)
    child.send("still there?")
    assert said(child) == ["still there?"]


def test_without_a_safe_fork_children_are_started_from_scratch(programs, monkeypatch, tmp_path):
    code = (
        "import sys; import thrifty.core._fork_server as server; "
        "server.may_fork = lambda: False; server.main(sys.argv[1:])"
    )
    monkeypatch.setattr(_child, "_SERVER", ("-c", code))
    (tmp_path / "heavy.py").write_text("import os\nmade_in = os.getpid()\n")
    child = programs(SAYS.format("(os.getpid(), __import__('heavy').made_in)"), preload=["heavy"])
    assert answer(child) == (child.pid, child.pid)
    os.kill(child.pid, signal.SIGKILL)
    assert all_said(child) == ([], "killed by signal 9")
    assert all_said(programs("os._exit(7)")) == ([], "exit status 7")


def test_a_driver_of_accelerators_forbids_forks(monkeypatch, tmp_path):
    assert _fork_server.may_fork() == (sys.platform == "linux")
    monkeypatch.setattr(_fork_server, "_ACCELERATOR_DEVICES", (str(tmp_path),))
    assert not _fork_server.may_fork()


def test_no_server_is_left_when_the_interpreter_ends(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    begin = "import sys\nfrom thrifty.core._child import parent_of\nc = parent_of(sys.argv[1:])\n"
    (tmp_path / "busy.py").write_text(begin + BUSY.format("while True: pass"))
    code = PARENT.replace("child.pid", "child.pid, child._server._process.pid")
    parent = subprocess.Popen(
        [sys.executable, "-c", code, "busy"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert parent.stdout is not None
    left = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    _, err = parent.communicate()
    assert not err
    _, alive = psutil.wait_procs(left, timeout=LONG_S)
    assert not alive


INTERRUPTED_FORK = """
import os, signal, sys, time
from thrifty.core._child import fork_ignoring_interrupts
interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
os.register_at_fork(**{sys.argv[1]: interrupt})
try:
    pid = fork_ignoring_interrupts()
    if not pid:
        interrupt()
        os._exit(0)
    print("ended with", os.waitpid(pid, 0)[1])
except KeyboardInterrupt:
    print("interrupted")
try:
    os.waitpid(-1, 0)
except ChildProcessError:
    print("no child is left")
"""


@pytest.mark.parametrize(
    ("where", "printed"), [("after_in_child", "ended with 0"), ("after_in_parent", "interrupted")]
)
def test_an_interruption_amid_a_fork_reaches_only_the_parent(where, printed):
    command = [sys.executable, "-c", INTERRUPTED_FORK, where]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{printed}\nno child is left\n", "")


def test_a_fork_that_fails_leaves_interruptions_as_they_were(monkeypatch):
    def fails():
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", fails)
    with pytest.raises(BlockingIOError):
        _child.fork_ignoring_interrupts()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
