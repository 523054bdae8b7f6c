"""The command ``thrifty resume NAME``."""

from __future__ import annotations

from typing import Any

import click

from ._completion import complete_study
from ._load import load_stored_study
from ._options import storage_option, training_options, trust_option
from ._train import train


@click.command("resume")
@click.argument("name", shell_complete=complete_study)
@storage_option
@trust_option
@training_options
def command(*, name: str, storage: str, trust_file: bool, **training: Any) -> None:
    """Resume study NAME, from the file that defined it."""
    train(load_stored_study(name, storage=storage, trust_file=trust_file), **training)
