"""The commands ``status`` and ``best``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import click

from thrifty.core import ThriftyError, plain_text
from thrifty.space import config_to_json
from thrifty.store import Store, StudySummary, TrialRecord, best_trials, redact_url

from ._completion import complete_study
from ._options import say, storage_option


_GONE = " (its process is gone; run it again to go on)"


@click.command("status")
@storage_option
@click.option("--name", help="Only this study.")
def status_command(*, storage: str, name: str | None) -> None:
    """Show the studies in a database, also while they run."""
    with Store.open(storage, create=False) as store:
        summaries = [store.studies.summary(name)] if name else store.studies.list()
    if not summaries:
        say(f"{redact_url(storage)} has no studies yet")
    for s in summaries:
        counts = ", ".join(
            f"{count:,} {plain_text(state)}" for state, count in _states(s).items()
        )
        say(plain_text(s.name), bold=True, nl=False)
        say(f"  {plain_text(s.state)}{_GONE if s.state == 'interrupted' else ''}")
        say(f"  trials      {sum(s.num_trials.values()):,} ({counts or 'none'})")
        if s.best_value is not None:
            say(f"  best        {s.best_value:.6g} (trial {s.best_trial})")
        say(
            f"  epochs      {s.trial_epochs:,} asked for, {s.plan_epochs:,} trained in its plan"
        )
        say(f"  training    {s.seconds:,.1f} s")


def _states(summary: StudySummary) -> dict[str, int]:
    """Return counts by the states of ``Study.trials``: a waiting trial is done or paused."""
    counts = {**summary.num_trials, "done": summary.num_done}
    counts["paused"] = counts.pop("waiting", 0) - summary.num_done
    return {state: count for state, count in sorted(counts.items()) if count}


@click.command("best")
@click.argument("name", shell_complete=complete_study)
@storage_option
@click.option("--json", "as_json", is_flag=True, help="As one JSON object, or a list of them.")
def best_command(*, name: str, storage: str, as_json: bool) -> None:
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
