"""Trials that are given: configurations filled in, and earlier studies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from thrifty.core import SpaceError, StudyMismatchError, plain_logger
from thrifty.search import Trial
from thrifty.space import Choice, Coordinate, Coordinates, Domain, Float, Int, Space
from thrifty.store import PriorRecord

from ._goals import Goals
from ._ledger import Ledger


_MAX_DRAWS = 1000


def fill_config(
    space: Space, given: Mapping[str, Any], *, rng: np.random.Generator
) -> dict[str, Any]:
    """Return a configuration of the space with the given values; the others are drawn.

    Values are returned as the space itself would draw them (``1`` from a ``Float`` is ``1.0``), so
    that equal configurations are also equal in training.

    Raises:
        SpaceError: A name is not in the space, a value is not in its domain, or a hyper-parameter
            has a value where its conditions do not hold.

    >>> space = Space(
    ...     lr=Float(0.0, 1.0), kind=Choice(["sgd", "adam"]), m=Choice([0.9]).when(kind="sgd")
    ... )
    >>> fill_config(space, {"lr": 1, "m": 0.9}, rng=np.random.default_rng(0))
    {'lr': 1.0, 'kind': 'sgd', 'm': 0.9}
    """
    picked: dict[str, Any] = {}
    for name, value in given.items():
        if name not in space.names:
            raise SpaceError(
                f"{name!r} is not in the space ({', '.join(space.names)}); name "
                "hyper-parameters of the study"
            )
        try:
            picked.update(Coordinates(_alone(name, space[name])).values({name: value}))
        except SpaceError as error:
            raise SpaceError(f"{error}; give a value that is") from None
    coordinates = Coordinates(space)

    def pick(coordinate: Coordinate) -> Any:
        if coordinate.name in picked:
            return _as_drawn(coordinate, picked[coordinate.name])
        domain = coordinate.domain
        return (
            int(rng.integers(len(domain.options)))
            if isinstance(domain, Choice)
            else domain.sample(rng)
        )

    # A value with a condition restricts what may be drawn, so draw until the condition holds.
    for _ in range(_MAX_DRAWS):
        config = coordinates.compose(pick)
        missing = [name for name in given if name not in config]
        if not missing:
            return config
    raise SpaceError(
        f"{missing[0]!r} is there only {_conditions(space[missing[0]])}; leave it out, or give "
        "that, too"
    )


def _alone(name: str, value: Any) -> Space:
    """Return a space of only one hyper-parameter, without its conditions."""
    return Space(**{name: _free(value)})


def _free(value: Any) -> Any:
    conditional = isinstance(value, Float | Int | Choice)
    return replace(value, conditions=()) if conditional else value


def _as_drawn(coordinate: Coordinate, value: Any) -> Any:
    if not isinstance(coordinate.domain, Float):
        return value
    if coordinate.domain.step is None:
        return float(value)
    return coordinate.from_unit(coordinate.to_unit(value))


def _conditions(domain: Domain) -> str:
    return " and ".join(
        f"where {c.name} is {' or '.join(map(repr, c.values))}" for c in domain.conditions
    )


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
