"""``thrifty run FILE``."""

from __future__ import annotations

from pathlib import Path

import click

from thrifty.run import Local

from ._load import load_study
from ._show import show_results


@click.command("run")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Which study, if the file defines several.")
@click.option(
    "--workers", type=int, help="Worker processes (default: one for each GPU, or one)."
)
@click.option("--threads", type=int, help="CPU threads of each worker.")
@click.option("--quiet", is_flag=True, help="No progress display.")
def command(
    *, file: Path, name: str | None, workers: int | None, threads: int | None, quiet: bool
) -> None:
    """Run the study that FILE defines, or go on with it."""
    study = load_study(file, name=name)
    study.run(executor=Local(workers=workers, threads=threads), progress=not quiet)
    show_results(study)
