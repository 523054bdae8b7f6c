"""What a remote worker is told, and its pulse."""

from __future__ import annotations

import pickle
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from thrifty.core import EpochDone, StoreWriteError, error_traceback

from ._executor import Assignment, Order, Report
from ._worker import Worker, WorkerSpec


class Pulse:
    """A liveness check that asks in a thread of its own, because an answer may never come.

    It asks every ``every_s`` seconds. ``check`` is quick and never raises. It reports an error
    once there has been no answer for ``patience_s``.
    """

    def __init__(
        self,
        ask: Callable[[], object],
        *,
        every_s: float = 5.0,
        patience_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._every_s = every_s
        self._patience_s = patience_s
        self._clock = clock
        self._answered = self._asked = clock()
        self._trouble = "no answer"
        self._asking: threading.Thread | None = None

    def check(self) -> str:
        """Return what is wrong, or an empty text; ask again if it is time."""
        now = self._clock()
        if self._asking is not None and self._asking.is_alive():
            if now - self._asked >= self._patience_s:
                return self._silent(now)
            return ""
        if self._asked - self._answered >= self._patience_s:
            return self._silent(now)
        if now - self._asked >= self._every_s:
            self._asked = now
            self._asking = threading.Thread(target=self._listen, name="pulse", daemon=True)
            self._asking.start()
        return ""

    def _listen(self) -> None:
        try:
            self._ask()
        except Exception as error:  # noqa: BLE001 (any error means that there was no answer)
            self._trouble = " ".join(str(error).split()) or type(error).__name__
        else:
            self._answered = self._clock()

    def _silent(self, now: float) -> str:
        return f"{self._trouble} for {now - self._answered:.0f} s"


TURN_S = 0.1
"""Duration of a call if epochs are shorter; the overhead of a call is a few milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The result of one call of ``advance``.

    Attributes:
        reports: What has happened.
        unwritable: The message of a StoreWriteError.
        is_last: Whether the worker ends now, because its machine was told to.
    """

    reports: Sequence[Report]
    unwritable: str = ""
    is_last: bool = False


class RemoteWorker:
    """A ``Worker`` controlled by calls, one at a time.

    The first call is ``prepare``. Then ``advance`` is called while the worker has assignments.
    """

    def __init__(self) -> None:
        self._worker: Worker | None = None
        self._stopping = False
        self.is_leaving = False
        """Whether it ends its assignments with their current epochs, whatever it is told."""

    @property
    def num_active(self) -> int:
        """Number of assignments that the worker has."""
        return 0 if self._worker is None else self._worker.num_active

    def prepare(self, spec: WorkerSpec, paths: Sequence[str], task: bytes) -> str:
        """Load the task; return the traceback if that fails, else an empty text.

        ``paths`` are the folders in which the study's process finds the user's code.
        """
        # Extend the path before loading the task, so that its module is found where the study
        # found it.
        sys.path[:0] = [path for path in paths if path not in sys.path]
        try:
            loaded = pickle.loads(task)
            self._worker = Worker(
                loaded, spec, should_stop=lambda: self._stopping or self.is_leaving
            )
        except BaseException as error:  # noqa: BLE001 (user code may raise SystemExit, too)
            return error_traceback(error)
        return ""

    def advance(
        self, assignments: Sequence[Assignment], *, orders: Sequence[Order] = (), stop: bool = False
    ) -> Turn:
        """Add assignments, and train until there is something to report or ``TURN_S`` is over."""
        worker = self._worker
        assert worker is not None, "prepare() comes first"
        self._stopping = stop
        for assignment in assignments:
            worker.submit(assignment)
        for order in orders:
            worker.obey(order)
        reports: list[Report] = []
        until = time.monotonic() + TURN_S
        try:
            while worker.num_active and time.monotonic() < until:
                reports += worker.advance()
                # The study must know of a stage's start before the stage can kill the worker, and
                # of its end because that makes room for another assignment.
                if any(not isinstance(report.event, EpochDone) for report in reports):
                    break
        except StoreWriteError as error:
            return Turn(reports=reports, unwritable=str(error))
        return Turn(reports=reports, is_last=self.is_leaving and not worker.num_active)


def user_paths() -> list[str]:
    """Return the entries of ``sys.path`` outside the Python installation, as absolute paths.

    Each machine has a Python installation of its own.
    """
    installed = [
        Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    paths = [Path(path).absolute() for path in sys.path]
    return [
        str(path)
        for path in paths
        if path.name not in ("site-packages", "dist-packages")
        and path.name != f"python{sys.version_info.major}{sys.version_info.minor}.zip"
        and not any(path.is_relative_to(each) for each in installed)
    ]
