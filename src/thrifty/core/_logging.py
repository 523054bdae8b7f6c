"""Loggers whose messages are plain text, whatever names, values and errors are in them."""

from __future__ import annotations

import logging

from ._text import plain_text


def plain_logger(name: str) -> logging.Logger:
    """Return the logger of a name; what it says can be shown on any terminal."""
    logger = logging.getLogger(name)
    if not any(isinstance(each, _Plain) for each in logger.filters):
        logger.addFilter(_Plain())
    return logger


class _Plain(logging.Filter):
    """Changes records before any handler gets them."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Put the message together, and make it plain."""
        record.msg, record.args = plain_text(record.getMessage(), lines=True), ()
        return True
