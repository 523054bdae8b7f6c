"""Times, attributes and means of stored epochs, and in which unit a study counts them."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from thrifty.core import EpochDone
from thrifty.space import TimeUnit

from ._records import EpochRecord


AttributesByNode = Mapping[int, Mapping[int, Mapping[str, Any]]]
"""The user attributes that were set in each epoch, by node and epoch."""


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds covered by at least one span; spans must be sorted by beginning.

    >>> busy([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for began, ended in spans:
        total += max(0.0, ended - max(began, until))
        until = max(until, ended)
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUse:
    """What a worker has done for a plan, as far as it was measured.

    Attributes:
        worker: Its name.
        device: Its device; None: not recorded.
        num_stages: How many stages it has trained.
        busy_s: Seconds in which it trained at least one stage.
        seconds: Seconds from the beginning of its first stage to the end of its last.
        peak_bytes: Peak memory of its process; None: not measured.
    """

    worker: str
    device: str | None
    num_stages: int
    busy_s: float
    seconds: float
    peak_bytes: int | None


def worker_use(worker: str, stages: Sequence[Any]) -> WorkerUse:
    """Return what a worker has used, from its stages in the order of their beginning."""
    spans = [(each.started_at, each.started_at + each.seconds) for each in stages]
    peaks = [each.peak_bytes for each in stages if each.peak_bytes is not None]
    devices = [each.device for each in stages if each.device is not None]
    return WorkerUse(
        worker=worker,
        device=devices[-1] if devices else None,
        num_stages=len(stages),
        busy_s=busy(spans),
        seconds=max(ended for _, ended in spans) - spans[0][0],
        peak_bytes=max(peaks, default=None),
    )


def path_to(
    node: int, epoch: int, *, origins: Mapping[int, tuple[int | None, int]]
) -> list[tuple[int, int]]:
    """Return the nodes from the root to a node, each with its last epoch on the path.

    Args:
        node: The last node.
        epoch: The last epoch.
        origins: The parent of each node, and the epoch of the parent at which it begins.

    >>> path_to(3, 9, origins={0: (None, 0), 3: (0, 2)})
    [(0, 2), (3, 9)]
    """
    found = []
    at: int | None = node
    while at is not None and at in origins:
        found.append((at, epoch))
        at, start = origins[at]
        epoch = min(epoch, start)
    return found[::-1]


def last_attributes(
    path: Iterable[tuple[int, int]], attributes: AttributesByNode
) -> dict[str, Any]:
    """Return the user attributes along the path to a trial: of each key, the value set last.

    Args:
        path: The nodes from the root on, each with its last epoch on the path.
        attributes: The attributes of the plan.

    >>> last_attributes([(0, 2), (3, 9)], {0: {1: {"a": 1, "b": 1}, 4: {"a": 4}}, 3: {5: {"b": 5}}})
    {'a': 1, 'b': 5}
    """
    found: dict[str, Any] = {}
    for node, stop in path:
        own = attributes.get(node, {})
        for epoch in sorted(own):
            if epoch <= stop:
                found |= own[epoch]
    return copy.deepcopy(found)


def attribute_text(value: Any) -> str:
    """Return the value of a user attribute as text: a text as it is, anything else as JSON.

    >>> attribute_text("as it is"), attribute_text({"cat": [0.5, None]})
    ('as it is', '{"cat": [0.5, null]}')
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochTimes:
    """Seconds of one epoch, or of several.

    Attributes:
        seconds: Seconds that were spent, including checks.
        checks: The part of ``seconds`` that went into checks.
        alone: Seconds that training alone would have taken; None if a part was not measured.
        alone_low: Low end of ``alone``.
        alone_high: High end of ``alone``.
        packed: The number of epochs that were trained in a pack with others.
    """

    seconds: float = 0.0
    checks: float = 0.0
    alone: float | None = 0.0
    alone_low: float = 0.0
    alone_high: float = 0.0
    packed: int = 0

    @classmethod
    def of(cls, epoch: EpochDone | EpochRecord) -> EpochTimes:
        """Return the times of an epoch that has ended."""
        alone, low, high = (epoch.seconds_alone, epoch.seconds_alone_low, epoch.seconds_alone_high)
        return cls(
            seconds=epoch.seconds,
            checks=epoch.seconds_checks,
            alone=alone,
            alone_low=(alone or 0.0) if low is None else low,
            alone_high=(alone or 0.0) if high is None else high,
            # The time of an epoch that was trained alone has no range: it was measured itself.
            packed=alone is None or low is not None,
        )

    @classmethod
    def of_again(cls, epoch: EpochRecord) -> EpochTimes:
        """Return the total time of all repeated trainings of an epoch."""
        low, high = epoch.again_alone_low_s, epoch.again_alone_high_s
        is_known = low is not None and high is not None
        return cls(
            seconds=epoch.again_s,
            checks=epoch.again_checks_s,
            alone=epoch.again_alone_s if is_known else None,
            alone_low=low or 0.0,
            alone_high=high or 0.0,
            packed=not is_known or low != high,
        )

    def plus(self, other: EpochTimes) -> EpochTimes:
        """Return the sum; the low end of a sum is the sum of the low ends."""
        is_known = self.alone is not None and other.alone is not None
        return EpochTimes(
            seconds=self.seconds + other.seconds,
            checks=self.checks + other.checks,
            alone=(self.alone or 0.0) + (other.alone or 0.0) if is_known else None,
            alone_low=self.alone_low + other.alone_low,
            alone_high=self.alone_high + other.alone_high,
            packed=self.packed + other.packed,
        )


def stored_unit(spec: Mapping[str, Any]) -> TimeUnit:
    """Return the unit in which a stored study shows what it trains."""
    return TimeUnit.from_json(spec.get("unit"))


def counted(spec: Mapping[str, Any], epochs: int) -> dict[str, float]:
    """Return a number of epochs in the unit of a stored study; nothing if that is epochs.

    >>> counted({"unit": {"name": "steps", "per_epoch": 500}}, 10), counted({}, 10)
    ({'steps': 5000}, {})
    """
    unit = stored_unit(spec)
    return {} if unit.is_epochs else {unit.name: unit.count(epochs)}


def standard_deviation(values: Sequence[float]) -> float:
    """Return the standard deviation of a sample of two or more; infinite if a value is not finite.

    >>> standard_deviation([1.0, 3.0]) == 2**0.5
    True
    """
    if not all(map(math.isfinite, values)):
        return math.inf
    mean = mean_of(values)
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
    mean, half = mean_of(values), quantile * standard_deviation(values) / math.sqrt(len(values))
    return mean - half, mean + half


def mean_of(values: Sequence[float]) -> float:
    """Return the mean of values, which may be as large as floats can be."""
    # Divide first: the sum of large values could overflow.
    return sum(value / len(values) for value in values)


def mean_curve(curves: Sequence[Sequence[Mapping[str, float]]]) -> list[Mapping[str, float]]:
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
