"""Choices from measured costs: the size of a pack, and slicing a product by its dropout mask."""

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
        backend: Name of the back-end, one of ``BACKENDS``.
        step_s: Seconds of a joint step, by ``k``.
        memory_bytes: Peak memory of a joint step, by ``k``; empty if memory does not matter.
        variant: Name of a variant of the back-end, if it has several.

    Raises:
        UsageError: The back-end is unknown, no step was measured, or a number cannot be a
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
            UsageError: The data does not come from ``to_json``.

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
        curves: Measured curves of the back-ends.
        longest: Steps on the longest chain of pending work.
        total: All pending steps.
        ready: Trials that could start now.
        workers: Number of workers.
        cap_bytes: Memory of a worker in bytes.
        margin: Share of ``cap_bytes`` that a pack may use.
        max_size: Largest pack to consider.

    Raises:
        UsageError: There are no curves.

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


_MOVED = 6
"""Numbers that move to or from memory for each kept weight.

The weight is gathered twice, and its gradient is computed and added to the existing one. All other
accesses hit the cache.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicedProduct:
    """Product of a batch in parts with a weight matrix, of which each part keeps a block.

    Attributes:
        parts: Number of parts of the batch.
        rows: Samples in each part.
        inputs: Input features.
        outputs: Output features.
        inputs_kept: Input features that a part keeps.
        outputs_kept: Output features that a part keeps.
    """

    parts: int
    rows: int
    inputs: int
    outputs: int
    inputs_kept: int
    outputs_kept: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicingCosts:
    """Time of a layer's three products, in units of one floating-point operation.

    The products are the forward one, and the backward ones for inputs and weight. With slicing,
    each part of the batch gathers its blocks of the weight twice and adds its gradient to them.
    With masking, everything is multiplied.

    The numbers were fitted to 108 products of 768 to 3072 features and batches of 96 to 1536 on two
    CPU cores. `python -m bench.bench_gyro --fit` prints how well they predict them.

    Args:
        flops_per_byte: Floating-point operations that take as long as moving one byte.
        half_rows: Samples in a part at which products run at half their speed.
        margin: Factor by which slicing must be faster.

    >>> wide = {"inputs": 4096, "outputs": 4096, "inputs_kept": 2048, "outputs_kept": 2048}
    >>> costs = SlicingCosts()
    >>> costs.pays(SlicedProduct(parts=4, rows=64, **wide))
    True
    >>> costs.pays(SlicedProduct(parts=64, rows=4, **wide))
    False
    """

    flops_per_byte: float = 25.0
    half_rows: float = 8.0
    margin: float = 1.05

    def share(self, product: SlicedProduct) -> float:
        """Return the time with slicing as a share of the time with masking."""
        weights = product.inputs * product.outputs
        kept = product.inputs_kept * product.outputs_kept
        masked = self._products(product.parts * product.rows, weights) + self._bytes(3 * weights)
        of_part = self._products(product.rows, kept) + self._bytes(_MOVED * kept)
        return (product.parts * of_part + self._bytes(weights)) / masked

    def pays(self, product: SlicedProduct) -> bool:
        """Return whether slicing is faster, by at least the margin."""
        return self.margin * self.share(product) < 1

    def _products(self, rows: int, weights: int) -> float:
        return 6.0 * weights * (rows + self.half_rows)

    def _bytes(self, numbers: int) -> float:
        return self.flops_per_byte * 4 * numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class SlicingKernelCosts(SlicingCosts):
    """Time of a layer's three products on a GPU whose kernels read kept blocks in place.

    Nothing is gathered: each part reads its blocks of the weight twice, mostly from the cache, and
    the gradient of the whole weight is written once. Loads and operations overlap.

    Speeds and overhead are those of an H200 in float32 (`python -m bench.gyro.kernels` and
    `python -m bench.bench_gyro --device cuda`); the other numbers are guesses.

    Args:
        flops_per_byte: Floating-point operations that take as long as moving one byte to or from
            memory.
        half_rows: Samples in a part at which products run at half their speed; kernels adapt their
            tiles, so there is none.
        margin: Factor by which slicing must be faster.
        flops_per_cached_byte: Floating-point operations that take as long as reading one byte from
            the cache.
        speed: Operations a second of the kernels, as a share of those of a dense product.
        large_speed: The same for parts of ``large_rows`` samples or more.
        large_rows: See ``large_speed``.
        tile_rows: Rows of a part that read a block of the weight once.
        overhead: Operations that take as long as the launches that slicing adds. They are 0.6 ms
            of Python for a layer; in a CUDA graph, a hundredth of that.

    >>> wide = {"inputs": 4096, "outputs": 4096, "inputs_kept": 2048, "outputs_kept": 2048}
    >>> costs = SlicingKernelCosts()
    >>> costs.pays(SlicedProduct(parts=16, rows=256, **wide))
    True
    >>> costs.pays(SlicedProduct(parts=16, rows=16, **wide))  # launches take longer
    False
    >>> narrow = {"inputs": 256, "outputs": 256, "inputs_kept": 128, "outputs_kept": 128}
    >>> costs.pays(SlicedProduct(parts=16, rows=16, **narrow))
    False
    """

    flops_per_byte: float = 17.0
    half_rows: float = 0.0
    margin: float = 1.05
    flops_per_cached_byte: float = 10.0
    speed: float = 0.6
    large_speed: float = 0.9
    large_rows: int = 128
    tile_rows: int = 64
    overhead: float = 3e10

    def share(self, product: SlicedProduct) -> float:
        """Return the time with slicing as a share of the time with masking."""
        weights = product.inputs * product.outputs
        kept = product.inputs_kept * product.outputs_kept
        masked = self._products(product.parts * product.rows, weights) + self._bytes(3 * weights)
        # A tile has at least 16 rows.
        rows = max(product.rows, 16)
        speed = self.large_speed if product.rows >= self.large_rows else self.speed
        operations = product.parts * self._products(rows, kept) / speed
        reads = 2 * product.parts * math.ceil(product.rows / self.tile_rows)
        cached = self.flops_per_cached_byte * 4 * kept * reads
        return (max(operations, cached) + self._bytes(weights) + self.overhead) / masked
