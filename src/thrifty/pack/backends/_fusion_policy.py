"""The decision whether to fuse a trial, by a measurement of it or of a similar structure."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from thrifty.core import fingerprint
from thrifty.pack._backend import Member
from thrifty.pack.fused._member import FusedTrial
from thrifty.pack.fused._step import BlockOptions
from thrifty.pack.task._data import num_valid_of
from thrifty.pack.task._task import Task, Trainable
from thrifty.perf import PackCurve

from ._calibrate import calibrate
from ._fused import FusedBackend, Traits


PRICE_STEPS = 100
PRICE_S = 0.2
"""The approximate cost of measuring whether fusing pays, in steps and in seconds.

Nothing is measured until plain training of a model and its relatives has cost as much. So a small
study never loses more than it might have gained (the ski-rental rule: rent until the rents add up
to the price).
"""
TRUST_RATIO = 1.15
"""A relative's measurement is used if fusing was at least this factor faster, or slower, there."""
MOST_PADDING = 1.5
"""The largest factor by which zero padding may enlarge a batch."""
CHANGE = 1.03
"""A fused trial returns to plain training if that is faster by this factor.

The margin keeps it from moving at every change in the number of trials beside it.
"""


CHECKED_STEPS = 2
"""How many steps of each stage are always checked: the first in a block, and the last."""
CHECK_STEPS = 4.0
"""The cost of a checked step, in steps of a trial alone.

The step itself, copies of the state and the comparison cost two to three. A second computation in
double precision costs ten or more, where rounding requires one.
"""
FORWARD_STEPS = 1 / 3
"""The cost of evaluating a batch, in steps of a trial alone: a step also has a backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """The measurements of one structure on one device.

    ``key`` names both; ``structure`` and ``device`` describe them in words. ``memory_bytes`` is the
    memory of the device that all its users share.
    """

    key: str
    structure: str
    device: str
    curves: tuple[PackCurve, ...]
    memory_bytes: float = math.inf

    @property
    def solo_s(self) -> float:
        """Seconds of a step of one trial alone."""
        return next(c.step_s[1] for c in self.curves if c.backend == "solo")

    @property
    def fused(self) -> PackCurve | None:
        """The best curve of the fused back-end; None if there is none."""
        curves = [c for c in self.curves if c.backend == "fused"]
        return min(curves, key=lambda c: min(c.per_trial(k) for k in c.step_s), default=None)

    def gain(self, num: int) -> float:
        """Return the speed-up of fusing ``num`` trials over training each by itself."""
        curve = self.fused
        if curve is None:
            return 0.0
        return self.solo_s / curve.per_trial(min(num, max(curve.step_s)))

    def fuses(self, num: int) -> bool:
        """Return whether ``num`` trials train faster fused than each by itself."""
        return self.gain(num) > 1


class FusionPolicy:
    """A judge of which back-end is best for a trial, measuring where it does not know.

    Options:
        ``known``: Curves by key.
        ``on_calibrated``: Called with each calibration, known or new.
        ``patient``: Whether to measure only once enough plain training has been done to pay for it.
    """

    def __init__(
        self,
        task: Task | Trainable,
        device: torch.device,
        *,
        known: Mapping[str, Sequence[PackCurve]],
        on_calibrated: Callable[[Calibration], None],
        patient: bool,
    ) -> None:
        self._task = task
        self._device = device
        self._known = known
        self._on_calibrated = on_calibrated
        self._patient = patient
        self._calibrations: dict[Hashable, Calibration] = {}
        self._relatives: dict[Hashable, Calibration] = {}
        self._traits: WeakKeyDictionary[FusedTrial, Traits] = WeakKeyDictionary()
        self._spent: dict[Hashable, tuple[float, int]] = {}

    def fuses(
        self,
        fused: FusedBackend,
        trial: FusedTrial,
        values: Mapping[str, Any],
        *,
        num_epochs: int = 1,
        checked: bool = True,
    ) -> bool:
        """Return whether fusing is faster for a trial beside those of its kind.

        It is False while it is too early to tell.

        Args:
            fused: The back-end that would fuse it.
            trial: The trial.
            values: Its hyper-parameters.
            num_epochs: How many epochs it will be trained.
            checked: Whether to count the cost of the checks that are never skipped.

        Raises:
            UnfusableError: It cannot be fused.
        """
        self._traits[trial] = fused.traits(trial, values)
        host = fused.host(trial, values) if self._calibrations else None
        if host is not None:  # it trains as fast as the trials that it joins
            self._traits[trial] = fused.traits_of(host)
        traits = self._traits[trial]
        num = self._num_like(traits)
        steps = num_epochs * trial.num_steps(values)
        if checked and steps <= _price(fused, trial, values):
            return False  # even packs that took no time at all would not pay
        calibration = self._found(fused, trial, values, num=num)
        if calibration is None or not calibration.fuses(num):
            return False
        price = _price(fused, trial, values, solo_s=calibration.solo_s) if checked else 0.0
        return steps * (1 - 1 / calibration.gain(num)) > price

    def stays(self, trial: FusedTrial) -> bool:
        """Return whether a fused trial is still about as fast as it would be by itself."""
        calibration = self.calibration(trial)
        return (
            calibration is None
            or calibration.gain(self._num_like(self._traits[trial])) * CHANGE > 1
        )

    def _num_like(self, traits: Traits) -> int:
        """Return how many trials could be in one block."""
        return sum(other.group == traits.group for other in self._traits.values())

    def calibration(self, trial: FusedTrial) -> Calibration | None:
        """Return the measurement of a trial, or the one of a relative assumed to hold for it."""
        traits = self._traits.get(trial)
        if traits is None:
            return None
        return self._calibrations.get(traits.identity) or self._relatives.get(traits.kin)

    def spent(self, trials: Sequence[FusedTrial], seconds: float) -> None:
        """Record the seconds in which plain training took each trial through an epoch or less.

        ``trials`` are those that have not failed.
        """
        for trial in trials:
            traits = self._traits.get(trial)
            if traits is None or not trial.is_trained:
                continue
            before, steps = self._spent.get(traits.kin, (0.0, 0))
            self._spent[traits.kin] = (
                before + seconds / len(trials),
                steps + trial.num_steps(trial.plan.values),
            )

    def _found(
        self, fused: FusedBackend, trial: FusedTrial, values: Mapping[str, Any], *, num: int
    ) -> Calibration | None:
        """Return a calibration that holds for a trial among ``num`` of its group, or None."""
        traits = self._traits[trial]
        own = self._calibrations.get(traits.identity)
        if own is not None:
            return own
        keeps = bool(trial.frozen) and fused.activations.is_on
        name = self._name((traits.identity, "kept") if keeps else traits.identity)
        if name not in self._known:
            relative = self._relatives.get(traits.kin)
            if relative is not None and not 1 / TRUST_RATIO < relative.gain(num) < TRUST_RATIO:
                if relative.fuses(num):
                    _configure(fused, trial, relative, values=values)
                return relative
            if self._patient and not self._has_paid(traits.kin):
                return None
        return self._calibrate(name, fused=fused, trial=trial, values=values)

    def _has_paid(self, kin: Hashable) -> bool:
        seconds, steps = self._spent.get(kin, (0.0, 0))
        return seconds >= PRICE_S and steps >= PRICE_STEPS

    def _name(self, identity: Hashable) -> str:
        return fingerprint([
            repr(identity),
            device_name(self._device),
            torch.get_num_threads(),
            torch.__version__,
        ])

    def _calibrate(
        self, name: str, *, fused: FusedBackend, trial: FusedTrial, values: Mapping[str, Any]
    ) -> Calibration:
        assert isinstance(self._task, Task)
        # before the measurement, because this raises if the trial cannot be fused
        structure = fused.structure(trial, values)
        curves = self._known.get(name)
        if curves is None:
            curves = calibrate(
                self._task,
                Member(values=values, seed=trial.seed, first=trial.readings.first),
                device=self._device,
                structures=fused.structures,
                channels_last=structure.has_images,
                whole=structure.whole,
                activations=fused.activations,
            )
        calibration = Calibration(
            key=name,
            structure=f"{type(trial.model).__qualname__}, {describe(trial.model)}",
            device=device_name(self._device),
            curves=tuple(curves),
            memory_bytes=device_memory(self._device),
        )
        traits = self._traits[trial]
        self._calibrations[traits.identity] = self._relatives[traits.kin] = calibration
        self._spent.pop(traits.kin, None)  # the next measurement has to be paid for anew
        _configure(fused, trial, calibration, values=values)
        self._on_calibrated(calibration)
        return calibration


def _price(
    fused: FusedBackend,
    trial: FusedTrial,
    values: Mapping[str, Any],
    *,
    solo_s: float | None = None,
) -> float:
    """Return the cost of the checks of a stage that are never skipped, in steps of a trial alone.

    Args:
        fused: The back-end that knows how long an evaluation takes, if one was measured.
        trial: The trial.
        values: Its hyper-parameters.
        solo_s: Seconds of a step alone, if that is known.
    """
    num_valid = num_valid_of(trial.source) or 0
    evaluation = FORWARD_STEPS * num_valid / trial.batch_size(values)
    measured_s = fused.evaluation_s(trial, values)
    if measured_s is not None and solo_s:
        evaluation = measured_s / solo_s
    return CHECKED_STEPS * CHECK_STEPS + evaluation


def _configure(
    fused: FusedBackend, trial: FusedTrial, calibration: Calibration, *, values: Mapping[str, Any]
) -> None:
    """Have trials like this one fused in the way that was best."""
    best = calibration.fused
    if best is not None:
        fused.configure(
            fused.key(trial, values),
            BlockOptions(
                size=max(best.step_s),
                max_padding=max_padding(best),
                channels_last=best.variant == "channels last",
            ),
        )


def max_padding(curve: PackCurve) -> float:
    """Return the largest ratio of a larger batch to a smaller one that is padded to it.

    At this ratio the zeros cost at most half of what training together saves, by the line
    ``T(k) = a + b k`` through the ends of a curve: training together saves ``a``, and zeros cost
    their share of ``b``.

    >>> max_padding(PackCurve(backend="fused", step_s={1: 5.0, 4: 17.0}))
    1.1428571428571428
    >>> max_padding(PackCurve(backend="fused", step_s={1: 5.0, 4: 6.0}))
    1.5
    """
    size = max(curve.step_s)
    if size == 1:
        return 1.0
    slope = (curve.time(size) - curve.time(1)) / (size - 1)
    saved = curve.time(1) - slope
    if saved >= 2 * slope:
        return MOST_PADDING
    return min(max(2 * slope / (2 * slope - saved), 1.0), MOST_PADDING)


def device_name(device: torch.device) -> str:
    """Return the manufacturer's name of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


def device_memory(device: torch.device) -> float:
    """Return the free memory of a GPU or of this machine; infinite if unknown.

    Memory that PyTorch keeps for later counts as free.
    """
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + kept)
    try:
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return math.inf


def describe(model: torch.nn.Module) -> str:
    """Return the size of a model in words."""
    return f"{sum(p.numel() for p in model.parameters()):,} parameters"
