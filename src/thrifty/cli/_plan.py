"""The command ``thrifty plan FILE``."""

from __future__ import annotations

from pathlib import Path

import click

from ._load import load_study
from ._options import say


@click.command("plan")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Which study, if the file defines several.")
def command(*, file: Path, name: str | None) -> None:
    """Show how much the study in FILE has to train, before any training."""
    say(load_study(file, name=name).plan())
