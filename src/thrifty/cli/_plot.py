"""The command ``thrifty plot NAME KIND``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from thrifty.core import UsageError
from thrifty.study import Study

from ._completion import complete_study
from ._load import load_stored_study
from ._options import say, storage_option, trust_option


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
def command(
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
