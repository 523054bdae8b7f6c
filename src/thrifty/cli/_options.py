"""Options that several commands share, how they print, and their completion in a shell."""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import click
from click.shell_completion import CompletionItem, get_completion_class
from rich.text import Text

from thrifty.agents.documents import SCHEMA_VERSION, to_json
from thrifty.core import ThriftyError, UsageError, plain_text


_VARIABLE = "_THRIFTY_COMPLETE"
_DEFAULT = "sqlite:///thrifty.db"
_SQLITE = "sqlite:///"
_POSTGRESQL = "postgresql+psycopg://"
_MOST = 500

_COLONS = """
# an address of a database has colons, which are no ends of words
COMP_WORDBREAKS=${COMP_WORDBREAKS//:}
"""


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else."
)


@contextmanager
def reserved_output() -> Iterator[IO[str]]:
    """Reserve standard output for the document of a command, which the context yields as a file.

    What any other code prints goes to standard error: a study's file, a task, its worker processes,
    libraries. Where standard output is a file of the system, this lasts until the process ends.
    """
    output = before = sys.stdout or io.StringIO()  # the caller may have closed it
    with suppress(OSError, ValueError):  # not a file of the system, as in tests
        if before.fileno() == 1:
            before.flush()
            output = os.fdopen(os.dup(1), "w", encoding="ascii")
            os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        yield output
    finally:
        with suppress(OSError):  # a command says so when it prints
            output.flush()
        if output is before:
            sys.stdout = before


def print_document(document: Mapping[str, Any]) -> None:
    """Print the JSON document of a command, on the output that ``main`` has reserved for it."""
    output: IO[str] = click.get_current_context().find_root().obj or sys.stdout
    try:
        output.write(f"{to_json(document)}\n")
        output.flush()
    except OSError as error:
        raise UsageError(f"cannot write to standard output: {error.strerror}") from None


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@json_option
@click.pass_context
def completion_command(ctx: click.Context, *, shell: str, as_json: bool) -> None:
    """Print a script that lets SHELL complete commands, options, studies and databases.

    \b
    bash: echo 'eval "$(thrifty completion bash)"' >> ~/.bashrc
    zsh:  echo 'eval "$(thrifty completion zsh)"' >> ~/.zshrc
    fish: thrifty completion fish > ~/.config/fish/completions/thrifty.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    source = kind(ctx.find_root().command, {}, "thrifty", _VARIABLE).source()
    script = source + (_COLONS if shell == "bash" else "")
    if as_json:
        print_document({"schema_version": SCHEMA_VERSION, "shell": shell, "script": script})
        return
    click.echo(script)


def complete_study(
    ctx: click.Context,
    param: click.Parameter,  # noqa: ARG001 (click's signature)
    incomplete: str,
) -> list[CompletionItem]:
    """Complete the studies of the database that the command line names, newest first.

    Without a readable database there are no suggestions.
    """
    names = study_names(ctx)
    # Omit names with special characters, which the shell would interpret.
    return [
        CompletionItem(name)
        for name in names
        if name.startswith(incomplete) and name == plain_text(name)
    ]


def complete_storage(
    ctx: click.Context,  # noqa: ARG001 (click's signature)
    param: click.Parameter,  # noqa: ARG001
    incomplete: str,
) -> list[CompletionItem]:
    """Complete the addresses of existing SQLite files."""
    if incomplete.startswith(_SQLITE):
        return _files(incomplete.removeprefix(_SQLITE))
    found = _files("") if _SQLITE.startswith(incomplete) else []
    if _POSTGRESQL.startswith(incomplete):
        found.append(CompletionItem(_POSTGRESQL))
    return found


def _files(begun: str) -> list[CompletionItem]:
    folder, _, start = begun.rpartition("/")
    if begun.startswith("/"):
        folder = folder or "/"
    found: list[CompletionItem] = []
    with suppress(OSError):
        for path in sorted(Path(folder or ".").iterdir()):
            if not path.name.startswith(start) or (path.name.startswith(".") and not start):
                continue
            shown = f"{begun.removesuffix(start)}{path.name}"
            if path.is_dir():
                found.append(CompletionItem(f"{_SQLITE}{shown}/"))
            elif path.suffix in (".db", ".sqlite", ".sqlite3"):
                found.append(CompletionItem(f"{_SQLITE}{shown}"))
    return found


def study_names(ctx: click.Context) -> list[str]:
    """Return the studies of the database that the command line names, newest first."""
    return _study_names(ctx.params.get("storage") or os.environ.get("THRIFTY_STORAGE") or _DEFAULT)


def _study_names(url: str) -> list[str]:
    """Read study names without changing anything; of an unreadable database there are none.

    Pressing a key must neither create nor upgrade a database.
    """
    # Imported late: ``thrifty --help`` does not wait for the database's library.
    from sqlalchemy import create_engine, text  # noqa: PLC0415
    from sqlalchemy.exc import SQLAlchemyError  # noqa: PLC0415

    from thrifty.store._address import read_address  # noqa: PLC0415
    from thrifty.store._engine import ReadOnlyFile  # noqa: PLC0415

    query = text("SELECT name FROM studies ORDER BY id DESC LIMIT :most")
    with suppress(SQLAlchemyError, ThriftyError, ImportError, OSError):
        address = read_address(url)
        if address.get_backend_name() == "sqlite":
            if not address.database or not Path(address.database).is_file():
                return []
            file = Path(address.database).resolve()
            engine = ReadOnlyFile(file, timeout_s=1.0).engine(address)
        else:
            if address.drivername == "postgresql":
                address = address.set(drivername="postgresql+psycopg")
            engine = create_engine(address, connect_args={"connect_timeout": 2})
        try:
            with engine.connect() as connection:
                return list(connection.execute(query, {"most": _MOST}).scalars())
        finally:
            engine.dispose()
    return []


storage_option = click.option(
    "--storage",
    default="sqlite:///thrifty.db",
    show_default=True,
    envvar="THRIFTY_STORAGE",
    shell_complete=complete_storage,
    help="Database address.",
)


trust_option = click.option(
    "--trust-file",
    is_flag=True,
    help="Run the study's file even if another user may have written it.",
)


class Number(click.types.FloatParamType):
    """A finite number, optionally above 0; the message for another one names the option."""

    def __init__(self, *, above_0: bool = False) -> None:
        self._above_0 = above_0

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number) or (self._above_0 and number <= 0):
            wanted = "a finite number above 0" if self._above_0 else "a finite number"
            self.fail(f"{number!r} is not {wanted}.", param, ctx)
        return number


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options for how to train, and when to stop."""
    for option in reversed((
        click.option(
            "--workers",
            type=click.IntRange(min=1),
            help="Worker processes (default: one for each GPU, or one).",
        ),
        click.option("--threads", type=click.IntRange(min=1), help="CPU threads of each worker."),
        click.option(
            "--epoch-timeout",
            type=Number(above_0=True),
            help="Seconds after which an epoch counts as hung; its trial fails.",
        ),
        click.option("--quiet", is_flag=True, help="No progress display."),
        click.option(
            "--stop-epochs",
            type=click.IntRange(min=1),
            help="Stop after this many trained epochs; an epoch that trials share counts once.",
        ),
        click.option(
            "--stop-seconds", type=Number(above_0=True), help="Stop after this many seconds."
        ),
        click.option(
            "--target", type=Number(), help="Stop when a trial reaches this value of the metric."
        ),
    )):
        command = option(command)
    return command


def say(text: object, **options: Any) -> None:
    """Print some lines; ``options`` are those of ``click.secho``.

    Pass a name within a line as ``plain_text(name)``, so that it contains no newlines.
    """
    click.secho(plain_text(text, lines=True), **options)


def cell(value: object, *, style: str = "") -> Text:
    """Return a text for a table of rich, without interpreting markup."""
    return Text(plain_text(value), style=style)


_SHORT_NUMBER = re.compile(r"[-+]?(\.\d+|\d+\.\d*|\d+)(e[-+]?\d+)?", re.IGNORECASE | re.ASCII)


class Pair(click.ParamType):  # type: ignore[type-arg]
    """A name and a value, written as NAME=VALUE; the value is JSON or plain text."""

    def __init__(self, *, whole: bool) -> None:
        self.name = "name=number" if whole else "name=value"
        self._whole = whole

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Any]:
        """Split at the first equals sign."""
        name, sign, text = str(value).partition("=")
        if not name or not sign:
            self.fail(f"{value!r} is no pair; write {self.name.upper()}", param, ctx)
        if self._whole and not text.isdecimal():
            self.fail(f"{value!r}: {text!r} is no whole number", param, ctx)
        with suppress(ValueError):
            return name, json.loads(text)
        if _SHORT_NUMBER.fullmatch(text):
            return name, float(text)  # JSON lacks .3 and 3., which people type
        return name, text


def parsed_json(text: str, option: str) -> Any:
    """Return what the JSON text of an option says.

    Raises:
        UsageError: It is not JSON, or names something twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{option} {shortened(text)} is not JSON: {error}") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse an object with a name twice, of which Python's parser would keep the last."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"it has {shortened(name)} twice")
        found[name] = value
    return found


def shortened(value: object) -> str:
    """Return a value as text for an error message."""
    return plain_text(repr(value), limit=100)
