"""The command ``thrifty mcp``."""

from __future__ import annotations

import signal
import sys
from importlib import import_module
from pathlib import Path

import click

from thrifty.core import UsageError, require

from ._options import complete_storage


@click.command("mcp")
@click.argument(
    "files",
    nargs=-1,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="[FILE]...",
)
@click.option(
    "--storage",
    envvar="THRIFTY_STORAGE",
    shell_complete=complete_storage,
    help="Database address  [default: that of the studies, or sqlite:///thrifty.db].",
)
@click.option("--allow-run", is_flag=True, help="Let the agent train, within the budget.")
@click.option(
    "--max-epochs",
    type=click.IntRange(min=1),
    help="Epochs that the agent may train, all of its runs together.",
)
@click.option(
    "--max-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds that the agent may train, all of its runs together.",
)
def mcp_command(
    *,
    files: tuple[Path, ...],
    storage: str | None,
    allow_run: bool,
    max_epochs: int | None,
    max_seconds: float | None,
) -> None:
    """Serve tools for coding agents over standard input and output (MCP).

    The agent sees the studies in the database and what they have trained, and it asks what
    configurations of the studies in FILEs would cost. Without --allow-run, it changes nothing.
    It can only use the files that are named here.
    """
    if not allow_run and (max_epochs is not None or max_seconds is not None):
        raise UsageError("--max-epochs and --max-seconds limit what --allow-run allows; add it")
    if allow_run and not files:
        raise UsageError("--allow-run needs a FILE with the study that the agent may train")
    require("mcp", extra="mcp")
    server = import_module("thrifty.agents._server")
    budget = import_module("thrifty.agents._budget")
    jobs = import_module("thrifty.agents._jobs").Jobs(command=[sys.executable, "-m", "thrifty.cli"])
    studies = import_module("thrifty.agents._source_files").Studies(
        [file.resolve() for file in files],
        load=import_module("thrifty.cli._train").studies_of,
        storage=storage,
    )
    tools = server.Tools(
        studies,
        default="sqlite:///thrifty.db",
        budget=budget.Budget(is_allowed=allow_run, max_epochs=max_epochs, max_seconds=max_seconds),
        jobs=jobs,
    )

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        server.make_server(tools).run()
    finally:
        jobs.close()
