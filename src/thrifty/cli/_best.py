"""The command ``thrifty best NAME``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from thrifty.core import ThriftyError, plain_text
from thrifty.space import config_to_json
from thrifty.store import Store, TrialRecord, best_trials

from ._completion import complete_study
from ._options import say, storage_option


@click.command("best")
@click.argument("name", shell_complete=complete_study)
@storage_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, or a list of them.")
def command(*, name: str, storage: str, as_json: bool) -> None:
    """Show the best trial of study NAME, or its Pareto front if it has several objectives."""
    with Store.open(storage, create=False) as store:
        info = store.studies.get(name)
        trials = store.studies.load(info.id).trials
    best = best_trials(info, trials)
    if not best:
        reported = any(t.value is not None and t.state != "failed" for t in trials)
        why = "has no trial that keeps its constraints" if reported else "has no results yet"
        raise ThriftyError(f"study {name!r} {why}")
    if as_json:
        found = [_plain(trial) for trial in best]
        click.echo(json.dumps(found if isinstance(info.spec.get("metric"), list) else found[0]))
        return
    for trial in best:
        values: Mapping[str, float | None] = trial.objectives or {"": trial.value}
        said = ", ".join(
            f"{plain_text(metric)} {value:.6g}".strip() for metric, value in values.items()
        )
        say(f"trial {trial.number}: {said} after {trial.reached} epochs")
        for key, value in trial.config.items():
            say(f"  {plain_text(key)} = {plain_text(value)}")


def _plain(trial: TrialRecord) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "value": trial.value,
        **({} if trial.objectives is None else {"values": dict(trial.objectives)}),
        "epochs": trial.reached,
        "config": config_to_json(trial.config),
    }
