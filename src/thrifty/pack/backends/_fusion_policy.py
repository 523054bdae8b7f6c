"""The decision whether to fuse a trial, by a measurement of it or of a similar structure."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary

import torch

from thrifty.core import fingerprint
from thrifty.pack._backend import EpochPlan, Member, UnverifiedError, device_name, out_of_memory
from thrifty.pack.fused._activations import ActivationStore
from thrifty.pack.fused._fusable import UnfusableError
from thrifty.pack.fused._member import FusedTrial
from thrifty.pack.fused._step import BlockOptions
from thrifty.pack.task._data import num_valid_of
from thrifty.pack.task._task import Task, Trainable
from thrifty.pack.trial._trial import TaskTrial
from thrifty.perf import PackCurve

from ._dry_runs import Structures, may_use_files
from ._fused import FusedBackend, Traits


PRICE_STEPS = 100
PRICE_S = 0.2
"""The approximate cost of measuring whether fusing pays, in steps and in seconds.

Nothing is measured until plain training of a model and its relatives has cost as much. So a small
study never loses more than it might have gained (the ski-rental rule: rent until the rents add up
to the price).
"""
MUCH_MORE = 20
"""The multiple of this price in steps that are known to come, from which it is paid at once.

Then measuring costs a twentieth of the study if fusing does not pay. Waiting would cost more if it
does: the first epochs would be trained alone, and by one trial, as packs have no size until then.
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
        ``patient``: Whether to measure only once enough plain training has been done to pay for it,
            or enough is known to come.

    Attributes:
        epochs_to_come: How many epochs are known to be trained from now on.
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
        self.epochs_to_come = 0.0
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
        host = fused.blocks.host(trial, values) if self._calibrations else None
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
        return self._calibrations.get(traits.identity) or self._relatives.get(
            traits.rough_signature
        )

    def spent(self, trials: Sequence[FusedTrial], seconds: float) -> None:
        """Record the seconds in which plain training took each trial through an epoch or less.

        ``trials`` are those that have not failed.
        """
        for trial in trials:
            traits = self._traits.get(trial)
            if traits is None or not trial.is_trained:
                continue
            before, steps = self._spent.get(traits.rough_signature, (0.0, 0))
            self._spent[traits.rough_signature] = (
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
        keeps = _keeps_activations(fused, trial)
        name = self._name((traits.identity, "kept") if keeps else traits.identity)
        if name not in self._known:
            relative = self._relatives.get(traits.rough_signature)
            if relative is not None and not 1 / TRUST_RATIO < relative.gain(num) < TRUST_RATIO:
                if relative.fuses(num):
                    _configure(fused, trial, relative, values=values)
                return relative
            if self._patient and not (
                self._has_paid(traits.rough_signature) or self._is_worth(trial, values)
            ):
                return None
        return self._calibrate(name, fused=fused, trial=trial, values=values)

    def _has_paid(self, rough_signature: Hashable) -> bool:
        seconds, steps = self._spent.get(rough_signature, (0.0, 0))
        return seconds >= PRICE_S and steps >= PRICE_STEPS

    def _is_worth(self, trial: FusedTrial, values: Mapping[str, Any]) -> bool:
        """Return whether enough is known to come, and steps of copies leave nothing behind."""
        steps = self.epochs_to_come * trial.num_steps(values)
        return steps >= MUCH_MORE * PRICE_STEPS and not may_use_files(trial)

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
        structure = fused.dry_runs.structure(trial, values)
        curves = self._known.get(name)
        if curves is None:
            curves = calibrate(
                self._task,
                Member(values=values, seed=trial.seed, first=trial.readings.first),
                device=self._device,
                structures=fused.dry_runs.structures,
                channels_last=structure.has_images,
                whole=structure.whole,
                activations=fused.activations,
                shares_checks=_keeps_activations(fused, trial),
            )
        calibration = Calibration(
            key=name,
            structure=f"{type(trial.model).__qualname__}, {describe(trial.model)}",
            device=device_name(self._device),
            curves=tuple(curves),
            memory_bytes=device_memory(self._device),
        )
        traits = self._traits[trial]
        self._calibrations[traits.identity] = self._relatives[traits.rough_signature] = calibration
        self._spent.pop(
            traits.rough_signature, None
        )  # the next measurement has to be paid for anew
        _configure(fused, trial, calibration, values=values)
        self._on_calibrated(calibration)
        return calibration


def _keeps_activations(fused: FusedBackend, trial: FusedTrial) -> bool:
    return bool(trial.frozen) and fused.activations.is_on


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
        fused.blocks.configure(
            fused.blocks.key(trial, values),
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


# -- measurements ----------------------------------------------------------------------------------


SIZES = {"cpu": (1, 4, 16, 32), "cuda": (1, 4, 16, 64, 256)}
WHOLE_SIZES = (4, 16)
"""The sizes for whole batches: their steps are long, and any gain from fusing grows with size."""
MEASURE_S = 0.012
"""How many seconds each size is measured if steps are short; at least three steps."""
LONG_STEP_S = 0.1
"""The length in seconds from which steps are measured twice, after one warm-up step.

Shorter steps are measured three times or more, after two warm-up steps.
"""
MAX_STEP_S = 2.0
"""The seconds a joint step may take before larger packs are no longer tried."""
EXPLORE_RATIO = 0.9
"""A larger pack is measured if its time per trial may shrink to this fraction."""
NUM_KEPT_STEPS = 2
"""The steps that are measured again and again where activations of a frozen trunk are kept."""
GAIN = 0.97
"""A larger pack is worth using if its time per trial shrinks to this fraction."""


def calibrate(
    task: Task,
    member: Member,
    *,
    device: torch.device,
    structures: Structures,
    channels_last: bool,
    whole: bool = False,
    activations: ActivationStore | None = None,
    shares_checks: bool = False,
) -> list[PackCurve]:
    """Measure curves of the solo and the fused back-end, in each memory format that applies.

    The measured trials are fresh copies of ``member``, discarded afterwards. On whole batches
    (``whole``) trials trained one by one also share what is prepared from a batch, so their steps
    are measured on a batch that is ready. A size that runs out of memory ends its curve. Where
    ``activations`` of a frozen trunk are kept, steps are measured that find them there, as all but
    those of a first epoch do; trials that share a trunk compute it once for all of their checks
    (``shares_checks``).

    Raises:
        UnfusableError: One of the copies changes what others read.
    """
    solo_s = _seconds(_solo_steps(task, member, device, whole=whole), device)
    curves = [PackCurve(backend="solo", step_s={1: solo_s})]
    sizes = WHOLE_SIZES if whole else SIZES.get(device.type, SIZES["cpu"])
    first: dict[int, float] = {}  # step time by pack size in the first memory format
    for last in (False, True) if channels_last else (False,):
        step_s: dict[int, float] = {}
        memory: dict[int, float] = {}
        # try the second format at one size, and at all sizes only if it is faster there
        order = [*sizes[1:2], *sizes[:1], *sizes[2:]] if last else sizes
        for size in order:
            try:
                step_s[size], memory[size] = _measure_fused(
                    task,
                    member,
                    size,
                    device=device,
                    structures=structures,
                    channels_last=last,
                    activations=activations,
                )
            except Exception as error:
                if not out_of_memory(error):
                    raise
                break
            worse = last and len(step_s) == 1 and step_s[size] > GAIN * first.get(size, math.inf)
            if worse or (size >= max(step_s) and not _promises_more(step_s)):
                break
        if step_s:
            first = first or step_s
            fused = PackCurve(
                backend="fused",
                variant="channels last" if last else "",
                step_s=step_s,
                memory_bytes=memory,
            )
            curves.append(_up_to_the_best(fused, shares_checks=shares_checks))
    return curves


def _promises_more(step_s: Mapping[int, float]) -> bool:
    """Return whether larger packs may be worth measuring.

    The slope of the line through the two largest sizes is the best time per trial they can reach.
    """
    *_, k = sizes = sorted(step_s)
    if step_s[k] > MAX_STEP_S:
        return False
    if len(sizes) == 1:
        return True
    j = sizes[-2]
    limit = (step_s[k] - step_s[j]) / (k - j)
    return limit < EXPLORE_RATIO * min(step_s[k] / k for k in sizes)


def _up_to_the_best(curve: PackCurve, *, shares_checks: bool) -> PackCurve:
    """Drop the sizes past saturation: larger packs run as several groups of the best size.

    A pack has to gain something over its trials by themselves, or may lose as little if they share
    a trunk in their checks.
    """
    best = min(
        curve.step_s, key=lambda k: curve.step_s[k] / k * GAIN ** ((k == 1) is not shares_checks)
    )
    return replace(curve, step_s={k: s for k, s in curve.step_s.items() if k <= best})


def _measure_fused(
    task: Task,
    member: Member,
    size: int,
    *,
    device: torch.device,
    structures: Structures,
    channels_last: bool,
    activations: ActivationStore | None,
) -> tuple[float, float]:
    backend = FusedBackend(
        task,
        device=device,
        block=BlockOptions(size=size, channels_last=channels_last),
        structures=structures,
        activations=activations,
    )
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)  # what others in this process hold
    for slot in range(size):
        backend.put(slot, replace(member, state=None, epoch=0))
    try:
        seconds = _seconds(_fused_steps(backend, size, member.values), device)
    except UnverifiedError as error:
        raise UnfusableError(str(error)) from error
    if device.type == "cuda":
        return seconds, float(torch.cuda.max_memory_allocated(device) - before)
    return seconds, float(backend.memory_bytes())


def _solo_steps(task: Task, member: Member, device: torch.device, *, whole: bool) -> Iterator[None]:
    trial = TaskTrial(task, device)
    trial.begin(replace(member, state=None, epoch=0))
    epoch = 0
    while True:
        plan = EpochPlan(epoch=epoch, values=member.values)
        batches = partial(repeat, next(trial.batches(plan))) if whole else None
        trial.start(plan, batches=batches)
        while trial.step():
            yield
        epoch += 1


def _fused_steps(backend: FusedBackend, size: int, values: Mapping[str, Any]) -> Iterator[None]:
    epoch, is_first = 0, True
    while True:
        plan = EpochPlan(epoch=epoch, values=values)
        for step in range(backend.start(dict.fromkeys(range(size), plan))):
            if step == NUM_KEPT_STEPS and backend.keeps_activations:
                break
            backend.one_step()
            # The steps that keep activations are not timed: nearly all others find them.
            if not (is_first and backend.keeps_activations):
                yield
        is_first = False
        epoch += not backend.keeps_activations


def _seconds(steps: Iterator[None], device: torch.device) -> float:
    """Return the shortest time of a step after warm-up; disturbances only make a step longer."""

    def timed() -> float:
        began = time.perf_counter()
        next(steps)
        _wait(device)
        return time.perf_counter() - began

    # long steps are expensive to measure, and disturbances matter less for them
    long = timed() > LONG_STEP_S
    if not long:
        timed()
    times: list[float] = []
    while len(times) < 3 - long or (sum(times) < MEASURE_S and len(times) < 200):
        times.append(timed())
    return min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
