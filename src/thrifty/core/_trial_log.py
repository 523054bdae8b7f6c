"""What a trial logs beside its metrics: attributes (JSON values) and artefacts (files)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from ._errors import TaskError, ThriftyError, plain_text


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


# -- artefacts ---------------------------------------------------------------------------


MAX_ARTIFACT_BYTES = 256 * 2**20
"""Default size limit of an artefact, in bytes."""
MAX_NAME_BYTES = 255
"""Bytes of the name of an artefact in UTF-8: what file systems take."""


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
    """Where the artefacts of the trials of this process go."""

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
    """Store the artefacts that trials log within this context; elsewhere they are only checked."""
    token = _SINK.set(sink)
    try:
        yield
    finally:
        _SINK.reset(token)


class Artifacts:
    """The artefacts that a trial logs in one epoch; of each name, the last."""

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
                    f"{call}: an artefact must be a file, got "
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
    """Check the name of an artefact.

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
    """Return the artefact that ``Artifact.to_json`` has returned."""
    return Artifact(**{key: stored[key] for key in ("name", "digest", "num_bytes", "error")})
