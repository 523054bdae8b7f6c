"""Documents of what a database holds: states of studies, best trials, comparisons."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from thrifty.core import Artifact, ThriftyError, UsageError
from thrifty.search._scores import certainty
from thrifty.space import TimeUnit, config_to_json
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
from thrifty.store._acts import Act
from thrifty.store._epoch_times import standard_deviation, stored_unit
from thrifty.store._reports import (
    Comparison,
    compare,
    failure_lines,
    most_alike,
    no_such_trial,
    num_stopped_in_training,
    shown_state,
    trials_by_state,
)
from thrifty.store._trash import Deleted, Garbage

from .documents import (
    SCHEMA_VERSION,
    ActDocument,
    ActOfStudy,
    ActsDocument,
    Amounts,
    BestDocument,
    DeleteDocument,
    DeletedStudy,
    ExplainDocument,
    FailureDocument,
    GcDocument,
    LogLineDocument,
    LogsDocument,
    RestoreDocument,
    StatusDocument,
    StudyStatus,
    TrialDocument,
    TrialFile,
    WorkerDocument,
)


def status_document(
    store: Store, *, url: str, name: str | None = None, traceback: bool = False
) -> StatusDocument:
    """Return the states of the studies in a database.

    Args:
        store: The database.
        url: Its address, which is shown without its password.
        name: The only study to describe; None for all.
        traceback: Whether to include the tracebacks of errors.

    Raises:
        StudyNotFoundError: There is no study of this name.
    """
    summaries = [store.studies.summary(name)] if name is not None else store.studies.list()
    return {
        "schema_version": SCHEMA_VERSION,
        "storage": redact_url(url),
        "studies": [
            _status(store, each, traceback=traceback, workers=name is not None)
            for each in summaries
        ],
    }


def _status(store: Store, found: StudySummary, *, traceback: bool, workers: bool) -> StudyStatus:
    groups = failures_of(store, found)
    cut_short = stopped_in_training(store, found)
    return {
        "name": found.name,
        "state": found.state,
        "metric": found.metric,
        "num_trials": sum(found.num_trials.values()),
        "trials": trials_by_state(
            found.num_trials, num_done=found.num_done, study_state=found.state
        ),
        "stopped_in_training": len(cut_short),
        "best": None
        if found.best_trial is None
        else {
            "trial": found.best_trial,
            "value": found.best_value,
            "reached": amounts(found.unit, found.best_epochs or 0),
        },
        "num_infeasible": found.num_infeasible,
        "requested": amounts(found.unit, found.trial_epochs),
        "trained": amounts(found.unit, found.plan_epochs),
        "trained_by_study": amounts(found.unit, found.trained_epochs),
        "seconds": found.plan_seconds,
        "seconds_by_study": found.seconds,
        "remaining": {
            "max_epochs": None
            if found.remaining.max_epochs is None
            else amounts(found.unit, found.remaining.max_epochs),
            "num_trials": found.remaining.num_trials,
            "most": amounts(found.unit, found.remaining.most_epochs),
            "num_enqueued": found.remaining.num_enqueued,
            "requested_max_epochs": found.remaining.requested_max_epochs,
        },
        "seeds": found.num_seeds,
        "errors": failure_documents(groups, traceback=traceback),
        "workers": worker_documents(store, found.name) if workers else None,
    }


def worker_documents(store: Store, name: str) -> list[WorkerDocument]:
    """Return what each worker has used that trained for the task of a study."""
    return [
        {
            "worker": each.worker,
            "device": each.device,
            "num_stages": each.num_stages,
            "busy_s": each.busy_s,
            "seconds": each.seconds,
            "peak_bytes": each.peak_bytes,
        }
        for each in store.studies.workers(store.studies.get(name))
    ]


def failures_of(store: Store, found: StudySummary) -> list[FailureGroup]:
    """Return the errors of a study's trials."""
    if not found.num_trials.get("failed"):
        return []
    return failure_groups(store.studies.failures(found.id))


def stopped_in_training(store: Store, found: StudySummary) -> list[int]:
    """Return the last epoch of each trial whose training was stopped, in ascending order."""
    if not num_stopped_in_training(found.num_trials, study_state=found.state):
        return []
    return sorted(store.studies.trained_to(found.id, state="running").values())


def failure_documents(groups: Sequence[FailureGroup], *, traceback: bool) -> list[FailureDocument]:
    """Return errors of trials as documents."""
    return [
        {
            "trials": list(group.trials),
            "message": group.message,
            "traceback": group.traceback if traceback else "",
        }
        for group in groups
    ]


def amounts(unit: TimeUnit, epochs: float) -> Amounts:
    """Return a number of epochs in all units that a study counts in.

    >>> amounts(TimeUnit(name="steps", per_epoch=500), 10)
    {'epochs': 10, 'steps': 5000}
    """
    return {"epochs": epochs, **({} if unit.is_epochs else {unit.name: unit.count(epochs)})}


# -- the best trials --------------------------------------------------------------------------

Seeds = Mapping[int, Sequence[float]]
"""The last value of each seed of the trials that have reported, by trial number."""


def last_values(store: Store, info: StudyInfo) -> Seeds:
    """Return the last value of the first metric for each seed; empty for a study of one seed."""
    if info.num_seeds < 2:
        return {}
    found = store.studies.seed_curves(info.id, _objectives(info)[0])
    return {number: [c[-1] for c in curves] for number, curves in found.items() if curves[0]}


def best_certainty(
    info: StudyInfo, trials: Sequence[TrialRecord], *, best: Sequence[TrialRecord], seeds: Seeds
) -> float | None:
    """Return how sure it is which trial is best, as ``Study.best_trial`` says it.

    Studies of one seed or of several objectives do not say it.
    """
    if not seeds or isinstance(info.spec.get("metric"), list):
        return None
    found = [t for t in trials if t.state != "failed" and t.value is not None and t.feasible]
    sign = -1.0 if info.spec.get("mode") == "min" else 1.0
    return certainty(
        found.index(best[0]),
        [sign * (trial.value or 0.0) for trial in found],
        [
            standard_deviation(values) / math.sqrt(len(values))
            for values in (seeds[trial.number] for trial in found)
        ],
        seed=info.spec.get("seed", 0),
    )


def best_of(info: StudyInfo, trials: Sequence[TrialRecord]) -> Sequence[TrialRecord]:
    """Return the best trial of a study, or its Pareto front.

    Raises:
        ThriftyError: No trial has reported, all have failed, or none keeps the constraints.
    """
    best = best_trials(info, trials)
    if not best:
        raise ThriftyError(f"study {info.name!r} {_why_none(trials)}")
    return best


def _why_none(trials: Sequence[TrialRecord]) -> str:
    """Return why a study has no best trial, as the end of a sentence."""
    failed = {trial.number: trial.error for trial in trials if trial.state == "failed"}
    if any(trial.value is not None and trial.state != "failed" for trial in trials):
        return "has no trial that keeps its constraints"
    if failed:
        listed = "\n".join(failure_lines(failure_groups(failed)))
        return f"has no results, because all trials that ended have failed:\n{listed}"
    return "has no results yet"


def best_document(store: Store, name: str) -> BestDocument:
    """Return the best trial of a study, or its Pareto front.

    Raises:
        StudyNotFoundError: There is no study of this name.
        ThriftyError: No trial has reported, all have failed, or none keeps the constraints.
    """
    info = store.studies.current(name)
    trials = store.studies.load(info.id).trials
    seeds = last_values(store, info)
    best = best_of(info, trials)
    sure = best_certainty(info, trials, best=best, seeds=seeds)
    attributes = store.studies.user_attrs(info.id)
    artifacts = store.studies.artifacts(info.id)
    return {
        "schema_version": SCHEMA_VERSION,
        "study": info.name,
        "metric": list(_objectives(info)),
        "mode": _modes(info),
        "trials": [
            trial_document(
                info,
                each,
                values=seeds.get(each.number, ()),
                certainty=sure,
                user_attrs=attributes.get(each.number),
                artifacts=artifacts.get(each.number, {}).values(),
            )
            for each in best
        ],
    }


def logs_document(store: Store, name: str, trial: int, *, last: int | None) -> LogsDocument:
    """Return what a trial has logged.

    Args:
        store: The database.
        name: The study.
        trial: Number of the trial.
        last: How many of the last lines to return (default: all kept lines).

    Raises:
        StudyNotFoundError: There is no study of this name.
        UsageError: There is no such trial.
    """
    info, summary = store.studies.get(name), store.studies.summary(name)
    num_trials = sum(summary.num_trials.values())
    if not 0 <= trial < num_trials:
        raise UsageError(no_such_trial(name, trial, num_trials=num_trials))
    found = store.log_lines.of(info, trial)
    lines: list[LogLineDocument] = [
        {
            "epoch": each.epoch,
            "at": each.line.at,
            "level": each.line.level,
            "logger": each.line.logger,
            "text": each.line.text,
        }
        for each in (found if last is None else found[-last:])
    ]
    return {"schema_version": SCHEMA_VERSION, "study": info.name, "trial": trial, "lines": lines}


def trial_document(
    info: StudyInfo,
    trial: TrialRecord,
    *,
    values: Collection[float] = (),
    certainty: float | None = None,
    user_attrs: Mapping[str, Any] | None = None,
    artifacts: Iterable[Artifact] = (),
) -> TrialDocument:
    """Return a trial as a document.

    Args:
        info: The study.
        trial: The trial.
        values: The last value of each seed; empty for one seed.
        certainty: Probability that it is the best trial, if it is known.
        user_attrs: Its user attributes.
        artifacts: Its artifacts.
    """
    metric = _objectives(info)[0]
    return {
        "number": trial.number,
        "state": trial_state(info, trial),
        "value": trial.value,
        "values": {metric: trial.value, **(trial.objectives or {})},
        "reached": amounts(stored_unit(info.spec), trial.reached),
        "config": config_to_json(trial.config),
        "sd": standard_deviation(list(values)) if len(values) > 1 else None,
        "seeds": max(1, len(values)),
        "certainty": certainty,
        "user_attrs": dict(user_attrs or {}),
        "artifacts": trial_files(artifacts),
    }


def trial_files(artifacts: Iterable[Artifact]) -> list[TrialFile]:
    """Return artifacts of a trial as documents."""
    return [
        {"name": each.name, "digest": each.digest, "num_bytes": each.num_bytes, "error": each.error}
        for each in artifacts
    ]


def trial_state(info: StudyInfo, trial: TrialRecord) -> str:
    """Return the trial's state as in ``TrialResult``.

    Args:
        info: The study, whose state is that of ``Studies.current``.
        trial: The trial.
    """
    horizon = info.spec.get("max_epochs") if trial.horizon is None else trial.horizon
    return shown_state(trial.state, reached=trial.reached, horizon=horizon, study_state=info.state)


def _objectives(info: StudyInfo) -> list[str]:
    return _as_list(info.spec.get("metric", ""))


def _modes(info: StudyInfo) -> list[str]:
    return _as_list(info.spec.get("mode", "max"))


def _as_list(value: Any) -> list[str]:
    return list(value) if isinstance(value, list) else [value]


# -- what studies share -----------------------------------------------------------------------


def explain_document(store: Store, name: str, other: str | None = None) -> ExplainDocument:
    """Return what two studies share.

    Args:
        store: The database.
        name: Name of a study.
        other: Name of the other one; None for the study whose task is most similar.

    Raises:
        StudyNotFoundError: There is no such study.
        UsageError: There is no other study.
    """
    found = comparison(store, name, other)
    return {
        "schema_version": SCHEMA_VERSION,
        "studies": list(found.names),
        "shares": found.shares,
        "why": found.why,
        "differences": list(found.differences),
    }


def comparison(store: Store, name: str, other: str | None) -> Comparison:
    """Return what a study and another one share; None: the study whose task is most similar.

    Raises:
        StudyNotFoundError: There is no such study.
        UsageError: There is no other study.
    """
    one, two = two_studies(store, name, other)
    is_one_plan = one.plan == two.plan
    return compare(one, two, num_common=store.studies.num_common(one, two) if is_one_plan else 0)


def two_studies(store: Store, name: str, other: str | None) -> tuple[StudyInfo, StudyInfo]:
    """Return a study and another one, or the one whose task is most similar.

    Raises:
        StudyNotFoundError: There is no such study.
        UsageError: There is no other study.
    """
    one = store.studies.get(name)
    if other is not None:
        return one, store.studies.get(other)
    rest = [info for info in store.studies.made().values() if info.id != one.id]
    return one, most_alike(one, rest)


def act_document(name: str, act: Act) -> ActDocument:
    """Return the document of one request to a study."""
    return {"schema_version": SCHEMA_VERSION, "study": name, "act": _act(act)}


def acts_document(store: Store, name: str) -> ActsDocument:
    """Return all requests to a study.

    Raises:
        StudyNotFoundError: There is no such study.
    """
    acts = store.acts.of(store.studies.get(name).id)
    return {"schema_version": SCHEMA_VERSION, "study": name, "acts": [_act(act) for act in acts]}


def deleted_document(study: Deleted) -> DeleteDocument:
    """Return what was deleted."""
    return {"schema_version": SCHEMA_VERSION, "deleted": study.name, "num_trials": study.num_trials}


def restore_document(restored: str | None, deleted: Sequence[Deleted]) -> RestoreDocument:
    """Return the study that was restored, if one was, and those that can be."""
    return {
        "schema_version": SCHEMA_VERSION,
        "restored": restored,
        "deleted": [_deleted(each) for each in deleted],
    }


def gc_document(garbage: Garbage, *, dry_run: bool) -> GcDocument:
    """Return what was removed."""
    return {
        "schema_version": SCHEMA_VERSION,
        "dry_run": dry_run,
        "studies": [_deleted(each) for each in garbage.studies],
        "num_states": garbage.num_states,
        "num_bytes": garbage.num_bytes,
        "num_elsewhere": garbage.num_elsewhere,
        "num_busy": garbage.num_busy,
    }


def _deleted(study: Deleted) -> DeletedStudy:
    return {"name": study.name, "num_trials": study.num_trials, "who": study.who, "at": study.at}


def _act(act: Act) -> ActOfStudy:
    return {
        "kind": act.kind,
        "trial": act.trial,
        "text": act.text,
        "who": act.who,
        "at": act.at,
        "queued": act.is_queued,
        "answer": act.answer,
    }
