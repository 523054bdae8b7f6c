"""Common code of the loggers: each has its own thread, and its errors never reach the study."""

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
"""Consecutive failures after which a tracker gets no more events in this run."""

Run = TypeVar("Run")


class Tracker(Protocol):
    """Destination of one run of a study; used by one thread only."""

    def take(self, event: TrialEvent) -> None:
        """Write an event. After ``StudyEnded``, the last one, everything must be written."""
        ...


class Logger(ABC):
    """An observer that writes the events of a study to a tracker, from its own thread.

    A slow tracker delays nothing until the end of the run, which waits for it for at most
    ``patience_s`` seconds. If a tracker fails, a warning is logged and the study continues.

    Raises:
        UsageError: ``patience_s`` is not a number of seconds.
    """

    def __init__(self, *, patience_s: float) -> None:
        if (
            isinstance(patience_s, bool)
            or not isinstance(patience_s, int | float)
            or patience_s < 0
        ):
            raise UsageError(f"patience_s is {patience_s!r}; give a number of seconds, 0 or more")
        self._patience_s = patience_s
        self._writer: _Writer | None = None

    @abstractmethod
    def open(self, began: StudyBegan) -> Tracker:
        """Open the tracker for a run of a study; called in the logger's thread."""

    def on_event(self, event: Event | TrialEvent) -> None:
        """Queue an event and return at once; for ``StudyEnded``, wait for the writer."""
        if isinstance(event, StudyBegan):
            if self._writer is not None:  # the last run never reported its end
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
        # A daemon thread, so that a tracker that hangs cannot keep the process alive.
        self._thread = Thread(target=self._write_all, name=f"thrifty-{name}", daemon=True)
        self._thread.start()

    def put(self, event: TrialEvent) -> None:
        self._events.put(event)

    def finish(self, patience_s: float) -> None:
        self._thread.join(patience_s)
        if self._thread.is_alive():
            logger.warning(
                "%s is not done after %g s, with %d events to go; what it has not written when "
                "this process ends is lost "
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
        except Exception as error:  # noqa: BLE001 (a tracker may raise anything; the study goes on)
            # Without a tracker, a retry cannot succeed.
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
    """The open tracker runs of the trials that were written to last.

    Thousands of trials may wait for a decision at the same time, and each open run costs files,
    threads or connections. Beyond ``limit``, the run that was written to least recently is closed.
    It is reopened when it is needed.
    """

    def __init__(
        self, open_run: Callable[[int], Run], close_run: Callable[[Run], None], *, limit: int
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
        """Return a trial's run and stop tracking it; the caller must close it."""
        run = self[trial]
        del self._runs[trial]
        return run

    def close(self) -> None:
        """Close all runs."""
        while self._runs:
            _, run = self._runs.popitem()
            self._close(run)


def plain(config: Mapping[str, Any]) -> dict[str, bool | int | float | str]:
    """Return a configuration with values that every tracker accepts.

    Values that are neither numbers nor text become their ``repr``.

    >>> from thrifty.space import Step
    >>> plain({"width": 64, "lr": Step(0.1, [3])})
    {'width': 64, 'lr': 'Step(0.1, (3,))'}
    """
    return {
        name: value if isinstance(value, bool | int | float | str) else repr(value)
        for name, value in config.items()
    }


def safe_name(name: str) -> str:
    """Return a name that is safe in a file name; other characters become ``_``.

    >>> safe_name("digits"), safe_name("../a b")[:7]
    ('digits', '.._a_b-')
    """
    safe = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:100]
    # Append a digest to changed names, so that different names stay different.
    return safe if safe == name and safe.strip(".") else f"{safe}-{fingerprint(name)[:6]}"
