"""What a notebook shows of a study and of its trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from heapq import nsmallest
from typing import Literal

from thrifty.core import StudyNotFoundError, ThriftyError
from thrifty.store import redact_url

from ._goals import Goals
from ._html import MAX_COLUMNS, MAX_ROWS, config_rows, facts, table, value_text
from ._ledger import Ledger
from ._reader import Reader
from ._repository import StudyRepository
from ._results import TrialResult, best_ones, candidates, savings, state_of


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
        title = _counted(Counter(trial.state for trial in self))
        if len(self) > 1:
            title += f", best {self._goals.metrics[0]} first"
        return table(
            title,
            ("trial", "state", "epochs", *self._goals.metrics, *violation, *names),
            (tuple(self._cells(trial, names)) for trial in shown),
            notes=notes,
        )

    def _rank(self, trial: TrialResult) -> tuple[bool, float, float, int]:
        """Return a key that is smaller for better trials; failed trials come last."""
        lacks = trial.state == "failed" or trial.value is None
        value = 0.0 if trial.value is None else trial.value
        return lacks, trial.violation, -self._goals.sign * value, trial.number

    def _cells(self, trial: TrialResult, names: Iterable[str]) -> Iterator[object]:
        yield trial.number
        message = trial.error.partition("\n")[0]
        yield f"{trial.state}: {message}" if message else trial.state
        yield trial.epochs
        for metric in self._goals.metrics:
            yield value_text(trial.values.get(metric))
        if self._goals.constraints:
            yield value_text(trial.violation if trial.values else None)
        for name in names:
            yield value_text(trial.config[name]) if name in trial.config else "-"


def overview(
    archive: StudyRepository, reader: Reader, *, result: Callable[[Ledger, int], TrialResult]
) -> str:
    """Return a study as HTML: what it optimises, how far it is, and its best trials.

    Args:
        archive: The records of the study.
        reader: Reads the ledger.
        result: Returns the result of a trial, by number.
    """
    goals = archive.recipe.goals
    pairs = zip(goals.metrics, goals.modes, strict=True)
    rows: list[tuple[str, object]] = [
        ("storage", redact_url(archive.storage.url)),
        ("algorithm", archive.recipe.algorithm),
        ("metric", ", ".join(f"{metric} ({mode})" for metric, mode in pairs)),
    ]
    if goals.constraints:
        limits = (
            f"{name} {b.side.replace('_', ' ')} {b.limit:g}" for name, b in goals.constraints
        )
        rows.append(("constraints", ", ".join(limits)))
    title = f"Study {archive.name!r}"
    try:
        state, ledger = reader.state(archive)
    except StudyNotFoundError:
        return facts(title, [*rows, ("state", "not run yet")])
    except ThriftyError as error:
        return facts(title, [*rows, ("state", f"cannot be read: {_in_one_line(error)}")])
    if state:
        rows.append(("state", _ADVICE.get(state, state)))
    states = (state_of(trial, max_epochs=ledger.max_epochs) for trial in ledger.history)
    rows.append(("trials", _counted(Counter(states))))
    told = [("savings", savings(ledger))] if ledger.trial_epochs else []
    best = [result(ledger, trial.number) for trial in best_ones(ledger)]
    if not best:
        return facts(title, [*rows, ("best", _why_none(ledger, name=archive.name)), *told])
    if len(goals.metrics) > 1:
        front = Trials(best, goals=goals, source="best_trials")
        return facts(title, [*rows, ("best", "the Pareto front"), *told]) + front._repr_html_()
    (trial,) = best
    place = f"trial {trial.number} at epoch {trial.epochs:,}"
    found = ("best", f"{goals.metrics[0]} {value_text(trial.value)}, {place}")
    config, notes = config_rows(trial.config, source="study.best_trial.config")
    return facts(title, [*rows, found, *config, *told], notes=notes)


def _counted(states: Counter[str]) -> str:
    """Return the number of trials, in total and in each state.

    >>> _counted(Counter(["failed", "done", "done"]))
    '3 trials: 2 done, 1 failed'
    """
    total = states.total()
    each = ", ".join(f"{states[state]:,} {state}" for state in _STATES if states[state])
    return f"{total:,} trial{'' if total == 1 else 's'}{': ' if each else ''}{each}"


def _why_none(ledger: Ledger, *, name: str) -> str:
    """Return why a study has no best trial, as ``best_trial`` says it."""
    try:
        candidates(ledger, name=name)
    except ThriftyError as error:
        return _in_one_line(error)
    return "-"


def _in_one_line(error: ThriftyError) -> str:
    return " ".join(str(error).split())
