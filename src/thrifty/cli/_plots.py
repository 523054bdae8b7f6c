"""The commands ``plot`` and ``importance``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.bar import Bar
from rich.console import Console
from rich.table import Table

from thrifty.agents import SCHEMA_VERSION, importance_document
from thrifty.core import UsageError
from thrifty.study import Study

from ._options import (
    cell,
    complete_study,
    json_option,
    print_document,
    say,
    storage_option,
    trust_option,
)
from ._train import load_stored_study


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
    "scaling-law": lambda study: study.plot_scaling_law(),
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
    help="File to write; its extension chooses the format  [default: KIND.png]",
)
@click.option(
    "--dpi",
    type=click.IntRange(min=1),
    default=150,
    show_default=True,
    help="Resolution of the figure, in dots per inch.",
)
@json_option
def plot_command(
    *,
    name: str,
    kind: str,
    storage: str,
    trust_file: bool,
    out: Path | None,
    dpi: int,
    as_json: bool,
) -> None:
    """Draw a plot of study NAME."""
    figure = plot(load_stored_study(name, storage=storage, trust_file=trust_file), kind)
    file = out or Path(f"{kind}.png")
    known = figure.canvas.get_supported_filetypes()
    if file.suffix[1:].lower() not in known:
        raise UsageError(f"{file}: its extension must be one of {', '.join(sorted(known))}")
    if not file.resolve().parent.is_dir():
        raise UsageError(f"there is no folder {file.resolve().parent}; make it first")
    figure.savefig(file, dpi=dpi)
    say(f"wrote {file}")
    if as_json:
        print_document({"schema_version": SCHEMA_VERSION, "study": name, "written": [str(file)]})


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
        "fanova: what explains the metric over the whole space. "
        "ped-anova: what distinguishes the best tenth of the trials."
    ),
)
@click.option(
    "--level",
    type=click.Choice(["hyperparameter", "coordinate"]),
    default="hyperparameter",
    show_default=True,
    help="One share for each hyper-parameter, or for each domain inside schedules and choices.",
)
@json_option
def importance_command(
    *, name: str, storage: str, trust_file: bool, method: Any, level: Any, as_json: bool
) -> None:
    """Show which hyper-parameters of study NAME matter.

    The shares sum to 100 %. Trials are compared at the largest epoch that enough of them have
    reached. Failed trials are left out.
    """
    study = load_stored_study(name, storage=storage, trust_file=trust_file)
    if as_json:
        print_document(importance_document(study, method=method, level=level))
        return
    shares = study.importance(method=method, level=level)
    largest = max(shares.values(), default=0.0) or 1.0
    table = Table(show_header=False, box=None)
    table.add_column(overflow="fold")
    table.add_column(justify="right")
    table.add_column(min_width=20, ratio=1)
    for key, share in shares.items():
        table.add_row(cell(key), shares.text(key), Bar(largest, 0, share, color="blue"))
    console = Console()
    console.print(cell(f"share in what makes trials differ in {study.metric}"))
    console.print(cell(f"{method}: {shares.basis}"), soft_wrap=True)
    if any(shares.values()):
        console.print(table)
    else:
        console.print("no hyper-parameter explains a difference between these trials")
