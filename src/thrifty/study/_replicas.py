"""Statistics of a trial's replicas: means, standard errors, intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


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
            name: _mean([metrics[name] for metrics in epoch])
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


def standard_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample of two or more; infinite if a value is not finite.

    >>> standard_deviation([1.0, 3.0]) == 2**0.5
    True
    """
    if not all(map(math.isfinite, values)):
        return math.inf
    mean = _mean(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))


_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""The 97.5 % quantiles of Student's t distribution with 1, 2, ... degrees of freedom."""


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a 95 % confidence interval of the mean of two or more values, by Student's t.

    >>> low, high = interval([1.0, 2.0, 3.0])
    >>> round(low, 2), round(high, 2)
    (-0.48, 4.48)
    """
    freedom = len(values) - 1
    # Beyond the table, this expansion is right to three digits.
    quantile = (
        _T_975[freedom - 1] if freedom <= len(_T_975) else 1.96 + 2.372 / freedom + 2.8 / freedom**2
    )
    mean, half = _mean(values), quantile * standard_deviation(values) / math.sqrt(len(values))
    return mean - half, mean + half


def _mean(values: Sequence[float]) -> float:
    # Divide first: the sum of large values could overflow.
    return sum(value / len(values) for value in values)
