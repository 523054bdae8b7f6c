"""Text for people: errors, names and values as plain text, also in log messages."""

from __future__ import annotations

import logging
import traceback
import unicodedata
from typing import Any

from ._interrupt import is_from_user


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
