"""Trials that were trained for different numbers of epochs, made comparable."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thrifty.core import SpaceError
from thrifty.space import Choice, Coordinate, Coordinates, Space

from ._results import TrialResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparable:
    """What was tried and what came out of it, at one epoch.

    Attributes:
        epoch: the epoch at which the values were taken (0: there are none).
        numbers: of the trials.
        picked: for each trial what was picked, by coordinate (options by their index).
        values: for each trial the metric after ``epoch`` epochs, finite.
        feasible: for each trial whether it keeps the study's constraints where its training stands.
        coordinates: those that can take more than one value.
    """

    epoch: int
    numbers: tuple[int, ...]
    picked: tuple[Mapping[str, Any], ...]
    values: tuple[float, ...]
    feasible: tuple[bool, ...]
    coordinates: tuple[Coordinate, ...]

    def __len__(self) -> int:
        return len(self.numbers)

    def coordinate(self, name: str) -> Coordinate | None:
        """The coordinate of this name, if there is one."""
        return next((c for c in self.coordinates if c.name == name), None)


def comparable(trials: Sequence[TrialResult], space: Space, *, at_least: int = 0) -> Comparable:
    """The trials as they were at the largest epoch that enough of them have reached, or else all.

    A bandit stops most trials early, and a few epochs say little beside a finished training: what trials ended with
    must not be compared. Enough are ``enough(...)`` trials, and not fewer than ``at_least``, which are not all the same
    few configurations: a small space is drawn from with repetitions, and its best one would be all there is. Left out are failed
    trials, values that are not finite, and trials that are not of the space (a population's, whose schedules
    changed on the way).
    """
    coordinates = Coordinates(space)
    varying = tuple(c for c in coordinates.coordinates if c.domain.size() > 1)
    usable = []
    for trial in trials:
        picked = picked_by(trial, coordinates)
        if picked is not None and trial.curve and trial.state != "failed":
            usable.append((trial, picked))
    num_needed = enough(num_coordinates=len(varying))
    curves, longest = [trial.curve for trial, _ in usable], _longest_of_each(usable)
    epoch = min(
        common_epoch(curves, num_needed=max(num_needed, at_least)),
        common_epoch(longest, num_needed=min(num_needed, len(longest))),
    )
    usable = [(t, p) for t, p in usable if _is_finite_at(t.curve, epoch)]
    return Comparable(
        epoch=epoch,
        numbers=tuple(trial.number for trial, _ in usable),
        picked=tuple(picked for _, picked in usable),
        values=tuple(trial.curve[epoch - 1] for trial, _ in usable),
        feasible=tuple(not trial.violation for trial, _ in usable),
        coordinates=varying,
    )


def _longest_of_each(
    usable: Sequence[tuple[TrialResult, Mapping[str, Any]]],
) -> list[tuple[float, ...]]:
    """Of each configuration the longest curve."""
    longest: dict[str, tuple[float, ...]] = {}
    for trial, picked in usable:
        of_its_kind = longest.get(repr(picked), ())
        longest[repr(picked)] = max(of_its_kind, tuple(trial.curve), key=len)
    return list(longest.values())


def enough(*, num_coordinates: int) -> int:
    """How many trials say something about so many coordinates: two more than those, and at least 8.

    >>> enough(num_coordinates=3), enough(num_coordinates=20)
    (8, 22)
    """
    return max(8, num_coordinates + 2)


def common_epoch(curves: Sequence[Sequence[float]], *, num_needed: int) -> int:
    """The largest epoch at which ``num_needed`` curves have a finite value; else the largest that all have reached.

    >>> curves = [[0.5], [0.5, 0.6], [0.5, 0.7, 0.8]]
    >>> common_epoch(curves, num_needed=2), common_epoch(curves, num_needed=4)
    (2, 1)
    """
    lengths = sorted({len(curve) for curve in curves}, reverse=True)
    for epoch in lengths:
        if sum(_is_finite_at(curve, epoch) for curve in curves) >= num_needed:
            return epoch
    return lengths[-1] if lengths else 0


def picked_by(trial: TrialResult, coordinates: Coordinates) -> dict[str, Any] | None:
    """What was picked for a trial, by coordinate; None if it is not of the space."""
    try:
        return coordinates.values(trial.config)
    except SpaceError:
        return None


def objective_values(trial: TrialResult, metrics: Sequence[str]) -> tuple[float, ...] | None:
    """The trial's objectives where its training stands; None unless all are there and finite."""
    if len(metrics) == 1:
        values = [trial.value]
    else:
        values = [trial.values.get(metric) for metric in metrics]
    known = tuple(value for value in values if value is not None and math.isfinite(value))
    return known if len(known) == len(values) else None


def is_log(coordinate: Coordinate) -> bool:
    """Whether its axis is logarithmic."""
    return not isinstance(coordinate.domain, Choice) and coordinate.domain.log


def _is_finite_at(curve: Sequence[float], epoch: int) -> bool:
    return 0 < epoch <= len(curve) and math.isfinite(curve[epoch - 1])
