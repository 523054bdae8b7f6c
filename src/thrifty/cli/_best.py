"""``thrifty best NAME``."""

from __future__ import annotations

import json

import click

from thrifty.core import ThriftyError
from thrifty.space import config_to_json
from thrifty.store import Store

from ._options import storage_option


@click.command("best")
@click.argument("name")
@storage_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON object.")
def command(*, name: str, storage: str, as_json: bool) -> None:
    """Show the best trial of study NAME."""
    with Store.open(storage, create=False) as store:
        summary = store.studies.summary(name)
        if summary.best_trial is None:
            raise ThriftyError(f"study {name!r} has no results yet")
        records = store.studies.load(store.studies.get(name).id)
    trial = next(t for t in records.trials if t.number == summary.best_trial)
    found = {
        "trial": trial.number,
        "value": summary.best_value,
        "epochs": trial.reached,
        "config": config_to_json(trial.config),
    }
    if as_json:
        click.echo(json.dumps(found))
        return
    click.echo(f"trial {trial.number}: {summary.best_value:.6g} after {trial.reached} epochs")
    for key, value in trial.config.items():
        click.echo(f"  {key} = {value}")
