"""Loggers whose messages are printable, whatever names, values and errors they contain."""

from __future__ import annotations

import logging

from ._text import plain_text


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
