"""Output of results on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from thrifty.study import Study, TrialResult

from ._options import cell


def show_results(study: Study) -> None:
    """Print the best trials and the savings.

    With several objectives, the best trials are the Pareto front.
    """
    console = Console()
    trials = study.trials
    if not any(trial.epochs or trial.error for trial in trials):
        console.print(cell(f"study {study.name!r}: no trial has reported yet"))
        return
    best = study.best_trials if len(study.goals.metrics) > 1 else [study.best_trial]
    which = "best" if len(best) == 1 else f"the {len(best)} best"
    console.print(cell(f"study {study.name!r}: {which} of {len(trials)} trials"))
    for trial in best:
        console.print(_table(trial))
    failed = sum(trial.state == "failed" for trial in trials)
    if failed:
        console.print(f"{failed} trials failed; see [bold]study.trials[i].error[/bold]")
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
