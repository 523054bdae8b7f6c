"""The command ``thrifty dashboard [URL]``."""

from __future__ import annotations

import os
import webbrowser
from contextlib import suppress

import click

from thrifty.store import redact_url
from thrifty.web import serve

from ._options import say


@click.command("dashboard")
@click.argument("url", default="sqlite:///thrifty.db", envvar="THRIFTY_STORAGE")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8550,
    show_default=True,
    help="0: any free.",
)
@click.option(
    "--token",
    envvar="THRIFTY_DASHBOARD_TOKEN",
    help="What readers need; made up for any host but this machine's own.",
)
@click.option("--open", "browse", is_flag=True, help="Open it in the browser.")
def command(*, url: str, host: str, port: int, token: str | None, browse: bool) -> None:
    """Show the studies of database URL in the browser, also while they run."""
    server = serve(url, host=host, port=port, token=token)
    if hasattr(os, "nice"):
        os.nice(15)  # training has priority
    say(f"dashboard of {redact_url(url)}: {server.address}\nCtrl-C ends it")
    if browse:
        webbrowser.open(server.address)
    with suppress(KeyboardInterrupt):
        server.run()
