"""The commands ``plot`` and ``importance``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from thrifty.core import UsageError
from thrifty.study import Study

from ._completion import complete_study
from ._load import load_stored_study
from ._options import cell, say, storage_option, trust_option


if TYPE_CHECKING:
    from matplotlib.figure import Figure


KINDS: dict[str, Callable[[Study], Figure]] = {
    "history": lambda study: study.plot_history(),
    "curves": lambda study: study.plot_learning_curves(),
    "forest": lambda study: study.plot_forest(),
    "importance": lambda study: study.plot_importance(),
    "parallel": lambda study: study.plot_parallel(),
    "slice": lambda study: study.plot_slice(),
    "contour": lambda study: study.plot_contour(),
    "pareto": lambda study: study.plot_pareto(),
}


def plot(study: Study, kind: str) -> Figure:
    """Return a plot of a study by its name on the command line."""
    return KINDS[kind](study)


@click.command("plot")
@click.argument("name", shell_complete=complete_study)
@click.argument("kind", type=click.Choice(list(KINDS)))
@storage_option
@trust_option
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where it goes; the ending says in which format  [default: KIND.png]",
)
@click.option("--dpi", type=click.IntRange(min=1), default=150, show_default=True)
def plot_command(
    *, name: str, kind: str, storage: str, trust_file: bool, out: Path | None, dpi: int
) -> None:
    """Draw a plot of study NAME."""
    figure = plot(load_stored_study(name, storage=storage, trust_file=trust_file), kind)
    file = out or Path(f"{kind}.png")
    known = figure.canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise UsageError(f"{file}: its ending must be one of {', '.join(sorted(known))}")
    if not file.resolve().parent.is_dir():
        raise UsageError(f"there is no folder {file.resolve().parent}; make it first")
    figure.savefig(file, dpi=dpi)
    say(f"wrote {file}")


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
def importance_command(
    *, name: str, storage: str, trust_file: bool, method: Any, level: Any
) -> None:
    """Show which hyper-parameters of study NAME matter.

    The shares sum to 100 %. Trials are compared at the largest epoch that enough of them have
    reached. Failed trials are left out.
    """
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
    console.print(cell(f"{method}: {shares.basis}"), soft_wrap=True)
    if any(shares.values()):
        console.print(table)
    else:
        console.print("no hyper-parameter explains a difference between these trials")
