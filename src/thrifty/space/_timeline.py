"""A configuration as its values at each epoch, in a form that can be compared exactly."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from ._pieces import Hold, Segment, hold, values_at
from .schedules import Schedule
from .schedules._base_schedule import epoch_times


class Run(NamedTuple):
    """Epochs ``[start, stop)`` in which every hyper-parameter follows one piece.

    Two runs with equal ``key`` have equal values at every step, whatever the number of steps.
    """

    start: int
    stop: int
    key: Hashable


class Timeline:
    """The values of all hyper-parameters over the epochs of one run.

    Args:
        config: The hyper-parameters; schedules change over the epochs.
        epochs: The number of epochs.
        replica: Which of the study's seeds the run is trained with. Runs of different replicas
            share no epoch.

    Raises:
        ScheduleError: A schedule is longer than the run, or stands where a plain value must be.

    >>> from thrifty.space import Constant, Step
    >>> a = Timeline({"lr": Step(0.1, [30]), "width": 64}, epochs=90)
    >>> b = Timeline({"lr": Constant(0.1), "width": 64}, epochs=90)
    >>> common_prefix(a, b)
    30
    """

    __slots__ = ("config", "epochs", "replica", "runs")

    def __init__(self, config: Mapping[str, Any], *, epochs: int, replica: int = 0) -> None:
        self.config = config
        self.epochs = epochs
        self.replica = replica
        runs = _runs(config, epochs)
        # Replica 0 keeps the keys of a timeline without replicas, so that both are one run.
        self.runs = _of_replica(runs, replica) if replica else runs

    def __repr__(self) -> str:
        replica = f", replica={self.replica}" if self.replica else ""
        return f"Timeline({dict(self.config)!r}, epochs={self.epochs}{replica})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Timeline):
            return NotImplemented
        return self.epochs == other.epochs and self.runs == other.runs

    def __hash__(self) -> int:
        return hash((self.epochs, self.runs))

    def moving(self, *, stop: int | None = None) -> frozenset[str]:
        """Return the hyper-parameters that change before epoch ``stop`` (default: end of the run).

        >>> from thrifty.space import Step
        >>> timeline = Timeline({"lr": Step(0.1, [30]), "width": 64}, epochs=90)
        >>> sorted(timeline.moving()), sorted(timeline.moving(stop=30))
        (['lr'], [])
        """
        end = self.epochs if stop is None else stop
        return frozenset(
            name
            for name, value in self.config.items()
            if isinstance(value, Schedule) and _moves(_spans(value, self.epochs), end)
        )

    def at(self, epoch: int) -> dict[str, Any]:
        """Return the value of every hyper-parameter at the start of an epoch."""
        return {name: self.values(name, epoch, num_steps=1) for name in self.config}

    def values(self, name: str, epoch: int, *, num_steps: int) -> Any:
        """Return one hyper-parameter's value within one epoch.

        If it changes during the epoch, return a list of ``num_steps`` values (a single value if
        ``num_steps`` is 1).
        """
        value = self.config[name]
        if not isinstance(value, Schedule):
            return value
        symbol = _symbol_at(_spans(value, self.epochs), epoch)
        if isinstance(symbol, Hold):
            return symbol.value
        times = epoch_times(epoch, epoch + 1, num_steps)
        values = values_at(value.segments(self.epochs), times)
        return values[0] if num_steps == 1 else values

    def piece(self, name: str, epoch: int) -> Hashable:
        """Return what a hyper-parameter follows in an epoch.

        If it is equal for two timelines, their values are equal at every step.

        >>> from thrifty.space import Step
        >>> timeline = Timeline({"lr": Step(0.1, [3])}, epochs=9)
        >>> timeline.piece("lr", 0) == timeline.piece("lr", 2) != timeline.piece("lr", 3)
        True
        """
        value = self.config.get(name)
        if not isinstance(value, Schedule):
            return hold(value)
        return _symbol_at(_spans(value, self.epochs), epoch)


def common_prefix(a: Timeline, b: Timeline) -> int:
    """Return the number of initial epochs in which two timelines agree at every step.

    >>> from thrifty.space import Cosine, Warmup
    >>> a = Timeline({"lr": Warmup(5, Cosine(0.1))}, epochs=50)
    >>> b = Timeline({"lr": Warmup(5, Cosine(0.1, epochs=20))}, epochs=50)
    >>> common_prefix(a, b)
    5
    """
    i = j = shared = 0
    while i < len(a.runs) and j < len(b.runs) and a.runs[i].key == b.runs[j].key:
        shared = min(a.runs[i].stop, b.runs[j].stop)
        i, j = i + (a.runs[i].stop == shared), j + (b.runs[j].stop == shared)
    return shared


def starts_alike(config: Mapping[str, Any], *, before: int, after: int) -> bool:
    """Return whether a run of ``after`` epochs begins as one of ``before`` epochs.

    >>> from thrifty.space import Cosine, Step
    >>> starts_alike({"lr": Step(0.1, [3])}, before=8, after=16)
    True
    >>> starts_alike({"lr": Cosine(0.1)}, before=8, after=16)
    False
    """
    runs = (Timeline(config, epochs=epochs) for epochs in (before, after))
    return common_prefix(*runs) == before


Spans = tuple[tuple[int, int, Hashable], ...]
"""What a hyper-parameter does, as ascending ``(start, stop, symbol)`` of whole epochs."""


def _runs(config: Mapping[str, Any], epochs: int) -> tuple[Run, ...]:
    names = tuple(sorted(config))
    all_spans: list[Spans] = []
    moving: list[int] = []
    for index, name in enumerate(names):
        value = config[name]
        spans = (
            _spans(value, epochs) if isinstance(value, Schedule) else ((0, epochs, hold(value)),)
        )
        all_spans.append(spans)
        if len(spans) > 1:
            moving.append(index)
    key: list[Hashable] = [names, *(spans[0][2] for spans in all_spans)]
    if len(moving) > 1:
        return _merged(key, [(index, all_spans[index]) for index in moving], epochs)
    # By far the most frequent case: at most one hyper-parameter has a schedule.
    place = moving[0] if moving else 0
    out = []
    for start, stop, symbol in all_spans[place]:
        key[place + 1] = symbol
        out.append(Run(start, stop, _one_object(tuple(key))))
    return tuple(out)


def _merged(key: list[Hashable], moving: list[tuple[int, Spans]], epochs: int) -> tuple[Run, ...]:
    """Cut wherever any of several hyper-parameters changes."""
    cuts = sorted({start for _, spans in moving for start, _, _ in spans} | {epochs})
    at = [0] * len(moving)
    out = []
    for start, stop in itertools.pairwise(cuts):
        for which, (index, spans) in enumerate(moving):
            if spans[at[which]][1] <= start:
                at[which] += 1
            key[index + 1] = spans[at[which]][2]
        out.append(Run(start, stop, _one_object(tuple(key))))
    return tuple(out)


def key_without_replica(run: Run, *, replica: int) -> Hashable:
    """Return the key that a run of a replica would have in the first replica."""
    return run.key[1] if replica else run.key  # type: ignore[index]  # made by _of_replica


def _of_replica(runs: tuple[Run, ...], replica: int) -> tuple[Run, ...]:
    return tuple(run._replace(key=_one_object((replica, run.key))) for run in runs)


@lru_cache(maxsize=16384)
def _one_object(key: tuple[Hashable, ...]) -> tuple[Hashable, ...]:
    """Return one object for equal keys: a million timelines consist mostly of the same few."""
    return key


@lru_cache(maxsize=4096)
def _spans(schedule: Schedule, epochs: int) -> Spans:
    """Return one hyper-parameter as ascending ``(start, stop, symbol)`` of whole epochs.

    An epoch in which a piece ends gets its own symbol: all the parts within it.
    """
    out: list[tuple[int, int, Hashable]] = []
    segments = schedule.segments(epochs)
    epoch = 0
    while epoch < epochs:
        inside = [s for s in segments if s.start < epoch + 1 and s.stop > epoch]
        stop, symbol = _symbol(inside, epoch)
        stop = min(stop, epochs)
        out.append((
            epoch,
            stop,
            symbol,
        ))  # never equal to the one before: equal neighbours are one segment
        epoch = stop
    return tuple(out)


def _moves(spans: Spans, stop: int) -> bool:
    return not isinstance(spans[0][2], Hold) or any(start < stop for start, _, _ in spans[1:])


def _symbol(inside: list[Segment], epoch: int) -> tuple[int, Any]:
    if len(inside) == 1:
        return max(math.floor(inside[0].stop), epoch + 1), inside[0].piece
    parts = tuple((max(s.start, epoch), min(s.stop, epoch + 1), s.piece) for s in inside)
    return epoch + 1, parts


def _symbol_at(spans: Spans, epoch: int) -> Hashable:
    for _, stop, symbol in spans:
        if epoch < stop:
            return symbol
    raise IndexError(f"epoch {epoch} is beyond the run")
