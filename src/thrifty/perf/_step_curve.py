"""Time of a worker's training step by batch size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thrifty.core import UsageError


_FLAT = 1e-6
"""Least time of a sample, as a share of the fixed time; well above rounding errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """Seconds of one step of one worker: ``fixed_s + sample_s * batch``.

    It is a line, because above the sizes at which a device idles, time grows with work. ``fixed_s``
    covers the rest.

    Args:
        sample_s: seconds that one more sample takes; positive.
        fixed_s: seconds that every step takes, however small.
        most: samples that fit into the worker's memory; None: any number.
        least: samples that the worker must get; 0: it may be left out.

    Raises:
        UsageError: a time is negative or not finite, or ``least`` is above ``most``.

    >>> curve = StepCurve(fixed_s=0.01, sample_s=0.001)
    >>> round(curve.seconds(20), 6), curve.seconds(0)
    (0.03, 0.0)
    """

    sample_s: float
    fixed_s: float = 0.0
    most: int | None = None
    least: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sample_s) and self.sample_s > 0):
            raise UsageError(f"sample_s is positive and finite, not {self.sample_s}")
        if not (math.isfinite(self.fixed_s) and self.fixed_s >= 0):
            raise UsageError(f"fixed_s is finite and not negative, not {self.fixed_s}")
        if self.least < 0 or (self.most is not None and self.most < max(1, self.least)):
            raise UsageError(
                f"0 <= least <= most and 1 <= most, not least={self.least}, most={self.most}"
            )

    @classmethod
    def fit(
        cls,
        batches: Sequence[int],
        seconds: Sequence[float],
        *,
        most: int | None = None,
        least: int = 0,
    ) -> StepCurve:
        """Return the line through measured steps with the smallest squared relative error.

        Args:
            batches: positive batch sizes.
            seconds: positive seconds of a step of each size; as many as ``batches``.
            most: see the class.
            least: see the class.

        Raises:
            UsageError: nothing was measured, or a size or a time is not positive.

        >>> StepCurve.fit([8, 16, 32], [0.5, 0.9, 1.7]).sample_s.__round__(4)
        0.05
        """
        sizes, times = np.asarray(batches, dtype=float), np.asarray(seconds, dtype=float)
        if not len(sizes) or len(sizes) != len(times):
            raise UsageError(f"{len(sizes)} batch sizes and {len(times)} times make no curve")
        if not (np.isfinite(sizes) & (sizes > 0) & np.isfinite(times) & (times > 0)).all():
            raise UsageError("batch sizes and times of steps are positive and finite")
        fixed, slope = _line(sizes, times)
        return cls(sample_s=float(slope), fixed_s=float(fixed), most=most, least=least)

    def seconds(self, batch: int) -> float:
        """Return the seconds of a step with ``batch`` samples; 0 for an empty batch."""
        return self.fixed_s + self.sample_s * batch if batch else 0.0

    def scaled(self, factor: float) -> StepCurve:
        """Return the curve of the same worker, ``factor`` times as slow.

        >>> StepCurve(sample_s=0.5).scaled(2.0).sample_s
        1.0
        """
        return replace(self, fixed_s=self.fixed_s * factor, sample_s=self.sample_s * factor)

    def capacity(self, seconds: float, batch: int) -> int:
        """Return how many samples, at most ``batch``, the worker trains in ``seconds`` seconds."""
        most = batch if self.most is None else min(batch, self.most)
        if seconds >= self.seconds(most):
            return most
        fit = int(min(most, max(0.0, (seconds - self.fixed_s) / self.sample_s)))
        # The quotient is rounded, so check it against seconds().
        while fit and self.seconds(fit) > seconds:
            fit -= 1
        while fit < most and self.seconds(fit + 1) <= seconds:
            fit += 1
        return min(most, max(self.least, fit))


def _line(sizes: np.ndarray, times: np.ndarray) -> tuple[float, float]:
    """Return fixed seconds and seconds per sample, both non-negative.

    The fit minimises relative errors, so that a step of 1 ms matters as much as one of 1 s.
    """
    if len(set(sizes)) > 1:
        columns = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
        fixed, slope = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)[0]
        if slope <= _FLAT * fixed:
            # The device idles, so more samples cost nothing yet. Use the best constant, and a small
            # slope that tells sizes apart.
            fixed = float((1 / times).sum() / (1 / times**2).sum())
            return fixed, _FLAT * fixed
        if fixed >= 0:
            return float(fixed), float(slope)
    return 0.0, float((sizes / times).sum() / ((sizes / times) ** 2).sum())
