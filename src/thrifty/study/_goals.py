"""The goals of a study: metrics to optimise, and constraints on others."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from thrifty.core import TaskError, UsageError


Mode = Literal["max", "min"]

_FLOOR = -10.0
"""Below the score of every feasible trial and above that of every infeasible one."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A limit on a metric; created by ``at_most`` and ``at_least``.

    A limit of the side ``in_the_end`` is one like ``at_most`` that trials break until they end. It
    says which of them may be the best, but they are compared without it on their way.
    """

    side: Literal["at_most", "at_least", "in_the_end"]
    limit: float

    def __post_init__(self) -> None:
        if not _is_number(self.limit):
            raise UsageError(f"{self.side}({self.limit!r}): the limit must be a finite number")

    def excess(self, value: float) -> float:
        """Return by how much a value breaks the limit, or 0 if it keeps the limit.

        The excess is a share of the limit, or the plain difference if the limit is 0.

        >>> at_most(4.0).excess(5.0), at_least(4.0).excess(5.0), at_most(0.0).excess(5.0)
        (0.25, 0.0, 5.0)
        """
        over = self.limit - value if self.side == "at_least" else value - self.limit
        if over <= 0:
            return 0.0
        share = over / abs(self.limit) if self.limit else over
        # An excess must stay positive and finite.
        return min(max(share, sys.float_info.min), sys.float_info.max)


def at_most(limit: float) -> Bound:
    """Return the constraint that a metric must not exceed a limit.

    Raises:
        UsageError: The limit is not a finite number.

    >>> at_most(5.0)
    Bound(side='at_most', limit=5.0)
    """
    return Bound("at_most", limit)


def at_least(limit: float) -> Bound:
    """Return the constraint that a metric must not fall below a limit.

    Raises:
        UsageError: The limit is not a finite number.

    >>> at_least(0.9)
    Bound(side='at_least', limit=0.9)
    """
    return Bound("at_least", limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """The objectives of a study (rungs compare trials by the first) and its constraints.

    >>> goals = Goals.of("accuracy", "max", constraints={"latency_ms": 5.0})
    >>> goals.violation({"accuracy": 0.9, "latency_ms": 6.0})
    0.2
    >>> goals.score({"accuracy": 0.9, "latency_ms": 6.0}) < goals.score({
    ...     "accuracy": 0.1,
    ...     "latency_ms": 4.0,
    ... })
    True
    """

    metrics: tuple[str, ...]
    modes: tuple[Mode, ...]
    constraints: tuple[tuple[str, Bound], ...] = ()

    @classmethod
    def of(
        cls,
        metric: str | Sequence[str],
        mode: Mode | Sequence[Mode],
        *,
        constraints: Mapping[str, Bound | float] | None = None,
    ) -> Goals:
        """Return the goals that the arguments of a study describe.

        Raises:
            UsageError: There is no metric, or not exactly one mode for each metric.
        """
        metrics = (metric,) if isinstance(metric, str) else metric
        if not isinstance(metrics, Sequence) or not all(isinstance(m, str) for m in metrics):
            raise UsageError(
                f"metric is {metric!r}; it must be a metric's name, or a list of names"
            )
        if not metrics or not all(metrics) or len(set(metrics)) < len(metrics):
            raise UsageError(f"metric is {metric!r}; name at least one metric, each only once")
        modes = (mode,) if isinstance(mode, str) else mode
        if not isinstance(modes, Sequence) or any(m not in ("max", "min") for m in modes):
            raise UsageError(f'mode is {mode!r}; it must be "max" or "min", or a list of these')
        if len(modes) != len(metrics):
            raise UsageError(
                f'metric is {metric!r} and mode is {mode!r}; give each metric its "max" or "min"'
            )
        if not isinstance(constraints or {}, Mapping):
            raise UsageError(
                f'constraints is {constraints!r}; write {{"a metric": 5.0}} for at most 5, or '
                "at_least(5.0)"
            )
        bounds = tuple((name, _bound(b)) for name, b in (constraints or {}).items())
        return cls(metrics=tuple(metrics), modes=tuple(modes), constraints=bounds)

    @property
    def names(self) -> tuple[str, ...]:
        """All metrics that the study needs, each once."""
        return tuple(dict.fromkeys((*self.metrics, *(name for name, _ in self.constraints))))

    @property
    def sign(self) -> float:
        """1 if higher is better for the first objective, else -1."""
        return 1.0 if self.modes[0] == "max" else -1.0

    def check(self, known: Collection[str]) -> None:
        """Raise TaskError unless all needed metrics are known."""
        for name in self.names:
            if name not in known:
                what = "metric" if name in self.metrics else "constrained metric"
                raise TaskError(
                    f"the study's {what} {name!r} is not among the task's metrics "
                    f"({', '.join(sorted(known))}); name one of these"
                )

    def objectives(self, metrics: Mapping[str, float]) -> tuple[float, ...]:
        """Return all objectives, with signs such that higher is better."""
        pairs = zip(self.metrics, self.modes, strict=True)
        return tuple(metrics[name] if mode == "max" else -metrics[name] for name, mode in pairs)

    def values(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return all objectives by name, as the task measured them."""
        return {name: metrics[name] for name in self.metrics}

    def value(self, metrics: Mapping[str, float]) -> float:
        """Return the first objective; a value that is not finite counts as the worst."""
        value = metrics[self.metrics[0]]
        return value if math.isfinite(value) else -self.sign * math.inf

    def not_finite(self, metrics: Mapping[str, float]) -> list[str]:
        """Return the needed metrics that are not finite."""
        return [name for name in self.names if not math.isfinite(metrics[name])]

    def violation(self, metrics: Mapping[str, float]) -> float:
        """Return the sum of all excesses, each as a share of its limit; 0 if all limits hold."""
        return _violation(metrics, self.constraints)

    def score(self, metrics: Mapping[str, float]) -> float:
        """Return a number to compare trials by; higher is better.

        It is ``-inf`` if a needed metric is not finite. A feasible trial is better than an
        infeasible one, and among infeasible trials the least violation is the best. Without
        constraints, the score is the first objective, with its sign changed if lower is better.
        Limits that hold only in the end do not count.

        References:
            Deb, "An efficient constraint handling method for genetic algorithms", 2000.
        """
        # A fast path, because this runs for each epoch of each trial.
        for name in self.metrics:
            if not math.isfinite(metrics[name]):
                return -math.inf
        score = self.sign * metrics[self.metrics[0]]
        if not self.constraints:
            return score
        if self.not_finite(metrics):
            return -math.inf
        always = [(name, bound) for name, bound in self.constraints if bound.side != "in_the_end"]
        if not always:
            return score
        violation = _violation(metrics, always)
        return _FLOOR - math.log1p(violation) if violation else _above_floor(score)


def _violation(metrics: Mapping[str, float], constraints: Sequence[tuple[str, Bound]]) -> float:
    total = sum(bound.excess(metrics[name]) for name, bound in constraints)
    return min(total, sys.float_info.max)


def _above_floor(score: float) -> float:
    """Squeeze scores below zero into ``(_FLOOR, 0)``, in order and almost as precise.

    The logarithm comes first, because a bounded function of the score itself would make large ones
    equal.
    """
    if score >= 0:
        return score
    depth = math.log1p(-score)
    return -depth / (1 - depth / _FLOOR)


def _bound(value: object) -> Bound:
    if isinstance(value, Bound):
        return value
    if not _is_number(value):
        raise UsageError(
            f"a constraint is {value!r}; it must be a finite number (at most so much), or "
            "at_least(number)"
        )
    return Bound("at_most", value)  # type: ignore[arg-type]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
