"""Step times on another device, or of a new network, from what has been measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from thrifty.core import UsageError, require

from ._hybrid import Overlapping, overlapped
from ._model import Columns, Setup, SingleDeviceTime, checked


_ANY = 4.0
"""Prior variance of the common log ratio: devices may differ tenfold and more."""

_USUAL = np.array([0.1, 0.02, 0.01, 3e-4, 0.25])
"""Prior values of the hyperparameters.

They are the variances of the part that networks share, of a network's offset, of its bend and of
the noise, then the squared rate at which ratios change per standard deviation of an input.
"""

_NOISE, _PACES = 3, 4
"""Indices of the noise, and of the first rate: there is one rate for each input."""

_SURE = 1.5
"""Standard deviation of the prior on the hyperparameters, in e-folds."""

_MOST = 5.0
"""Largest deviation from the prior, in e-folds; noise never vanishes, so inverses are stable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedSteps:
    """Steps of one network on this device ("here") and on the other device ("there").

    Args:
        setups: Positive numbers that a step's time depends on, such as batch and image size,
            [steps, numbers].
        here_s: Seconds on this device, [steps].
        there_s: Seconds on the other device, [steps].

    Raises:
        UsageError: There is no step, shapes do not match, or a number is not positive.
    """

    setups: np.ndarray
    here_s: np.ndarray
    there_s: np.ndarray

    def __post_init__(self) -> None:
        shape = np.shape(self.there_s)
        if not self.inputs.size or shape != np.shape(self.here_s):
            raise UsageError(
                f"one time there for each of at least one time here, not {shape} for "
                f"{np.shape(self.here_s)}"
            )
        _logs(self.there_s)

    @property
    def inputs(self) -> np.ndarray:
        """Logarithms of the seconds here and of the setups, [steps, 1 + numbers]."""
        return _inputs(self.setups, self.here_s)

    @property
    def ratios(self) -> np.ndarray:
        """Logarithms of the time ratios, there by here, [steps]."""
        out: np.ndarray = _logs(self.there_s) - _logs(self.here_s)
        return out


class OtherDevice:
    """Ratio of a step's time on the other device to its time on this device.

    Small steps are bound by kernel launches, which take equally long on all devices. Large ones are
    bound by arithmetic or memory, where devices differ. A step's seconds here, its batch and
    similar numbers show where it lies in between. So the log ratio is modelled as a Gaussian
    process over these numbers: a part that all networks share, and an offset and a bend of each
    network.

    The variances of these parts maximise the likelihood of the references, so a probe counts for as
    much as networks differ. Probes of the shortest, a middle and the longest step are the most
    informative.

    Args:
        references: Other networks that ran on both devices, even if only for a few steps on the
            other device.

    Raises:
        UsageError: There are fewer than two references (one does not show how networks differ), or
            their setups differ in the number of inputs.
        MissingExtraError: scipy is not installed.

    >>> batch = np.array([8.0, 16.0, 32.0, 64.0])
    >>> def network(work, few=4):
    ...     here, there = 1 + work * batch, 1 + 3 * work * batch
    ...     return PairedSteps(setups=batch[:few, None], here_s=here[:few], there_s=there[:few])
    >>> model = OtherDevice([network(work) for work in (0.02, 0.1, 1.0, 4.0)])
    >>> model.fit(network(0.5, few=1))
    >>> new = network(0.5)
    >>> bool(np.abs(model.predict(new.setups, new.here_s) / new.there_s - 1).max() < 0.05)
    True
    """

    _process: _Process

    def __init__(self, references: Sequence[PairedSteps]) -> None:
        if len(references) < 2:
            raise UsageError(f"give at least two networks on both devices, got {len(references)}")
        self._references = tuple(references)
        self._numbers = references[0].inputs.shape[1] - 1
        self._likeliest = _likeliest(self._steps(self._references))

    def fit(self, probes: PairedSteps) -> None:
        """Add the probes of the new network.

        Raises:
            UsageError: Its setups have another number of inputs than those of the references.
        """
        steps = self._steps((*self._references, probes))
        self._process = _Process.of(steps, self._likeliest)

    def predict(self, setups: np.ndarray, here_s: np.ndarray) -> np.ndarray:
        """Return the seconds of each step on the other device; call ``fit`` first.

        Args:
            setups: Setups with the same inputs as the references, [steps, numbers].
            here_s: Seconds on this device, [steps].

        Raises:
            UsageError: The number of inputs differs from the references, or a number is not
                positive.
        """
        return self._posterior(setups, here_s)[0]

    def interval(
        self, setups: np.ndarray, here_s: np.ndarray, *, coverage: float = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends between which each time lies in a share ``coverage`` of the cases.

        Raises:
            UsageError: As in ``predict``, or ``coverage`` is not between 0 and 1.
        """
        if not 0 < coverage < 1:
            raise UsageError(f"`coverage` must be between 0 and 1, got {coverage}")
        middle, deviation = self._posterior(setups, here_s)
        factor = np.exp(NormalDist().inv_cdf((1 + coverage) / 2) * deviation)
        return middle / factor, middle * factor

    def _posterior(self, setups: np.ndarray, here_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds on the other device, and the standard deviation of their log."""
        inputs = self._checked(_inputs(setups, here_s))
        mine = np.full(len(inputs), len(self._references))
        mean, variance = self._process(inputs, mine)
        return here_s * np.exp(mean), np.sqrt(variance)

    def _steps(self, networks: Sequence[PairedSteps]) -> _Steps:
        inputs = [self._checked(each.inputs) for each in networks]
        return _Steps(
            inputs=np.concatenate(inputs),
            network=np.repeat(np.arange(len(networks)), [len(each) for each in inputs]),
            ratios=np.concatenate([each.ratios for each in networks]),
        )

    def _checked(self, inputs: np.ndarray) -> np.ndarray:
        numbers = inputs.shape[1] - 1
        if numbers != self._numbers:
            raise UsageError(
                f"setups of {numbers} numbers, where the first network's have {self._numbers}"
            )
        return inputs


class _Steps(NamedTuple):
    """Steps of several networks: inputs, index of the network, and log ratios (there by here)."""

    inputs: np.ndarray
    network: np.ndarray
    ratios: np.ndarray


class _Process(NamedTuple):
    """Gaussian process conditioned on some steps."""

    steps: _Steps
    params: np.ndarray
    inverse: np.ndarray

    @classmethod
    def of(cls, steps: _Steps, params: np.ndarray) -> _Process:
        """Return the process with these variances and rates."""
        covariance = _ANY + np.sum(_parts(*steps[:2], known=steps, params=params), axis=0)
        covariance[np.diag_indices_from(covariance)] += params[_NOISE]
        return cls(steps, params, np.linalg.inv(covariance))

    def __call__(self, inputs: np.ndarray, network: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and variance of measurements on the other device."""
        cross = _ANY + np.sum(_parts(inputs, network, known=self.steps, params=self.params), axis=0)
        weights = cross @ self.inverse
        variance = _ANY + self.params[:_PACES].sum() - np.einsum("ij,ij->i", weights, cross)
        # Measurements have noise, so rounding must not push the variance below it.
        return weights @ self.steps.ratios, np.maximum(variance, self.params[_NOISE])


def _parts(
    inputs: np.ndarray, network: np.ndarray, *, known: _Steps, params: np.ndarray
) -> list[np.ndarray]:
    """Return covariances with known steps: of the shared part, the offsets and the bends."""
    near = np.exp(-0.5 * _squares(inputs, known.inputs) @ params[_PACES:])
    same = network[:, None] == known.network
    shared, offset, bend = params[:_NOISE]
    return [shared * near, offset * same, bend * same * near]


def _squares(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    out: np.ndarray = (one[:, None] - other) ** 2
    return out


def _likeliest(steps: _Steps) -> np.ndarray:
    """Return the variances and rates with the highest posterior probability for these steps."""
    minimize = require("scipy.optimize", extra="cloud").minimize
    spread = steps.inputs.std(axis=0)
    paces = _USUAL[_PACES] / np.where(spread > 1e-9, spread, 1.0) ** 2
    usual = np.log(np.concatenate([_USUAL[:_PACES], paces]))
    best = minimize(
        _surprise,
        usual,
        args=(steps, usual),
        jac=True,
        method="L-BFGS-B",
        bounds=np.stack([usual - _MOST, usual + _MOST], 1),
        options={"maxiter": 100},
    )
    out: np.ndarray = np.exp(best.x)
    return out


def _surprise(logs: np.ndarray, steps: _Steps, usual: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the negative log of likelihood times prior, with its gradient."""
    params = np.exp(logs)
    process = _Process.of(steps, params)
    solved = process.inverse @ steps.ratios
    by_covariance = 0.5 * (process.inverse - np.outer(solved, solved))
    weighted = [by_covariance * part for part in _parts(*steps[:2], known=steps, params=params)]
    squares = _squares(steps.inputs, steps.inputs)
    by_pace = -0.5 * np.einsum("ij,ijk->k", weighted[0] + weighted[2], squares)
    slopes = [*map(np.sum, weighted), params[_NOISE] * np.trace(by_covariance)]
    slopes += list(by_pace * params[_PACES:])
    away = (logs - usual) / _SURE
    value = steps.ratios @ solved - np.linalg.slogdet(process.inverse)[1] + away @ away
    return float(value) / 2, np.array(slopes) + away / _SURE


def _inputs(setups: np.ndarray, here_s: np.ndarray) -> np.ndarray:
    shape, steps = np.shape(setups), np.shape(here_s)
    if len(shape) != 2 or steps != shape[:1]:
        raise UsageError(
            f"`setups` must be [steps, numbers] and `seconds` [steps], got {shape}, {steps}"
        )
    return _logs(np.column_stack([here_s, setups]))


def _logs(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, float)
    if not (np.isfinite(values) & (values > 0)).all():
        raise UsageError("seconds, and the numbers of setups, are positive and finite")
    out: np.ndarray = np.log(values)
    return out


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
        references: Measured setups and times of other networks on the same type of device, or of
            the same network on other devices.

    Raises:
        UsageError: There is no reference.

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
            UsageError: Nothing was measured, or a time is not positive.
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
            np.log(overlapped(alone, volume * shape.exchange_s(setups) + 1e-12 * alone, overlap))
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
    for candidate in sorted({overlap, *_OVERLAPS}, key=lambda each: abs(np.log(each / overlap))):
        guessed = overlapped(
            alone_s[None], _VOLUMES[:, None] * exchange_s[None] + 1e-12 * alone_s[None], candidate
        )
        errors = np.sqrt(np.mean(np.log(guessed / times) ** 2, axis=1))
        errors = errors + 0.01 * abs(np.log(candidate / overlap)) + _AWAY
        at = int(errors.argmin())
        if errors[at] < best[2]:
            best = (float(_VOLUMES[at]), candidate, float(errors[at]))
    return best
