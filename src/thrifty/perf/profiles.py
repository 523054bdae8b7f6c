"""Profiles of training steps and power."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from thrifty.core import UsageError


Precision = Literal["float32", "bfloat16", "float16"]
"""Data type of a model's matrix products; 16 bits under autocast."""

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

_NOISY = 0.15
"""``StepProfile.noise`` of a busy machine; an idle one has a few hundredths."""

_SHARED = 0.15
"""``StepProfile.others`` of a busy machine: one processor of seven or more is still quiet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Measured phases of a step by batch size, and the gradient's buckets.

    Args:
        device: Name of the device.
        batches: Measured batch sizes, ascending.
        forward_s: Seconds of the forward pass for each of them.
        backward_s: Seconds of the backward pass for each of them.
        optimizer_s: Seconds of an optimizer step, whatever the batch.
        peak_bytes: Peak memory for each of them; the last measured size is the last that fitted.
        bucket_bytes: Bytes of the gradient's buckets, in the order in which they become ready.
        bucket_ready: Share of the backward pass after which each bucket is ready, ascending to 1.
        sample_input_s: Seconds to read one sample.
        overhead_s: Other seconds of a step.
        noise: By how much longer, relative to them, steps took because the machine was busy.
        others: Share of the machine's processors that other programs used meanwhile.
        peak_error: By how much, relative to them, a step may need more than ``peak_bytes``; by
            default what an allocator loses to fragments.
        precision: Precision in which the step was measured.

    Raises:
        UsageError: The numbers do not fit together.

    >>> profile = StepProfile(
    ...     device="here",
    ...     batches=(8, 16),
    ...     forward_s=(0.25, 0.5),
    ...     backward_s=(0.5, 1.0),
    ...     optimizer_s=0.1,
    ...     peak_bytes=(100, 180),
    ...     bucket_bytes=(40,),
    ...     bucket_ready=(1.0,),
    ... )
    >>> float(profile.forward_at(32)), float(profile.peak_at(32))
    (1.0, 340.0)
    """

    device: str
    batches: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    optimizer_s: float
    peak_bytes: tuple[float, ...]
    bucket_bytes: tuple[float, ...]
    bucket_ready: tuple[float, ...]
    sample_input_s: float = 0.0
    overhead_s: float = 0.0
    noise: float = 0.0
    others: float = 0.0
    peak_error: float = 0.1
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        sizes = np.asarray(self.batches, float)
        columns = (self.forward_s, self.backward_s, self.peak_bytes)
        ascending = np.isfinite(sizes).all() and (np.diff(sizes) > 0).all()
        if not sizes.size or not ascending or sizes[0] < 1:
            raise UsageError(f"`batches` must ascend from 1 or more, got {list(self.batches)}")
        if any(len(column) != sizes.size for column in columns):
            raise UsageError(
                f"each of {sizes.size} batches has a time forward and backward, and a peak of "
                f"memory; not {[len(column) for column in columns]} of them"
            )
        times = np.array([*self.forward_s, *self.backward_s])
        if not (np.isfinite(times).all() and (times > 0).all()):
            raise UsageError("times forward and backward are positive and finite")
        others = np.array([
            self.optimizer_s,
            self.sample_input_s,
            self.overhead_s,
            self.noise,
            self.others,
            self.peak_error,
            *self.peak_bytes,
            *self.bucket_bytes,
        ])
        if not (np.isfinite(others).all() and (others >= 0).all()):
            raise UsageError("times and bytes are finite and not negative")
        if self.precision not in PRECISIONS:
            raise UsageError(
                f"`precision` must be one of {', '.join(PRECISIONS)}, got {self.precision!r}"
            )
        ready = np.asarray(self.bucket_ready, float)
        if len(self.bucket_bytes) != ready.size or not ready.size:
            raise UsageError(
                f"each bucket has its bytes and its moment, not {len(self.bucket_bytes)} and "
                f"{ready.size} of them"
            )
        if not (np.diff(ready) >= 0).all() or not 0 <= ready[0] <= ready[-1] <= 1:
            raise UsageError(
                f"`bucket_ready` must ascend from 0 to 1, got {list(self.bucket_ready)}"
            )

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was busy while the step was timed."""
        return bool(self.disturbance)

    @property
    def disturbance(self) -> str:
        """What the machine did besides, if that makes the times unreliable; else ``""``.

        Other programs may make all steps slower by the same factor, through a shared cache, clock
        or core, so that the steps alone do not tell.
        """
        if self.noise > _NOISY:
            return f"the machine was busy, which made steps {100 * self.noise:.0f} % longer"
        if self.others > _SHARED:
            return f"other programs used {100 * self.others:.0f} % of the machine's processors"
        return ""

    def forward_at(self, batch: ArrayLike) -> np.ndarray:
        """Return the seconds of the forward pass of ``batch`` samples.

        The curve is linear between measured sizes; beyond them, the nearest piece is extended.
        """
        return _along(self.batches, self.forward_s, batch)

    def backward_at(self, batch: ArrayLike) -> np.ndarray:
        """Return the seconds of the backward pass, interpolated like ``forward_at``."""
        return _along(self.batches, self.backward_s, batch)

    def peak_at(self, batch: ArrayLike) -> np.ndarray:
        """Return the bytes of memory, interpolated like ``forward_at``."""
        return _along(self.batches, self.peak_bytes, batch)

    def high_peak_at(self, batch: ArrayLike) -> np.ndarray:
        """Return the bytes of memory that a step may need: the upper end of ``peak_at``.

        It adds ``peak_error``, the largest relative distance of ``peak_bytes`` from a line, and the
        gradient once more: several devices copy it into buckets, and gradient accumulation keeps it
        during the forward pass. All of it is 0 if no memory was measured.
        """
        if not any(self.peak_bytes):
            return self.peak_at(batch)
        spread = 1 + self.peak_error + _distance(self.batches, self.peak_bytes)
        return np.asarray(spread * self.peak_at(batch) + sum(self.bucket_bytes))

    def max_batch(self, memory_bytes: float) -> int:
        """Return the largest batch that fits into ``memory_bytes`` by ``high_peak_at``.

        It is 0 if not even one sample fits.
        """
        low, high = 0, 1
        while self.high_peak_at(high) <= memory_bytes and high < 2**30:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.high_peak_at(middle) <= memory_bytes:
                low = middle
            else:
                high = middle
        return low

    def slowed(self, factor: float, *, device: str) -> StepProfile:
        """Return the profile of the same model on a device that takes ``factor`` times as long."""
        return replace(
            self,
            device=device,
            forward_s=tuple(factor * each for each in self.forward_s),
            backward_s=tuple(factor * each for each in self.backward_s),
            optimizer_s=factor * self.optimizer_s,
            overhead_s=factor * self.overhead_s,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data, from which ``from_json`` restores the profile."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepProfile:
        """Restore a profile from the data that ``to_json`` returned.

        Raises:
            UsageError: The data does not come from ``to_json``.
        """
        try:
            fields: dict[str, Any] = {
                name: tuple(value) if isinstance(value, list | tuple) else value
                for name, value in data.items()
            }
            return cls(**fields)
        except UsageError:
            raise
        except (AttributeError, TypeError, ValueError) as error:
            raise UsageError(f"this is no step profile: {error}") from error


def _along(sizes: tuple[int, ...], values: tuple[float, ...], at: ArrayLike) -> np.ndarray:
    """Interpolate linearly; beyond both ends extend the nearest piece, but not below zero."""
    x, y = np.asarray(sizes, float), np.asarray(values, float)
    wanted = np.asarray(at, float)
    if x.size == 1:
        return np.asarray(y[0] * wanted / x[0])
    index = np.clip(np.searchsorted(x, wanted) - 1, 0, x.size - 2)
    slope = (y[index + 1] - y[index]) / (x[index + 1] - x[index])
    out: np.ndarray = np.maximum(y[index] + slope * (wanted - x[index]), 0.0)
    return out


def _distance(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the largest relative distance of positive values from the line that fits them best."""
    x, y = np.asarray(sizes, float), np.asarray(values, float)
    if x.size < 3 or not (y > 0).all():
        return 0.0
    columns = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    line = columns @ np.linalg.lstsq(columns, np.ones_like(y), rcond=None)[0]
    return float(np.abs(line - 1).max())


_FLAT = 1e-6
"""Least time of a sample, as a share of the fixed time; well above rounding errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCurve:
    """Seconds of one step of one worker: ``fixed_s + sample_s * batch``.

    It is a line, because above the sizes at which a device idles, time grows with work. ``fixed_s``
    covers the rest.

    Args:
        sample_s: Seconds that one more sample takes; positive.
        fixed_s: Seconds that every step takes, however small.
        max_samples: Samples that fit into the worker's memory; None: any number.
        min_samples: Samples that the worker must get; 0: it may be left out.

    Raises:
        UsageError: A time is negative or not finite, or ``min_samples`` is above ``max_samples``.

    >>> curve = StepCurve(fixed_s=0.01, sample_s=0.001)
    >>> round(curve.seconds(20), 6), curve.seconds(0)
    (0.03, 0.0)
    """

    sample_s: float
    fixed_s: float = 0.0
    max_samples: int | None = None
    min_samples: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.sample_s) and self.sample_s > 0):
            raise UsageError(f"`sample_s` must be positive and finite, got {self.sample_s}")
        if not (math.isfinite(self.fixed_s) and self.fixed_s >= 0):
            raise UsageError(f"`fixed_s` must be finite and not negative, got {self.fixed_s}")
        if self.min_samples < 0 or (
            self.max_samples is not None and self.max_samples < max(1, self.min_samples)
        ):
            raise UsageError(
                "0 <= min_samples <= max_samples and 1 <= max_samples, not "
                f"min_samples={self.min_samples}, max_samples={self.max_samples}"
            )

    @classmethod
    def fit(
        cls,
        batches: Sequence[int],
        seconds: Sequence[float],
        *,
        max_samples: int | None = None,
        min_samples: int = 0,
    ) -> StepCurve:
        """Return the line through measured steps with the smallest squared relative error.

        Args:
            batches: Positive batch sizes.
            seconds: Positive seconds of a step of each size; as many as ``batches``.
            max_samples: See the class.
            min_samples: See the class.

        Raises:
            UsageError: Nothing was measured, or a size or a time is not positive.

        >>> StepCurve.fit([8, 16, 32], [0.5, 0.9, 1.7]).sample_s.__round__(4)
        0.05
        """
        sizes, times = np.asarray(batches, dtype=float), np.asarray(seconds, dtype=float)
        if not len(sizes) or len(sizes) != len(times):
            raise UsageError(f"{len(sizes)} batch sizes and {len(times)} times make no curve")
        if not (np.isfinite(sizes) & (sizes > 0) & np.isfinite(times) & (times > 0)).all():
            raise UsageError("batch sizes and times of steps are positive and finite")
        fixed, slope = _line(sizes, times)
        return cls(
            sample_s=float(slope),
            fixed_s=float(fixed),
            max_samples=max_samples,
            min_samples=min_samples,
        )

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
        max_samples = batch if self.max_samples is None else min(batch, self.max_samples)
        if seconds >= self.seconds(max_samples):
            return max_samples
        fit = int(min(max_samples, max(0.0, (seconds - self.fixed_s) / self.sample_s)))
        # The quotient is rounded, so check it against seconds().
        while fit and self.seconds(fit) > seconds:
            fit -= 1
        while fit < max_samples and self.seconds(fit + 1) <= seconds:
            fit += 1
        return min(max_samples, max(self.min_samples, fit))


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


def iteration_s(
    *,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    optimizer_s: ArrayLike,
    bucket_ready: Sequence[float],
    bucket_s: ArrayLike,
    stolen: float = 0.0,
    input_s: ArrayLike = 0.0,
) -> np.ndarray:
    """Return the seconds of an iteration, from two serial streams with dependencies.

    The replay follows Srifty (MLSys 2022), as in the first author's simulator. Compute runs the
    forward pass, then the backward pass. The all-reduce of bucket ``k`` starts when the slowest
    worker has reached it and bucket ``k - 1`` is done. The optimizer runs when both streams are
    done.

    All times broadcast, so that one call can answer for many fleets.

    Args:
        forward_s: Seconds of each worker's forward pass, [..., workers]; 1 worker stands for equal
            ones.
        backward_s: Seconds of each worker's backward pass, [..., workers].
        optimizer_s: Seconds of each worker's optimizer, [..., workers].
        bucket_ready: Share of the backward pass after which each bucket is ready, ascending,
            [buckets].
        bucket_s: Seconds of each bucket's all-reduce, [..., buckets].
        stolen: Share of communication time during which compute stalls: 0 if a network card does
            the work, up to 1 if the same cores do.
        input_s: Seconds to read a worker's samples, [..., workers]; reading overlaps with
            everything else.

    Returns:
        Seconds, [...].

    Raises:
        UsageError: The numbers of all-reduces and of buckets differ.

    >>> float(
    ...     iteration_s(
    ...         forward_s=[1.0],
    ...         backward_s=[2.0],
    ...         optimizer_s=[0.5],
    ...         bucket_ready=[0.5, 1.0],
    ...         bucket_s=[2.0, 0.25],
    ...     )
    ... )
    4.75
    """
    forward, backward = np.asarray(forward_s, float), np.asarray(backward_s, float)
    sums = np.asarray(bucket_s, float)
    if sums.shape[-1] != len(bucket_ready):
        raise UsageError(
            f"each of {len(bucket_ready)} buckets has a sum, not {sums.shape[-1]} of them"
        )
    end = np.zeros(())
    lost = np.zeros(())
    for index, share in enumerate(bucket_ready):
        ready = (forward + share * backward).max(axis=-1) + lost
        took = sums[..., index]
        end = np.maximum(ready, end) + took
        if share < 1.0:
            lost = lost + stolen * took
    compute = (forward + backward).max(axis=-1) + lost
    # A worker that ends its backward pass early waits for the all-reduces like all others.
    # Optimizers run at the same time on all workers.
    trained = np.maximum(compute, end) + np.asarray(optimizer_s, float).max(axis=-1)
    reading = np.asarray(input_s, float)
    return np.asarray(np.maximum(trained, reading.max(axis=-1) if reading.ndim else reading))


@dataclass(frozen=True, slots=True, kw_only=True)
class Power:
    """Declared model of a worker's power: one number while waiting, one while training.

    Args:
        idle_w: Watts while it waits.
        busy_w: Watts while it trains; at least ``idle_w``.

    Raises:
        UsageError: A number is negative or not finite, or ``busy_w`` is below ``idle_w``.

    >>> Power(idle_w=2.0, busy_w=5.0).joules(busy_s=3.0, whole_s=4.0)
    17.0
    """

    idle_w: float
    busy_w: float

    def __post_init__(self) -> None:
        if not 0 <= self.idle_w <= self.busy_w < math.inf:
            raise UsageError(
                f"watts must be finite with 0 <= idle_w <= busy_w, got idle_w={self.idle_w}, "
                f"busy_w={self.busy_w}"
            )

    def joules(self, *, busy_s: float, whole_s: float) -> float:
        """Return the energy in joules of ``whole_s`` seconds, of which it trains ``busy_s``."""
        return self.idle_w * whole_s + (self.busy_w - self.idle_w) * busy_s
