"""The commands plan, run and resume, how they load a study, and what they print at the end.

A study comes from a user's file, or from the file that a database names for it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

import click
from rich.console import Console
from rich.table import Table

from thrifty.agents import act_document, error_document, plan_document, result_document
from thrifty.core import Event, ThriftyError, UsageError, error_text, is_from_user, plain_text
from thrifty.run import ExecutorConfig, Local
from thrifty.store import Store
from thrifty.store._address import shell_command
from thrifty.store._reports import listed, trials_text
from thrifty.store._steering_requests import ask, is_run, last_queued
from thrifty.study import StopWhen, Study, StudyEnded, TrialEvent, TrialResult
from thrifty.study._preflight import refused_runs

from ._options import (
    cell,
    complete_study,
    json_option,
    print_document,
    say,
    storage_option,
    training_options,
    trust_option,
)


_DEMO = Path(__file__).resolve().with_name("_demo.py")
_PACKAGE = Path(__file__).resolve().parents[1]


def load_study(path: Path, *, name: str | None = None, may_train: bool = False) -> Study:
    """Load the study that a Python file defines at its top level; ``name`` selects one of several.

    Args:
        path: The file.
        name: Name of the study.
        may_train: Whether the file may run a study at its top level.

    Raises:
        UsageError: The file cannot be loaded, it defines no study of this name, or it defines
            several and no name is given.
    """
    found = studies_of(path, may_train=may_train)
    named = found if name is None else [study for study in found if study.name == name]
    if name is not None and not named:
        named = [each for study in found for each in _some_of(study, name)]
    if not named:
        raise UsageError(_no_study(path, name, found=found))
    if len(named) > 1:
        names = listed([repr(study.name) for study in named])
        raise UsageError(
            f"{path} defines several studies ({names}); pick one with --name"
            if name is None
            else f"{path} defines {len(named)} studies of the name {name!r}; "
            "give each a name of its own"
        )
    return named[0]


def _no_study(path: Path, name: str | None, *, found: Sequence[Study]) -> str:
    """Return the message for a file without the study that is looked for."""
    which = "a study" if name is None else f"study {name!r}"
    if found:
        names = listed([repr(study.name) for study in found])
        return f"{path} does not define {which}; it defines {names}"
    return f"{path} does not define {which}; write `study = thrifty.Study(...)` at its top level"


def studies_of(path: Path, *, may_train: bool = False) -> list[Study]:
    """Return all studies that a Python file defines at its top level.

    A study with several names there, such as the variable of a loop, is one study.

    Args:
        path: The file.
        may_train: Whether the file may run a study at its top level.

    Raises:
        UsageError: The file cannot be loaded.
    """
    with nullcontext() if may_train else refused_runs(_trains(path)):
        values = vars(_module(path)).values()
    studies = list({id(value): value for value in values if isinstance(value, Study)}.values())
    for study in studies:
        study.file = path
    return studies


def _trains(path: Path) -> str:
    """Return the message for a file that trains while a command loads it that does not train it."""
    context = click.get_current_context(silent=True)
    command = "thrifty" if context is None else f"thrifty {context.info_name}"
    return (
        f"{path} calls study.run() while `{command}` loads it; put the call under "
        '`if __name__ == "__main__":`'
    )


def _some_of(study: Study, name: str) -> Iterator[Study]:
    """Yield the study of some of its configurations that has this name, if there can be one."""
    if match := re.fullmatch(rf"{re.escape(study.name)}-(?:only|agent)-([1-9]\d*)", name):
        yield study.only((), epochs=int(match[1]), name=name)


def _module(path: Path) -> ModuleType:
    if path.resolve() == _DEMO:
        # This module is part of a package, and its studies refer to it by its full name.
        return importlib.import_module("thrifty.cli._demo")
    # Worker processes find the module by its name along the same path.
    sys.path.insert(0, str(path.resolve().parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        # As Python's own import does; `thrifty rent` looks there for tasks.
        sys.modules.pop(path.stem, None)
        if isinstance(error, ThriftyError):
            raise
        if is_from_user(error):
            raise
        raise UsageError(
            f"{path} cannot be loaded: {_where(error, path)}{error_text(error)}; "
            f"mend it (python {path} shows the whole traceback)"
        ) from error
    return module


def _where(error: BaseException, path: Path) -> str:
    """Return the line of the file that raised the error, as a prefix of a message."""
    if isinstance(error, SyntaxError):
        return ""  # its message contains file and line
    frames = traceback.extract_tb(error.__traceback__)
    mine = path.resolve()
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == mine]
    return f"line {lines[-1]}: " if lines else ""


def load_stored_study(
    name: str, *, storage: str, trust_file: bool = False, may_train: bool = False
) -> Study:
    """Load a study of a database from the file that defined it. The file is named before it is run.

    Args:
        name: Name of the study.
        storage: Address of the database, which names the file.
        trust_file: Whether to run a file that belongs to another user or is writable by everybody.
        may_train: Whether the file may run a study at its top level.

    Raises:
        StudyNotFoundError: The database or the study does not exist.
        UsageError: The file is unknown or missing, or another user may have written it.
    """
    with Store.open(storage, create=False) as store:
        file = store.studies.get(name).spec.get("file")
    if not _is_file(file):
        where = f"is gone: {plain_text(str(file))}" if file else "is unknown: a session made it"
        raise UsageError(
            f"the file that defines study {name!r} {where}. Commands that load a study need one; "
            "save the study in a file, and run it once with: thrifty run FILE (under another name "
            "if its task was typed into a session, too: its code counts as changed then)"
        )
    path = Path(file)
    if path.resolve() != _DEMO:
        say(f"loading {plain_text(path)}, which the database names for study {name!r}", err=True)
        if not trust_file:
            _check_owner(path)
    study = load_study(path, name=name, may_train=may_train)
    # The file may give the same database by a path relative to another folder.
    study.storage = replace(study.storage, url=storage)
    return study.as_stored()


def _is_file(file: object) -> TypeGuard[str]:
    """Return whether a database entry names an existing file that may define a study.

    Earlier versions recorded a module of thrifty where the task was one of its classes.
    """
    try:
        if not isinstance(file, str) or not Path(file).is_file():
            return False
        path = Path(file).resolve()
        return path == _DEMO or not path.is_relative_to(_PACKAGE)
    except (OSError, ValueError):
        return False


def _check_owner(path: Path) -> None:
    """Reject a file that another user may have written.

    Raises:
        UsageError: The file or its folder belongs to a user other than the current one or root, or
            is writable by everybody.
    """
    if not hasattr(os, "geteuid"):
        return
    mine = {os.geteuid(), 0}
    real = path.resolve()
    for part in (path, real, real.parent):
        found = part.stat()
        if found.st_uid not in mine:
            why = f"{_what(part)} belongs to {_name_of(found.st_uid)}"
        elif found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            why = f"everybody can change {_what(part)}"
        else:
            continue
        raise UsageError(
            f"the database says that {plain_text(path)} defines this study, and {why}, so another "
            "user may have written the code that would run; read the file, and pass --trust-file "
            "if it is yours"
        )


def _what(part: Path) -> str:
    return "its folder" if part.is_dir() else "it"


def _name_of(uid: int) -> str:
    try:
        # The module does not exist on every system.
        return f"user {importlib.import_module('pwd').getpwuid(uid).pw_name}"
    except (ImportError, KeyError):
        return f"user {uid}"


def show_results(study: Study) -> None:
    """Print the best trials and the savings.

    With several objectives, the best trials are the Pareto front.

    Raises:
        ThriftyError: All trials have failed, or none keeps the constraints.
    """
    console = Console()
    trials = study.trials
    if not any(trial.epochs or trial.error for trial in trials):
        console.print(cell(f"study {study.name!r}: no trial has reported yet"))
        return
    failed = [trial for trial in trials if trial.state == "failed"]
    if len(failed) == len(trials):
        # The log has grouped the errors already; here is the traceback of one of them.
        message, begin, traceback = failed[0].error.partition("Traceback (most recent")
        why = f"the first one:\n{begin}{traceback}" if begin else f"the first one: {message}"
        raise ThriftyError(f"all {len(trials):,} trials of study {study.name!r} failed; {why}")
    best = study.best_trials if len(study.goals.metrics) > 1 else [study.best_trial]
    which = "best" if len(best) == 1 else f"the {len(best)} best"
    console.print(cell(f"study {study.name!r}: {which} of {trials_text(len(trials))}"))
    for trial in best:
        console.print(_table(trial))
    if failed:
        count = f"{trials_text(len(failed))} failed"
        command = shell_command(
            "status", "--name", study.name, "--traceback", url=study.storage.url
        )
        console.print(cell(f"{count}; {command} shows why"), soft_wrap=True)
    console.print(cell(study.savings, style="green"))


def _table(trial: TrialResult) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    for metric, value in trial.values.items():
        table.add_row(cell(metric), cell(f"{value:.4f}", style="bold"))
    table.add_row("trial", str(trial.number))
    table.add_row(*trial.unit.fact(trial.epochs))
    for name, value in trial.config.items():
        table.add_row(cell(name), cell(format_value(value)))
    return table


def format_value(value: Any) -> str:
    """Return a value in readable form."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def executor_and_stop(
    *,
    workers: int | None,
    threads: int | None,
    epoch_timeout: float | None,
    stop_epochs: int | None,
    stop_seconds: float | None,
    target: float | None,
) -> tuple[ExecutorConfig, StopWhen | None]:
    """Return where to train and when to stop, as the options of a command say."""
    given = (stop_epochs, stop_seconds, target)
    stop = (
        StopWhen(epochs=stop_epochs, seconds=stop_seconds, target=target)
        if any(value is not None for value in given)
        else None
    )
    return Local(workers=workers, threads=threads, epoch_timeout=epoch_timeout), stop


def train(study: Study, *, quiet: bool, as_json: bool, **training: Any) -> None:
    """Run a study as the options say, and show its results."""
    executor, stop = executor_and_stop(**training)
    run_and_show(study, executor=executor, stop=stop, progress=not quiet, as_json=as_json)


class EndObserver:
    """Note how a run has ended.

    Attributes:
        signal: The signal that has stopped it.
        done: Whether nothing is left to train, as in a study that was done before.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self.done = True

    def on_event(self, event: Event | TrialEvent) -> None:
        """Read how it ended from the last event."""
        if isinstance(event, StudyEnded):
            self.signal = event.signal
            self.done = event.state == "done"


def run_watched(
    study: Study, *, executor: ExecutorConfig, stop: StopWhen | None, progress: bool
) -> EndObserver:
    """Run a study and return how the run has ended."""
    watch = EndObserver()
    study.run(executor=executor, stop=stop, progress=progress, observers=[watch])
    return watch


def run_and_show(
    study: Study,
    *,
    executor: ExecutorConfig,
    stop: StopWhen | None = None,
    progress: bool,
    as_json: bool = False,
    pictures: Callable[[], Sequence[Path]] = tuple,
) -> None:
    """Run a study and show its results.

    Args:
        study: The study.
        executor: Where it is trained.
        stop: When to stop before it is done.
        progress: Whether to show a progress display.
        as_json: Whether to print a JSON document instead of text.
        pictures: Writes pictures of a study that has results, and returns their files.

    Raises:
        ThriftyError: All trials have failed, or none keeps the constraints.
        click.exceptions.Exit: A signal has stopped the run; the exit code is that of a process
            which the signal ends, 130 for Ctrl-C.
    """
    watch = run_watched(study, executor=executor, stop=stop, progress=progress)
    try:
        if as_json:
            found = result_document(study, done=watch.done, signal=watch.signal)
        else:
            show_results(study)
        # A user who interrupts a run does not want to wait for pictures.
        written = pictures() if watch.signal is None else ()
        if as_json:
            print_document({**found, "written": [str(file) for file in written]})
    except ThriftyError as error:
        if watch.signal is None:
            raise
        say(f"error: {error}", fg="red", err=True)
        if as_json:
            print_document(error_document(error, str(error)))
    if watch.signal is not None:
        raise click.exceptions.Exit(128 + watch.signal)


@click.command("plan")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Name of the study, if the file defines several.")
@json_option
def plan_command(*, file: Path, name: str | None, as_json: bool) -> None:
    """Show how much the study in FILE has to train, before any training."""
    study = load_study(file, name=name)
    found = study.plan()
    if as_json:
        print_document(plan_document(study.name, found))
        return
    say(found)


@click.command("run")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Name of the study, if the file defines several.")
@training_options
@json_option
def run_command(*, file: Path, name: str | None, **training: Any) -> None:
    """Run the study that FILE defines, or resume it.

    The exit code is 2 if all trials have failed, or if none keeps the constraints.
    """
    train(load_study(file, name=name, may_train=True), **training)


@click.command("resume")
@click.argument("name", shell_complete=complete_study)
@storage_option
@trust_option
@training_options
@json_option
def resume_command(*, name: str, storage: str, trust_file: bool, **training: Any) -> None:
    """Resume study NAME, from the file that defined it, or where it is paused.

    If a process has paused the study, it goes on there, and this command ends at once. A request to
    stop or pause that no process has applied is taken back. The exit code is 2 if all trials have
    failed, or if none keeps the constraints.
    """
    with Store.open(storage, create=False) as store:
        state, last = store.studies.summary(name).state, last_queued(store, store.studies.get(name))
        if state == "paused" or (is_run(state) and last in ("stop", "pause")):
            act = ask(store, name, "resume")
            if training["as_json"]:
                print_document(act_document(name, act))
            else:
                say("asked the process that has paused the study to go on")
            return
    study = load_stored_study(name, storage=storage, trust_file=trust_file, may_train=True)
    if last in ("stop", "pause"):
        with Store.open(storage, create=False) as store:
            ask(store, name, "resume")
            say(f"took back the request to {last} the study", err=True)
    train(study, **training)
