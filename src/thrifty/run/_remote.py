"""What runs on another machine: a worker that trains for as long as one call lasts."""

from __future__ import annotations

import pickle
import sys
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from thrifty.core import EpochDone, StoreWriteError, error_traceback

from ._assignment import Assignment, Refusal, Report
from ._worker import Worker, WorkerSpec


TURN_S = 0.1
"""A call lasts about so long if epochs are shorter: it costs a few milliseconds itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What one call of ``advance`` brought; ``unwritable`` says what the store could not write."""

    reports: Sequence[Report]
    unwritable: str = ""


class RemoteWorker:
    """A ``Worker`` behind calls, one at a time: first ``prepare``, then ``advance`` while it has something to do."""

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._stopping = False

    def prepare(self, spec: WorkerSpec, paths: Sequence[str], task: bytes) -> str:
        """Loads the task; what went wrong, or nothing. ``paths`` are where the study finds the user's code."""
        # before the task: its module is found where the study found it
        sys.path[:0] = [path for path in paths if path not in sys.path]
        try:
            loaded = pickle.loads(task)
            self._worker = Worker(loaded, spec, should_stop=lambda: self._stopping)
        except BaseException as error:  # noqa: BLE001 (user code may raise anything, sys.exit() included)
            return error_traceback(error)
        return ""

    def advance(
        self,
        assignments: Sequence[Assignment],
        *,
        refusals: Sequence[Refusal] = (),
        stop: bool = False,
    ) -> Turn:
        """Takes more assignments, and trains until somebody should hear of it."""
        worker = self._worker
        assert worker is not None, "prepare() comes first"
        self._stopping = stop
        for refusal in refusals:
            worker.refuse(refusal.key, refusal.reason)
        for assignment in assignments:
            worker.submit(assignment)
        reports: list[Report] = []
        until = time.monotonic() + TURN_S
        try:
            while worker.num_active and time.monotonic() < until:
                reports += worker.advance()
                # what begins a stage must be known before it can kill the worker; what ends one makes room
                if any(not isinstance(report.event, EpochDone) for report in reports):
                    break
        except StoreWriteError as error:
            return Turn(reports=reports, unwritable=str(error))
        return Turn(reports=reports)


def user_paths() -> list[str]:
    """Where this process finds modules, but for those of the Python installation, which each machine has itself."""
    installed = [
        Path(sysconfig.get_path(name))
        for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    paths = [Path(path).absolute() for path in sys.path]
    return [
        str(path)
        for path in paths
        if path.name not in ("site-packages", "dist-packages")
        and path.name != f"python{sys.version_info.major}{sys.version_info.minor}.zip"
        and not any(path.is_relative_to(each) for each in installed)
    ]
