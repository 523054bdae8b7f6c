"""The interface of models of step times, the setups that they forecast, and one device's time.

Their coefficients are fitted by least squares and are never negative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from thrifty.core import UsageError, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Devices and batch of a data-parallel step.

    Args:
        placement: devices used on each machine.
        batch: samples per device.

    Raises:
        UsageError: a machine has no device, or the batch is not positive.

    >>> Setup(placement=(4, 2), batch=32).num_devices
    6
    """

    placement: tuple[int, ...]
    batch: float

    def __post_init__(self) -> None:
        if not self.placement or min(self.placement) < 1:
            raise UsageError(
                f"each machine of a placement has 1 device or more, not {self.placement}"
            )
        if not 0 < self.batch < math.inf:
            raise UsageError(f"a batch is positive, not {self.batch}")

    @property
    def num_devices(self) -> int:
        """Devices on all machines."""
        return sum(self.placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Setups as arrays, each of shape [setups].

    Attributes:
        batch: samples per device.
        nodes: number of machines.
        devices: devices on all machines.
        most: devices on the fullest machine.
        least: devices on the emptiest machine.
    """

    batch: np.ndarray
    nodes: np.ndarray
    devices: np.ndarray
    most: np.ndarray
    least: np.ndarray

    @classmethod
    def of(cls, setups: Sequence[Setup]) -> Columns:
        """Return the setups as arrays."""
        return cls(
            batch=np.array([setup.batch for setup in setups], float),
            nodes=np.array([len(setup.placement) for setup in setups], float),
            devices=np.array([setup.num_devices for setup in setups], float),
            most=np.array([max(setup.placement) for setup in setups], float),
            least=np.array([min(setup.placement) for setup in setups], float),
        )

    @property
    def apart(self) -> np.ndarray:
        """1 if several machines take part, else 0."""
        return (self.nodes > 1).astype(float)

    @property
    def together(self) -> np.ndarray:
        """1 if several devices of a single machine take part, else 0."""
        out: np.ndarray = ((self.nodes == 1) & (self.devices > 1)).astype(float)
        return out


class StepTimeModel(Protocol):
    """Model that predicts the step times of new setups from measured ones."""

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit the model to measurements, some of them of a single device.

        Raises:
            UsageError: nothing was measured, or a time is not positive.
        """
        ...

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the seconds of a step of each setup, [setups]; call ``fit`` first."""
        ...


def checked(setups: Sequence[Setup], step_s: Sequence[float]) -> np.ndarray:
    """Return measured times as an array.

    Raises:
        UsageError: nothing was measured, or a time is not positive.
    """
    times = np.asarray(step_s, float)
    if times.shape != (len(setups),) or not times.size:
        raise UsageError(
            f"one time for each of at least one setup, not {times.shape} for {len(setups)}"
        )
    if not (np.isfinite(times).all() and (times > 0).all()):
        raise UsageError("step times are positive and finite")
    return times


class SingleDeviceTime:
    """Step time of one device.

    Measured times are used as they are. Between measured sizes the curve is a straight line in
    logarithms, beyond them it follows ``a + c b``. If no single device was measured, ``a + c b``
    through the smallest placements is used instead.
    """

    def __init__(self, columns: Columns, step_s: np.ndarray) -> None:
        fewest = columns.devices == columns.devices.min()
        batches, times = columns.batch[fewest], step_s[fewest]
        self._sizes = np.unique(batches)
        self._times = np.array([np.mean(times[batches == size]) for size in self._sizes])
        line = relative_fit(np.stack([np.ones_like(batches), batches], 1), times)
        self._line = (float(line[0]), float(line[1]))

    def __call__(self, batch: np.ndarray) -> np.ndarray:
        """Return seconds, [batches]."""
        inside = np.exp(np.interp(np.log(batch), np.log(self._sizes), np.log(self._times)))
        clipped = np.clip(batch, self._sizes[0], self._sizes[-1])
        out: np.ndarray = inside * self._along(batch) / self._along(clipped)
        return out

    def _along(self, batch: np.ndarray) -> np.ndarray:
        return self._line[0] + self._line[1] * batch


class PerfectScaling:
    """Step time of one device with its batch: the bound that no placement beats for long.

    >>> model = PerfectScaling()
    >>> model.fit([Setup(placement=(1,), batch=8), Setup(placement=(1,), batch=16)], [1.0, 2.0])
    >>> model.predict([Setup(placement=(4, 4), batch=16)]).round(6).tolist()
    [2.0]
    """

    _alone: SingleDeviceTime

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit one device's step times."""
        self._alone = SingleDeviceTime(Columns.of(setups), checked(setups, step_s))

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the step times of one device."""
        return self._alone(Columns.of(setups).batch)


_RIDGE = 1e-6
"""Ridge penalty on the coefficients of normalised columns.

Of equally good fits it selects the smallest, whatever the rounding.
"""


def relative_fit(basis: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Return the non-negative coefficients with the smallest squared relative error.

    Args:
        basis: terms of each measurement, [measurements, terms].
        times: positive times, [measurements].

    Returns:
        Coefficients, [terms].

    >>> relative_fit(np.array([[1.0, 1.0], [1.0, 2.0]]), np.array([3.0, 5.0])).round(6).tolist()
    [1.0, 2.0]
    """
    nnls = require("scipy.optimize", extra="cloud").nnls
    scaled = basis / times[:, None]
    # Normalise the columns, because scipy's solver depends on the conditioning.
    size = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    num = basis.shape[1]
    rows = np.concatenate([scaled / size, _RIDGE * np.eye(num)])
    wanted = np.concatenate([np.ones(len(times)), np.zeros(num)])
    found, _ = nnls(rows, wanted, maxiter=100 * num)
    out: np.ndarray = found / size
    return out
