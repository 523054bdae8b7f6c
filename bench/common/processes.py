"""Processes of a benchmark: fresh ones with their peak memory, and pinned ones in groups."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import psutil


RESULT = "RESULT "
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def in_fresh_process(module: str, *args: str) -> dict[str, Any]:
    """Run ``python -m module args``; return its result line with its process tree's peak memory."""
    process = subprocess.Popen(
        [sys.executable, "-m", module, *args],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD},
    )
    peak = _PeakMemory(process.pid)
    try:
        out, _ = process.communicate()
    finally:
        peak_bytes = peak.stop()
    lines = [line for line in out.splitlines() if line.startswith(RESULT)]
    if process.returncode or not lines:
        raise RuntimeError(
            f"{module} {' '.join(args)} failed ({process.returncode}):\n{out[-2000:]}"
        )
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(RESULT))
    return {**result, "peak_mb": peak_bytes / 2**20}


def say_result(result: dict[str, Any]) -> None:
    """Print a result line: the child's side of ``in_fresh_process``."""
    print(RESULT + json.dumps(result), flush=True)


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
