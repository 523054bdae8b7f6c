"""Made-up measurements for tests."""

from __future__ import annotations

from thrifty.perf import PackCurve


def curves(fused):
    """Return curves where a solo step takes a second; ``fused`` maps pack sizes to seconds."""
    return [PackCurve(backend="solo", step_s={1: 1.0}), PackCurve(backend="fused", step_s=fused)]


class Measuring:
    """A stand-in for ``calibrate`` that records its calls."""

    def __init__(self, fused, **options):
        self.calls = []
        self._curves = curves(fused)

    def __call__(self, task, member, **options):
        self.calls.append((member, options))
        return self._curves
