"""Comparison of trials that were trained for different numbers of epochs."""

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
    """The trials of a study and their results at one epoch.

    Attributes:
        epoch: The epoch at which the values were taken (0: there are no values).
        numbers: The trials' numbers.
        picked: For each trial its picks by coordinate (options by their index).
        values: For each trial the metric after ``epoch`` epochs, finite.
        feasible: For each trial whether it keeps the study's constraints at the epoch it has
            reached.
        coordinates: The coordinates that can take more than one value.
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
        """Return the coordinate of this name, or None."""
        return next((c for c in self.coordinates if c.name == name), None)


def comparable(trials: Sequence[TrialResult], space: Space, *, at_least: int = 0) -> Comparable:
    """Return the trials at the largest epoch that enough of them have reached.

    If too few trials exist, use the largest epoch that all have reached. An algorithm that stops
    most trials early leaves values from a few epochs, which say little next to a finished training,
    so the final values of trials must not be compared.

    Enough means ``enough(...)`` trials, and at least ``at_least``. They must also cover enough
    different configurations: sampling a small space repeats configurations, and otherwise only the
    best one might be left. Failed trials are left out, and so are values that are not finite and
    trials that are not of the space (those of a population whose schedules changed on the way).
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
    """Return the longest curve of each configuration."""
    longest: dict[str, tuple[float, ...]] = {}
    for trial, picked in usable:
        of_its_kind = longest.get(repr(picked), ())
        longest[repr(picked)] = max(of_its_kind, tuple(trial.curve), key=len)
    return list(longest.values())


def enough(*, num_coordinates: int) -> int:
    """Return how many trials are informative: ``num_coordinates + 2``, and at least 8.

    >>> enough(num_coordinates=3), enough(num_coordinates=20)
    (8, 22)
    """
    return max(8, num_coordinates + 2)


def common_epoch(curves: Sequence[Sequence[float]], *, num_needed: int) -> int:
    """Return the largest epoch at which ``num_needed`` curves have a finite value.

    If there is none, return the largest epoch that all curves have reached.

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
    """Return a trial's picks by coordinate, or None if it is not of the space."""
    try:
        return coordinates.values(trial.config)
    except SpaceError:
        return None


def objective_values(trial: TrialResult, metrics: Sequence[str]) -> tuple[float, ...] | None:
    """Return the trial's objectives at the epoch it has reached.

    Return None unless all objectives are known and finite.
    """
    if len(metrics) == 1:
        values = [trial.value]
    else:
        values = [trial.values.get(metric) for metric in metrics]
    known = tuple(value for value in values if value is not None and math.isfinite(value))
    return known if len(known) == len(values) else None


def is_log(coordinate: Coordinate) -> bool:
    """Return whether the coordinate has a logarithmic axis."""
    return not isinstance(coordinate.domain, Choice) and coordinate.domain.log


def _is_finite_at(curve: Sequence[float], epoch: int) -> bool:
    return 0 < epoch <= len(curve) and math.isfinite(curve[epoch - 1])
