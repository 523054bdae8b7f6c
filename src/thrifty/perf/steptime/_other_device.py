"""Step times on a device on which a network has hardly run, from its times on another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from thrifty.core import MissingExtraError, UsageError


_ANY = 4.0
"""Variance of the common ratio's logarithm: devices may differ tenfold and more."""

_USUAL = np.array([0.1, 0.02, 0.01, 3e-4, 0.25])
"""Before anything is known: variances of what networks share, of a network's offset, of its bend and of noise; and how fast ratios change with a number, per standard deviation, squared."""

_NOISE, _PACES = 3, 4
"""Where among these the noise is, and where the paces begin: one for each number."""

_SURE = 1.5
"""How far the references may pull these, in e-folds at one standard deviation."""

_MOST = 5.0
"""... and at most; so noise never vanishes, which keeps inverses sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnBoth:
    """Steps of one network on the device at hand and on the other one.

    Args:
        setups: what a step's length depends on, positive numbers such as batch and image size, [steps, numbers].
        here_s: seconds on the device at hand, [steps].
        there_s: on the other one, [steps].

    Raises:
        UsageError: there is no step, shapes do not match, or something is not positive.
    """

    setups: np.ndarray
    here_s: np.ndarray
    there_s: np.ndarray

    def __post_init__(self) -> None:
        shape = np.shape(self.there_s)
        if not self.inputs.size or shape != np.shape(self.here_s):
            raise UsageError(
                f"one time there for each of at least one time here, not {shape} for {np.shape(self.here_s)}"
            )
        _logs(self.there_s)

    @property
    def inputs(self) -> np.ndarray:
        """Logarithms of the seconds here and of the setups, [steps, 1 + numbers]."""
        return _inputs(self.setups, self.here_s)

    @property
    def ratios(self) -> np.ndarray:
        """Logarithms of there by here, [steps]."""
        out: np.ndarray = _logs(self.there_s) - _logs(self.here_s)
        return out


class OtherDevice:
    """How many times as long a step takes there as here: what networks share, and what is this one's own.

    Small steps are bound by launches, which take alike on all devices; large ones by arithmetic or memory, where the devices differ. Where a step lies between shows in its seconds here, its batch and the
    like. So the ratio's logarithm is a Gaussian process over theirs, with a shared part, and an offset and a bend of each network. How large these are is what makes the references likeliest: a
    probe counts for as much as networks differ. Probes of the shortest, a middle and the longest step say most.

    Args:
        references: other networks that ran on both devices, if only a few steps there.

    Raises:
        UsageError: fewer than two references (one does not say how networks differ), or setups of other numbers.
        MissingExtraError: scipy is not installed.

    >>> batch = np.array([8.0, 16.0, 32.0, 64.0])
    >>> def network(work, few=4):
    ...     here, there = 1 + work * batch, 1 + 3 * work * batch
    ...     return OnBoth(setups=batch[:few, None], here_s=here[:few], there_s=there[:few])
    >>> model = OtherDevice([network(work) for work in (0.02, 0.1, 1.0, 4.0)])
    >>> model.fit(network(0.5, few=1))
    >>> new = network(0.5)
    >>> bool(np.abs(model.predict(new.setups, new.here_s) / new.there_s - 1).max() < 0.05)
    True
    """

    _process: _Process

    def __init__(self, references: Sequence[OnBoth]) -> None:
        if len(references) < 2:
            raise UsageError(f"at least two networks on both devices, not {len(references)}")
        self._references = tuple(references)
        self._numbers = references[0].inputs.shape[1] - 1
        self._likeliest = _likeliest(self._steps(self._references))

    def fit(self, probes: OnBoth) -> None:
        """Learns what little is known of the network at hand.

        Raises:
            UsageError: its setups have other numbers than the references'.
        """
        steps = self._steps((*self._references, probes))
        self._process = _Process.of(steps, self._likeliest)

    def predict(self, setups: np.ndarray, here_s: np.ndarray) -> np.ndarray:
        """Seconds there of each step, after ``fit``.

        Args:
            setups: as of the references, [steps, numbers].
            here_s: seconds here, [steps].

        Raises:
            UsageError: other numbers than the references', or something is not positive.
        """
        return self._posterior(setups, here_s)[0]

    def interval(
        self, setups: np.ndarray, here_s: np.ndarray, *, coverage: float = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        """What each time measured there lies between in ``coverage`` of the cases.

        Raises:
            UsageError: as of ``predict``, or ``coverage`` is not between 0 and 1.
        """
        if not 0 < coverage < 1:
            raise UsageError(f"coverage is between 0 and 1, not {coverage}")
        middle, deviation = self._posterior(setups, here_s)
        factor = np.exp(NormalDist().inv_cdf((1 + coverage) / 2) * deviation)
        return middle / factor, middle * factor

    def _posterior(
        self, setups: np.ndarray, here_s: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Seconds there, and the standard deviation of their logarithms."""
        inputs = self._checked(_inputs(setups, here_s))
        mine = np.full(len(inputs), len(self._references))
        mean, variance = self._process(inputs, mine)
        return here_s * np.exp(mean), np.sqrt(variance)

    def _steps(self, networks: Sequence[OnBoth]) -> _Steps:
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
    """Steps of several networks: where they lie, whose they are, and the logarithms of there by here."""

    inputs: np.ndarray
    network: np.ndarray
    ratios: np.ndarray


class _Process(NamedTuple):
    """A Gaussian process that knows some steps."""

    steps: _Steps
    params: np.ndarray
    inverse: np.ndarray

    @classmethod
    def of(cls, steps: _Steps, params: np.ndarray) -> _Process:
        """With these variances and paces."""
        covariance = _ANY + np.sum(_parts(*steps[:2], known=steps, params=params), axis=0)
        covariance[np.diag_indices_from(covariance)] += params[_NOISE]
        return cls(steps, params, np.linalg.inv(covariance))

    def __call__(
        self, inputs: np.ndarray, network: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of what is measured there."""
        cross = _ANY + np.sum(
            _parts(inputs, network, known=self.steps, params=self.params), axis=0
        )
        weights = cross @ self.inverse
        variance = _ANY + self.params[:_PACES].sum() - np.einsum("ij,ij->i", weights, cross)
        # What is measured has noise, whatever rounding says.
        return weights @ self.steps.ratios, np.maximum(variance, self.params[_NOISE])


def _parts(
    inputs: np.ndarray, network: np.ndarray, *, known: _Steps, params: np.ndarray
) -> list[np.ndarray]:
    """Covariances with known steps: of what networks share, of their offsets, of their bends."""
    near = np.exp(-0.5 * _squares(inputs, known.inputs) @ params[_PACES:])
    same = network[:, None] == known.network
    shared, offset, bend = params[:_NOISE]
    return [shared * near, offset * same, bend * same * near]


def _squares(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    out: np.ndarray = (one[:, None] - other) ** 2
    return out


def _likeliest(steps: _Steps) -> np.ndarray:
    """Variances and paces that make these steps likeliest."""
    try:
        from scipy.optimize import minimize  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError("scipy", extra="cloud") from error
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
    """Minus the logarithm of the steps' likelihood and of the parameters' prior, with its slopes."""
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
        raise UsageError(f"setups are [steps, numbers], seconds [steps], not {shape}, {steps}")
    return _logs(np.column_stack([here_s, setups]))


def _logs(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, float)
    if not (np.isfinite(values) & (values > 0)).all():
        raise UsageError("seconds, and the numbers of setups, are positive and finite")
    out: np.ndarray = np.log(values)
    return out
