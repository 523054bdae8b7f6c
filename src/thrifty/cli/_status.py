"""The commands ``status``, ``best``, ``explain`` and ``delete``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click

from thrifty.core import ThriftyError, UsageError, plain_text
from thrifty.search._certainty import certainty
from thrifty.space import config_to_json
from thrifty.store import (
    FailureGroup,
    Store,
    StudyInfo,
    StudySummary,
    TrialRecord,
    best_trials,
    failure_groups,
    redact_url,
)
from thrifty.store._reports import (
    counted,
    failure_lines,
    interval,
    is_legacy,
    likeness,
    standard_deviation,
    stored_unit,
)

from ._options import complete_study, say, storage_option


_GONE = " (its process is gone; run it again to go on)"


@click.command("status")
@storage_option
@click.option("--name", help="Only this study.")
@click.option("--traceback", is_flag=True, help="Show the traceback of each error.")
def status_command(*, storage: str, name: str | None, traceback: bool) -> None:
    """Show the studies in a database, also while they run.

    The best trial is the one whose metric is best at the epoch that it has reached. Trials that are
    not finished count. Failed trials and those that break a constraint do not.
    """
    with Store.open(storage, create=False) as store:
        summaries = [store.studies.summary(name)] if name else store.studies.list()
        failures = {
            s.name: failure_groups(store.studies.failures(s.id))
            for s in summaries
            if s.num_trials.get("failed")
        }
        cut_short = {
            s.name: sorted(store.studies.trained_to(s.id, state="running").values())
            for s in summaries
            if s.state != "running"
        }
    if not summaries:
        say(f"{redact_url(storage)} has no studies yet")
    for s in summaries:
        _say_study(s, failures.get(s.name, []), cut_short.get(s.name, []), traceback=traceback)


def _say_study(
    s: StudySummary, failures: Sequence[FailureGroup], cut_short: Sequence[int], *, traceback: bool
) -> None:
    """Print what is known of a study.

    Args:
        s: The study.
        failures: Its errors.
        cut_short: The last epoch of each trial whose training was stopped, in ascending order.
        traceback: Whether to show tracebacks.
    """
    num_trials = sum(s.num_trials.values())
    states = _states(s)
    if cut_short:
        del states["running"]  # no process trains them
    parts = [f"{count:,} {plain_text(state)}" for state, count in states.items()]
    if cut_short:
        low, high = cut_short[0], cut_short[-1]
        where = s.unit.place(low) if low == high else s.unit.places(low, high)
        parts.append(f"{len(cut_short):,} stopped in training, at {where}")
    counts = ", ".join(parts)
    say(plain_text(s.name), bold=True, nl=False)
    say(f"  {plain_text(s.state)}{_GONE if s.state == 'interrupted' else ''}")
    say(f"  trials      {num_trials:,} ({counts or 'none'})")
    if s.best_value is not None:
        where = f"trial {s.best_trial} after {s.unit.text(s.best_epochs or 0)}"
        where += f", mean of {s.num_seeds} seeds" * (s.num_seeds > 1)
        say(f"  best        {s.best_value:.6g} ({where})")
    elif s.num_infeasible:
        say("  best        none, because no trial keeps the constraints")
    elif s.num_trials.get("failed"):
        say("  best        none, because all trials that ended have failed")
    for line in failure_lines(failures):
        say(f"  errors      {plain_text(line)}")
    trained = f"{s.unit.count(s.plan_epochs):,} trained by all studies of its task"
    note = "" if s.unit.is_epochs else f" ({s.unit.definition})"
    say(f"  {s.unit.name:10}  {s.unit.count(s.trial_epochs):,} requested, {trained}{note}")
    say(f"  training    {s.seconds:,.1f} s")
    if traceback:
        for group in failures:
            say(f"trial {group.trials[0]}: {group.traceback or group.message}".rstrip())
    elif any(group.traceback for group in failures):
        say("  --traceback shows where these errors come from")


def _states(summary: StudySummary) -> dict[str, int]:
    """Return counts by the states of ``Study.trials``: a waiting trial is done or paused."""
    counts = {**summary.num_trials, "done": summary.num_done}
    counts["paused"] = counts.pop("waiting", 0) - summary.num_done
    return {state: count for state, count in sorted(counts.items()) if count}


@click.command("best")
@click.argument("name", shell_complete=complete_study)
@storage_option
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON: one object, or a list for a Pareto front."
)
def best_command(*, name: str, storage: str, as_json: bool) -> None:
    """Show the best trial of study NAME, or its Pareto front if it has several objectives.

    Trials are compared by their metric at the epoch that each has reached. Trials that are not
    finished count. Failed trials and those that break a constraint do not.

    With several seeds, values are means, and the certainty is the probability that the trial has
    the best true mean of these trials.
    """
    with Store.open(storage, create=False) as store:
        info = store.studies.get(name)
        trials = store.studies.load(info.id).trials
        seeds = last_values(store, info)
    best = best_trials(info, trials)
    if not best:
        raise ThriftyError(f"study {name!r} {_why_none(trials)}")
    sure = _certainty(info, trials, best=best, seeds=seeds)
    if as_json:
        found = [
            {**_plain(info, trial), **seed_columns(seeds.get(trial.number)), **sure}
            for trial in best
        ]
        click.echo(json.dumps(found if isinstance(info.spec.get("metric"), list) else found[0]))
        return
    unit = stored_unit(info.spec)
    for trial in best:
        values: Mapping[str, float | None] = trial.objectives or {"": trial.value}
        said = ", ".join(
            f"{plain_text(metric)} {value:.6g}".strip() for metric, value in values.items()
        )
        say(f"trial {trial.number}: {said} after {unit.text(trial.reached)}")
        for line in _of_seeds(seeds.get(trial.number), **sure):
            say(f"  {line}")
        for key, value in trial.config.items():
            say(f"  {plain_text(key)} = {plain_text(value)}")


Seeds = Mapping[int, Sequence[float]]
"""The last value of each seed of the trials that have reported, by trial number."""


def last_values(store: Store, info: StudyInfo) -> Seeds:
    """Return the last value of the first metric for each seed; empty for a study of one seed."""
    if info.num_seeds < 2:
        return {}
    metric = info.spec["metric"]
    found = store.studies.seed_curves(info.id, metric[0] if isinstance(metric, list) else metric)
    return {number: [c[-1] for c in curves] for number, curves in found.items() if curves[0]}


def seed_columns(values: Sequence[float] | None) -> dict[str, Any]:
    """Return the standard deviation over seeds and their number; empty for one seed."""
    return {"sd": standard_deviation(values), "seeds": len(values)} if values else {}


def _certainty(
    info: StudyInfo, trials: Sequence[TrialRecord], *, best: Sequence[TrialRecord], seeds: Seeds
) -> dict[str, float]:
    """Return how sure it is which trial is best, as ``Study.best_trial`` says it.

    Studies of one seed or of several objectives do not say it.
    """
    if not seeds or isinstance(info.spec.get("metric"), list):
        return {}
    found = [t for t in trials if t.state != "failed" and t.value is not None and t.feasible]
    sign = -1.0 if info.spec.get("mode") == "min" else 1.0
    probability = certainty(
        found.index(best[0]),
        [sign * (trial.value or 0.0) for trial in found],
        [
            standard_deviation(values) / math.sqrt(len(values))
            for values in (seeds[trial.number] for trial in found)
        ],
        seed=info.spec.get("seed", 0),
    )
    return {"certainty": probability}


def _of_seeds(values: Sequence[float] | None, *, certainty: float | None = None) -> Iterator[str]:
    """Yield what is known of the mean over several seeds; nothing for one seed."""
    if not values:
        return
    low, high = interval(values)
    yield (
        f"mean of {len(values)} seeds, sd {standard_deviation(values):.3g}, "
        f"95 % interval {low:.6g} to {high:.6g}"
    )
    if certainty is not None:
        yield f"the best trial with a probability of {certainty:.0%}"


def _why_none(trials: Sequence[TrialRecord]) -> str:
    """Return why a study has no best trial, as the end of a sentence."""
    failed = {trial.number: trial.error for trial in trials if trial.state == "failed"}
    if any(trial.value is not None and trial.state != "failed" for trial in trials):
        return "has no trial that keeps its constraints"
    if failed:
        listed = "\n".join(failure_lines(failure_groups(failed)))
        return f"has no results, because all trials that ended have failed:\n{listed}"
    return "has no results yet"


@click.command("delete")
@click.argument("name", shell_complete=complete_study)
@storage_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def delete_command(*, name: str, storage: str, yes: bool) -> None:
    """Delete study NAME and its trials, so that you can use the name again.

    What it trained stays in the database: a study of the same task and seed does not train it
    again. A study that a process runs is not deleted.
    """
    with Store.open(storage, create=False) as store:
        summary = store.studies.summary(name)
        if not yes:
            num_trials = sum(summary.num_trials.values())
            shown = f"{plain_text(name)} with its {num_trials:,} trials"
            click.confirm(f"delete study {shown}?", abort=True)
        store.studies.delete(name)
    say(f"deleted study {plain_text(name)}")


def _plain(info: StudyInfo, trial: TrialRecord) -> dict[str, Any]:
    return {
        "trial": trial.number,
        "value": trial.value,
        **({} if trial.objectives is None else {"values": dict(trial.objectives)}),
        "epochs": trial.reached,
        **counted(info.spec, trial.reached),
        "config": config_to_json(trial.config),
    }


@click.command("explain")
@click.argument("name", shell_complete=complete_study)
@click.argument("other", required=False, shell_complete=complete_study)
@storage_option
def explain_command(*, name: str, other: str | None, storage: str) -> None:
    """Explain why studies NAME and OTHER do or do not share training.

    Without OTHER, NAME is compared with the study of the database whose task is most similar.
    """
    with Store.open(storage, create=False) as store:
        one = store.studies.get(name)
        found = [info for info in store.studies.made().values() if info.id != one.id]
        two = store.studies.get(other) if other is not None else _most_alike(one, found)
    for line in explained(one, two):
        say(line)


def explained(one: StudyInfo, two: StudyInfo) -> Iterator[str]:
    """Yield lines that say what two studies share, and if they do not share everything, why."""
    both = f"studies {one.name!r} and {two.name!r}"
    if one.plan == two.plan:
        yield f"{both} have one search plan: each epoch is trained once for both"
        return
    old = [info.name for info in (one, two) if is_legacy(info.spec)]
    if len(old) == 1:
        yield (
            f"{both} share nothing: {old[0]!r} was made by an older version of thrifty, which "
            "knew its task by other means"
        )
        return
    (training, metrics), (other_training, other_metrics) = map(_parts, (one.spec, two.spec))
    names = (one.name, two.name)
    reasons = [*_setting(one.spec, two.spec), *_differences(training, other_training, names)]
    evaluated = _differences(metrics, other_metrics, names)
    if reasons:
        yield f"{both} share nothing:"
    elif evaluated:
        yield f"{both} train the same; kept states are evaluated again, for their metrics differ:"
    else:
        yield f"{both} are equal, but thrifty has changed between them: they share nothing"
    for reason in [*reasons, *evaluated]:
        yield f"  {reason}"


def _most_alike(one: StudyInfo, others: Sequence[StudyInfo]) -> StudyInfo:
    if not others:
        raise UsageError(f"the database has no other study than {one.name!r} to compare it with")
    return max(others, key=lambda info: (likeness(one.spec, info.spec), info.id))


def _parts(spec: Mapping[str, Any]) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Return what a task trains and how it evaluates, by name.

    An older version stored both as one.
    """
    task = spec.get("task", {})
    return (task, {}) if is_legacy(spec) else (task["training"], task["evaluation"])


def _setting(one: Mapping[str, Any], two: Mapping[str, Any]) -> Iterator[str]:
    if one.get("seed") != two.get("seed"):
        yield f"seed: {one.get('seed')} and {two.get('seed')}"


def _differences(
    one: Mapping[str, str], two: Mapping[str, str], names: tuple[str, str]
) -> list[str]:
    out = []
    for name in dict.fromkeys((*one, *two)):
        mine, theirs = one.get(name), two.get(name)
        if mine is None or theirs is None:
            out.append(f"{name}: only in {names[theirs is not None]!r}")
        elif mine != theirs and (mine.startswith("#") or theirs.startswith("#")):
            out.append(f"{name}: differs")
        elif mine != theirs:
            out.append(f"{name}: {mine} and {theirs}")
    return sorted(out)
