"""``thrifty resume NAME``."""

from __future__ import annotations

from pathlib import Path

import click

from thrifty.core import UsageError
from thrifty.run import Local
from thrifty.store import Store

from ._load import load_study
from ._options import storage_option
from ._show import show_results


@click.command("resume")
@click.argument("name")
@storage_option
@click.option(
    "--workers", type=int, help="Worker processes (default: one for each GPU, or one)."
)
@click.option("--threads", type=int, help="CPU threads of each worker.")
@click.option("--quiet", is_flag=True, help="No progress display.")
def command(
    *, name: str, storage: str, workers: int | None, threads: int | None, quiet: bool
) -> None:
    """Go on with study NAME, from the file that defined it."""
    with Store.open(storage, create=False) as store:
        file = store.studies.get(name).spec.get("file")
    if file is None or not Path(file).exists():
        raise UsageError(
            f"the file that defined study {name!r} is not known or gone ({file}); "
            "go on with: thrifty run FILE"
        )
    study = load_study(Path(file), name=name)
    study.run(executor=Local(workers=workers, threads=threads), progress=not quiet)
    show_results(study)
