"""Choice of pack size and back-end with which pending work finishes first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from thrifty.core import UsageError

from ._pack_curve import PackCurve


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
