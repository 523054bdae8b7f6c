"""How results look on the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from thrifty.study import Study


def show_results(study: Study) -> None:
    """The best configuration, its metric, and what was saved."""
    console = Console()
    best = study.best_trial
    console.print(f"study {study.name!r}: best of {len(study.trials)} trials", highlight=False)
    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")
    table.add_row(study.metric, f"[bold]{best.value:.4f}[/bold]")
    table.add_row("trial", str(best.number))
    table.add_row("epochs", str(best.epochs))
    for name, value in best.config.items():
        table.add_row(name, format_value(value))
    console.print(table)
    failed = sum(trial.state == "failed" for trial in study.trials)
    if failed:
        console.print(f"{failed} trials failed; see [bold]study.trials[i].error[/bold]")
    console.print(f"[green]{study.savings}[/green]", highlight=False)


def format_value(value: Any) -> str:
    """A value as a person would write it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
