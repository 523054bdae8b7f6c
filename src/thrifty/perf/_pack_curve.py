"""Measured curve of the time and memory of a joint step of k trials."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
