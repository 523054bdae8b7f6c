"""Reading a study: its state, what is known, who trained it, and what a notebook shows."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import nsmallest
from typing import Any, Literal

from thrifty.core import StoreUnreachableError, StudyNotFoundError, ThriftyError, plain_logger
from thrifty.space import Config, Timeline, TimeUnit
from thrifty.space._units import EPOCHS
from thrifty.store import Store, StudyInfo, redact_url
from thrifty.store._address import read_address
from thrifty.store._epoch_times import mean_curve
from thrifty.store._reports import trials_text
from thrifty.store._steering_requests import is_run

from ._goals import Goals
from ._ledger import Ledger
from ._repository import StudyRepository
from ._results import (
    MAX_COLUMNS,
    MAX_ROWS,
    TrialResult,
    best_ones,
    candidates,
    certainty_of,
    config_rows,
    facts,
    savings,
    state_of,
    table,
    value_text,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The sources of the epochs that a study's trials have reached, each epoch counted once.

    Epochs that this run trained count even if no trial has reported them yet: those of a stage that
    was stopped, whose state is kept.

    Attributes:
        trained: Epochs that this run trained.
        unreported: Those of them that no trial has reported.
        evaluated: Epochs that this run did not train: their kept states were evaluated again.
        known: Epochs known before, by the id of the study that trained them (None: deleted study).
    """

    trained: int
    evaluated: int
    known: Mapping[int | None, int]
    unreported: int = 0
    unit: TimeUnit = EPOCHS

    @classmethod
    def of(cls, ledger: Ledger) -> Provenance:
        """Count the epochs that the trials of a study have reached, or that this run trained."""
        places: set[tuple[int, int]] = set()
        for number in range(len(ledger.history)):
            for passed in ledger.places(number):
                for place in passed:
                    if place in places:
                        break  # all earlier epochs are counted as well
                    places.add(place)
        fresh = places - ledger.epochs.origins.keys()
        unreported = ledger.epochs.times.keys() - ledger.epochs.origins.keys() - places
        evaluated = len((fresh | unreported) & ledger.epochs.evaluated)
        return cls(
            trained=len(fresh) + len(unreported) - evaluated,
            unreported=len(unreported - ledger.epochs.evaluated),
            evaluated=evaluated,
            known=Counter(ledger.epochs.origins[place] for place in places - fresh),
            unit=ledger.unit,
        )

    def text(self, studies: Mapping[int, StudyInfo], *, own: int, is_stopped: bool = False) -> str:
        """Return the sources in one line, or an empty string if no trial has reported.

        Args:
            studies: The studies of the database, by id.
            own: The id of this study.
            is_stopped: Whether trials are left to train.
        """
        count, name = self.unit.count, self.unit.name
        num_known = count(sum(self.known.values()))
        evaluated, trained = count(self.evaluated), count(self.trained)
        total = num_known + evaluated + trained
        if not total:
            return ""
        parts = []
        if num_known:
            parts.append(f"{num_known:,} of {total:,} {name} known from {self._from(studies, own)}")
        if evaluated:
            of = "" if num_known else f" of {total:,} {name}"
            parts.append(f"{evaluated:,}{of} evaluated again with kept states")
        if not trained:
            return f"{', '.join(parts)}; " + ("none trained" if is_stopped else "nothing to train")
        shown = f"{trained:,}" if parts else self.unit.short(self.trained)
        unreported = count(self.unreported) if is_stopped else 0
        rest = f" ({unreported:,} of them not reported by a trial yet)" if unreported else ""
        return ", ".join([*parts, f"{shown} trained{rest}"])

    def _from(self, studies: Mapping[int, StudyInfo], own: int) -> str:
        first, *rest = sorted(self.known, key=lambda study: -self.known[study])
        info = None if first is None else studies.get(first)
        if info is None:
            name = "a study that was deleted"
        else:
            day = time.strftime("%Y-%m-%d", time.localtime(info.created_at))
            name = f"this study ({day})" if first == own else f"study {info.name!r} ({day})"
        more = (
            "" if not rest else " and another one" if len(rest) == 1 else f" and {len(rest)} others"
        )
        return name + more


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownEpoch:
    """An epoch of a configuration that is trained already.

    Attributes:
        epoch: The epoch, from 1.
        metrics: The metrics after it.
        studies: The studies that trained it, several only with several seeds; None for a study that
            was deleted.
        kept: Whether the state after it is kept, so that training can go on from there.

    With several seeds, an epoch is known if it is for all of them; its metrics are their means.
    """

    epoch: int
    metrics: Mapping[str, float]
    studies: tuple[str | None, ...]
    kept: bool


def known_epochs(
    repository: StudyRepository, config: Config, *, epochs: int, horizon: int, num_seeds: int
) -> list[KnownEpoch]:
    """Return which of a configuration's first epochs are known, in order.

    Args:
        repository: The study whose plan is looked at.
        config: The configuration.
        epochs: The number of epochs.
        horizon: The length of its training; schedules without an end of their own depend on it.
        num_seeds: The number of seeds that a configuration is trained with.
    """
    plan, origins, names = repository.known_with_origins()
    places = [
        plan.insert(Timeline(config, epochs=horizon, replica=replica))
        for replica in range(num_seeds)
    ]
    found = []
    for epoch in range(1, epochs + 1):
        owners = [plan.owner(place, epoch) for place in places]
        if any(epoch not in owner.metrics for owner in owners):
            break
        ids = dict.fromkeys(origins.get((owner.id, epoch)) for owner in owners)
        (metrics,) = mean_curve([[owner.metrics[epoch]] for owner in owners])
        found.append(
            KnownEpoch(
                epoch=epoch,
                metrics=dict(metrics),
                studies=tuple(None if each is None else names.get(each) for each in ids),
                kept=all(epoch in owner.checkpoints for owner in owners),
            )
        )
    return found


logger = plain_logger(__name__)


class Reader:
    """A cache of a study's ledger, which is read again when the database has changed.

    While this process runs the study, its own ledger is ahead of the database.
    """

    def __init__(self) -> None:
        self._ledger: Ledger | None = None
        self._mark: Any = None
        """State of the database when the ledger was read (None: unknown)."""
        self._is_running = False

    def current(self, repository: StudyRepository) -> Ledger:
        """Return the current ledger.

        Raises:
            StudyNotFoundError: The study does not exist. The message says what to do in Python.
        """
        if self._ledger is not None and (self._is_running or is_in_memory(repository)):
            return self._ledger
        try:
            with repository.open(create=False) as store:
                return self.read(repository, store)
        except StudyNotFoundError:
            raise StudyNotFoundError(
                f"study {repository.name!r} is not in {redact_url(repository.storage.url)}: "
                "call study.run() first, or give Study the name= and the storage= of a study that "
                "was run"
            ) from None
        except StoreUnreachableError as error:
            if self._ledger is None:
                raise
            logger.warning("%s; this is what was read of the study before", error)
            return self._ledger

    def state(self, repository: StudyRepository) -> tuple[str, Ledger]:
        """Return the study's state as in ``StudySummary``, and its ledger.

        The state is "" for a study in memory.

        Raises:
            StudyNotFoundError: The study does not exist.
            StudyMismatchError: The database has a different study of this name.
            StoreUnreachableError: The database does not answer, and nothing was read before.
        """
        if self._ledger is not None and self._is_running:
            return "running", self._ledger
        if is_in_memory(repository):
            return "", self.current(repository)
        try:
            with repository.open(create=False) as store:
                repository.find(store)
                state = store.studies.summary(repository.name).state
                return state, self.read(repository, store)
        except StoreUnreachableError:
            if self._ledger is None:
                raise
            return "unknown; its database does not answer", self._ledger

    def read(self, repository: StudyRepository, store: Store) -> Ledger:
        """Return the ledger of a study that this process is not running."""
        mark = store.studies.mark(repository.name)
        if self._ledger is None or mark is None or mark != self._mark:
            self._ledger = repository.load(store, store.studies.get(repository.name))
            self._mark = mark
        # A process that is killed writes nothing, so the mark does not tell.
        self._ledger.is_run = is_run(store.studies.current(repository.name).state)
        return self._ledger

    def finished(self, repository: StudyRepository, store: Store, info: StudyInfo) -> Ledger | None:
        """Return the ledger of a study that has nothing left to try, or None."""
        if info.state != "done" or repository.recipe.extends(info.spec):
            return None
        ledger = self.read(repository, store)
        return None if ledger.history.enqueued else ledger

    @contextmanager
    def running(
        self, repository: StudyRepository, store: Store, info: StudyInfo
    ) -> Iterator[Ledger]:
        """Provide the ledger with which this process runs the study in this context."""
        self._ledger, self._mark = repository.load(store, info), None
        self._is_running = self._ledger.is_run = True
        try:
            yield self._ledger
            self._ledger.epochs.count_as_known()
            if not repository.storage.is_shared:
                self._mark = store.studies.mark(repository.name)
        finally:
            self._is_running = self._ledger.is_run = False


def is_in_memory(repository: StudyRepository) -> bool:
    """Return whether the database is in memory and vanishes when the run ends.

    Raises:
        UsageError: The storage is not a database address.
    """
    url = read_address(repository.storage.url)
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


_STATES = ("done", "running", "paused", "stopped", "failed")
_ADVICE = {
    "stopped": "stopped; run it again to go on",
    "interrupted": "interrupted, its process is gone; run it again to go on",
}


class Trials(list[TrialResult]):
    """A list of trials that a notebook shows as a table, the best ones first.

    Args:
        trials: The trials, in the order of the list.
        goals: What makes a trial better than another.
        source: The property of ``Study`` that returned the list.
    """

    def __init__(
        self,
        trials: Iterable[TrialResult],
        *,
        goals: Goals,
        source: Literal["trials", "best_trials"] = "trials",
    ) -> None:
        super().__init__(trials)
        self._goals = goals
        self._source = source

    @property
    def _has_seeds(self) -> bool:
        return any(trial.num_seeds > 1 for trial in self)

    def _repr_html_(self) -> str:
        shown = nsmallest(MAX_ROWS, self, key=self._rank)
        names = list(dict.fromkeys(name for trial in shown for name in trial.config))
        num_hidden = len(names) - MAX_COLUMNS
        names = names[:MAX_COLUMNS]
        notes = []
        if num_hidden > 0:
            notes.append(f"… and {num_hidden:,} more hyper-parameters: trial.config")
        if len(self) > len(shown):
            everything = f"list(study.{self._source})"
            if self._source == "trials":
                everything += " or study.trials_dataframe()"
            notes.append(f"… and {len(self) - len(shown):,} more: {everything}")
        violation = ("violation",) if self._goals.constraints else ()
        sd = ("sd over seeds",) if self._has_seeds else ()
        title = _counted(Counter(trial.state for trial in self))
        if len(self) > 1:
            title += f", best {self._goals.metrics[0]} first"
        return table(
            title,
            ("trial", "state", self._unit.name, *self._goals.metrics, *sd, *violation, *names),
            (tuple(self._cells(trial, names)) for trial in shown),
            notes=notes,
        )

    @property
    def _unit(self) -> TimeUnit:
        return self[0].unit if self else EPOCHS

    def _rank(self, trial: TrialResult) -> tuple[bool, float, float, int]:
        """Return a key that is smaller for better trials; failed trials come last."""
        lacks = trial.state == "failed" or trial.value is None
        value = 0.0 if trial.value is None else trial.value
        return lacks, trial.violation, -self._goals.sign * value, trial.number

    def _cells(self, trial: TrialResult, names: Iterable[str]) -> Iterator[object]:
        yield trial.number
        message = trial.error.partition("\n")[0]
        yield f"{trial.state}: {message}" if message else trial.state
        yield self._unit.count(trial.epochs)
        for metric in self._goals.metrics:
            yield value_text(trial.values.get(metric))
        if self._has_seeds:
            yield value_text(trial.sd)
        if self._goals.constraints:
            yield value_text(trial.violation if trial.values else None)
        for name in names:
            yield value_text(trial.config[name]) if name in trial.config else "-"


def overview(
    repository: StudyRepository, reader: Reader, *, result: Callable[[Ledger, int], TrialResult]
) -> str:
    """Return a study as HTML: what it optimises, how far it is, and its best trials.

    Args:
        repository: The records of the study.
        reader: Reads the ledger.
        result: Returns the result of a trial, by number.
    """
    goals = repository.recipe.goals
    pairs = zip(goals.metrics, goals.modes, strict=True)
    rows: list[tuple[str, object]] = [
        ("storage", redact_url(repository.storage.url)),
        ("algorithm", repository.recipe.algorithm),
        ("metric", ", ".join(f"{metric} ({mode})" for metric, mode in pairs)),
    ]
    if goals.constraints:
        limits = (f"{name} {b.side.replace('_', ' ')} {b.limit:g}" for name, b in goals.constraints)
        rows.append(("constraints", ", ".join(limits)))
    title = f"Study {repository.name!r}"
    try:
        state, ledger = reader.state(repository)
    except StudyNotFoundError:
        return facts(title, [*rows, ("state", "not run yet")])
    except ThriftyError as error:
        return facts(title, [*rows, ("state", f"cannot be read: {_in_one_line(error)}")])
    if state:
        rows.append(("state", _ADVICE.get(state, state)))
    states = (state_of(trial, is_run=ledger.is_run) for trial in ledger.history)
    rows.append(("trials", _counted(Counter(states))))
    told: list[tuple[str, object]] = []
    if ledger.trial_epochs:
        told.append(("savings", savings(ledger)))
    best = [result(ledger, trial.number) for trial in best_ones(ledger)]
    if not best:
        return facts(title, [*rows, ("best", _why_none(ledger, name=repository.name)), *told])
    if len(goals.metrics) > 1:
        front = Trials(best, goals=goals, source="best_trials")
        return facts(title, [*rows, ("best", "the Pareto front"), *told]) + front._repr_html_()
    (trial,) = best
    place = f"trial {trial.number} at {trial.unit.place(trial.epochs)}"
    found = ("best", f"{goals.metrics[0]} {value_text(trial.value)}, {place}")
    if trial.interval is not None:
        rows += [("seeds of each trial", trial.num_seeds)]
        low, high = map(value_text, trial.interval)
        sure = certainty_of(ledger, trial.number, seed=repository.recipe.seed)
        told = [
            ("95 % interval of the mean", f"{low} to {high}"),
            ("probability of being the best", f"{sure:.0%}"),
            *told,
        ]
    config, notes = config_rows(trial.config, source="study.best_trial.config")
    return facts(title, [*rows, found, *config, *told], notes=notes)


def _counted(states: Counter[str]) -> str:
    """Return the number of trials, in total and in each state.

    >>> _counted(Counter(["failed", "done", "done"]))
    '3 trials: 2 done, 1 failed'
    """
    total = states.total()
    each = ", ".join(f"{states[state]:,} {state}" for state in _STATES if states[state])
    return f"{trials_text(total)}{': ' if each else ''}{each}"


def _why_none(ledger: Ledger, *, name: str) -> str:
    """Return why a study has no best trial, as ``best_trial`` says it."""
    try:
        candidates(ledger, name=name)
    except ThriftyError as error:
        return _in_one_line(error)
    return "-"


def _in_one_line(error: ThriftyError) -> str:
    return " ".join(str(error).split())
