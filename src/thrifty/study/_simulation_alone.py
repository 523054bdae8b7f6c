"""A plan without sharing: what a study would take if each trial trained alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from thrifty.plan import SearchPlan
from thrifty.search import History
from thrifty.space import MultiStep, Timeline


WHOSE = "(trial)"
"""A hyper-parameter name that no space can use; its value is the trial that owns an epoch."""


class UnsharedPlan(SearchPlan):
    """A plan in which every trial has its own timeline, so that nothing merges.

    A trial that branches off another one (population-based training) continues from it there, as in
    any plan. ``history`` is the history of the study: it says which trial branches off which.

    >>> plan = UnsharedPlan(History())
    >>> (
    ...     plan.insert(Timeline({"lr": 0.1}, epochs=9)),
    ...     plan.insert(Timeline({"lr": 0.1}, epochs=9)),
    ... )
    (0, 1)
    >>> plan.original(plan.nodes[1].timeline)
    Timeline({'lr': 0.1}, epochs=9)
    """

    def __init__(self, history: History) -> None:
        super().__init__()
        self._history = history
        self._originals: list[Timeline] = []
        self._lines: list[tuple[tuple[int, int], ...]] = []
        """For each trial, the owners of its training and the epochs from which they own it."""

    def insert(self, timeline: Timeline) -> int:
        """Return the node of the next trial."""
        number = len(self._lines)
        trial = self._history[number] if number < len(self._history) else None
        parent = None if trial is None else trial.parent
        line: tuple[tuple[int, int], ...] = ((0, number),)
        if parent is not None:
            donor, epoch = parent
            line = (*(part for part in self._lines[donor] if part[0] < epoch), (epoch, number))
        self._lines.append(line)
        self._originals.append(timeline)
        own = {**timeline.config, WHOSE: _schedule(line)}
        return super().insert(Timeline(own, epochs=timeline.epochs))

    def original(self, timeline: Timeline) -> Timeline:
        """Return the timeline that was inserted as ``timeline``."""
        whose = timeline.config[WHOSE]
        return self._originals[whose if isinstance(whose, int) else whose.levels[-1]]


def _schedule(line: Sequence[tuple[int, int]]) -> Any:
    starts, whose = zip(*line, strict=True)
    return whose[0] if len(whose) == 1 else MultiStep(whose, milestones=starts[1:])
