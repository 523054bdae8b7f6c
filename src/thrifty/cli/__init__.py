"""The command line; a command's module is imported when the command is called."""

from __future__ import annotations

import difflib
import io
import re
import sys
from contextlib import suppress
from importlib import import_module
from typing import IO, NamedTuple

import click

from thrifty import __version__
from thrifty.agents import error_document, to_json
from thrifty.core import (
    ThriftyError,
    UsageError,
    error_text,
    error_traceback,
    gc_off_at_exit,
    gc_paused,
    plain_text,
)

from ._options import reserved_output, say, study_names


class _Command(NamedTuple):
    """The module that holds a command, and the first sentence of its help.

    The function is called ``<name>_command``.
    """

    module: str
    help: str


COMMANDS = {
    "demo": _Command(
        "_demo", "Tune a network on handwritten digits: 81 trials, about ten seconds of training."
    ),
    "run": _Command("_train", "Run the study that FILE defines, or resume it."),
    "plan": _Command(
        "_train", "Show how much the study in FILE has to train, before any training."
    ),
    "cost": _Command(
        "_try", "Show what training some configurations costs, and what is known of them already."
    ),
    "try": _Command("_try", "Train some configurations of the study in FILE, and nothing else."),
    "status": _Command(
        "_status", "Show the studies in a database, or one STUDY, also while they run."
    ),
    "best": _Command(
        "_status",
        "Show the best trial of study NAME, or its Pareto front if it has several objectives.",
    ),
    "artifacts": _Command(
        "_status", "Show the files that trials of study NAME have logged, or save copies of them."
    ),
    "logs": _Command(
        "_status",
        "Show the lines that the code of a trial of study NAME has logged with ``logging``.",
    ),
    "branch": _Command(
        "_steer", "Enqueue a branch of a trial of study NAME, after showing what it costs."
    ),
    "enqueue": _Command("_steer", "Enqueue a configuration that study NAME tries next."),
    "extend": _Command(
        "_steer", "Let study NAME train its trials for longer, after showing what that costs."
    ),
    "stop": _Command(
        "_steer", "Stop study NAME, or one of its trials, in the process that runs it."
    ),
    "pause": _Command(
        "_steer", "Let the process that runs study NAME wait, until ``thrifty resume NAME``."
    ),
    "note": _Command("_steer", "Keep the note TEXT about study NAME, or about one of its trials."),
    "tag": _Command("_steer", "Give study NAME, or one of its trials, the tag TAG."),
    "acts": _Command(
        "_steer", "Show the requests to study NAME: who made them, when, and their results."
    ),
    "delete": _Command(
        "_steer", "Delete study NAME and its trials; ``thrifty restore`` brings them back."
    ),
    "restore": _Command(
        "_steer", "Restore the deleted study NAME; without NAME, list those that can be restored."
    ),
    "gc": _Command("_steer", "Free disk space: remove old deleted studies and unused checkpoints."),
    "explain": _Command(
        "_status", "Explain why studies NAME and OTHER do or do not share training."
    ),
    "importance": _Command("_plots", "Show which hyper-parameters of study NAME matter."),
    "plot": _Command("_plots", "Draw a plot of study NAME."),
    "resume": _Command(
        "_train", "Resume study NAME, from the file that defined it, or where it is paused."
    ),
    "export": _Command(
        "_export", "Export study NAME: trials as a table, the study for Optuna, or an adapter."
    ),
    "rent": _Command("_rent", "Show which machines to rent for the study or the task in FILE."),
    "catalogue": _Command(
        "_rent._rent_options",
        "Show the price lists that ``thrifty rent`` reads, and how old their rows are.",
    ),
    "dashboard": _Command(
        "_dashboard", "Show the studies in a database in the browser, also while they run."
    ),
    "mcp": _Command("_try", "Serve tools for coding agents over standard input and output (MCP)."),
    "doctor": _Command(
        "_doctor",
        "Check this installation: versions, extras, devices, back-ends, kernels, storage.",
    ),
    "completion": _Command(
        "_options",
        "Print a script that lets SHELL complete commands, options, studies and databases.",
    ),
}
"""All commands, in the order in which the help lists them, which imports none of them."""


_CLOSE = 0.7
"""Similarity of a command that is suggested: "bets" is close to "best", "bogus" not to "logs"."""


class _Lazy(click.Group):
    """Imports a command's module only when it is needed: ``status`` must not wait for torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        with gc_paused():
            module = import_module(f"thrifty.cli.{COMMANDS[cmd_name].module}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name; an error suggests the nearest one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            # click itself suggests only commands that are imported already
            near = difflib.get_close_matches(args[0], COMMANDS, n=1, cutoff=_CLOSE)
            if near and not args[0].startswith("-"):
                error.message += f" Did you mean {near[0]!r}?"  # type: ignore[misc]
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the whole first sentence of each command, on two lines if it is long."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, each.help) for name, each in COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="thrifty")
def _app() -> None:
    """Hyper-parameter tuning that never pays twice."""


def main() -> None:
    """Run a command; show errors that the user can fix as one message, without a traceback.

    With ``--json``, only documents are printed on standard output; such an error is one of them.
    """
    gc_off_at_exit()
    if "--json" in sys.argv[1:]:
        with reserved_output() as output:
            code = _run(output)
    else:
        code = _run(None)
    if code:
        raise SystemExit(code)


def _run(output: IO[str] | None) -> int:
    """Run a command and return its exit code.

    Args:
        output: Where documents are printed; None if the command prints text.
    """
    try:
        # click returns the code of an early exit (``--help``, a failed doctor check) as a number.
        code = _app(standalone_mode=False, obj=output)
    except ThriftyError as error:
        say(f"error: {error}", fg="red", err=True)
        return _failed(error, str(error), code=2, output=output)
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.ClickException as error:
        _add_advice(error)
        # the message may quote what a file or a database holds
        error.message = plain_text(error.message, lines=True)  # type: ignore[misc]
        _show(error)
        # click's own classes differ between its versions
        usage = UsageError(error.format_message())
        return _failed(usage, str(usage), code=error.exit_code, output=output)
    except (click.Abort, KeyboardInterrupt):
        stopped = UsageError("interrupted before there was a result; run the command again")
        return _failed(stopped, str(stopped), code=130, output=output)
    except Exception as error:  # noqa: BLE001 (a bug: show its traceback as plain text)
        say(error_traceback(error), err=True)
        return _failed(error, error_text(error), code=1, output=output)
    return code if isinstance(code, int) else 0


def _show(error: click.ClickException) -> None:
    """Print an error of click's as it would, but begin its last line as our own errors begin."""
    text = io.StringIO()
    error.show(file=text)
    say(
        re.sub(r"^Error: ", "error: ", text.getvalue(), count=1, flags=re.MULTILINE),
        err=True,
        nl=False,
    )


_NO_NUMBER = re.compile(r"is not a valid (integer|float)( range)?\.?$")
_NOT_ONE_OF = re.compile(r"^'(.*)' is not one of ", re.DOTALL)


def _add_advice(error: click.ClickException) -> None:
    """Say in a message of click's what to do about it, in the words of the user."""
    parameter = getattr(error, "param", None)
    message = error.message or ""
    if found := _NO_NUMBER.search(message):
        kind = "whole number" if found[1] == "integer" else "number"
        message = f"{message[: found.start()]}is not a {kind}."
    elif (found := _NOT_ONE_OF.search(message)) and parameter is not None:
        options = [str(each) for each in getattr(parameter.type, "choices", ())]
        if near := difflib.get_close_matches(found[1], options, n=1, cutoff=_CLOSE):
            message += f" Did you mean {near[0]!r}?"
    elif isinstance(error, click.MissingParameter) and _is_study(parameter) and error.ctx:
        names = study_names(error.ctx)
        message = f"The database has: {', '.join(names)}." if names else message
    error.message = message  # type: ignore[misc]


def _is_study(parameter: click.Parameter | None) -> bool:
    """Return whether a parameter is the name of a stored study."""
    return isinstance(parameter, click.Argument) and parameter.name == "name"


def _failed(error: Exception, message: str, *, code: int, output: IO[str] | None) -> int:
    """Print an error as a document, if documents are printed; return the exit code."""
    if output is not None:
        with suppress(OSError):
            output.write(f"{to_json(error_document(error, message))}\n")
            output.flush()
    return code
