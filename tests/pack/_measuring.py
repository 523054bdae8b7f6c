"""Measurements that are made up."""

from __future__ import annotations

from thrifty.perf import PackCurve


def curves(fused):
    """A trial alone takes a second; ``fused`` has the seconds of packs by size."""
    return [
        PackCurve(backend="solo", step_s={1: 1.0}),
        PackCurve(backend="fused", step_s=fused),
    ]


class Measuring:
    """Stands for ``calibrate`` and counts its calls."""

    def __init__(self, fused, **options):
        self.calls = []
        self._curves = curves(fused)

    def __call__(self, task, member, **options):
        self.calls.append((member, options))
        return self._curves
