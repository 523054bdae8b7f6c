"""Step times of a new network, from how other networks scale on the same machines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thrifty.core import UsageError

from ._hybrid import Overlapping, overlapped
from ._model import Columns, Setup, SingleDeviceTime, checked


_VOLUMES = np.exp(np.linspace(np.log(1e-3), np.log(1e3), 601))
"""Candidate exchange volumes of the new network, as multiples of a reference's."""

_AWAY = 1e-6 * np.abs(np.log(_VOLUMES))
"""Small penalty that keeps the reference's volume where probes say nothing about it."""

_SPREAD = 0.1
"""Extra relative error at the probes that divides a reference's weight by e."""

_OVERLAPS = (1.0, 1.5, 2.0, 3.0, 6.0, 12.0)


class Transfer:
    """One device's profile and few probes of a new network, with the scaling of known networks.

    The cost of an all-reduce on a placement is a property of the machines; the number of bytes is a
    property of the network. So each reference gives the shape, and the probes give the multiple and
    the overlap. References are weighted by how well they then explain the probes.

    Args:
        references: measured setups and times of other networks on the same type of device, or of
            the same network on other devices.

    Raises:
        UsageError: there is no reference.

    >>> known = [Setup(placement=(1,) * n, batch=8) for n in (1, 2, 4, 8)]
    >>> model = Transfer([(known, [1.0, 1.5, 2.0, 2.5])])
    >>> model.fit(known[:2], [4.0, 4.5])  # the same bytes, more arithmetic
    >>> bool(4.5 < model.predict(known[3:])[0] < 6.0)
    True
    """

    def __init__(self, references: Sequence[tuple[Sequence[Setup], Sequence[float]]]) -> None:
        if not references:
            raise UsageError("a transfer needs measurements of another network")
        self._shapes: list[Overlapping] = []
        for setups, step_s in references:
            shape = Overlapping()
            shape.fit(setups, step_s)
            self._shapes.append(shape)
        self._explained: list[tuple[float, float, float]] = []

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit one device's times, and volume and overlap from the probes on several devices.

        Raises:
            UsageError: nothing was measured, or a time is not positive.
        """
        times = checked(setups, step_s)
        columns = Columns.of(setups)
        self._alone = SingleDeviceTime(columns, times)
        several = columns.devices > 1
        probes = [setup for setup, more in zip(setups, several, strict=True) if more]
        alone = self._alone(columns.batch)[several]
        self._explained = [
            _explain(shape.exchange_s(probes), alone, times[several], overlap=shape.overlap)
            if probes
            else (1.0, shape.overlap, 0.0)
            for shape in self._shapes
        ]

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the weighted geometric mean of all references' forecasts."""
        alone = self._alone(Columns.of(setups).batch)
        logs = [
            np.log(
                overlapped(alone, volume * shape.exchange_s(setups) + 1e-12 * alone, overlap)
            )
            for shape, (volume, overlap, _) in zip(self._shapes, self._explained, strict=True)
        ]
        errors = np.array([error for _, _, error in self._explained])
        weights = np.exp(-(errors - errors.min()) / _SPREAD)
        out: np.ndarray = np.exp(np.average(logs, axis=0, weights=weights))
        return out


def _explain(
    exchange_s: np.ndarray, alone_s: np.ndarray, times: np.ndarray, *, overlap: float
) -> tuple[float, float, float]:
    """Return the volume and overlap that explain the probes best, and the remaining error.

    Another overlap than the reference's is penalised, so it must improve the fit to win.
    """
    best = (1.0, overlap, np.inf)
    for candidate in sorted(
        {overlap, *_OVERLAPS}, key=lambda each: abs(np.log(each / overlap))
    ):
        guessed = overlapped(
            alone_s[None],
            _VOLUMES[:, None] * exchange_s[None] + 1e-12 * alone_s[None],
            candidate,
        )
        errors = np.sqrt(np.mean(np.log(guessed / times) ** 2, axis=1))
        errors = errors + 0.01 * abs(np.log(candidate / overlap)) + _AWAY
        at = int(errors.argmin())
        if errors[at] < best[2]:
            best = (float(_VOLUMES[at]), candidate, float(errors[at]))
    return best
