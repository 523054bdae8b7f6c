"""The command ``thrifty dashboard``."""

from __future__ import annotations

import os
import webbrowser

import click

from thrifty.agents import SCHEMA_VERSION
from thrifty.core import UsageError
from thrifty.store import redact_url
from thrifty.web import serve

from ._options import json_option, print_document, say, storage_option


@click.command("dashboard")
@click.argument("url", required=False)
@storage_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8550,
    show_default=True,
    help="Port to listen on; 0 takes a free one.",
)
@click.option(
    "--token",
    envvar="THRIFTY_DASHBOARD_TOKEN",
    help="Token that readers need  [default: none on this machine, else a random one].",
)
@click.option(
    "--steer",
    is_flag=True,
    help="Let readers, who then need the token, stop studies and trials, and write notes and tags.",
)
@click.option(
    "--checkpoints", help="Folder of the trials' artifacts (default: beside the database)."
)
@click.option("--open", "browse", is_flag=True, help="Open the dashboard in your browser.")
@json_option
@click.pass_context
def dashboard_command(  # noqa: PLR0913 (one argument for each option)
    ctx: click.Context,
    *,
    url: str | None,
    storage: str,
    host: str,
    port: int,
    token: str | None,
    steer: bool,
    checkpoints: str | None,
    browse: bool,
    as_json: bool,
) -> None:
    """Show the studies in a database in the browser, also while they run.

    URL is the database's address, as --storage is.
    """
    given = ctx.get_parameter_source("storage") is click.core.ParameterSource.COMMANDLINE
    if url is not None and given:
        raise UsageError(
            f"thrifty dashboard has two addresses, {redact_url(url)!r} and --storage "
            f"{redact_url(storage)!r}: give one of them"
        )
    url = storage if url is None else url
    server = serve(url, host=host, port=port, token=token, steer=steer, checkpoints=checkpoints)
    if hasattr(os, "nice"):
        os.nice(15)  # training has priority
    shown = redact_url(url)
    say(f"dashboard of {shown}: {server.address}\nCtrl-C ends it")
    if as_json:
        document = {"schema_version": SCHEMA_VERSION, "storage": shown}
        print_document({**document, "address": server.address})
    if browse:
        webbrowser.open(server.address)
    server.run()
