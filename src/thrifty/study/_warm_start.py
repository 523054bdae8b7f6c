"""The trials of earlier studies that a new study learns from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from thrifty.core import SpaceError, StudyMismatchError, plain_logger
from thrifty.search import Trial
from thrifty.space import Coordinates, Space
from thrifty.store import PriorRecord

from ._goals import Goals
from ._ledger import Ledger


logger = plain_logger(__name__)


def check_goals(goals: Goals, *, source: str, theirs: Goals) -> None:
    """Raise StudyMismatchError unless an earlier study had the same objectives."""
    if (goals.metrics, goals.modes) != (theirs.metrics, theirs.modes):
        raise StudyMismatchError(
            f"warm_start: study {source!r} optimised {_said(theirs)}, this one {_said(goals)}; "
            "what one learnt says nothing to the other: leave it out, or optimise the same"
        )


def priors_of(ledger: Ledger, space: Space, *, source: str, goals: Goals) -> list[PriorRecord]:
    """Return the trials of an earlier study that the new study can learn from.

    They have reported or failed, and are of the new study's space.

    Raises:
        StudyMismatchError: The trials lack a metric that the new study needs.
    """
    coordinates = Coordinates(space)
    out: list[PriorRecord] = []
    num_skipped = 0
    for trial in ledger.history:
        if not trial.reached and trial.state != "failed":
            continue
        try:
            coordinates.values(trial.config)
        except SpaceError:
            num_skipped += 1
            continue
        curve = ledger.curve(trial.number)
        missing = [name for name in goals.names for metrics in curve if name not in metrics]
        if missing:
            raise StudyMismatchError(
                f"warm_start: the trials of study {source!r} have no metric {missing[0]!r}, which "
                "this study "
                "needs; leave the study out, or the constraint"
            )
        failed = trial.state == "failed"
        out.append(
            PriorRecord(
                config=trial.config,
                state="failed" if failed else "waiting",
                target=trial.target if failed else trial.reached,
                metrics=[{name: metrics[name] for name in goals.names} for metrics in curve],
            )
        )
    if num_skipped:
        logger.warning(
            "warm_start: %d trials of study %r are not of this study's space and were left out",
            num_skipped,
            source,
        )
    return out


def prior_trials(records: Iterable[PriorRecord], goals: Goals) -> Sequence[Trial]:
    """Return trials of earlier studies as algorithms see them, scored by the new study's goals."""
    return [_trial(number, record, goals) for number, record in enumerate(records)]


def _trial(number: int, record: PriorRecord, goals: Goals) -> Trial:
    metrics = record.metrics[-1] if record.metrics else None
    return Trial(
        number=number,
        config=record.config,
        target=record.target,
        reached=len(record.metrics),
        scores=tuple(goals.score(m) for m in record.metrics),
        state="failed" if record.state == "failed" else "waiting",
        objectives=() if metrics is None else goals.objectives(metrics),
        violation=0.0 if metrics is None else goals.violation(metrics),
    )


def _said(goals: Goals) -> str:
    return ", ".join(
        f"{m} ({mode})" for m, mode in zip(goals.metrics, goals.modes, strict=True)
    )
