"""User attributes: JSON values that a trial keeps beside its metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ._errors import TaskError, ThriftyError, plain_text


MAX_ATTRIBUTE_BYTES = 65_536
"""Bytes that the attributes of one epoch may take as JSON."""
MAX_KEY_CHARS = 255
"""Characters of a key."""
MAX_DEPTH = 32
"""Levels of nested lists and dicts."""

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
        if not isinstance(key, str) or not 1 <= len(key) <= MAX_KEY_CHARS:
            raise self._refused(
                key, f"the key must be a text of 1 to {MAX_KEY_CHARS} characters, got {_cut(key)}"
            )
        try:
            text = json.dumps(self._json_value(key, value, depth=0))
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
