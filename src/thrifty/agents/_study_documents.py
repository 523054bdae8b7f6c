"""Documents of what a study knows that its database does not: forecasts, savings, importance."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from thrifty.pack.trial._trial_needs import MemoryForecast
from thrifty.space import TimeUnit, config_to_json
from thrifty.space._coordinates import read_config, whole_config
from thrifty.store import failure_groups
from thrifty.study import Branch, Extension, Forecast, KnownEpoch, Savings, Study, TrialResult
from thrifty.study._importance import Level, Method

from ._store_documents import amounts, failure_documents, trial_files
from .documents import (
    SCHEMA_VERSION,
    BranchDocument,
    ConfigCost,
    CostDocument,
    EnqueuedDocument,
    ExtensionDocument,
    ImportanceDocument,
    MemoryDocument,
    PlanDocument,
    ResultDocument,
    SavingsDocument,
    TrialDocument,
    TriedDocument,
    UnitDocument,
)


def plan_document(name: str, found: Forecast) -> PlanDocument:
    """Return the forecast of a study as a document."""
    low, high = found.unique_range
    return {
        "schema_version": SCHEMA_VERSION,
        "study": name,
        "unit": _unit_document(found.unit),
        "num_trials": found.num_trials,
        "trial_epochs": found.trial_epochs,
        "unique_epochs": found.unique_epochs,
        "unique_epochs_low": low,
        "unique_epochs_high": high,
        "exact": found.exact and found.known_exact,
        "merge_rate": found.merge_rate,
        "known_epochs": found.known_epochs,
        "evaluated_epochs": found.evaluated_epochs,
        "epochs_to_train": found.epochs_to_train,
        "seconds": found.seconds,
        "seconds_to_train": found.seconds_to_train,
        "memory": None if found.memory is None else _memory_document(found.memory),
        "choice": found.choice,
    }


def _unit_document(unit: TimeUnit) -> UnitDocument:
    return {"name": unit.name, "per_epoch": unit.per_epoch}


def _memory_document(memory: MemoryForecast) -> MemoryDocument:
    return {
        "capacity_bytes": memory.capacity_bytes,
        "place": memory.place,
        "base_bytes": memory.base_bytes,
        "trial_bytes": list(memory.own_bytes),
        "trials_at_once": memory.num_trials(shared=True)[0],
        "trials_at_once_alone": memory.num_trials(shared=False)[0],
    }


def result_document(
    study: Study, *, done: bool, signal: int | None = None, written: Sequence[str] = ()
) -> ResultDocument:
    """Return the results of a run.

    Args:
        study: The study.
        done: Whether nothing is left to train.
        signal: The signal that stopped the run.
        written: Files that were written.

    Raises:
        ThriftyError: All trials have failed, or none keeps the constraints.
    """
    trials = study.trials
    best: Sequence[TrialResult] = ()
    if any(trial.epochs or trial.error for trial in trials):
        best = study.best_trials if len(study.goals.metrics) > 1 else [study.best_trial]
    errors = {
        trial.number: ("", *_parts(trial.error)) for trial in trials if trial.state == "failed"
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study.name,
        "num_trials": len(trials),
        "trials": dict(sorted(Counter(trial.state for trial in trials).items())),
        "done": done,
        "signal": signal,
        "best": [_trial_document(each) for each in best],
        "errors": failure_documents(failure_groups(errors), traceback=False),
        "savings": _savings_document(study.savings),
        "written": list(written),
    }


def _parts(error: str) -> tuple[str, str]:
    message, _, traceback = error.partition("\n")
    return message, traceback


def _trial_document(trial: TrialResult) -> TrialDocument:
    return {
        "number": trial.number,
        "state": trial.state,
        "value": trial.value,
        "values": dict(trial.values),
        "reached": amounts(trial.unit, trial.epochs),
        "config": config_to_json(trial.config),
        "sd": trial.sd,
        "seeds": trial.num_seeds,
        "certainty": trial.certainty,
        "user_attrs": dict(trial.user_attrs),
        "artifacts": trial_files(trial.artifacts.values()),
    }


def _savings_document(found: Savings) -> SavingsDocument:
    return {
        "trial_epochs": found.trial_epochs,
        "unique_epochs": found.unique_epochs,
        "evaluated_epochs": found.evaluated_epochs,
        "unreported_epochs": found.unreported_epochs,
        "retrained_epochs": found.retrained_epochs,
        "packed_epochs": found.packed_epochs,
        "seconds": found.seconds,
        "seconds_trained": found.seconds_trained,
        "seconds_checks": found.seconds_checks,
        "seconds_alone": found.seconds_alone,
        "shared_factor": found.shared_factor,
        "packed_factor": found.packed_factor,
    }


def cost_document(
    study: Study, configs: Sequence[Mapping[str, Any]], *, epochs: int | None = None
) -> CostDocument:
    """Return what training some configurations of a study costs, and what is known of them.

    Args:
        study: The study.
        configs: The configurations; schedules may be JSON objects.
        epochs: How many of their first epochs are trained (default: all).

    Raises:
        SpaceError: A configuration is not in the space, or lacks a hyper-parameter.
    """
    given = [whole_config(study.space, read_config(each)) for each in configs]
    # Never run and never stored, so its name has to be one that no stored study has.
    found = study.only(given, epochs=epochs, name=secrets.token_hex(16)).plan(memory=False)
    length = study.algorithm.max_epochs if epochs is None else epochs
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study.name,
        "unit": _unit_document(found.unit),
        "configs": [_config_cost(study, config, epochs=length) for config in given],
        "trial_epochs": found.trial_epochs,
        "unique_epochs": found.unique_epochs,
        "known_epochs": found.known_epochs,
        "evaluated_epochs": found.evaluated_epochs,
        "epochs_to_train": found.epochs_to_train,
        "seconds_to_train": found.seconds_to_train,
    }


def _config_cost(study: Study, config: Mapping[str, Any], *, epochs: int) -> ConfigCost:
    known = study.known(config, epochs=epochs)
    return {
        "config": config_to_json(config),
        "known_epochs": len(known),
        "epochs": min(epochs, study.space.horizon_of(config) or epochs),
        "trained_by": _names(known),
        "metrics": dict(known[-1].metrics) if known else None,
    }


def branch_document(study: Study, branch: Branch, *, enqueued: bool) -> BranchDocument:
    """Return what a branch costs, and whether it is enqueued."""
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study.name,
        "trial": branch.trial,
        "epoch": branch.epoch,
        "config": config_to_json(branch.config),
        "known_epochs": branch.known_epochs,
        "kept_epoch": branch.kept_epoch,
        "epochs_again": branch.epochs_again,
        "epochs_to_train": branch.epochs_to_train,
        "enqueued": enqueued,
    }


def enqueued_document(study: Study, config: Mapping[str, Any]) -> EnqueuedDocument:
    """Return a configuration that was enqueued, and how much of it is known."""
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study.name,
        "config": config_to_json(config),
        "known_epochs": len(study.known(config)),
    }


def extension_document(study: Study, found: Extension, *, extended: bool) -> ExtensionDocument:
    """Return what a longer study costs, and whether it is extended."""
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study.name,
        "before": found.before,
        "after": found.after,
        "num_trials": found.num_trials,
        "num_unfinished": found.num_unfinished,
        "known_epochs": found.known_epochs,
        "epochs_again": found.epochs_again,
        "most_epochs_to_train": found.most_epochs_to_train,
        "extended": extended,
        "queued": found.is_queued,
    }


def tried_document(
    study: Study, configs: Sequence[Mapping[str, Any]], *, done: bool, signal: int | None = None
) -> TriedDocument:
    """Return the results of some configurations.

    Args:
        study: A study that ``Study.only`` has made, and that was run.
        configs: The configurations, all hyper-parameters included.
        done: Whether nothing is left to train.
        signal: The signal that stopped the run.
    """
    found = [trial for config in configs for trial in study.trials if trial.config == config]
    errors = {trial.number: ("", *_parts(trial.error)) for trial in found if trial.error}
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study.name,
        "metric": list(study.goals.metrics),
        "mode": list(study.goals.modes),
        "done": done,
        "signal": signal,
        "trials": [
            {**_trial_document(trial), "trained_by": _trained_by(study, trial)} for trial in found
        ],
        "errors": failure_documents(failure_groups(errors), traceback=False),
        "savings": _savings_document(study.savings),
    }


def _trained_by(study: Study, trial: TrialResult) -> list[str]:
    """Return the studies that have trained the epochs of a trial, each once."""
    return _names(study.known(trial.config)[: trial.epochs])


def _names(known: Sequence[KnownEpoch]) -> list[str]:
    """Return the studies that have trained some epochs, each once."""
    names = (name or "a study that was deleted" for each in known for name in each.studies)
    return list(dict.fromkeys(names))


def importance_document(study: Study, *, method: Method, level: Level) -> ImportanceDocument:
    """Return the shares of hyper-parameters as a document.

    Raises:
        UsageError: Too few trials have reported.
        MissingExtraError: scikit-learn or Optuna is not installed.
    """
    shares = study.importance(method=method, level=level)
    return {
        "schema_version": SCHEMA_VERSION,
        "study": study.name,
        "metric": study.metric,
        "method": method,
        "basis": shares.basis,
        "shares": dict(shares),
        "one_value": sorted(shares.one_value),
    }
