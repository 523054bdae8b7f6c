"""Worker processes, each on a core of its own, and the environment of a group's processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


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
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **(env or {})},
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
