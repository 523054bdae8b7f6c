"""``thrifty export NAME``."""

from __future__ import annotations

import csv
from pathlib import Path

import click

from thrifty.core import UsageError
from thrifty.store import Store, export_optuna

from ._options import storage_option


@click.command("export")
@click.argument("name")
@storage_option
@click.option(
    "--optuna", type=click.Path(path_type=Path), help="Write an Optuna database (SQLite)."
)
@click.option(
    "--csv", "csv_file", type=click.Path(path_type=Path), help="Write one row for each trial."
)
def command(*, name: str, storage: str, optuna: Path | None, csv_file: Path | None) -> None:
    """Write a copy of study NAME for other tools."""
    if optuna is None and csv_file is None:
        raise UsageError("say what to write: --optuna FILE or --csv FILE")
    if optuna is not None:
        export_optuna(storage, name, file=optuna)
        click.echo(f"wrote {optuna}: open it with optuna-dashboard sqlite:///{optuna}")
    if csv_file is not None:
        with Store.open(storage, create=False) as store:
            info = store.studies.get(name)
            trials = store.studies.load(info.id).trials
        metric = info.spec.get("metric")
        metrics = metric if isinstance(metric, list) else []
        names = sorted({key for trial in trials for key in trial.config})
        with csv_file.open("w", newline="", encoding="utf-8") as out:
            writer = csv.writer(out)
            columns = [f"values_{each}" for each in metrics]
            writer.writerow(["number", "state", "epochs", "value", *columns, *names])
            for trial in trials:
                values = [str(trial.config.get(key, "")) for key in names]
                writer.writerow([
                    trial.number,
                    trial.state,
                    trial.reached,
                    trial.value,
                    *((trial.objectives or {}).get(each) for each in metrics),
                    *values,
                ])
        click.echo(f"wrote {csv_file}")
