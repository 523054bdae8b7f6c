"""Step time of a single device by its batch size."""

from __future__ import annotations

import numpy as np

from thrifty.perf._nonnegative import relative_fit

from ._setup import Columns


class Alone:
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
