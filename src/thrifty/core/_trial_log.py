"""What user code logs while a trial trains: lines, attributes (JSON values) and artifacts (files).

Lines are taken from ``logging`` without changing it.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from ._errors import TaskError, ThriftyError, plain_text


# -- lines -------------------------------------------------------------------------------

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
        lines = other.lines()
        for line in lines:
            self.add(line)
        self._num_added += max(0, other._num_added - len(lines))

    def lines(self) -> list[LogLine]:
        """Return the lines; another thread may add some meanwhile."""
        while True:
            try:
                return list(self._lines)
            except RuntimeError:  # one came in between
                continue

    def clear(self) -> None:
        """Forget all lines."""
        self._lines.clear()
        self._num_added = 0

    def take(self) -> tuple[LogLine, ...]:
        """Return the lines since the last call; the first says how many are left out."""
        found = tuple(self.lines())
        num_left_out = self._num_added - len(found)
        self.clear()
        return (left_out(num_left_out, before=found[0]), *found) if num_left_out else found


def left_out(num: int, *, before: LogLine) -> LogLine:
    """Return a line that stands for earlier lines of an epoch that are not kept."""
    what = "1 earlier line" if num == 1 else f"{num:,} earlier lines"
    text = f"{what} of this epoch left out"
    return LogLine(at=before.at, level="INFO", logger="thrifty", text=text)


class LineCapture:
    """A context that notes what is logged in this process, by the trial that logs it.

    It looks at the records that loggers hand to their handlers. So handlers, levels and filters of
    the user stay as they are, and a line that a logger's level or filter rules out is not noted.
    Nothing of the user runs once more: a text that no handler has made is made of plain values
    only. Lines of thrifty itself are left out.

    >>> logger = logging.getLogger("train")
    >>> logger.addHandler(logging.NullHandler())
    >>> with LineCapture() as capture:
    ...     logger.error("of all")
    ...     with lines_of(3):
    ...         logger.error("of trial %d", 3)
    >>> [line.text for line in capture.of(2).take()]
    ['of all']
    >>> [line.text for line in capture.of(3).take()]
    ['of all', 'of trial 3']
    """

    def __init__(self) -> None:
        self._owner: int | None = None
        self._found: dict[int | None, LineBuffer] = {}
        self._thread = 0

    def __enter__(self) -> Self:
        self._thread = threading.get_ident()
        if not _WATCHING:
            _WATCHING.append(logging.Logger.callHandlers)
            logging.Logger.callHandlers = _call_handlers  # type: ignore[assignment,method-assign]
        _CAPTURES.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _CAPTURES.remove(self)

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

    def note(self, line: LogLine) -> None:
        """Note a line; one of another thread than that of the trials is a line of all of them.

        There is no lock, since garbage collection may log in the middle of anything.
        """
        owner = self._owner if threading.get_ident() == self._thread else None
        self._found.setdefault(owner, LineBuffer()).add(line)


_WATCHING: list[Callable[[logging.Logger, logging.LogRecord], None]] = []
"""The method of loggers that is watched since the first capture of the process; once set, it stays.

A change in the middle of training could be one of a value that the code of a trial reads.
"""
_CAPTURES: list[LineCapture] = []
"""Captures that are open, in any thread."""


def _call_handlers(logger: logging.Logger, record: logging.LogRecord) -> None:
    """Let handlers have a record, then note it."""
    _WATCHING[0](logger, record)
    capture = _current()
    if capture is None:
        return
    with suppress(Exception):  # no record is so odd that it may stop training
        if str(_plain(record.name)).partition(".")[0] != "thrifty":
            capture.note(_line(record))


def _current() -> LineCapture | None:
    """Return the last capture of this thread, or else the last of all."""
    captures, thread = _CAPTURES[::-1], threading.get_ident()
    mine = (each for each in captures if each._thread == thread)
    return next(mine, captures[0] if captures else None)


@contextmanager
def lines_of(trial: int) -> Iterator[None]:
    """Let what this thread logs within the context be lines of one trial.

    Elsewhere they are lines of all trials that train together.
    """
    capture = _current()
    if capture is None:
        yield
        return
    before, capture._owner = capture._owner, trial
    try:
        yield
    finally:
        capture._owner = before


# -- the text of a record, made without running code of the user -----------------------------------


_PLAIN = frozenset({str, int, float, bool, complex, bytes, type(None)})
_MAX_ITEMS, _MAX_DEPTH = 100, 3


def _line(record: logging.LogRecord) -> LogLine:
    text = "\n".join(filter(None, [_message(record), _error(record)]))
    return LogLine(
        at=float(record.created),
        level=plain_text(_plain(record.levelname), limit=40),
        logger=plain_text(_plain(record.name), limit=200),
        text=plain_text(text, lines=True, limit=MAX_LINE_CHARS),
    )


def _message(record: logging.LogRecord) -> str:
    made = vars(record).get("message")
    if type(made) is str:  # a handler has made it
        return made
    text, given = record.msg, record.args
    if type(text) is not str:
        return str(_plain(text))
    if not given:
        return text
    try:
        if type(given) is dict:
            return text % {key: _plain(value) for key, value in given.items()}
        return text % tuple(map(_plain, given))
    except Exception:  # noqa: BLE001 (wrong arguments; ``logging`` reports them itself)
        return text


def _error(record: logging.LogRecord) -> str:
    """Return the last line of the traceback that a record has; empty without one."""
    info = record.exc_info
    if type(info) is not tuple or len(info) != 3 or not isinstance(info[1], BaseException):
        return ""
    error, made = info[1], record.exc_text
    kind = type(error)
    if kind.__module__ == "builtins" and all(type(each) in _PLAIN for each in error.args):
        return f"{kind.__name__}: {error}"
    return made.rstrip().rpartition("\n")[2] if type(made) is str else kind.__name__


def _plain(value: Any, depth: int = 0) -> Any:
    """Return a value that is plain, or the name of its class, since ``str`` would run its code."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if depth < _MAX_DEPTH and kind in (list, tuple) and len(value) <= _MAX_ITEMS:
        return kind(_plain(each, depth + 1) for each in value)
    if depth < _MAX_DEPTH and kind is dict and len(value) <= _MAX_ITEMS:
        return {_plain(k, _MAX_DEPTH): _plain(each, depth + 1) for k, each in value.items()}
    return f"<{kind.__name__}>"


def line_from_json(stored: dict[str, Any]) -> LogLine:
    """Return the line that ``LogLine.to_json`` has returned."""
    return LogLine(**{key: stored[key] for key in ("at", "level", "logger", "text")})


# -- attributes --------------------------------------------------------------------------


MAX_ATTRIBUTE_BYTES = 65_536
"""Bytes that the attributes of one epoch may take as JSON."""
MAX_KEY_CHARS = 255
"""Characters of the key of an attribute."""
MAX_DEPTH = 32
"""Levels of nested lists and dicts in an attribute."""

_KINDS = "give a text, a number, a bool, None, or a list or dict of these"


class Attributes:
    """The attributes that a trial sets in one epoch, as copies that later changes do not reach.

    Args:
        call: How errors write the call that sets one; it has a place for the key.
        error: The class of these errors.

    >>> attributes = Attributes()
    >>> attributes.set("classes", ("cat", "dog"))
    ['cat', 'dog']
    >>> attributes.take(), attributes.take()
    ({'classes': ['cat', 'dog']}, {})
    """

    def __init__(
        self,
        *,
        call: str = "trial.set_user_attr({key}, ...)",
        error: type[ThriftyError] = TaskError,
    ) -> None:
        self._call, self._error = call, error
        self._values: dict[str, Any] = {}
        self._sizes: dict[str, int] = {}

    def set(self, key: str, value: Any) -> Any:
        """Set an attribute, and return its value as it is read later: tuples become lists.

        Raises:
            TaskError: The key is not a text of 1 to ``MAX_KEY_CHARS`` characters, the value is not
                JSON, or the attributes of the epoch take more than ``MAX_ATTRIBUTE_BYTES``.
        """
        if (
            not isinstance(key, str)
            or not 1 <= len(key) <= MAX_KEY_CHARS
            or any("\ud800" <= each <= "\udfff" for each in key)  # no table or file takes them
        ):
            raise self._refused(
                key, f"the key must be a text of 1 to {MAX_KEY_CHARS} characters, got {_cut(key)}"
            )
        plain = self._json_value(key, value, depth=0)
        try:
            text = json.dumps(plain)
        except ValueError as error:  # a whole number with thousands of digits
            raise self._refused(key, f"the value cannot be written as JSON ({error})") from None
        size = len(text) + len(json.dumps(key))
        total = sum(self._sizes.values()) - self._sizes.get(key, 0) + size
        if total > MAX_ATTRIBUTE_BYTES:
            raise self._refused(
                key,
                f"the attributes of one epoch may take {MAX_ATTRIBUTE_BYTES:,} bytes as JSON, got "
                f"{total:,} with this one; keep a shorter value, or write a file",
            )
        self._sizes[key] = size
        self._values[key] = json.loads(text)
        return json.loads(text)

    def take(self) -> dict[str, Any]:
        """Return what was set since the last call, with the last value of each key."""
        found, self._values, self._sizes = self._values, {}, {}
        return found

    def _json_value(self, key: str, value: Any, *, depth: int) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if depth >= MAX_DEPTH:
            raise self._refused(
                key, f"the value is nested in more than {MAX_DEPTH} levels; keep a flatter one"
            )
        if isinstance(value, Mapping):
            for name in value:
                if not isinstance(name, str):
                    raise self._refused(
                        key, f"keys of dicts must be texts, got {_cut(name)}; convert it with str()"
                    )
            return {
                name: self._json_value(key, each, depth=depth + 1) for name, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._json_value(key, each, depth=depth + 1) for each in value]
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            # A scalar of NumPy or torch, neither of which is imported here.
            scalar = value.item()
            if isinstance(scalar, bool | int | float | str):
                return scalar
        if hasattr(value, "tolist"):
            raise self._refused(
                key, f"the value has a {type(value).__name__}; convert it with .tolist()"
            )
        raise self._refused(key, f"the value has a {type(value).__name__}; {_KINDS}")

    def _refused(self, key: object, why: str) -> ThriftyError:
        return self._error(f"{self._call.format(key=_cut(key))}: {why}")


def _cut(value: object) -> str:
    return plain_text(repr(value), limit=60)


# -- artifacts ---------------------------------------------------------------------------


MAX_ARTIFACT_BYTES = 256 * 2**20
"""Default size limit of an artifact, in bytes."""
MAX_NAME_BYTES = 255
"""Bytes of the name of an artifact in UTF-8: what file systems take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file that a trial has logged.

    Attributes:
        name: Its name, by which a trial has one file.
        digest: The hexadecimal BLAKE2b of its content.
        num_bytes: Its size.
        error: Why it is not stored, such as a full disk; empty if it is stored.
    """

    name: str
    digest: str
    num_bytes: int
    error: str = ""

    @property
    def is_stored(self) -> bool:
        """Whether the file was stored."""
        return not self.error

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data.

        >>> Artifact(name="log.txt", digest="ab", num_bytes=3).to_json()
        {'name': 'log.txt', 'digest': 'ab', 'num_bytes': 3, 'error': ''}
        """
        return asdict(self)


class ArtifactSink(Protocol):
    """Where the artifacts of the trials of this process go."""

    def put(self, path: Path, *, name: str) -> Artifact:
        """Store a copy of a file.

        Raises:
            OSError: The file cannot be read.
            TaskError: It changes while it is read.
        """
        ...


_SINK: ContextVar[ArtifactSink | None] = ContextVar("artifact_sink", default=None)


@contextmanager
def storing_artifacts(sink: ArtifactSink) -> Iterator[None]:
    """Store the artifacts that trials log within this context; elsewhere they are only checked."""
    token = _SINK.set(sink)
    try:
        yield
    finally:
        _SINK.reset(token)


class Artifacts:
    """The artifacts that a trial logs in one epoch; of each name, the last."""

    def __init__(self) -> None:
        self._found: dict[str, Artifact] = {}

    def log(
        self, path: str | os.PathLike[str], *, name: str | None, max_bytes: int, keep: bool = True
    ) -> None:
        """Store a file, unless this process only looks for suggestions or checks states.

        Args:
            path: The file.
            name: Its name (default: the last part of the path).
            max_bytes: Size limit.
            keep: Whether to store the file; if not, it is only checked.

        Raises:
            TaskError: The file is missing, a folder, unreadable or too large, or the name is
                invalid.
        """
        if not isinstance(path, str | os.PathLike):
            raise TaskError(
                f"trial.log_artifact(): `path` must be a path, got {_cut(path)}; write the content "
                "to a file first"
            )
        file = Path(path)
        call = f"trial.log_artifact({plain_text(repr(str(file)), limit=200)})"
        name = file.name if name is None else name
        check_artifact_name(name, call=call)
        try:
            size = file.stat().st_size
            if not file.is_file():
                raise TaskError(
                    f"{call}: an artifact must be a file, got "
                    f"{'a folder' if file.is_dir() else 'something else'}; log each file by "
                    "itself, or pack the folder with shutil.make_archive()"
                )
            if size > max_bytes:
                raise TaskError(
                    f"{call}: the file may have {max_bytes:,} bytes, got {size:,}; log a smaller "
                    "file, or raise max_bytes="
                )
            sink = _SINK.get()
            if sink is not None and keep:
                self._found[name] = sink.put(file, name=name)
        except FileNotFoundError:
            raise TaskError(
                f"{call}: there is no such file in {Path.cwd()}; write it before you log it"
            ) from None
        except TaskError:
            raise
        except (OSError, ValueError) as error:
            said = getattr(error, "strerror", None) or str(error)
            raise TaskError(
                f"{call}: the file cannot be read ({said}); log one that can"
            ) from error

    def take(self) -> tuple[Artifact, ...]:
        """Return what was logged since the last call."""
        found, self._found = self._found, {}
        return tuple(found.values())


def check_artifact_name(name: object, *, call: str) -> None:
    """Check the name of an artifact.

    Raises:
        TaskError: It is not a text, empty or too long, a path, or has unprintable characters.
    """
    if (
        isinstance(name, str)
        and name.isprintable()
        and 1 <= len(name.encode()) <= MAX_NAME_BYTES
        and not {"/", "\\"} & set(name)
        and name not in (".", "..")
    ):
        return
    raise TaskError(
        f"{call}: the name must be a text of 1 to {MAX_NAME_BYTES} bytes of printable characters "
        f"without path separators, got {plain_text(repr(name), limit=100)}; pass name="
    )


def artifact_from_json(stored: Mapping[str, Any]) -> Artifact:
    """Return the artifact that ``Artifact.to_json`` has returned."""
    return Artifact(**{key: stored[key] for key in ("name", "digest", "num_bytes", "error")})
