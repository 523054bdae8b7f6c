"""Text of others, such as names, values and errors of users' code, made safe to keep and to show."""

from __future__ import annotations

import traceback
import unicodedata
from typing import Any

from ._interrupt import is_from_user


MESSAGE_CHARS = 10_000
TRACEBACK_CHARS = 100_000
"""What is kept of an error; the middle of a longer text is left out."""


def plain_text(value: object, *, lines: bool = False, limit: int | None = None) -> str:
    r"""Return a text that every terminal, file and database takes as it is.

    Characters that are not printed are written as Python escapes them: control characters (and so the
    escape sequences of terminals), marks that change the direction of writing, halves of surrogate pairs.

    Args:
        value: A text, or something to make a text of; it may raise when asked.
        lines: Whether newlines and tabs stay.
        limit: How many characters stay; of a longer text the middle is left out.

    >>> plain_text("\x1b[31mred\x00")
    '\\x1b[31mred\\x00'
    """
    text = value if type(value) is str else _text_of(value)
    if limit is not None and len(text) > limit:
        head = limit * 2 // 3
        left_out = f"... ({len(text) - limit:,} characters left out) ..."
        text = f"{text[:head]}{left_out}{text[head - limit :]}"
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or (lines and c in "\n\t") or _is_space(c) else _escaped(c)
        for c in text
    )


def error_text(error: BaseException) -> str:
    """Return the type and the message of an error, whatever its ``__str__`` does, as plain text.

    >>> error_text(ValueError("no"))
    'ValueError: no'
    """
    message = plain_text(error, lines=True, limit=MESSAGE_CHARS)
    name = plain_text(type(error).__name__, limit=200)
    return f"{name}: {message}" if message else name


def error_traceback(error: BaseException) -> str:
    """Return an error and where it comes from, with its causes, as plain text."""
    try:
        found = "".join(traceback.format_exception(error))
    except BaseException as other:
        if is_from_user(other):
            raise
        # An error may have any attributes, and formatting reads some of them.
        found = f"{''.join(traceback.format_tb(error.__traceback__))}{error_text(error)}"
    return plain_text(found, lines=True, limit=TRACEBACK_CHARS)


def _text_of(value: Any) -> str:
    try:
        # The second call makes a plain string of one whose class has its own methods.
        return str.__str__(str(value))
    except BaseException as error:
        if is_from_user(error):
            raise
        return f"<{type(value).__name__}: its text cannot be read, {type(error).__name__}>"


def _is_space(character: str) -> bool:
    return unicodedata.category(character) == "Zs"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
