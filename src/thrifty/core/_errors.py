"""Every error that thrifty raises on purpose, checks of arguments, and the text of errors.

::

    ThriftyError
    ├── UsageError (ValueError)      the user's call or code is invalid
    │   ├── SpaceError               invalid domain, condition or search space
    │   ├── ScheduleError            invalid schedule, or one that does not fit the run
    │   ├── AlgorithmError           invalid option of a search algorithm
    │   ├── TaskError                invalid task, metrics or hyper-parameters
    │   │   └── StateError           training state that the checkpoint does not contain
    │   ├── GraphError               invalid graph, seeds or fanouts
    │   ├── LayerError               invalid option of a layer, or an input that does not fit
    │   ├── HeteroError              invalid heterogeneous workers, their data or their options
    │   ├── CloudError               invalid catalogue or workload, or no fleet fits
    │   └── StudyMismatchError       the stored study of this name is a different one
    ├── StoreError                   the database or the checkpoint folder
    │   ├── StoreVersionError        written by a newer thrifty
    │   ├── StoreBusyError           another process runs this study
    │   ├── StoreUnreachableError    the database server does not answer
    │   ├── StoreWriteError          read-only place, full disk
    │   ├── StudyNotFoundError       no such study in this database
    │   └── CheckpointError          missing, truncated or altered file
    ├── TrainingError                training of one stage failed
    │   ├── DivergedError            a loss or metric is not finite
    │   ├── WorkerLostError          a worker process ended unexpectedly
    │   ├── PackMismatchError        a packed model differs from the same model trained alone
    │   ├── PeerLostError            another worker of the same job is gone
    │   └── TooFewWorkersError       too few workers of a job are left
    └── MissingExtraError (ImportError)   an optional dependency is not installed

Messages say what is wrong, where, and how to fix it.
"""

from __future__ import annotations

import difflib
import inspect
import logging
import re
import signal
import threading
import traceback
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from importlib import import_module
from numbers import Integral
from typing import Any, ParamSpec, TypeVar


_P = ParamSpec("_P")
_R = TypeVar("_R")


class ThriftyError(Exception):
    """Root of every error raised by thrifty.

    Its text is printable, whatever names and values it contains, and names no private module.
    """

    def __str__(self) -> str:
        return plain_text(_without_private_paths(super().__str__()), lines=True)


_PRIVATE_CLASS = re.compile(r"<class 'thrifty(?:\.\w+)*?\._\w+(?:\.\w+)*?\.(\w+)'>")
_PRIVATE_OBJECT = re.compile(
    r"<thrifty(?:\.\w+)*?\._\w+(?:\.\w+)*?\.(\w+) object at 0x[0-9a-fA-F]+>"
)


def _without_private_paths(text: str) -> str:
    """Return a text in which classes of thrifty have names only.

    >>> _without_private_paths("executor is <class 'thrifty.run._local.Local'>")
    'executor is the class Local'
    """
    text = _PRIVATE_CLASS.sub(r"the class \1", text)
    return _PRIVATE_OBJECT.sub(r"an object of \1", text)


class UsageError(ThriftyError, ValueError):
    """The user's call or code is invalid."""


class SpaceError(UsageError):
    """A domain, a condition or a search space is invalid."""


class ScheduleError(UsageError):
    """A schedule is invalid, or does not fit the run."""


class AlgorithmError(UsageError):
    """An option of a search algorithm is invalid."""


class TaskError(UsageError):
    """A task does not provide what the study needs."""


class StateError(TaskError):
    """A trial restored from its checkpoint continues differently from the live trial."""


class GraphError(UsageError):
    """A graph is invalid, or cannot be sampled as requested."""


class LayerError(UsageError):
    """An option of a layer is invalid, or its input does not fit."""


class HeteroError(UsageError):
    """Heterogeneous workers cannot train together as requested."""


class CloudError(UsageError):
    """A catalogue or a workload is invalid, or no fleet fits it."""


class StudyMismatchError(UsageError):
    """The stored study of this name differs from the requested one."""


class StoreError(ThriftyError):
    """The database or the checkpoint folder cannot be used as requested."""


class StoreVersionError(StoreError):
    """The database was written by a newer version of thrifty."""


class StoreBusyError(StoreError):
    """Another live process runs this study, or holds its plan."""


class StoreWriteError(StoreError):
    """A record could not be written: the disk is full, or the place is read-only."""


class StoreUnreachableError(StoreError):
    """The server of the database does not answer."""


class StudyNotFoundError(StoreError):
    """The database holds no study of this name."""


class CheckpointError(StoreError):
    """A checkpoint is missing, truncated or altered."""


class TrainingError(ThriftyError):
    """Training of one stage failed."""


class DivergedError(TrainingError):
    """A loss or a metric is no longer finite."""


class WorkerLostError(TrainingError):
    """A worker process ended unexpectedly."""


class PackMismatchError(TrainingError):
    """A packed model differs from the same model trained alone, and this cannot be undone."""


class PeerLostError(TrainingError):
    """Another worker of a job is gone; the remaining workers may continue."""


class TooFewWorkersError(TrainingError):
    """Too few workers of a job are left."""


def installing(extra: str) -> str:
    """Return the command that installs an extra of thrifty in its checkout."""
    return f"pip install -c constraints.txt -e '.[{extra}]'"


class MissingExtraError(ThriftyError, ImportError):
    """An optional dependency is not installed, or cannot be imported."""

    def __init__(self, package: str, *, extra: str, cause: str = "") -> None:
        self._made_of = package, extra, cause
        super().__init__(
            f"{package} cannot be imported ({cause}); install it again, for example by: "
            f"pip install --force-reinstall {package}"
            if cause
            else f"{package} is not installed; run: pip install {package} "
            f"(or, in the checkout of thrifty: {installing(extra)})"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Without this, unpickling would leave out the keyword arguments.
        package, extra, cause = self._made_of
        return partial(MissingExtraError, extra=extra, cause=cause), (package,)


for _error in [each for each in globals().values() if isinstance(each, type)]:
    # Tracebacks name the module from which users import an error.
    if issubclass(_error, ThriftyError):
        _error.__module__ = "thrifty"


def require(module: str, *, extra: str, package: str | None = None) -> Any:
    """Import a module of an optional dependency.

    Args:
        module: The module, such as ``"scipy.optimize"``.
        extra: The extra of thrifty that installs it.
        package: The name under which it is installed, where that is not the module's first part.

    Raises:
        MissingExtraError: It is not installed, or its installation is broken.

    >>> require("json", extra="none").dumps([1])
    '[1]'
    """
    try:
        return import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        name = error.name if isinstance(error, ModuleNotFoundError) else None
        is_missing = name is not None and name.partition(".")[0] == top
        raise MissingExtraError(
            package or top, extra=extra, cause="" if is_missing else str(error)
        ) from error


RESERVED_NAMES = frozenset({"get", "items", "keys", "names_read", "values"})
"""Methods of ``HyperParameters``; ``hp.values`` is always the method, never a value."""


def check_hyperparameter_names(names: Iterable[str]) -> None:
    """Reject names that a task could not read as attributes.

    >>> check_hyperparameter_names(["lr", "width"])

    Raises:
        SpaceError: A hyper-parameter is named like a method of ``HyperParameters``.
    """
    if RESERVED_NAMES.isdisjoint(names):
        return
    name = next(name for name in names if name in RESERVED_NAMES)
    raise SpaceError(
        f"a hyper-parameter cannot be called {name!r}: hp.{name} is a method of all "
        f"hyper-parameters; choose another name, such as {name}_"
    )


def check_integers(error: type[ThriftyError], least: int, /, **options: Any) -> None:
    """Check that all options are integers of at least ``least``.

    Args:
        error: The class of the error.
        least: The smallest value allowed.
        options: The options by name.

    Raises:
        ThriftyError: An option is not an integer, or too small; of the class ``error``.

    >>> check_integers(ThriftyError, 1, batch_size=8)
    """
    for name, value in options.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise error(f"{name}={value!r}; give an integer of at least {least}")


MESSAGE_CHARS = 10_000
TRACEBACK_CHARS = 100_000
"""Characters kept of an error's message and traceback; the middle of a longer text is cut."""


def plain_text(value: object, *, lines: bool = False, limit: int | None = None) -> str:
    r"""Return a text that every terminal, file and database accepts unchanged.

    Unprintable characters are replaced by their Python escapes: control characters (and with them
    terminal escape sequences), marks that change the writing direction, and lone surrogates.

    Args:
        value: A text, or an object to convert to text; its ``__str__`` may raise.
        lines: Whether to keep newlines and tabs.
        limit: Number of characters to keep; the middle of a longer text is cut. None: all.

    >>> plain_text("\x1b[31mred\x00")
    '\\x1b[31mred\\x00'
    """
    text = value if type(value) is str else _text_of(value)
    if limit is not None and len(text) > limit:
        head = limit * 2 // 3
        left_out = f"... ({len(text) - limit:,} characters left out) ..."
        if len(text) <= limit + len(left_out):
            return plain_text(text, lines=lines)  # the note would be longer than what it hides
        text = f"{text[:head]}{left_out}{text[head - limit :]}"
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or (lines and c in "\n\t") or _is_space(c) else _escaped(c)
        for c in text
    )


def error_text(error: BaseException) -> str:
    """Return the type and the message of an error as printable text, even if ``__str__`` fails.

    >>> error_text(ValueError("no"))
    'ValueError: no'
    """
    message = plain_text(error, lines=True, limit=MESSAGE_CHARS)
    name = plain_text(type(error).__name__, limit=200)
    return f"{name}: {message}" if message else name


def error_traceback(error: BaseException) -> str:
    """Return the traceback of an error, with its causes, as printable text."""
    try:
        found = "".join(traceback.format_exception(error))
    except BaseException as other:
        if is_from_user(other):
            raise
        # Formatting reads attributes of the error, and user code may have made them anything.
        found = f"{''.join(traceback.format_tb(error.__traceback__))}{error_text(error)}"
    return plain_text(found, lines=True, limit=TRACEBACK_CHARS)


def _text_of(value: Any) -> str:
    try:
        # The second call turns an instance of a str subclass into a plain str.
        return str.__str__(str(value))
    except BaseException as error:
        if is_from_user(error):
            raise
        return f"<{type(value).__name__}: its text cannot be read, {type(error).__name__}>"


def _is_space(character: str) -> bool:
    return unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def plain_logger(name: str) -> logging.Logger:
    """Return the logger of a name; its messages are safe to show on any terminal."""
    logger = logging.getLogger(name)
    if not any(isinstance(each, _Plain) for each in logger.filters):
        logger.addFilter(_Plain())
    return logger


class _Plain(logging.Filter):
    """A filter that makes messages printable before any handler gets them."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Format the message and escape its unprintable characters."""
        record.msg, record.args = plain_text(record.getMessage(), lines=True), ()
        return True


class StopNow(KeyboardInterrupt):
    """The user has pressed Ctrl-C again: stop at once.

    A signal handler that raises this, and never a plain KeyboardInterrupt, must have an attribute
    ``raises_stop_now``.
    """

    __module__ = "thrifty.core"  # tracebacks name the place to import it from


def is_from_user(error: BaseException) -> bool:
    """Return whether an error may be the user's Ctrl-C; if not, the running code has raised it.

    >>> is_from_user(SystemExit(3)), is_from_user(StopNow())
    (False, True)
    """
    if not isinstance(error, KeyboardInterrupt):
        return False
    if isinstance(error, StopNow):
        return True
    if threading.current_thread() is not threading.main_thread():
        return False  # Python delivers Ctrl-C only to the main thread
    handler = signal.getsignal(signal.SIGINT)
    quiet = handler in (signal.SIG_IGN, signal.SIG_DFL)
    return not quiet and not getattr(handler, "raises_stop_now", False)


def with_advice(
    advice: Mapping[str, str] | None = None,
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Let a function say what to write instead of an argument that it does not have.

    Args:
        advice: What to write, by the name of an argument of another library. For any other name,
            the function suggests a similar one of its own, and lists them.

    >>> @with_advice({"direction": 'mode="min"'})
    ... def search(*, mode, seed=0): ...
    >>> search(direction="minimize")
    Traceback (most recent call last):
    TypeError: search() has no argument 'direction'; write mode="min" instead
    >>> search(mood="min")
    Traceback (most recent call last):
    TypeError: search() has no argument 'mood'; did you mean mode? It has: mode, seed
    """
    known = advice or {}

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        names = _argument_names(function)
        is_method = function.__qualname__.endswith(".__init__")

        @wraps(function)
        def checked(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            for name in kwargs:
                if name not in names and (name in known or "" not in names):
                    # A class may have inherited its __init__.
                    called = type(args[0]).__name__ if is_method else function.__qualname__
                    raise TypeError(
                        f"{called}() has no argument {name!r}; {_instead(name, known, names=names)}"
                    )
            return function(*args, **kwargs)

        return checked

    return decorated


def _argument_names(function: Callable[..., Any]) -> Sequence[str]:
    """Return the arguments that can be given by name; one is empty if any name is accepted."""
    parameters = inspect.signature(function).parameters.values()
    named = [p.name for p in parameters if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return [*(name for name in named if name != "self"), *([""] if takes_any else [])]


def _instead(name: str, advice: Mapping[str, str], *, names: Sequence[str]) -> str:
    """Return what to write instead of an argument that a function does not have."""
    if name in advice:
        return f"write {advice[name]} instead"
    near = difflib.get_close_matches(name, names, n=1)
    listed = ", ".join(names) or "none"
    return f"did you mean {near[0]}? It has: {listed}" if near else f"it has: {listed}"
