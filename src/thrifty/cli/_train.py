"""The commands ``plan``, ``run`` and ``resume``, and what they print at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from thrifty.core import ThriftyError
from thrifty.run import Local
from thrifty.store._address import shell_command
from thrifty.study import StopWhen, Study, TrialResult

from ._load import load_stored_study, load_study
from ._options import cell, complete_study, say, storage_option, training_options, trust_option


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
        # The log has grouped the errors already; here is the whole text of one of them.
        raise ThriftyError(
            f"all {len(trials):,} trials of study {study.name!r} failed; "
            f"trial {failed[0].number}: {failed[0].error}"
        )
    best = study.best_trials if len(study.goals.metrics) > 1 else [study.best_trial]
    which = "best" if len(best) == 1 else f"the {len(best)} best"
    console.print(cell(f"study {study.name!r}: {which} of {len(trials)} trials"))
    for trial in best:
        console.print(_table(trial))
    if failed:
        count = f"{len(failed):,} trial{'' if len(failed) == 1 else 's'} failed"
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
    table.add_row("epochs", str(trial.epochs))
    for name, value in trial.config.items():
        table.add_row(cell(name), cell(format_value(value)))
    return table


def format_value(value: Any) -> str:
    """Return a value in readable form."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def train(
    study: Study,
    *,
    workers: int | None,
    threads: int | None,
    epoch_timeout: float | None,
    quiet: bool,
    stop_epochs: int | None,
    stop_seconds: float | None,
    target: float | None,
) -> None:
    """Run a study and show its results."""
    given = (stop_epochs, stop_seconds, target)
    stop = (
        StopWhen(epochs=stop_epochs, seconds=stop_seconds, target=target)
        if any(value is not None for value in given)
        else None
    )
    executor = Local(workers=workers, threads=threads, epoch_timeout=epoch_timeout)
    study.run(executor=executor, stop=stop, progress=not quiet)
    show_results(study)


@click.command("plan")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Which study, if the file defines several.")
def plan_command(*, file: Path, name: str | None) -> None:
    """Show how much the study in FILE has to train, before any training."""
    say(load_study(file, name=name).plan())


@click.command("run")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="Which study, if the file defines several.")
@training_options
def run_command(*, file: Path, name: str | None, **training: Any) -> None:
    """Run the study that FILE defines, or resume it.

    The exit code is 2 if all trials have failed, or if none keeps the constraints.
    """
    train(load_study(file, name=name), **training)


@click.command("resume")
@click.argument("name", shell_complete=complete_study)
@storage_option
@trust_option
@training_options
def resume_command(*, name: str, storage: str, trust_file: bool, **training: Any) -> None:
    """Resume study NAME, from the file that defined it.

    The exit code is 2 if all trials have failed, or if none keeps the constraints.
    """
    train(load_stored_study(name, storage=storage, trust_file=trust_file), **training)
