"""Writes docs/reference/cli.md from the commands: ``python scripts/cli_page.py``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from thrifty import cli


ROOT = Path(__file__).resolve().parents[1]
HEAD = """\
<!-- Made by scripts/cli_page.py from the commands.
Do not edit: run `python scripts/cli_page.py`. -->

# Command line

`thrifty COMMAND --help` shows the same.
Commands that name a study look for it in `--storage`, or in `THRIFTY_STORAGE`.
The exit code is 2 for an error that you can correct, and for a run without a best trial:
all trials failed, or none keeps the constraints.
It is 130 after Ctrl-C and 143 after SIGTERM; `run`, `resume` and `demo` stop cleanly before.
With `--json`, every command prints [one JSON object](json.md), also for an error.
"""


def page() -> str:
    """All commands, in the order in which the program shows them."""
    group = cli._app
    context = click.Context(group, info_name="thrifty", **group.context_settings)
    parts = [HEAD]
    for name, command in _commands(group, context):
        parts.append(_section(name, command, click.Context(command, context)))
    return "\n".join(parts).rstrip() + "\n"


def _commands(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            below = click.Context(command, info_name=f"{context.info_name} {name}")
            yield from _commands(command, below)
        elif not command.hidden:
            yield f"{context.info_name} {name}", command


def _help_option(command: click.Command, context: click.Context) -> click.Option:
    """Make a new context: click keeps the one of the command's first use."""
    names = command.get_help_option_names(context)
    return click.Option(names, is_flag=True, help="Show this message and exit.")


def _section(name: str, command: click.Command, context: click.Context) -> str:
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece)
    lines = [f"## {name}", "", "```text", f"{name} {usage}", "```", "", _help(command), ""]
    records = [
        record
        for parameter in (*command.params, _help_option(command, context))
        if isinstance(parameter, click.Option) and (record := parameter.get_help_record(context))
    ]
    if records:
        lines += ["| option | what it does |", "|---|---|"]
        lines += [f"| {_code(option)} | {_cell(text)} |" for option, text in records]
        lines.append("")
    return "\n".join(lines)


def _help(command: click.Command) -> str:
    return (command.help or "").replace("\b", "").strip()


def _code(option: str) -> str:
    return "`" + option.replace("|", "\\|") + "`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("[", "\\[").replace("<", "&lt;")


if __name__ == "__main__":
    (ROOT / "docs" / "reference" / "cli.md").write_text(page(), encoding="utf-8")
