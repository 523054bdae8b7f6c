"""What a study would take alone and at best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thrifty.plan import Node, SearchPlan
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


FloatArray = npt.NDArray[np.float64]


def least_s(
    plan: SearchPlan,
    *,
    seconds_of: Callable[[Timeline, int], float],
    slowdowns: Sequence[float],
) -> float:
    """Return a lower bound on the time for the trained epochs of a plan, in any order.

    It is the largest of:

    - the time of all work, shared evenly;
    - the time of the longest path;
    - for each length of time, that time plus all work that cannot begin before it is over, shared
      evenly (after Fernandez and Bussell).

    The bound includes neither faults nor the time to load states or to wait for the algorithm: it
    assumes that all decisions are known in advance. Counting time from the end as
    well would add nothing, because a tree only gets wider.

    Args:
        plan: The plan with the trained epochs.
        seconds_of: Gives the seconds of an epoch of a timeline on a worker that is not slow.
        slowdowns: The factor by which each worker is slower.

    >>> from thrifty.core import EpochDone
    >>> plan = SearchPlan()
    >>> for width in (1, 2, 4):
    ...     node = plan.insert(Timeline({"width": width}, epochs=width))
    ...     for epoch in range(1, width + 1):
    ...         _ = plan.record(
    ...             EpochDone(node=node, epoch=epoch, metrics={}, seconds=0.0, worker="")
    ...         )
    >>> [
    ...     least_s(plan, seconds_of=lambda timeline, epoch: 10.0, slowdowns=[1.0] * n)
    ...     for n in (1, 2, 3)
    ... ]
    [70.0, 40.0, 40.0]

    References:
        Fernandez and Bussell, "Bounds on the Number of Processors and Time for Multiprocessor
        Optimal Schedules", 1973.
    """
    costs = [_costs(node, seconds_of) for node in plan.nodes]
    heads = _heads(plan, costs)
    work = np.concatenate([np.zeros(0), *costs])
    if not work.size:
        return 0.0
    speed = sum(1.0 / slowdown for slowdown in slowdowns)
    quickest = min(slowdowns)
    heads *= quickest
    longest = float(np.max(heads + work * quickest))
    order = np.argsort(-heads, kind="stable")
    not_before = heads[order] + np.cumsum(work[order]) / speed
    return max(longest, float(np.max(not_before)))


def _costs(node: Node, seconds_of: Callable[[Timeline, int], float]) -> FloatArray:
    """Return the seconds of each epoch that was trained on a node, in order."""
    last = max(node.metrics, default=node.start)
    return np.array([seconds_of(node.timeline, e) for e in range(node.start + 1, last + 1)])


def _heads(plan: SearchPlan, costs: Sequence[FloatArray]) -> FloatArray:
    """Return the time that must pass before each epoch can begin."""
    ends: list[FloatArray] = []
    out = [np.zeros(0)]
    for node, cost in zip(plan.nodes, costs, strict=True):
        begin = 0.0
        if node.parent is not None and cost.size:
            begin = float(ends[node.parent.id][node.start - node.parent.start])
        ends.append(begin + np.concatenate([[0.0], np.cumsum(cost)]))
        out.append(ends[-1][:-1])
    return np.concatenate(out)
