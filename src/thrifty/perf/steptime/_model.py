"""Models of step times: their interface, setups, one device's time, and intervals.

The models' coefficients are fitted by least squares and are never negative. Intervals around their
forecasts come from errors nearby."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from thrifty.core import UsageError, require


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Devices and batch of a data-parallel step.

    Args:
        placement: Devices used on each machine.
        batch: Samples per device.

    Raises:
        UsageError: A machine has no device, or the batch is not positive.

    >>> Setup(placement=(4, 2), batch=32).num_devices
    6
    """

    placement: tuple[int, ...]
    batch: float

    def __post_init__(self) -> None:
        if not self.placement or min(self.placement) < 1:
            raise UsageError(
                f"each machine of a placement must have 1 device or more, got {self.placement}"
            )
        if not 0 < self.batch < math.inf:
            raise UsageError(f"a batch must be positive, got {self.batch}")

    @property
    def num_devices(self) -> int:
        """Devices on all machines."""
        return sum(self.placement)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Setups as arrays, each of shape [setups].

    Attributes:
        batch: Samples per device.
        nodes: Number of machines.
        devices: Devices on all machines.
        most: Devices on the fullest machine.
        least: Devices on the emptiest machine.
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
            UsageError: Nothing was measured, or a time is not positive.
        """
        ...

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the seconds of a step of each setup, [setups]; call ``fit`` first."""
        ...


def checked(setups: Sequence[Setup], step_s: Sequence[float]) -> np.ndarray:
    """Return measured times as an array.

    Raises:
        UsageError: Nothing was measured, or a time is not positive.
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
        basis: Terms of each measurement, [measurements, terms].
        times: Positive times, [measurements].

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


_MANY = 100
"""Least number of errors from which their local size can be learned."""


class LocalErrors:
    """Size of errors around a setup, as a factor on the overall size.

    Trees learn it from the errors of held-out placements (locally weighted conformal prediction,
    Lei et al. 2018).

    Args:
        setups: Setups with known errors.
        errors: Absolute errors, [setups]; with few of them, the factor is 1 everywhere.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """

    def __init__(self, setups: Sequence[Setup], errors: np.ndarray) -> None:
        self._trees: Any = None
        if len(errors) < _MANY:
            return
        HistGradientBoostingRegressor = require(
            "sklearn.ensemble", package="scikit-learn", extra="cloud"
        ).HistGradientBoostingRegressor
        self._trees = HistGradientBoostingRegressor(
            loss="absolute_error",
            max_iter=60,
            learning_rate=0.05,
            max_leaf_nodes=8,
            min_samples_leaf=20,
            early_stopping=False,
            random_state=0,
        )
        # Zero errors have no logarithm; errors far below the mean need not be told apart from zero.
        logs = np.log(errors + 0.1 * errors.mean() + 1e-12)
        self._trees.fit(_columns(setups), logs - logs.mean())

    def __call__(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return factors, [setups]."""
        if self._trees is None or not setups:
            return np.ones(len(setups))
        out: np.ndarray = np.exp(self._trees.predict(_columns(setups)))
        return out


def _columns(setups: Sequence[Setup]) -> np.ndarray:
    columns = Columns.of(setups)
    return np.stack(
        [np.log(columns.batch), columns.nodes, columns.devices, columns.most, columns.least], 1
    )


_SMALL = 0.7
"""Share of the largest scale up to which scales are small, to test a model's extrapolation."""


class Intervals:
    """A model with intervals as wide as its errors on unseen placements.

    The method follows cross-conformal prediction (Vovk 2015). Whole placements are held out in
    turn, never single measurements, because neighbouring batch sizes of the same placement would
    make the errors look too small.

    Setups larger than all measured ones get intervals from an inner extrapolation: a model fitted
    to small scales is compared with the large ones. These intervals are never narrower than the
    others.

    Args:
        make: Function that makes a model.
        folds: Number of groups of placements that are held out in turn.
        seed: Seed of the groups.

    >>> from thrifty.perf.steptime import PerfectScaling
    >>> model = Intervals(PerfectScaling, folds=3)
    >>> setups = [Setup(placement=(1,) * n, batch=8) for n in (1, 2, 3, 4)]
    >>> model.fit(setups, [1.0, 1.1, 1.1, 1.2])
    >>> low, high = model.interval(setups[:1])
    >>> bool(low[0] < 1.0 < high[0])
    True
    """

    def __init__(self, make: Callable[[], StepTimeModel], *, folds: int = 5, seed: int = 0) -> None:
        if folds < 2:
            raise UsageError(f"`folds` must be at least 2, got {folds}")
        self._make = make
        self._folds = folds
        self._seed = seed
        self._largest = 0
        self._errors = np.zeros(0)
        self._beyond = np.zeros(0)
        self._seen = np.zeros(0, int)
        self._guessed = np.zeros(0)
        self._factors = np.zeros(0)
        self._local = LocalErrors([], self._errors)
        self._model = make()

    def fit(self, setups: Sequence[Setup], step_s: Sequence[float]) -> None:
        """Fit the model, and others without one group of placements each."""
        times = np.asarray(step_s, float)
        self._model.fit(setups, step_s)
        devices = np.array([setup.num_devices for setup in setups])
        self._largest = int(devices.max())
        placements = [tuple(sorted(setup.placement)) for setup in setups]  # (4, 2) equals (2, 4)
        several = sorted({placement for placement in placements if sum(placement) > 1})
        order = np.random.default_rng(self._seed).permutation(len(several))
        fold_of = {several[at]: index % self._folds for index, at in enumerate(order)}
        folds = np.array([fold_of.get(placement, -1) for placement in placements])
        parts = [
            self._without(folds == fold, setups, times)
            for fold in range(min(self._folds, len(several)))
        ]
        none = (np.zeros(0, int), np.zeros(0))
        self._seen, self._guessed = (
            np.concatenate(each) for each in zip(none, *parts, strict=True)
        )
        errors = np.abs(np.log(self._guessed / times[self._seen]))
        seen = [setups[at] for at in self._seen]
        self._local = LocalErrors(seen, errors)
        self._factors = _crossed(seen, errors, folds[self._seen])
        self._errors = errors / self._factors
        large, guessed = self._without(devices > _SMALL * self._largest, setups, times)
        self._beyond = np.abs(np.log(guessed / times[large])) / self._local([
            setups[at] for at in large
        ])

    def held_out(self) -> tuple[np.ndarray, np.ndarray]:
        """Return indices of measurements, and their forecasts with their placements held out."""
        return self._seen, self._guessed

    def predict(self, setups: Sequence[Setup]) -> np.ndarray:
        """Return the model's forecasts."""
        return self._model.predict(setups)

    def interval(
        self, setups: Sequence[Setup], *, coverage: float = 0.9
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ends between which each time lies in a share ``coverage`` of the cases.

        Raises:
            UsageError: ``coverage`` is not between 0 and 1, or fewer than two placements were
                measured.
        """
        if not 0 < coverage < 1:
            raise UsageError(f"`coverage` must be between 0 and 1, got {coverage}")
        if not self._errors.size:
            raise UsageError("intervals need measurements of two placements or more")
        middle = self._model.predict(setups)
        factor = self._factor(setups, coverage)
        return middle / factor, middle * factor

    def upper_held_out(self, *, coverage: float = 0.9) -> np.ndarray:
        """Return the upper ends that belong to the forecasts of ``held_out``."""
        out: np.ndarray = self._guessed * np.exp(_quantile(self._errors, coverage) * self._factors)
        return out

    def _factor(self, setups: Sequence[Setup], coverage: float) -> np.ndarray:
        near = _quantile(self._errors, coverage)
        far = max(near, _quantile(self._beyond, coverage)) if self._beyond.size else near
        larger = np.array([setup.num_devices > self._largest for setup in setups])
        out: np.ndarray = np.exp(np.where(larger, far, near) * self._local(setups))
        return out

    def _without(
        self, held: np.ndarray, setups: Sequence[Setup], times: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the indices of held-out measurements, and a model's forecasts of them."""
        if not held.any() or held.all():
            return np.zeros(0, int), np.zeros(0)
        model = self._make()
        model.fit([setup for setup, out in zip(setups, held, strict=True) if not out], times[~held])
        guessed = model.predict([setup for setup, out in zip(setups, held, strict=True) if out])
        return np.flatnonzero(held), guessed


def _crossed(setups: Sequence[Setup], errors: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """Return each group's local factors, learned from the errors of the other groups.

    Factors from a group's own errors would be too optimistic.
    """
    out = np.ones(len(setups))
    for fold in np.unique(folds):
        own = folds == fold
        others = [setup for setup, mine in zip(setups, own, strict=True) if not mine]
        local = LocalErrors(others, errors[~own])
        out[own] = local([setup for setup, mine in zip(setups, own, strict=True) if mine])
    return out


def _quantile(errors: np.ndarray, coverage: float) -> float:
    """Return a quantile with the finite-sample correction of conformal prediction."""
    share = min(1.0, coverage * (1 + 1 / len(errors)))
    return float(np.quantile(errors, share, method="higher"))


def smallest_margin(
    missed: Callable[[float], Sequence[bool]],
    *,
    risk: float = 0.05,
    confidence: float = 0.95,
    steps: int = 20,
) -> float:
    """Return the smallest margin with which decisions rarely miss their limit.

    A margin is the share of the way from the forecast to the upper end of its interval. The upper
    end itself, which holds in nine cases of ten for every setup, is too conservative for decisions:
    few of the chosen setups are near their limit. The margin is calibrated on decisions over
    measured setups, with forecasts by models that did not see them (risk-controlling prediction
    sets, Bates et al. 2021, with the exact binomial bound).

    Args:
        missed: Function from a margin, from 0 (use the forecast) to 1 (use its upper end), to
            whether each decision missed its limit.
        risk: Share of decisions that may miss.
        confidence: Probability that the share stays below ``risk``, if decisions are independent.
        steps: Number of evenly spaced margins to try.

    Returns:
        Margin from 0 to 1; 1 if no smaller one suffices.

    Raises:
        UsageError: ``risk`` or ``confidence`` is not between 0 and 1.

    >>> smallest_margin(lambda margin: [margin < 0.5] + [False] * 99)
    0.0
    >>> smallest_margin(lambda margin: [margin < 0.5] * 5 + [False] * 95)
    0.5
    """
    for name, value in (("risk", risk), ("confidence", confidence)):
        if not 0 < value < 1:
            raise UsageError(f"`{name}` must be between 0 and 1, got {value}")
    for margin in np.linspace(0, 1, steps + 1):
        seen = np.asarray(missed(float(margin)), bool)
        if _at_most(int(seen.sum()), len(seen), risk) <= 1 - confidence:
            return float(margin)
    return 1.0


def _at_most(num: int, of: int, share: float) -> float:
    """Return the probability of at most ``num`` misses if their true share were ``share``."""
    logs = [
        math.lgamma(of + 1) - math.lgamma(k + 1) - math.lgamma(of - k + 1)
        + k * math.log(share) + (of - k) * math.log1p(-share)
        for k in range(num + 1)
    ]  # fmt: skip
    return math.fsum(map(math.exp, logs))
