"""What a training run needs, and its measured steps on rented machines and how far they reach."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from thrifty.core import CloudError
from thrifty.perf import PRECISIONS, PackCurve, Precision, StepProfile
from thrifty.plan import ForestStage

from ._offer import Interval, Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training, or many that run side by side.

    Args:
        profile: Profile of a step on a device that you have.
        steps: Steps of one training.
        other_profiles: Profiles of the same step on other devices, by accelerator, such as
            ``{"A100": profile}``. Machines with that accelerator are forecast from its own profile
            instead of from the device's speed relative to that of ``profile``.
        global_batch: Samples of a step, on all machines of a training together.
        parallelism_phases: Phases of a study, ``((trainings, steps), ...)``: how many
            trainings can run side by side, and for how many steps each. This is the width of
            the stage forest over time. None: one training of ``steps`` steps.
        packs: Measured curve of joint steps, with which a device may train several trainings of a
            study at once. It counts relative to a step of one training, on every type of device,
            and only on machines with one device. None: a device trains one at a time.
        accumulation: Whether a device may train its samples of a step in micro-batches, one after
            the other, where they do not fit together. The gradients are exchanged once a step. For
            a loss that is a mean over samples, the results are the same but for rounding; layers
            that use statistics of a batch, such as batch normalisation, see those of a micro-batch.
        precisions: Precisions in which the model may be trained, by autocast; a device takes the
            fastest that it has units for. They change the results. float32 must be among them,
            because some devices have units for no other. None: the profile's.
        state_bytes: Bytes of model and optimizer in a checkpoint.
        setup_s: Seconds from renting a machine until its first step.

    Raises:
        CloudError: A number is out of range.
    """

    profile: StepProfile
    steps: int
    global_batch: int
    parallelism_phases: tuple[tuple[int, int], ...] | None = None
    packs: PackCurve | None = None
    accumulation: Literal["allowed", "never"] = "allowed"
    precisions: tuple[Precision, ...] | None = None
    state_bytes: float = 0.0
    setup_s: float = 180.0
    other_profiles: Mapping[str, StepProfile] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.global_batch < 1:
            raise CloudError(
                f"`steps` and `global_batch` must be at least 1, got steps={self.steps}, "
                f"global_batch={self.global_batch}"
            )
        if not (self.state_bytes >= 0 and self.setup_s >= 0):
            raise CloudError(
                f"bytes and seconds are not negative: state_bytes={self.state_bytes}, "
                f"setup_s={self.setup_s}"
            )
        if self.packs is not None and self.parallelism_phases is None:
            raise CloudError(
                "packs are trainings of a study: give its parallelism_phases, or leave packs out"
            )
        if self.accumulation not in {"allowed", "never"}:
            raise CloudError(
                f'`accumulation` must be "allowed" or "never", got {self.accumulation!r}'
            )
        if self.precisions is not None and (
            "float32" not in self.precisions or not set(self.precisions) <= set(PRECISIONS)
        ):
            raise CloudError(
                f"`precisions` must be some of {', '.join(PRECISIONS)}, float32 among them, got "
                f"{self.precisions}"
            )
        if self.parallelism_phases is not None and (
            not self.parallelism_phases
            or any(width < 1 or steps < 1 for width, steps in self.parallelism_phases)
        ):
            raise CloudError(
                "parallelism_phases are pairs (trainings, steps), both 1 or more, "
                f"not {self.parallelism_phases}"
            )


def parallelism_phases_of(
    stages: Iterable[ForestStage], *, steps_per_epoch: int = 1
) -> tuple[tuple[int, int], ...]:
    """Return how many trainings can run side by side, and for how many steps.

    The result is the ``Workload.parallelism_phases`` of a stage forest. A stage starts when its
    parent ends. Completed stages are left out, and so are failed ones with all their
    descendants. Running stages count in full.

    Args:
        stages: The stages that ``stage_forest`` returns, parents first.
        steps_per_epoch: Steps per epoch of each training.

    Raises:
        CloudError: No stage is left to train, or an epoch has no steps.

    >>> from thrifty.plan import SearchPlan, stage_forest
    >>> from thrifty.space import Constant, Step, Timeline
    >>> plan = SearchPlan()
    >>> for trial, lr in enumerate([Constant(0.1), Step(0.1, [3]), Step(0.1, [3, 6])]):
    ...     plan.request(trial, plan.insert(Timeline({"lr": lr}, epochs=9)), 9)
    >>> parallelism_phases_of(stage_forest(plan, ends={}), steps_per_epoch=100)
    ((1, 300), (2, 300), (3, 300))
    """
    if steps_per_epoch < 1:
        raise CloudError(f"an epoch has at least one step, not steps_per_epoch={steps_per_epoch}")
    ends: dict[int, int] = {}
    change: dict[int, int] = {}
    failed: set[int | None] = set()
    for stage in stages:
        if stage.state == "failed" or stage.parent in failed:
            failed.add(stage.index)
            continue
        if stage.state == "done":
            continue
        start = 0 if stage.parent is None else ends.get(stage.parent, 0)
        ends[stage.index] = end = start + stage.stop - stage.start
        change[start] = change.get(start, 0) + 1
        change[end] = change.get(end, 0) - 1
    if not ends:
        raise CloudError("no stage is left to train, so no machines are needed")
    phases: list[tuple[int, int]] = []
    at = width = 0
    for moment in sorted(moment for moment, more in change.items() if more):
        if width:
            phases.append((width, (moment - at) * steps_per_epoch))
        at, width = moment, width + change[moment]
    return tuple(phases)


def study_s(
    step_s: np.ndarray,
    parallelism_phases: Sequence[tuple[int, int]],
    pack_ratio: np.ndarray | None = None,
) -> np.ndarray:
    """Return the seconds of a whole study on 1, 2, ... equal machines.

    In each phase, trainings run in waves: the trainings of one wave run side by side and share the
    machines equally. The waves are chosen so that the phase ends earliest. In a phase with more
    than twice as many trainings as machines, the first waves are those with the highest throughput.

    Args:
        step_s: Seconds of a step of one training on 1, 2, ... machines, [machines, ...].
        parallelism_phases: Number of trainings and of steps in each phase.
        pack_ratio: Seconds of a joint step of 1, 2, ... trainings on one machine, relative to that
            of one, [packs, ...]; infinite where they do not fit. None: no packs.

    Returns:
        Seconds, [machines, ...].

    >>> study_s(np.array([1.0, 0.6]), [(1, 100), (3, 10)]).tolist()
    [130.0, 76.0]
    >>> study_s(np.array([1.0, 0.6]), [(1, 100), (3, 10)], np.array([1.0, 1.2])).tolist()
    [122.0, 72.0]
    """
    ratio = np.ones(1) if pack_ratio is None else pack_ratio
    # Extra machines that would slow a training down stay idle.
    best = np.minimum.accumulate(np.asarray(step_s, float), axis=0)
    return np.stack([
        _phases_s(best[: num + 1], parallelism_phases, ratio) for num in range(len(best))
    ])


def _phases_s(
    best: np.ndarray, parallelism_phases: Sequence[tuple[int, int]], pack_ratio: np.ndarray
) -> np.ndarray:
    """Return the seconds of all phases on ``len(best)`` machines."""
    num = len(best)
    # Among waves that give each training the same number of machines, the widest is never worse.
    waves = {num // each: best[each - 1] for each in range(1, num + 1)}
    waves |= {num * k: best[0] * pack_ratio[k - 1] for k in range(2, len(pack_ratio) + 1)}
    most = 2 * max(waves)
    ends = [np.zeros(best.shape[1:])]
    for width in range(1, min(most, max(width for width, _ in parallelism_phases)) + 1):
        ends.append(np.min([s + ends[max(0, width - w)] for w, s in waves.items()], axis=0))
    table = np.stack(ends)
    phases = [steps * _wide_s(table, waves, width) for width, steps in parallelism_phases]
    return np.asarray(np.sum(phases, axis=0))


def _wide_s(table: np.ndarray, waves: dict[int, np.ndarray], width: int) -> np.ndarray:
    """Return the seconds of one step of ``width`` trainings, from a ``table`` for small widths."""
    if width < len(table):
        return np.asarray(table[width])
    wide, seconds = np.array(list(waves)), np.stack(list(waves.values()))
    shape = (-1, *[1] * (seconds.ndim - 1))
    quickest = np.argmin(seconds / wide.reshape(shape), axis=0)[None]
    each = wide[quickest]
    num = -(-(width - len(table) + 1) // each)
    rest = np.take_along_axis(table, width - num * each, axis=0)
    return np.asarray((num * np.take_along_axis(seconds, quickest, axis=0) + rest)[0])


Z90 = 1.6448536269514722
"""Standard deviations from the median to the ends of a 90 % interval."""

_LEAST_SD = math.log(1.03) / Z90
"""Least error of a forecast: equal machines differ by this much, however well one is known."""

_NOISE = 0.03
_STRAGGLING = 0.02
_BATCH, _BATCH_OCTAVES, _SAME_BATCH = 0.12, 1.5, 0.05
_PLACEMENT, _PLACEMENT_OCTAVES, _SAME_PLACEMENT = 0.1, 0.7, 0.05
"""Standard deviations of the logarithm of a step over its replay, and how far they reach.

A replay errs alike at neighbouring batch sizes, because the profile of one device has errors of its
own, and at neighbouring numbers of machines and of devices per machine. The figures are rough.
"""

_SAME = 1e-9
"""Octaves apart from which two batches or placements differ."""

_DOUBT = 8.0
"""How many measured steps it takes to doubt these deviations as much as to believe them."""


Factors = tuple[Interval, Interval, Interval]
"""Factors on computation, sums inside a machine, and sums between machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Measured step of a training on equal machines.

    Args:
        offer: Type of the machines.
        num: Number of machines.
        batch: Samples per device.
        seconds: Seconds of a step; a median of some tens of steps, after the first few.

    Raises:
        CloudError: A number is not positive.

    >>> offer = Offer(
    ...     cloud="aws",
    ...     region="us-east-1",
    ...     instance_type="p3.8xlarge",
    ...     accelerator="V100",
    ...     accelerator_count=4,
    ...     price_usd_h=12.24,
    ... )
    >>> print(StepTiming(offer=offer, num=2, batch=32, seconds=0.21))
    32 samples per device in 0.21 s on 2 x p3.8xlarge (4 V100 each)
    """

    offer: Offer
    num: int
    batch: int
    seconds: float

    def __post_init__(self) -> None:
        if self.num < 1 or self.batch < 1:
            raise CloudError(
                f"`num` and `batch` must be at least 1, got num={self.num}, batch={self.batch}"
            )
        if not 0 < self.seconds < math.inf:
            raise CloudError(f"`seconds` must be positive and finite, got {self.seconds}")

    def __str__(self) -> str:
        where = self.offer.spell(self.num)
        return f"{self.batch} samples per device in {self.seconds:g} s on {where}"


@dataclass(frozen=True, slots=True, eq=False)
class ObservedSteps:
    """Posterior of the steps on one type of machine, from some that were measured there.

    The logarithm of a step is its replay's, plus the replay's derivatives times errors of three
    factors (computation, sums inside a machine, sums between machines), plus a Gaussian process
    over the placement and the batch.

    Attributes:
        timings: Measured steps.
        prior: The factors' intervals before: compute, inner, network.
        posterior: Their intervals now.
        slopes: Derivatives of the measured steps' replays by the factors, [timings, 3].
        variances: Prior variances of the factors' logarithms, [3].
        inverse: Inverse covariance of the measured steps, [timings, timings].
        weights: The inverse times the measured steps' distances from the prior, [timings].
        scale: By how much larger the deviations are than expected.
    """

    timings: tuple[StepTiming, ...]
    prior: Factors
    posterior: Factors
    slopes: np.ndarray
    variances: np.ndarray
    inverse: np.ndarray
    weights: np.ndarray
    scale: float

    @classmethod
    def of(
        cls,
        timings: tuple[StepTiming, ...],
        *,
        prior: Factors,
        slopes: np.ndarray,
        residuals: np.ndarray,
    ) -> ObservedSteps:
        """Return the posterior.

        Args:
            timings: Measured steps.
            prior: The factors' intervals before.
            slopes: Derivatives of the measured steps' replays by the factors, [timings, 3].
            residuals: Log of the measured steps over their prior forecasts, [timings].
        """
        variances = np.array([_deviation(each) for each in prior]) ** 2
        places = np.concatenate([_places_of(each) for each in timings])
        covariance = (slopes * variances) @ slopes.T + _kernel(places, places)
        covariance += _NOISE**2 * np.eye(len(timings))
        inverse = np.linalg.inv(covariance)
        weights = inverse @ residuals
        scale = (_DOUBT + residuals @ weights) / (_DOUBT + len(timings))
        scale = math.sqrt(max(1.0, scale))
        gains = variances[:, None] * slopes.T
        left = variances - np.einsum("ij,jk,ik->i", gains, inverse, gains)
        moved = gains @ weights
        # A factor is no less sure than before, unless it moved farther than its prior allows.
        deviations = np.minimum(
            scale * np.sqrt(np.maximum(left, 0.0)), np.maximum(np.sqrt(variances), np.abs(moved))
        )
        deviations = np.maximum(deviations, _LEAST_SD)
        return cls(
            timings=timings,
            prior=prior,
            posterior=_around([each.median for each in prior] * np.exp(moved), deviations),
            slopes=slopes,
            variances=variances,
            inverse=inverse,
            weights=weights,
            scale=scale,
        )

    def ends(
        self,
        replays_s: np.ndarray,
        slopes: np.ndarray,
        *,
        nodes: np.ndarray,
        per_node: np.ndarray,
        batch: np.ndarray,
        wider: float = 1.0,
    ) -> np.ndarray:
        """Return steps on machines of this type: median, low, high, [3, steps].

        Args:
            replays_s: Seconds by the replay with the factors' medians after the measurement.
            slopes: Derivatives of their logarithms by the factors' logarithms, [steps, 3].
            nodes: Numbers of machines, [steps].
            per_node: Devices of each machine, [steps].
            batch: Samples per device, [steps].
            wider: Factor on the logarithm of the interval.
        """
        here = _places(nodes, per_node, batch)
        there = np.concatenate([_places_of(each) for each in self.timings])
        by_place = _kernel(here, there)
        shared = (slopes * self.variances) @ self.slopes.T + by_place
        known = np.einsum("ij,jk,ik->i", shared, self.inverse, shared)
        prior = (slopes**2) @ self.variances + _variance(here)
        deviations = np.maximum(self.scale * np.sqrt(np.maximum(prior - known, 0.0)), _LEAST_SD)
        medians = replays_s * np.exp(by_place @ self.weights)
        widths = np.exp(wider * Z90 * deviations)
        return np.stack([medians, medians / widths, medians * widths])


def _deviation(interval: Interval) -> float:
    """Return the standard deviation of the logarithm that an interval describes."""
    return max(math.log(interval.high / interval.low) / (2 * Z90), _LEAST_SD)


def _around(medians: np.ndarray, deviations: np.ndarray) -> Factors:
    compute, inner, network = (
        Interval(median=middle, low=middle / width, high=middle * width)
        for middle, width in zip(medians.tolist(), np.exp(Z90 * deviations).tolist(), strict=True)
    )
    return compute, inner, network


def _places_of(timing: StepTiming) -> np.ndarray:
    return _places(
        np.array([timing.num]), np.array([timing.offer.accelerator_count]), np.array([timing.batch])
    )


def _places(nodes: np.ndarray, per_node: np.ndarray, batch: np.ndarray) -> np.ndarray:
    """Return machines, devices per machine and samples per device, in octaves, [steps, 3]."""
    out: np.ndarray = np.log2(np.stack([nodes, per_node, batch], axis=1).astype(float))
    return out


def _kernel(here: np.ndarray, there: np.ndarray) -> np.ndarray:
    """Return the covariance of the replay's errors, [here, there]."""
    apart = here[:, None] - there[None]
    far = apart[..., :2]
    same_batch = np.abs(apart[..., 2]) < _SAME
    same_place = np.abs(far).max(axis=-1) < _SAME
    devices = here[:, :2].sum(axis=1)[:, None] * there[:, :2].sum(axis=1)[None]
    near_batch = np.exp(-0.5 * (apart[..., 2] / _BATCH_OCTAVES) ** 2)
    near_place = np.exp(-0.5 * (far**2).sum(axis=-1) / _PLACEMENT_OCTAVES**2)
    out: np.ndarray = (
        _STRAGGLING**2 * devices
        + _BATCH**2 * near_batch
        + _SAME_BATCH**2 * same_batch
        + _PLACEMENT**2 * near_place
        + _SAME_PLACEMENT**2 * same_place
    )
    return out


def _variance(here: np.ndarray) -> np.ndarray:
    """Return the variance of a measured step around its replay, [here]."""
    fixed = _BATCH**2 + _SAME_BATCH**2 + _PLACEMENT**2 + _SAME_PLACEMENT**2 + _NOISE**2
    out: np.ndarray = fixed + (_STRAGGLING * here[:, :2].sum(axis=1)) ** 2
    return out
