"""Measurement of how long joint steps take: a short dry run for each structure and device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import repeat
from typing import Any

import torch

from thrifty.pack._backend import EpochPlan, Member, UnverifiedError, out_of_memory
from thrifty.pack.fused._activations import ActivationStore
from thrifty.pack.fused._fusable import UnfusableError
from thrifty.pack.fused._step import BlockOptions
from thrifty.pack.task._task import Task
from thrifty.pack.trial._trial import TaskTrial
from thrifty.perf import PackCurve

from ._fused import FusedBackend, Structures


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
    max_size: int = 256,
    activations: ActivationStore | None = None,
) -> list[PackCurve]:
    """Measure curves of the solo and the fused back-end, in each memory format that applies.

    The measured trials are fresh copies of ``member``, discarded afterwards. On whole batches
    (``whole``) trials trained one by one also share what is prepared from a batch, so their steps
    are measured on a batch that is ready. A size that runs out of memory ends its curve. Where
    ``activations`` of a frozen trunk are kept, steps are measured that find them there, as all but
    those of a first epoch do.

    Raises:
        UnfusableError: One of the copies changes what others read.
    """
    solo_s = _seconds(_solo_steps(task, member, device, whole=whole), device)
    curves = [PackCurve(backend="solo", step_s={1: solo_s})]
    some = WHOLE_SIZES if whole else SIZES.get(device.type, SIZES["cpu"])
    sizes = [k for k in some if k <= max_size]
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
            curves.append(_up_to_the_best(fused))
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


def _up_to_the_best(curve: PackCurve) -> PackCurve:
    """Drop the sizes past saturation: larger packs run as several groups of the best size."""
    best = min(curve.step_s, key=lambda k: curve.step_s[k] / k * GAIN ** (k == 1))
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
        backend.stack(slot, replace(member, state=None, epoch=0))
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
    epoch = 0
    while True:
        plan = EpochPlan(epoch=epoch, values=values)
        for step in range(backend.start(dict.fromkeys(range(size), plan))):
            if step == NUM_KEPT_STEPS and backend.keeps_activations:
                break
            backend.one_step()
            yield
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
