"""What loggers have in common: a thread of their own, and errors that stay theirs."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, Protocol, TypeVar

from thrifty.core import Event, UsageError, fingerprint, plain_logger
from thrifty.study import StudyBegan, StudyEnded, TrialEvent


logger = plain_logger(__name__)

MAX_FAILURES = 3
"""So many failures in a row, and a tracker is left alone for the rest of the run."""

Run = TypeVar("Run")


class Tracker(Protocol):
    """Where one run of a study is written to; used by one thread only."""

    def take(self, event: TrialEvent) -> None:
        """Writes an event; after ``StudyEnded`` there is none, and everything must be written."""
        ...


class Logger(ABC):
    """An observer that writes what a study learns to a tracker, from a thread of its own.

    A tracker that is slow holds up nothing until the end of the run, which waits for it for ``patience_s`` seconds at
    most; one that fails is a warning, and the study goes on.

    Raises:
        UsageError: the patience is not a number of seconds.
    """

    def __init__(self, *, patience_s: float) -> None:
        if (
            isinstance(patience_s, bool)
            or not isinstance(patience_s, int | float)
            or patience_s < 0
        ):
            raise UsageError(
                f"patience_s is {patience_s!r}; give a number of seconds, 0 or more"
            )
        self._patience_s = patience_s
        self._writer: _Writer | None = None

    @abstractmethod
    def open(self, began: StudyBegan) -> Tracker:
        """The tracker for a run of a study; called in the logger's thread."""

    def on_event(self, event: Event | TrialEvent) -> None:
        """Hands an event on; returns at once, but for the last one."""
        if isinstance(event, StudyBegan):
            if self._writer is not None:  # a run that never said how it ended
                self._writer.put(StudyEnded(state="failed"))
                self._writer.finish(self._patience_s)
            self._writer = _Writer(type(self).__name__, self.open)
        if self._writer is None or not isinstance(event, TrialEvent):
            return
        self._writer.put(event)
        if isinstance(event, StudyEnded):
            self._writer.finish(self._patience_s)
            self._writer = None


class _Writer:
    """A thread that writes the events of one run."""

    def __init__(self, name: str, open_tracker: Callable[[StudyBegan], Tracker]) -> None:
        self._name = name
        self._open = open_tracker
        self._events: SimpleQueue[TrialEvent] = SimpleQueue()
        self._tracker: Tracker | None = None
        self._failures = 0
        self._warned = False
        # a daemon: a tracker that hangs must not keep the process from ending
        self._thread = Thread(target=self._write_all, name=f"thrifty-{name}", daemon=True)
        self._thread.start()

    def put(self, event: TrialEvent) -> None:
        self._events.put(event)

    def finish(self, patience_s: float) -> None:
        self._thread.join(patience_s)
        if self._thread.is_alive():
            logger.warning(
                "%s is not done after %g s, with %d events to go; what it has not written when this process ends is lost "
                "(patience_s waits for longer)",
                self._name,
                patience_s,
                self._events.qsize(),
            )

    def _write_all(self) -> None:
        while True:
            event = self._events.get()
            if self._failures < MAX_FAILURES:
                self._write(event)
            if isinstance(event, StudyEnded):
                return

    def _write(self, event: TrialEvent) -> None:
        try:
            if isinstance(event, StudyBegan):
                self._tracker = self._open(event)
            assert self._tracker is not None
            self._tracker.take(event)
        except Exception as error:  # noqa: BLE001 (whatever a tracker raises, the study goes on)
            # without a tracker there is nothing to try again
            self._failures = MAX_FAILURES if self._tracker is None else self._failures + 1
            self._warn(error)
        else:
            self._failures = 0

    def _warn(self, error: Exception) -> None:
        if self._warned:
            logger.debug("%s: %s", self._name, error)
            return
        self._warned = True
        logger.warning(
            "%s does not write: %s: %s; the study goes on, its log will have gaps",
            self._name,
            type(error).__name__,
            error,
        )


class OpenRuns(Generic[Run]):
    """The tracker's runs of those trials that were written to last.

    Thousands of trials may wait for a verdict at the same time, and each open run costs files, threads or connections: beyond
    ``limit`` the one that was written to longest ago is closed. It is opened again when it is needed.
    """

    def __init__(
        self,
        open_run: Callable[[int], Run],
        close_run: Callable[[Run], None],
        *,
        limit: int,
    ) -> None:
        self._open = open_run
        self._close = close_run
        self._limit = limit
        self._runs: OrderedDict[int, Run] = OrderedDict()

    def __getitem__(self, trial: int) -> Run:
        if trial not in self._runs:
            while len(self._runs) >= self._limit:
                _, oldest = self._runs.popitem(last=False)
                self._close(oldest)
            self._runs[trial] = self._open(trial)
        self._runs.move_to_end(trial)
        return self._runs[trial]

    def pop(self, trial: int) -> Run:
        """The run of a trial, which is no longer kept open here: closing it is the caller's."""
        run = self[trial]
        del self._runs[trial]
        return run

    def close(self) -> None:
        """Closes all of them."""
        while self._runs:
            _, run = self._runs.popitem()
            self._close(run)


def plain(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """A configuration in values that every tracker takes; what is neither number nor text is written as Python has it.

    >>> from thrifty.space import Step
    >>> plain({"width": 64, "lr": Step(0.1, [3])})
    {'width': 64, 'lr': 'Step(0.1, (3,))'}
    """
    return {
        name: value if isinstance(value, bool | int | float | str) else repr(value)
        for name, value in config.items()
    }


def safe_name(name: str) -> str:
    """A name as part of a file's name: what files cannot have becomes ``_``.

    >>> safe_name("digits"), safe_name("../a b")[:7]
    ('digits', '.._a_b-')
    """
    safe = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:100]
    # names that differ stay different
    return safe if safe == name and safe.strip(".") else f"{safe}-{fingerprint(name)[:6]}"
