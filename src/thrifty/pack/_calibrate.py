"""Measuring how long joint steps take: a short dry run for each structure and device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch

from thrifty.perf import PackCurve

from ._backend import EpochPlan, Member, UnverifiedError, out_of_memory
from ._fused import FusedBackend, Structures
from ._task import Task
from ._trial import TaskTrial
from .fused._options import BlockOptions
from .fused._registry import UnfusableError


SIZES = {"cpu": (1, 4, 16, 32), "cuda": (1, 4, 16, 64, 256)}
WHOLE_SIZES = (4, 16)
"""Steps on whole batches are long, and where they gain they gain with size."""
MEASURE_S = 0.012
"""How long each size is measured, if steps are short; three steps at least."""
LONG_STEP_S = 0.1
"""Steps from this length on are measured twice after one, and others three times or more after two."""
MAX_STEP_S = 2.0
"""No larger packs are tried when a joint step takes as long."""
HOPE = 0.9
"""A larger pack is measured if it may be that much better for each trial."""
GAIN = 0.97
"""A larger pack must be that much better for each trial to be worth having."""


def calibrate(
    task: Task,
    member: Member,
    *,
    device: torch.device,
    structures: Structures,
    channels_last: bool,
    whole: bool = False,
    max_size: int = 256,
) -> list[PackCurve]:
    """Curves of the solo back-end and of the fused one, in each order of images in memory that applies.

    Trials are copies of ``member``, fresh and thrown away again. On whole batches (``whole``) trials that are trained one by one share what
    is made of a batch, too, so their steps are measured on a batch that is there already. A size that runs out of memory ends its curve.

    Raises:
        UnfusableError: One of the copies changes what others read.
    """
    solo_s = _seconds(_solo_steps(task, member, device, whole=whole), device)
    curves = [PackCurve(backend="solo", step_s={1: solo_s})]
    some = WHOLE_SIZES if whole else SIZES.get(device.type, SIZES["cpu"])
    sizes = [k for k in some if k <= max_size]
    first: dict[int, float] = {}  # what packs of each size take in the first order
    for last in (False, True) if channels_last else (False,):
        step_s: dict[int, float] = {}
        memory: dict[int, float] = {}
        # the second order is tried at one size; only if that is better there at all of them
        order = [*sizes[1:2], *sizes[:1], *sizes[2:]] if last else sizes
        for size in order:
            try:
                step_s[size], memory[size] = _measure_fused(
                    task, member, size, device=device, structures=structures, channels_last=last
                )
            except Exception as error:
                if not out_of_memory(error):
                    raise
                break
            worse = (
                last and len(step_s) == 1 and step_s[size] > GAIN * first.get(size, math.inf)
            )
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
    """Whether larger packs may be worth measuring: the line through the two largest sizes says what they can reach at best."""
    *_, k = sizes = sorted(step_s)
    if step_s[k] > MAX_STEP_S:
        return False
    if len(sizes) == 1:
        return True
    j = sizes[-2]
    limit = (step_s[k] - step_s[j]) / (k - j)
    return limit < HOPE * min(step_s[k] / k for k in sizes)


def _up_to_the_best(curve: PackCurve) -> PackCurve:
    """Without the sizes past saturation: larger packs run as several groups of the best size."""
    best = min(curve.step_s, key=lambda k: curve.step_s[k] / k * GAIN ** (k == 1))
    return replace(
        curve,
        step_s={k: s for k, s in curve.step_s.items() if k <= best},
    )


def _measure_fused(
    task: Task,
    member: Member,
    size: int,
    *,
    device: torch.device,
    structures: Structures,
    channels_last: bool,
) -> tuple[float, float]:
    backend = FusedBackend(
        task,
        device=device,
        block=BlockOptions(size=size, channels_last=channels_last),
        structures=structures,
    )
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for slot in range(size):
        backend.stack(slot, replace(member, state=None, epoch=0))
    try:
        seconds = _seconds(_fused_steps(backend, size, member.values), device)
    except UnverifiedError as error:
        raise UnfusableError(str(error)) from error
    if device.type == "cuda":
        return seconds, float(torch.cuda.max_memory_allocated(device))
    return seconds, float(backend.memory_bytes())


def _solo_steps(
    task: Task, member: Member, device: torch.device, *, whole: bool
) -> Iterator[None]:
    trial = TaskTrial(task, device)
    trial.begin(replace(member, state=None, epoch=0))
    epoch = 0
    while True:
        plan = EpochPlan(epoch=epoch, values=member.values)
        batches = repeat(next(trial.batches(plan))) if whole else None
        trial.start(plan, batches=batches)
        while trial.step():
            yield
        epoch += 1


def _fused_steps(backend: FusedBackend, size: int, values: Mapping[str, Any]) -> Iterator[None]:
    epoch = 0
    while True:
        plan = EpochPlan(epoch=epoch, values=values)
        for _ in range(backend.start(dict.fromkeys(range(size), plan))):
            backend.one_step()
            yield
        epoch += 1


def _seconds(steps: Iterator[None], device: torch.device) -> float:
    """The least time of a step, after those that warm up: what disturbs a measurement only makes it longer."""

    def timed() -> float:
        began = time.perf_counter()
        next(steps)
        _wait(device)
        return time.perf_counter() - began

    # long steps cost much to measure, and are disturbed the less
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
