"""Options that several commands share, and how they print."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from rich.text import Text

from thrifty.core import plain_text

from ._completion import complete_storage


storage_option = click.option(
    "--storage",
    default="sqlite:///thrifty.db",
    show_default=True,
    envvar="THRIFTY_STORAGE",
    shell_complete=complete_storage,
    help="Database address.",
)


trust_option = click.option(
    "--trust-file",
    is_flag=True,
    help="Run the study's file even if another user may have written it.",
)


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for how to train, and when to stop."""
    for option in reversed((
        click.option(
            "--workers", type=int, help="Worker processes (default: one for each GPU, or one)."
        ),
        click.option("--threads", type=int, help="CPU threads of each worker."),
        click.option(
            "--epoch-timeout",
            type=float,
            help="Seconds after which an epoch counts as hung; its trial fails.",
        ),
        click.option("--quiet", is_flag=True, help="No progress display."),
        click.option(
            "--stop-epochs", type=int, help="Stop after this number of unique epochs."
        ),
        click.option("--stop-seconds", type=float, help="Stop after this number of seconds."),
        click.option("--target", type=float, help="Stop when the metric is as good as this."),
    )):
        command = option(command)
    return command


def say(text: object, **options: Any) -> None:
    """Print some lines; ``options`` are those of ``click.secho``.

    Pass a name within a line as ``plain_text(name)``, so that it contains no newlines.
    """
    click.secho(plain_text(text, lines=True), **options)


def cell(value: object, *, style: str = "") -> Text:
    """Return a text for a table of rich, without interpreting markup."""
    return Text(plain_text(value), style=style)
