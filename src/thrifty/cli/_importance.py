"""The command ``thrifty importance NAME``."""

from __future__ import annotations

from typing import Any

import click
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from ._completion import complete_study
from ._load import load_stored_study
from ._options import cell, storage_option, trust_option


@click.command("importance")
@click.argument("name", shell_complete=complete_study)
@storage_option
@trust_option
@click.option(
    "--method",
    type=click.Choice(["fanova", "ped-anova"]),
    default="fanova",
    show_default=True,
    help=(
        "What explains the metric everywhere, "
        "or what the best tenth of the trials have in common."
    ),
)
@click.option(
    "--level",
    type=click.Choice(["hyperparameter", "coordinate"]),
    default="hyperparameter",
    show_default=True,
    help="Hyper-parameters, or each domain inside their schedules and choices.",
)
def command(*, name: str, storage: str, trust_file: bool, method: Any, level: Any) -> None:
    """Show which hyper-parameters of study NAME matter."""
    study = load_stored_study(name, storage=storage, trust_file=trust_file)
    shares = study.importance(method=method, level=level)
    largest = max(shares.values(), default=0.0) or 1.0
    table = Table(show_header=False, box=None)
    table.add_column(overflow="fold")
    table.add_column(justify="right")
    table.add_column(min_width=20, ratio=1)
    for key, share in shares.items():
        table.add_row(cell(key), f"{share:.1%}", Bar(largest, 0, share, color="blue"))
    console = Console()
    console.print(cell(f"share in what makes trials differ in {study.metric}"))
    console.print(table)
