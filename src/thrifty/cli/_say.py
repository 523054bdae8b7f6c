"""Printing on the command line: names, values and errors are plain text on every terminal."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from thrifty.core import plain_text


def say(text: object, **options: Any) -> None:
    """Print some lines; ``options`` are those of ``click.secho``.

    Pass a name within a line as ``plain_text(name)``, so that it contains no newlines.
    """
    click.secho(plain_text(text, lines=True), **options)


def cell(value: object, *, style: str = "") -> Text:
    """Return a text for a table of rich, without interpreting markup."""
    return Text(plain_text(value), style=style)
