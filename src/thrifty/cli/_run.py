"""The command ``thrifty run FILE``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ._load import load_study
from ._options import training_options
from ._train import train


@click.command("run")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Which study, if the file defines several.")
@training_options
def command(*, file: Path, name: str | None, **training: Any) -> None:
    """Run the study that FILE defines, or resume it."""
    train(load_study(file, name=name), **training)
