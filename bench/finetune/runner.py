"""Start processes of ``bench.finetune.runs``, and let them train when they are told to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from bench.common.processes import RESULT
from bench.finetune.setting import Setting


def arguments(
    name: str, setting: Setting, threads: int | None, options: Mapping[str, Any]
) -> list[str]:
    """Return the command-line arguments of a job of ``bench.finetune.runs``."""
    out = [name, "--setting", json.dumps(setting.as_dict())]
    for key, value in {"threads": threads or os.cpu_count(), **options}.items():
        out += [f"--{key.replace('_', '-')}", str(value)]
    return out


class Runner:
    """A process that is ready to train, and trains epochs whenever it is told to."""

    def __init__(self, setting: Setting, *, threads: int, **options: Any) -> None:
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bench.finetune.runs",
                *arguments("speed", setting, threads, options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Runner:
        self._line()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def begin(self, *, epochs: int = 1) -> None:
        """Let it train so many epochs."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{epochs}\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Wait until it has trained; return what it found.

        Raises:
            RuntimeError: The process has ended.
        """
        found: dict[str, Any] = json.loads(self._line().removeprefix(RESULT))
        return found

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"bench.finetune.runs ended ({self._process.poll()})")
        return line
