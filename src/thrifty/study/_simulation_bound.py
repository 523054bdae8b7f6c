"""The least time in which any scheduler could have trained what was trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from thrifty.plan import Node, SearchPlan
from thrifty.space import Timeline


FloatArray = npt.NDArray[np.float64]


def least_s(
    plan: SearchPlan,
    *,
    seconds_of: Callable[[Timeline, int], float],
    slowdowns: Sequence[float],
) -> float:
    """A bound from below on the time that the trained epochs of a plan take, whatever the order.

    It is the largest of: all work shared evenly; the longest path; and, for each length of time, that time and all that
    cannot begin before it is over, shared evenly (after Fernandez and Bussell, "Bounds on the Number of Processors and Time for
    Multiprocessor Optimal Schedules", 1973; the same from the end adds nothing in a tree, which only gets wider).
    Loading states and faults are not in it, and neither is what algorithms wait for: it knows all decisions in advance.

    Args:
        plan: what was trained.
        seconds_of: seconds of an epoch of a timeline on a worker that is not slow.
        slowdowns: how many times as long that takes on each worker.

    >>> from thrifty.core import EpochDone
    >>> plan = SearchPlan()
    >>> for width in (1, 2, 4):
    ...     node = plan.insert(Timeline({"width": width}, epochs=width))
    ...     for epoch in range(1, width + 1):
    ...         _ = plan.record(EpochDone(node=node, epoch=epoch, metrics={}, seconds=0.0, worker=""))
    >>> [least_s(plan, seconds_of=lambda timeline, epoch: 10.0, slowdowns=[1.0] * n) for n in (1, 2, 3)]
    [70.0, 40.0, 40.0]
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
    """Seconds of each epoch that was trained on a node, in order."""
    last = max(node.metrics, default=node.start)
    return np.array([seconds_of(node.timeline, e) for e in range(node.start + 1, last + 1)])


def _heads(plan: SearchPlan, costs: Sequence[FloatArray]) -> FloatArray:
    """For each epoch the time that goes by before it can begin."""
    ends: list[FloatArray] = []
    out = [np.zeros(0)]
    for node, cost in zip(plan.nodes, costs, strict=True):
        begin = 0.0
        if node.parent is not None and cost.size:
            begin = float(ends[node.parent.id][node.start - node.parent.start])
        ends.append(begin + np.concatenate([[0.0], np.cumsum(cost)]))
        out.append(ends[-1][:-1])
    return np.concatenate(out)
