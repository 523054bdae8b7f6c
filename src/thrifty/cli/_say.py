"""How the command line prints: names, values and errors are text, and nothing else, on every terminal."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from thrifty.core import plain_text


def say(text: object, **options: Any) -> None:
    """Print some lines; ``options`` are those of ``click.secho``.

    A name within a line is given as ``plain_text(name)``: it has no newlines then.
    """
    click.secho(plain_text(text, lines=True), **options)


def cell(value: object, *, style: str = "") -> Text:
    """Return a text for a table of rich: no markup is read in it."""
    return Text(plain_text(value), style=style)
