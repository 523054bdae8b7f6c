"""Processes of a benchmark: fresh ones with their peak memory, and pinned ones in groups."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil


RESULT, TURN = "RESULT ", "TURN"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def in_fresh_process(module: str, *args: str) -> dict[str, Any]:
    """Run ``python -m module args``; return its result line with its process tree's peak memory."""
    return in_turns((module, *args))[0]


def in_turns(*commands: tuple[str, ...]) -> list[dict[str, Any]]:
    """Run commands as ``in_fresh_process`` does, of which only one works at a time.

    Each works until it waits for its next turn, so all see the same changes in the machine's speed.
    """
    children = [_Child(command) for command in commands]
    waiting = deque(children)
    try:
        while waiting:
            child = waiting.popleft()
            if child.works():
                waiting.append(child)
    finally:
        for child in children:
            child.stop()
    return [child.result for child in children]


def say_result(result: dict[str, Any]) -> None:
    """Print a result line: the child's side of ``in_fresh_process``."""
    print(RESULT + json.dumps(result), flush=True)


def wait_for_turn() -> None:
    """Let the other processes of ``in_turns`` work until it is this one's turn again."""
    print(TURN, flush=True)
    sys.stdin.readline()


class _Child:
    """A process that takes turns; its first turn begins with its start."""

    def __init__(self, command: tuple[str, ...]) -> None:
        self.result: dict[str, Any] = {}
        self._command = command
        self._process: subprocess.Popen[str] | None = None
        self._peak: _PeakMemory | None = None
        self._said: list[str] = []

    def works(self) -> bool:
        """Let it work; return whether it waits for another turn, and has not ended."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        if self._said:
            process.stdin.write("\n")
            process.stdin.flush()
        for line in process.stdout:
            self._said.append(line.rstrip("\n"))
            if self._said[-1] == TURN:
                return True
        self._end(process.wait())
        return False

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._peak is not None:
            self._peak.stop()

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, "-m", *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ONE_THREAD},
        )
        self._peak = _PeakMemory(self._process.pid)
        return self._process

    def _end(self, status: int) -> None:
        assert self._peak is not None
        lines = [line for line in self._said if line.startswith(RESULT)]
        if status or not lines:
            said = "\n".join(self._said)
            raise RuntimeError(f"{' '.join(self._command)} failed ({status}):\n{said[-2000:]}")
        self.result = {
            **json.loads(lines[-1].removeprefix(RESULT)),
            "peak_mb": self._peak.stop() / 2**20,
        }


@contextmanager
def pinned(
    module: str, *, core: int, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """Start a process of ``module`` with one thread; kill it at the end.

    The process gets its core and ``options`` in JSON and binds itself.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, json.dumps({"core": core, **options})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD, **(env or {})},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def member(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment variables that ``torch.distributed`` reads in a group's process."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def free_port() -> int:
    """Return a free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class _PeakMemory:
    """Sampler of the resident memory of a process and its children; shared pages count in each."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._peak = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._done.wait(0.1):
            try:
                tree = [self._process, *self._process.children(recursive=True)]
            except psutil.Error:
                continue  # it has just ended
            self._peak = max(self._peak, sum(_resident(process) for process in tree))


def _resident(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0  # it has just ended; the others still count
