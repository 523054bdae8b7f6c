"""The lines that user code logs while trials train, taken from ``logging`` without changing it."""

from __future__ import annotations

import logging
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from ._errors import plain_text


MAX_LINE_CHARS = 2_000
"""Characters of a line; the middle of a longer one is cut."""
MAX_EPOCH_LINES = 200
"""Lines of one epoch that are kept, the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line that user code has logged.

    Attributes:
        at: When, in seconds since 1970 (UTC).
        level: Its level, such as ``"WARNING"``.
        logger: The name of the logger.
        text: The message, printable, with the traceback of an exception that was logged.
    """

    at: float
    level: str
    logger: str
    text: str

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data.

        >>> LogLine(at=0.0, level="INFO", logger="train", text="begins").to_json()
        {'at': 0.0, 'level': 'INFO', 'logger': 'train', 'text': 'begins'}
        """
        return asdict(self)


class LineBuffer:
    """The last lines of an epoch of a trial, and how many were left out.

    >>> buffer = LineBuffer(max_lines=1)
    >>> for text in ("a", "b"):
    ...     buffer.add(LogLine(at=0.0, level="INFO", logger="train", text=text))
    >>> [line.text for line in buffer.take()], buffer.take()
    (['1 earlier line of this epoch left out', 'b'], ())
    """

    def __init__(self, *, max_lines: int = MAX_EPOCH_LINES) -> None:
        self._lines: deque[LogLine] = deque(maxlen=max_lines)
        self._num_added = 0

    def add(self, line: LogLine) -> None:
        """Add a line; the first one goes if there are too many."""
        self._lines.append(line)
        self._num_added += 1

    def extend(self, other: LineBuffer) -> None:
        """Add the lines of another buffer."""
        num_left_out = other._num_added - len(other._lines)
        for line in other._lines:
            self.add(line)
        self._num_added += num_left_out

    def clear(self) -> None:
        """Forget all lines."""
        self._lines.clear()
        self._num_added = 0

    def take(self) -> tuple[LogLine, ...]:
        """Return the lines since the last call; the first says how many are left out."""
        found, num_left_out = tuple(self._lines), self._num_added - len(self._lines)
        self.clear()
        return (left_out(num_left_out, before=found[0]), *found) if num_left_out else found


def left_out(num: int, *, before: LogLine) -> LogLine:
    """Return a line that stands for earlier lines of an epoch that are not kept."""
    what = "1 earlier line" if num == 1 else f"{num:,} earlier lines"
    text = f"{what} of this epoch left out"
    return LogLine(at=before.at, level="INFO", logger="thrifty", text=text)


class LineCapture:
    """A context that notes what is logged in this process, by the trial that logs it.

    It watches the creation of log records, so handlers, levels and filters of the user stay as they
    are: a line that a logger's level rules out is not noted. Lines of thrifty itself are left out.

    >>> logger = logging.getLogger("train")
    >>> logger.addHandler(logging.NullHandler())
    >>> with LineCapture() as capture:
    ...     logger.error("of all")
    ...     with lines_of(3):
    ...         logger.error("of trial 3")
    >>> [line.text for line in capture.of(2).take()]
    ['of all']
    >>> [line.text for line in capture.of(3).take()]
    ['of all', 'of trial 3']
    """

    def __init__(self) -> None:
        self._owner: int | None = None
        self._found: dict[int | None, LineBuffer] = {}
        self._lock = threading.Lock()
        self._thread = 0

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        _FACTORY.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _FACTORY.remove(self)

    def of(self, trial: int, *, shared: bool = True) -> LineBuffer:
        """Return the lines of a trial.

        Args:
            trial: Its number in ``lines_of``.
            shared: Whether lines count of which no trial is known.
        """
        out = LineBuffer()
        for owner in (None, trial) if shared else (trial,):
            if owner in self._found:
                out.extend(self._found[owner])
        return out

    def _note(self, record: logging.LogRecord) -> None:
        if record.name.partition(".")[0] == "thrifty":
            return
        line = _line(record)
        with self._lock:  # loaders log from threads of their own
            self._found.setdefault(self._owner, LineBuffer()).add(line)


class _Factory:
    """The factory of log records while lines are taken.

    It is set once for all captures of the process, which may begin and end in any order in several
    threads. A factory that user code sets meanwhile stays, also if it calls this one.
    """

    def __init__(self) -> None:
        self._captures: list[LineCapture] = []
        self._lock = threading.Lock()
        self._inside = threading.local()
        self._first = self._before = logging.getLogRecordFactory()
        self._own = self.make  # one object, since each access makes another bound method

    def add(self, capture: LineCapture) -> None:
        with self._lock:
            self._captures.append(capture)
            current = logging.getLogRecordFactory()
            if current is not self._own:
                self._before = current
                logging.setLogRecordFactory(self._own)

    def remove(self, capture: LineCapture) -> None:
        with self._lock:
            self._captures.remove(capture)
            if not self._captures and logging.getLogRecordFactory() is self._own:
                logging.setLogRecordFactory(self._before)
                self._before = self._first

    def current(self) -> LineCapture | None:
        """Return the last capture of this thread, or else the last of all."""
        captures, thread = self._captures[::-1], threading.get_ident()
        mine = (each for each in captures if each._thread == thread)
        return next(mine, captures[0] if captures else None)

    def make(self, *args: Any, **options: Any) -> logging.LogRecord:
        """Return a log record, and note its line."""
        if getattr(self._inside, "value", False):  # a factory of the user calls this one
            return self._first(*args, **options)
        self._inside.value = True
        try:
            record = self._before(*args, **options)
        finally:
            self._inside.value = False
        capture = self.current()
        if capture is not None:
            capture._note(record)
        return record


_FACTORY = _Factory()


@contextmanager
def lines_of(trial: int) -> Iterator[None]:
    """Let what is logged within the context be lines of one trial.

    Elsewhere they are lines of all trials that train together.
    """
    capture = _FACTORY.current()
    if capture is None:
        yield
        return
    before, capture._owner = capture._owner, trial
    try:
        yield
    finally:
        capture._owner = before


def _line(record: logging.LogRecord) -> LogLine:
    try:
        text = record.getMessage()
    except Exception:  # noqa: BLE001 (wrong arguments; ``logging`` reports them itself)
        text = str(record.msg) if isinstance(record.msg, str) else type(record.msg).__name__
    if record.exc_info and record.exc_info[1] is not None:
        text = "\n".join([text, *traceback.format_exception_only(record.exc_info[1])]).rstrip()
    return LogLine(
        at=record.created,
        level=plain_text(record.levelname, limit=40),
        logger=plain_text(record.name, limit=200),
        text=plain_text(text, lines=True, limit=MAX_LINE_CHARS),
    )


def line_from_json(stored: dict[str, Any]) -> LogLine:
    """Return the line that ``LogLine.to_json`` has returned."""
    return LogLine(**{key: stored[key] for key in ("at", "level", "logger", "text")})
