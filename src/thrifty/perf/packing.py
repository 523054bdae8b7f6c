"""Pack curves, and the choice of a pack size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from thrifty.core import UsageError


BACKENDS = ("fused", "concatenated", "solo")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackCurve:
    """Time and memory of one joint step of ``k`` trials on a back-end, measured at some ``k``.

    The rule for memory, ``M1 + (k - 1) (M2 - M1)``, is how Hydro (OSDI '23) limits its fusion.

    Args:
        backend: name of the back-end, one of ``BACKENDS``.
        step_s: seconds of a joint step, by ``k``.
        memory_bytes: peak memory of a joint step, by ``k``; empty if memory does not matter.
        variant: name of a variant of the back-end, if it has several.

    Raises:
        UsageError: the back-end is unknown, no step was measured, or a number cannot be a
            measurement.

    >>> curve = PackCurve(
    ...     backend="fused", step_s={1: 0.010, 4: 0.016}, memory_bytes={1: 3e9, 2: 5e9}
    ... )
    >>> curve.time(2), curve.time(8)
    (0.012, 0.032)
    >>> curve.memory(4)
    9000000000.0
    >>> curve.largest(cap_bytes=16e9, limit=100)
    6
    """

    backend: str
    step_s: Mapping[int, float]
    memory_bytes: Mapping[int, float] = field(default_factory=dict)
    variant: str = ""

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise UsageError(
                f"a pack curve has no back-end {self.backend!r}; it is one of: "
                f"{', '.join(BACKENDS)}"
            )
        if not self.step_s:
            raise UsageError("a pack curve needs at least one measured step in step_s")
        for name, points in (("step_s", self.step_s), ("memory_bytes", self.memory_bytes)):
            for k, value in points.items():
                if k < 1 or not (math.isfinite(value) and value > 0):
                    raise UsageError(
                        f"{name}[{k}] = {value} of a pack curve is no measurement; measure it "
                        "again: a size is "
                        "at least 1, its value finite and above 0"
                    )

    def time(self, k: int) -> float:
        """Return the seconds of a joint step of ``k`` trials.

        The time is linear between the measured sizes and constant below them. Above them, the time
        per trial stays that of the largest size, because a larger pack runs as several groups.
        """
        sizes = sorted(self.step_s)
        last = sizes[-1]
        if k > last:
            return k * self.step_s[last] / last
        return float(np.interp(k, sizes, [self.step_s[size] for size in sizes]))

    def per_trial(self, k: int) -> float:
        """Return the seconds of a step per trial, in a pack of ``k`` trials."""
        return self.time(k) / k

    def memory(self, k: int) -> float:
        """Return the peak bytes of a joint step of ``k`` trials; 0 if none was measured.

        The value is exact where measured. Elsewhere it lies on the line through the two smallest
        sizes (through the origin if there is only one), but not below a smaller measured pack and
        not above a larger one.
        """
        points = self.memory_bytes
        if not points or k in points:
            return float(points.get(k, 0.0))
        first, *others = sorted(points)
        # Without a second point, assume that an empty pack takes no memory.
        second, above = (others[0], points[others[0]]) if others else (0, 0.0)
        slope = max((above - points[first]) / (second - first), 0.0)
        line = points[first] + (k - first) * slope
        least = max((points[size] for size in points if size < k), default=0.0)
        most = min((points[size] for size in points if size > k), default=math.inf)
        return float(min(max(line, least), most))

    def fits(self, k: int, *, cap_bytes: float, margin: float = 0.9) -> bool:
        """Return whether ``k`` trials take no more than the share ``margin`` of ``cap_bytes``."""
        return self.memory(k) <= margin * cap_bytes

    def largest(self, *, cap_bytes: float, margin: float = 0.9, limit: int) -> int:
        """Return the largest pack that fits, of at most ``limit`` trials; 1 if none fits."""
        sizes = range(limit, 1, -1)
        return next((k for k in sizes if self.fits(k, cap_bytes=cap_bytes, margin=margin)), 1)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, from which ``from_json`` restores the curve."""
        return {
            "backend": self.backend,
            "variant": self.variant,
            "step_s": {str(k): value for k, value in self.step_s.items()},
            "memory_bytes": {str(k): value for k, value in self.memory_bytes.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Restore a curve from the data that ``to_json`` returned.

        Raises:
            UsageError: the data does not come from ``to_json``.

        >>> curve = PackCurve(backend="solo", step_s={1: 0.5})
        >>> PackCurve.from_json(curve.to_json()) == curve
        True
        """
        try:
            step_s, memory_bytes = (
                {int(k): float(value) for k, value in data[name].items()}
                for name in ("step_s", "memory_bytes")
            )
            backend, variant = data["backend"], str(data.get("variant", ""))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(
                f"this is no pack curve ({error!r}); measure it again: {data!r}"
            ) from error
        return cls(backend=backend, variant=variant, step_s=step_s, memory_bytes=memory_bytes)


TIE = 1.01
"""Ratio up to which forecasts count as equal: measurements are no more exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackChoice:
    """Packs of ``size`` trials on a back-end; ``forecast_s`` is when pending work would finish."""

    backend: str
    size: int
    forecast_s: float


def choose_pack(
    curves: Sequence[PackCurve],
    *,
    longest: float,
    total: float,
    ready: int,
    workers: int = 1,
    cap_bytes: float = math.inf,
    margin: float = 0.9,
    max_size: int = 256,
) -> PackChoice:
    """Return the back-end and pack size with the shortest forecast.

    Beside the longest chain of pending work, each worker trains up to ``k`` trials, in steps of
    ``T(k)`` seconds, until the other trials are done. The rest of the chain then takes ``T(1)`` per
    step.

    Of forecasts within 1 %, the larger pack wins, because it delivers the results that an algorithm
    waits for sooner. Packs beyond the measured sizes gain nothing and are not considered. If
    nothing fits into ``cap_bytes``, trials are not packed.

    Args:
        curves: measured curves of the back-ends.
        longest: steps on the longest chain of pending work.
        total: all pending steps.
        ready: trials that could start now.
        workers: number of workers.
        cap_bytes: memory of a worker in bytes.
        margin: share of ``cap_bytes`` that a pack may use.
        max_size: largest pack to consider.

    Raises:
        UsageError: there are no curves.

    >>> fused = PackCurve(backend="fused", step_s={1: 0.010, 16: 0.025})
    >>> solo = PackCurve(backend="solo", step_s={1: 0.008})
    >>> choose_pack([fused, solo], longest=100, total=1600, ready=16)
    PackChoice(backend='fused', size=16, forecast_s=2.5)
    >>> choose_pack([fused, solo], longest=100, total=100, ready=16)
    PackChoice(backend='solo', size=1, forecast_s=0.8)
    """
    if not curves:
        raise UsageError("no pack can be chosen without curves; measure at least one back-end")

    def forecast(curve: PackCurve, k: int) -> PackChoice:
        lanes = k * workers
        rounds = (total - longest) / (lanes - 1) if lanes > 1 else math.inf
        if rounds < longest:
            seconds = rounds * curve.time(k) + (longest - rounds) * curve.time(1)
        else:
            seconds = total / lanes * curve.time(k)
        return PackChoice(backend=curve.backend, size=k, forecast_s=seconds)

    limit = max(1, min(max_size, math.ceil(ready / workers)))
    choices = [
        forecast(curve, k)
        for curve in curves
        for k in range(1, min(limit, max(curve.step_s)) + 1)
        if curve.fits(k, cap_bytes=cap_bytes, margin=margin)
    ]
    choices = choices or [forecast(curve, 1) for curve in curves]
    best = min(choice.forecast_s for choice in choices)
    equal = [choice for choice in choices if choice.forecast_s <= TIE * best]
    return max(equal, key=lambda choice: choice.size)
