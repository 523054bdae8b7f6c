"""Profile of one training step of one model on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from thrifty.core import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """Measured phases of a step by batch size, and the gradient's buckets.

    Args:
        device: name of the device.
        batches: measured batch sizes, ascending.
        forward_s: seconds of the forward pass for each of them.
        backward_s: seconds of the backward pass for each of them.
        optimizer_s: seconds of an optimizer step, whatever the batch.
        peak_bytes: peak memory for each of them; the last measured size is the last that fitted.
        bucket_bytes: bytes of the gradient's buckets, in the order in which they become ready.
        bucket_ready: share of the backward pass after which each bucket is ready, ascending to 1.
        sample_input_s: seconds to read one sample.
        overhead_s: other seconds of a step.

    Raises:
        UsageError: the numbers do not fit together.

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

    def __post_init__(self) -> None:
        sizes = np.asarray(self.batches, float)
        columns = (self.forward_s, self.backward_s, self.peak_bytes)
        ascending = np.isfinite(sizes).all() and (np.diff(sizes) > 0).all()
        if not sizes.size or not ascending or sizes[0] < 1:
            raise UsageError(f"batches ascend from 1 or more, not {list(self.batches)}")
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
            *self.peak_bytes,
            *self.bucket_bytes,
        ])
        if not (np.isfinite(others).all() and (others >= 0).all()):
            raise UsageError("times and bytes are finite and not negative")
        ready = np.asarray(self.bucket_ready, float)
        if len(self.bucket_bytes) != ready.size or not ready.size:
            raise UsageError(
                f"each bucket has its bytes and its moment, not {len(self.bucket_bytes)} and "
                f"{ready.size} of them"
            )
        if not (np.diff(ready) >= 0).all() or not 0 <= ready[0] <= ready[-1] <= 1:
            raise UsageError(f"bucket_ready ascends from 0 to 1, not {list(self.bucket_ready)}")

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

    def most(self, memory_bytes: float) -> int:
        """Return the largest batch that fits into ``memory_bytes``; 0: not even one sample fits."""
        low, high = 0, 1
        while self.peak_at(high) <= memory_bytes and high < 2**30:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.peak_at(middle) <= memory_bytes:
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
            UsageError: the data does not come from ``to_json``.
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
