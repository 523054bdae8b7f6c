"""Slow references: the obvious way to compute what the library computes quickly."""

from __future__ import annotations

import math
from typing import Any

from thrifty.space import (
    REX,
    WSD,
    Constant,
    Cosine,
    CosineRestarts,
    Cyclic,
    Exponential,
    Linear,
    MultiStep,
    OneCycle,
    Polynomial,
    Schedule,
    Step,
    Then,
    Timeline,
    Trunk,
    Warmup,
)


def value_at(schedule: Schedule, time: float, epochs: float) -> float:
    """Return a schedule's value at one time of a run of ``epochs`` epochs, from its definition."""
    if isinstance(schedule, Trunk):
        up = schedule.warmup
        return schedule.value * time / up if time < up else schedule.value
    if isinstance(schedule, Then):
        if time < schedule.at:
            return value_at(schedule.first, time, schedule.at)
        return value_at(schedule.second, time - schedule.at, epochs - schedule.at)
    if isinstance(schedule, Warmup):
        length = schedule.epochs
        if time >= length:
            return value_at(schedule.schedule, time - length, epochs - length)
        peak = value_at(schedule.schedule, 0.0, epochs - length)
        read = read_time(schedule.sample, time, length)
        return peak * (schedule.start + (1.0 - schedule.start) * read / length)
    if isinstance(schedule, Constant | Step | MultiStep):
        return stepped(schedule, time)
    return timed(schedule, time, getattr(schedule, "epochs", None) or epochs)


def timed(schedule: Any, time: float, length: float) -> float:
    """Return the value of a schedule of a given length, whatever its family."""
    if time >= length:
        return last_value(schedule)
    return profile(schedule, read_time(schedule.sample, time, length), length)


def read_time(rate: Any, time: float, length: float) -> float:
    """Return when a profile was last read before ``time``.

    ``rate`` is what schedules call ``sample``: "step", "epoch", a fraction, or a tuple of them.
    """
    if rate == "step":
        return time
    if rate == "epoch":
        reads = [float(epoch) for epoch in range(math.ceil(length))]
    elif isinstance(rate, tuple):
        reads = [0.0, *(fraction * length for fraction in rate)]
    else:
        reads = [i * rate * length for i in range(round(1 / rate))]
    return max(read for read in reads if read <= time)


def stepped(schedule: Constant | Step | MultiStep, time: float) -> float:
    if isinstance(schedule, Constant):
        return schedule.value
    if isinstance(schedule, MultiStep):
        return schedule.levels[sum(m <= time for m in schedule.milestones)]
    every = schedule.every
    drops = math.floor(time / every) if every else sum(m <= time for m in schedule.milestones)
    return schedule.value * schedule.gamma**drops


def last_value(schedule: Any) -> float:
    if isinstance(schedule, OneCycle):
        return schedule.peak / schedule.final_div
    return schedule.floor


def profile(schedule: Schedule, time: float, length: float) -> float:
    left = 1.0 - time / length
    match schedule:
        case Linear(value=a, floor=b):
            return b + (a - b) * left
        case Cosine(value=a, floor=b):
            return half_cosine(a, b, 1 - left)
        case Polynomial(value=a, floor=b, power=power):
            return b + (a - b) * left**power
        case REX(value=a, floor=b, d=d):
            return b + (a - b) * rex(1 - left, d)
        case Exponential(value=a, gamma=gamma):
            return a * gamma**time
        case Cyclic(low=low, high=high, period=period):
            return triangle(low, high, period=period, time=time)
        case CosineRestarts(value=a, floor=b, period=period, growth=growth):
            return restarts((a, b), time, period=period, growth=growth)
        case OneCycle():
            return one_cycle(schedule, time / length)
        case WSD():
            return wsd(schedule, time, length)
    raise AssertionError(schedule)


def restarts(ends: tuple[float, float], time: float, *, period: float, growth: float) -> float:
    while time >= period:
        time -= period
        period *= growth
    return between(*ends, time / period, "cosine")


def one_cycle(schedule: OneCycle, progress: float) -> float:
    peak, up = schedule.peak, schedule.warmup
    if progress < up:
        return between(peak / schedule.div, peak, progress / up, schedule.shape)
    return between(peak, peak / schedule.final_div, (progress - up) / (1 - up), schedule.shape)


def wsd(schedule: WSD, time: float, length: float) -> float:
    if time < schedule.warmup:
        return schedule.value * time / schedule.warmup
    if time < length - schedule.cooldown:
        return schedule.value
    progress = 1 - (length - time) / schedule.cooldown
    return between(schedule.value, schedule.floor, progress, schedule.shape)


def between(first: float, last: float, progress: float, shape: str) -> float:
    if shape == "exp":
        return first * (last / first) ** progress
    if shape == "1-sqrt":
        progress = math.sqrt(max(progress, 0.0))
    if shape == "square":
        progress = progress**2
    if shape == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return first + (last - first) * progress


def common_prefix(a: Timeline, b: Timeline, *, steps: int) -> int:
    """Return for how many epochs two timelines have equal values at each of ``steps`` steps.

    Values must have equal types, too.
    """
    for epoch in range(min(a.epochs, b.epochs)):
        if epoch_values(a, epoch, steps) != epoch_values(b, epoch, steps):
            return epoch
    return min(a.epochs, b.epochs)


def epoch_values(timeline: Timeline, epoch: int, steps: int) -> dict[str, list[tuple[str, object]]]:
    out = {}
    for name, value in timeline.config.items():
        values = [value] * steps
        if isinstance(value, Schedule):
            values = timeline.values(name, epoch, num_steps=steps)
            values = values if isinstance(values, list) else [values] * steps
        out[name] = [(type(v).__name__, v) for v in values]
    return out


def half_cosine(first: float, last: float, progress: float) -> float:
    return between(first, last, progress, "cosine")


def rex(progress: float, d: float = 0.5) -> float:
    left = 1 - progress
    return left / (1 - d + d * left)


def triangle(low: float, high: float, *, period: float, time: float) -> float:
    return low + (high - low) * (1 - abs(1 - 2 * (time / period % 1)))
