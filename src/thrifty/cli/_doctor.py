"""``thrifty doctor``: check what is installed and what works."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import click
from rich.console import Console
from rich.table import Table

from ._checkup import Finding, State, findings
from ._options import cell


_COLOURS: dict[State, str] = {
    "ok": "green",
    "absent": "dim",
    "warning": "yellow",
    "broken": "red",
}


@click.command("doctor")
@click.option(
    "--storage",
    envvar="THRIFTY_STORAGE",
    help="A database address to look at, without changing anything in it.",
)
@click.option(
    "--extra", "extras", multiple=True, help="An extra that has to be there; repeat for more."
)
@click.option("--device", help="Where training steps are tried  [default: a GPU, or cpu]")
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
@click.pass_context
def doctor_command(
    ctx: click.Context,
    *,
    storage: str | None,
    extras: tuple[str, ...],
    device: str | None,
    as_json: bool,
) -> None:
    """Check this installation: versions, extras, devices, back-ends, kernels, storage.

    The exit code is 1 if a check fails that an option requests or that every study needs.
    """
    found = list(findings(storage=storage, extras=extras, device=device))
    failed = any(each.needed and each.state in ("broken", "absent") for each in found)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "checks": [each.to_json() for each in found]}))
    else:
        console = Console()
        console.print(_table(found))
        console.print(_summary(found), highlight=False)
    ctx.exit(1 if failed else 0)


def _table(found: list[Finding]) -> Table:
    table = Table("", "", "", "", show_header=False, box=None, pad_edge=False)
    section = ""
    for each in found:
        colour = _COLOURS[each.state]
        table.add_row(
            cell(each.section if each.section != section else "", style="bold"),
            cell(each.name),
            cell(each.state, style=colour),
            cell(each.detail),
        )
        section = each.section
    return table


def _summary(found: list[Finding]) -> str:
    return ", ".join(_counted(found)) or "nothing was looked at"


def _counted(found: list[Finding]) -> Iterator[str]:
    counts = Counter(each.state for each in found)
    for state, colour in _COLOURS.items():
        if counts[state]:
            yield f"[{colour}]{counts[state]} {state}[/{colour}]"
