"""Statistics of a trial's replicas, epoch by epoch: means and standard errors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from thrifty.store._reports import mean_of, standard_deviation


Curve = Sequence[Mapping[str, float]]


def mean_curve(curves: Sequence[Curve]) -> list[Mapping[str, float]]:
    """Return the means of all metrics over replicas, epoch by epoch.

    A metric that a replica lacks in an epoch has no mean there.

    >>> mean_curve([[{"loss": 1.0}], [{"loss": 2.0}]])
    [{'loss': 1.5}]
    """
    if len(curves) == 1:
        return list(curves[0])
    return [
        {
            name: mean_of([metrics[name] for metrics in epoch])
            for name in epoch[0]
            if all(name in metrics for metrics in epoch)
        }
        for epoch in zip(*curves, strict=True)
    ]


def standard_errors(scores: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the standard error of the mean of replicas, epoch by epoch; empty for one replica.

    It is infinite where a score is not finite.

    >>> standard_errors([[1.0, 2.0], [3.0, 2.0]]), standard_errors([[1.0]])
    ((1.0, 0.0), ())
    """
    if len(scores) == 1:
        return ()
    return tuple(
        standard_deviation(epoch) / math.sqrt(len(epoch)) for epoch in zip(*scores, strict=True)
    )
