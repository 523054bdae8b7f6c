"""The commands ``cost``, ``try`` and ``mcp``: configurations of your own choice or an agent's."""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from thrifty.agents import cost_document, tried_document
from thrifty.agents._jobs import STORAGE_VARIABLE, Budget, Jobs, Studies
from thrifty.agents.documents import CostDocument
from thrifty.core import ThriftyError, UsageError, plain_text, require
from thrifty.space._coordinates import read_config
from thrifty.store._address import read_address
from thrifty.study import Study, TrialResult

from ._options import (
    cell,
    complete_storage,
    json_option,
    parsed_json,
    print_document,
    say,
    shortened,
    training_options,
)
from ._train import executor_and_stop, format_value, load_study, run_watched, studies_of


def _config_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that say which configurations are meant."""
    for option in reversed((
        click.option("--name", help="Name of the study, if the file defines several."),
        click.option(
            "--config",
            "given",
            multiple=True,
            help='A configuration as JSON, such as {"lr": 0.1}; repeat for more.',
        ),
        click.option(
            "--configs",
            "file_of_configs",
            type=click.File(encoding="utf-8"),
            help="File with a JSON list of configurations; - for standard input.",
        ),
        click.option(
            "--epochs",
            type=click.IntRange(min=1),
            help="How many of their first epochs are trained  [default: all].",
        ),
        click.option(
            "--storage",
            envvar=STORAGE_VARIABLE,
            shell_complete=complete_storage,
            help="Database address  [default: that of the study].",
        ),
    )):
        command = option(command)
    return command


def _study_of(file: Path, *, name: str | None, storage: str | None) -> Study:
    """Return the study of a file, in another database if one is given."""
    study = load_study(file, name=name)
    if storage is not None:
        study.storage = replace(study.storage, url=storage)
    return study


def _configs(given: Sequence[str], file: Any) -> list[Mapping[str, Any]]:
    """Return the configurations of the options.

    Raises:
        UsageError: There are none, or they cannot be read.
    """
    found = [parsed_json(text, "--config") for text in given]
    if file is not None:
        try:
            text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--configs cannot be read: {error}") from None
        listed = parsed_json(text, "--configs")
        if not isinstance(listed, list):
            raise UsageError(f"--configs is a JSON list of objects, got {shortened(listed)}")
        found += listed
    if not found:
        raise UsageError("name a configuration with --config JSON, or several with --configs FILE")
    return found


@click.command("cost")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_config_options
@json_option
def cost_command(
    *,
    file: Path,
    name: str | None,
    given: tuple[str, ...],
    file_of_configs: Any,
    epochs: int | None,
    storage: str | None,
    as_json: bool,
) -> None:
    """Show what training some configurations costs, and what is known of them already.

    Nothing is trained. The configurations are those of the study in FILE.
    """
    study = _study_of(file, name=name, storage=storage)
    found = cost_document(study, _configs(given, file_of_configs), epochs=epochs)
    if as_json:
        print_document(found)
        return
    Console().print(_cost_table(study, found))
    say(_cost_line(found))


def _cost_table(study: Study, found: CostDocument) -> Table:
    columns = ("configuration", "known", study.metric, "trained by")
    table = Table(*(Column(cell(each)) for each in columns), box=None, pad_edge=False)
    for each in found["configs"]:
        value = None if each["metrics"] is None else each["metrics"].get(study.metric)
        table.add_row(
            cell(_in_one_line(each["config"])),
            cell(f"{each['known_epochs']:,} of {each['epochs']:,} epochs"),
            cell("" if value is None else f"{value:.6g}"),
            cell(", ".join(each["trained_by"])),
        )
    return table


def _cost_line(found: CostDocument) -> str:
    seconds, again = found["seconds_to_train"], found["evaluated_epochs"]
    time = "" if seconds is None else f", about {seconds:,.1f} s"
    left = f"{found['epochs_to_train']:,.0f} epochs to train of {found['trial_epochs']:,.0f}{time}"
    evaluated = f", {again:,.0f} only evaluated again" if again else ""
    return f"{left}; {found['known_epochs']:,.0f} known already{evaluated}"


def _in_one_line(config: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {format_value(value)}" for key, value in config.items())


@click.command("try")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@_config_options
@click.option(
    "--as",
    "own_name",
    help="Name of the study that has them as trials  [default: NAME-only-EPOCHS].",
)
@click.option("--lifeline", type=int, hidden=True, help="Stop when this pipe is closed.")
@training_options
@json_option
def try_command(  # noqa: PLR0913 (one argument for each option)
    *,
    file: Path,
    name: str | None,
    given: tuple[str, ...],
    file_of_configs: Any,
    epochs: int | None,
    storage: str | None,
    own_name: str | None,
    lifeline: int | None,
    as_json: bool,
    quiet: bool,
    **training: Any,
) -> None:
    """Train some configurations of the study in FILE, and nothing else.

    They are trials of a study of their own. What any study of this task has trained is not trained
    again. The exit code is 2 if all of these trials have failed.
    """
    study = _study_of(file, name=name, storage=storage)
    configs = [read_config(each) for each in _configs(given, file_of_configs)]
    asked = study.only(configs, epochs=epochs, name=own_name)
    if lifeline is not None:
        threading.Thread(target=_stop_when_closed, args=(lifeline,), daemon=True).start()
    executor, stop = executor_and_stop(**training)
    end = run_watched(asked, executor=executor, stop=stop, progress=not quiet)
    document = tried_document(asked, asked.enqueued, done=end.done, signal=end.signal)
    if as_json:
        print_document(document)
    else:
        numbers = [trial["number"] for trial in document["trials"]]
        _show(asked, [trial for trial in asked.trials if trial.number in numbers])
    if end.signal is not None:
        raise click.exceptions.Exit(128 + end.signal)
    states = {trial["state"] for trial in document["trials"]}
    if states == {"failed"}:
        if as_json:
            raise click.exceptions.Exit(2)  # the document has the errors
        first = document["errors"][0]
        raise ThriftyError(
            f"all of these trials failed; trial {first['trials'][0]}: {first['message']}"
        )


def _stop_when_closed(pipe: int) -> None:
    """Stop this process as Ctrl-C does, at the end of an epoch, when the pipe is closed.

    That is how a server of tools stops a run; it also happens when the server is killed.
    """
    with suppress(OSError):
        os.read(pipe, 1)
    os.kill(os.getpid(), signal.SIGINT)


def _show(study: Study, trials: Sequence[TrialResult]) -> None:
    """Print the results of some trials, one in a line."""
    columns = ("trial", "configuration", "state", study.unit.name, *study.goals.metrics)
    table = Table(*(Column(cell(each)) for each in columns), box=None, pad_edge=False)
    for trial in trials:
        values = (trial.values.get(metric) for metric in study.goals.metrics)
        table.add_row(
            str(trial.number),
            cell(_in_one_line(trial.config)),
            trial.state,
            f"{study.unit.count(trial.epochs):,}",
            *(cell("" if value is None else f"{value:.6g}") for value in values),
        )
    console = Console()
    console.print(table)
    console.print(cell(study.savings, style="green"))
    say(f"these are trials of study {plain_text(study.name)}")


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
    if max_seconds is not None and not math.isfinite(max_seconds):
        raise UsageError(f"--max-seconds is {max_seconds}; give a number of seconds")
    if storage is not None:
        read_address(storage)
    require("mcp", extra="mcp")
    server = import_module("thrifty.agents._server")
    jobs = Jobs(command=[sys.executable, "-m", "thrifty.cli"])
    studies = Studies([file.resolve() for file in files], load=studies_of, storage=storage)
    tools = server.Tools(
        studies,
        default="sqlite:///thrifty.db",
        budget=Budget(is_allowed=allow_run, max_epochs=max_epochs, max_seconds=max_seconds),
        jobs=jobs,
    )

    def leave(*_: object) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)
    try:
        server.make_server(tools).run()
    finally:
        jobs.close()
