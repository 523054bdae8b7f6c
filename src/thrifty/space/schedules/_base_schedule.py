"""Base class of all schedules, and the schedules that hold a value."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np

from thrifty.core import ScheduleError
from thrifty.space._domain import Domain, amounts_in, freeze, in_epochs
from thrifty.space._pieces import FloatArray, Hold, Segment, hold, sample_and_hold, values_at
from thrifty.space._units import Amount, EpochSize


# Types of fields. In a template, each field may also be a domain, which no type expresses, so the
# values are checked when the schedule is created.
Number = Any
"""A number."""
Values = Any
"""A list of any values, kept as a tuple."""
Time = Any
"""A number of epochs, or an amount in another unit (``steps(500)``)."""
Times = Any
"""A list of times, kept as a tuple."""
SampleRate = str | float | Sequence[float]

_MAY_HOLD_AMOUNTS = {"Time", "Times", "Schedule"}  # a schedule checks its own fields

_KINDS: dict[str, type[Schedule]] = {}


class Schedule(ABC):
    """A value that changes over training, as frozen data. Time is counted in epochs."""

    __slots__ = ("_amounts", "_strict", "_template")
    _amounts: tuple[Amount, ...]
    _strict: str
    _template: bool

    def __init_subclass__(cls, *, abstract: bool = False) -> None:
        if not abstract:
            _KINDS[cls.__name__] = cls

    @abstractmethod
    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return the pieces of a run of ``epochs`` epochs, before any sampling rate."""

    def span(self) -> float:
        """Return the fewest epochs that a run needs for this schedule (unless overridden: 0)."""
        return 0.0

    def validate(self) -> None:  # noqa: B027 (some kinds have nothing more to check)
        """Raise ScheduleError for values of the right kind that are invalid."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # every subclass is a dataclass
            value = freeze(getattr(self, each.name))
            if each.type == "Schedule" and not isinstance(value, Domain):
                value = as_schedule(value)
            object.__setattr__(self, each.name, value)
            if str(each.type).split()[0] not in _MAY_HOLD_AMOUNTS and amounts_in(value):
                raise ScheduleError(
                    f"{self!r}: {each.name} is not a time; give a plain value, not steps, tokens "
                    "or epochs"
                )
        if not self.is_template():
            self._check_kinds()
            if not self.amounts():
                self.validate()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Schedule):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        """Return the schedule as a user would write it, without fields at their default."""
        shown = []
        for each in fields(self):  # type: ignore[arg-type]
            value = getattr(self, each.name)
            if each.default is not MISSING and repr(value) == repr(each.default):
                continue
            shown.append(f"{each.name}={value!r}" if each.kw_only else repr(value))
        return f"{type(self).__name__}({', '.join(shown)})"

    def _key(self) -> str:
        """Return the schedule's content with types.

        A task may treat ``1``, ``1.0`` and ``True`` differently.
        """
        try:
            return self._strict
        except AttributeError:
            # repr is exact for numbers, tells their types apart, and is quick to compare and hash.
            values = [getattr(self, name) for name in _names(type(self))]
            object.__setattr__(self, "_strict", f"{type(self).__name__}{values!r}")
            return self._strict

    def _check_kinds(self) -> None:
        """Raise ScheduleError for a field of the wrong kind, before arithmetic fails on it."""
        for each in fields(self):  # type: ignore[arg-type]
            value, kind = getattr(self, each.name), str(each.type)
            given = value is not None or not kind.endswith("None")
            if kind.split()[0] in {"Number", "Time"} and given and not _is_number(value):
                raise ScheduleError(f"{self!r}: {each.name} must be a number, got {value!r}")
            if kind in {"Times", "Values"} and not isinstance(value, tuple):
                raise ScheduleError(f"{self!r}: {each.name} must be a list, got {value!r}")
            if kind == "Times" and not all(map(_is_number, value)):
                raise ScheduleError(f"{self!r}: {each.name} must be numbers, got {value!r}")
            if kind == "SampleRate":
                _check_rate(self, value)

    def is_template(self) -> bool:
        """Return whether some field is still a domain (``Step(Float(0.01, 0.1), [30])``)."""
        try:
            return self._template
        except AttributeError:
            found = any(_has_domain(getattr(self, name)) for name in _names(type(self)))
            object.__setattr__(self, "_template", found)
            return found

    def amounts(self) -> tuple[Amount, ...]:
        """Return the times that are amounts of steps, tokens or epochs, whose length is unknown."""
        try:
            return self._amounts
        except AttributeError:
            found = amounts_in(tuple(getattr(self, name) for name in _names(type(self))))
            object.__setattr__(self, "_amounts", found)
            return found

    def in_epochs(self, size: EpochSize) -> Schedule:
        """Return the same schedule with all times in epochs.

        Args:
            size: How many steps and tokens an epoch has.

        Raises:
            UsageError: The size of an epoch is unknown in the unit of a time.
            ScheduleError: The times do not fit each other.

        >>> from thrifty.space import EpochSize, Step, steps
        >>> Step(0.1, [steps(1_000), steps(1_250)]).in_epochs(EpochSize(steps=500))
        Step(0.1, (2, 2.5))
        """
        if not self.amounts():
            return self
        return replace(  # type: ignore[type-var]
            self, **{name: in_epochs(getattr(self, name), size) for name in _names(type(self))}
        )

    def segments(self, epochs: float) -> tuple[Segment, ...]:
        """Return the pieces of a run of ``epochs`` epochs, as trained.

        Raises ScheduleError if the run is too short.

        >>> from thrifty.space import Step
        >>> [(s.start, s.stop, s.piece.value) for s in Step(0.5, [30], gamma=0.5).segments(90)]
        [(0.0, 30.0, 0.5), (30.0, 90.0, 0.25)]
        """
        return _segments(self, float(epochs))

    def values(
        self, start: int, stop: int, *, epochs: float, steps_per_epoch: int = 1
    ) -> FloatArray:
        """Return the values at each step of epochs ``[start, stop)``.

        The shape is ``((stop - start) * steps_per_epoch,)``. ``epochs`` is the length of the whole
        run.

        >>> from thrifty.space import REX
        >>> REX(1.0).values(0, 5, epochs=5).round(4).tolist()
        [1.0, 0.8889, 0.75, 0.5714, 0.3333]
        """
        times = epoch_times(start, stop, steps_per_epoch)
        return np.array(values_at(self.segments(epochs), times))

    def then(self, other: Schedule | float, *, at: Time) -> Then:
        """Return this schedule until epoch ``at``, followed by ``other``.

        The time of the other schedule starts at ``at``.

        >>> from thrifty.space import Constant, Linear
        >>> Constant(1.0).then(Linear(1.0), at=2).values(0, 6, epochs=6).tolist()
        [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
        """
        return Then(self, as_schedule(other), at=at)

    def to_json(self) -> dict[str, Any]:
        """Return plain data that ``schedule_from_json`` turns back into the schedule."""
        body = {
            f.name: _encode(getattr(self, f.name))
            for f in fields(self)  # type: ignore[arg-type]
        }
        return {"schedule": type(self).__name__, "fields": body}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Then(Schedule):
    """One schedule until epoch ``at``, then another; created by ``Schedule.then``.

    Each schedule sees only the length of its own part, and the second one's time starts at zero
    (as in ``torch.optim.lr_scheduler.SequentialLR``).
    """

    first: Schedule
    second: Schedule
    at: Time = field(kw_only=True)

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return the pieces of both parts."""
        head = self.first.segments(self.at)
        tail = self.second.segments(epochs - self.at)
        return (*head, *shift(tail, self.at))

    def span(self) -> float:
        """Return the fewest epochs that a run needs."""
        return float(self.at + max(self.second.span(), 1.0))

    def validate(self) -> None:
        """Raise ScheduleError for invalid field values."""
        check_positive(self, at=self.at)
        if self.first.span() > self.at:
            raise ScheduleError(
                f"{self.first!r} needs {self.first.span():g} epochs but hands over at "
                f"{self.at:g}; hand over later or shorten it"
            )


def with_tail(segments: tuple[Segment, ...], *, last: float, epochs: float) -> tuple[Segment, ...]:
    """Hold the last value until the run ends if the run is longer than the segments."""
    end = segments[-1].stop
    return segments if end >= epochs else (*segments, Segment(end, epochs, hold(last)))


def as_schedule(value: Any) -> Schedule:
    """Return a schedule unchanged, a plain value as a constant schedule."""
    return (
        value
        if isinstance(value, Schedule)
        else _KINDS["Constant"](  # type: ignore[call-arg]
            value
        )
    )


def epoch_times(start: int, stop: int, steps_per_epoch: int) -> FloatArray:
    """Return the time of each step, epoch + step / steps_per_epoch, shape ``(num_steps,)``."""
    within = np.arange(steps_per_epoch) / steps_per_epoch
    return (np.arange(start, stop)[:, None] + within).ravel()


def shift(segments: tuple[Segment, ...], epochs: float) -> tuple[Segment, ...]:
    """Return the same segments, ``epochs`` later."""
    return tuple(Segment(a + epochs, b + epochs, piece.shifted(epochs)) for a, b, piece in segments)


def sampled(
    segments: tuple[Segment, ...], rate: SampleRate, *, length: float
) -> tuple[Segment, ...]:
    """Read a profile at a sampling rate: ``"step"``, ``"epoch"``, a fraction, or fractions.

    ``0.05`` reads at each 5% of ``length``, ``(0.5, 0.75)`` at a half and at three quarters of it.
    """
    if rate == "step":
        return segments
    if rate == "epoch":
        times = np.arange(math.ceil(length), dtype=float)
    elif isinstance(rate, tuple):
        times = np.array([0.0, *(f * length for f in rate if 0.0 < f < 1.0)])
    else:
        assert isinstance(rate, float)
        times = np.arange(math.ceil(1.0 / rate - 1e-9)) * rate * length
    return sample_and_hold(segments, times, stop=segments[-1].stop)


def _check_rate(schedule: Schedule, rate: SampleRate) -> None:
    """Raise ScheduleError unless the sampling rate is one of the four forms."""
    if rate in ("step", "epoch"):
        return
    fractions = rate if isinstance(rate, tuple) else (rate,)
    if all(isinstance(f, float) and 0.0 < f < 1.0 for f in fractions) and list(fractions) == sorted(
        set(fractions)
    ):
        return
    raise ScheduleError(
        f'{schedule!r}: sample must be "step", "epoch", a fraction between 0 and 1, or ascending '
        f"fractions, not {rate!r}"
    )


def check_positive(schedule: Schedule, **named: float | None) -> None:
    """Raise ScheduleError unless every number is positive (None is skipped)."""
    for name, value in named.items():
        if value is not None and not value > 0:
            raise ScheduleError(f"{schedule!r}: {name} must be positive, got {value!r}")


def check_milestones(schedule: Schedule, milestones: tuple[float, ...]) -> None:
    """Raise ScheduleError unless the milestones are positive and ascending."""
    if list(milestones) != sorted(set(milestones)) or any(m <= 0 for m in milestones):
        raise ScheduleError(f"{schedule!r}: milestones must be positive and ascending")


def schedule_from_json(data: Mapping[str, Any]) -> Schedule:
    """Return the schedule that ``to_json`` wrote.

    Fields that are left out have their defaults, so that people and agents may write schedules.

    Raises:
        ScheduleError: The kind or a field is unknown, or a field without a default is missing.

    >>> from thrifty.space import Cosine
    >>> schedule_from_json(Cosine(0.1).to_json()) == Cosine(0.1)
    True
    """
    kind = _KINDS.get(str(data.get("schedule")))
    if kind is None:
        raise ScheduleError(
            f"unknown schedule {data.get('schedule')!r}; known: {', '.join(sorted(_KINDS))}"
        )
    given = {name: _decode(value) for name, value in data.get("fields", {}).items()}
    known = _names(kind)
    needed = [
        each.name
        for each in fields(kind)  # type: ignore[arg-type]
        if each.default is MISSING and each.default_factory is MISSING
    ]
    if not set(needed) <= set(given) <= set(known):
        raise ScheduleError(
            f"{kind.__name__} has the fields {', '.join(known)} and needs {', '.join(needed)}; "
            f"got {', '.join(given) or 'none'}"
        )
    return kind(**given)


@lru_cache(maxsize=4096)
def _segments(schedule: Schedule, epochs: float) -> tuple[Segment, ...]:
    if schedule.is_template():
        raise ScheduleError(f"{schedule!r} still has a domain in it; sample the space first")
    if schedule.amounts():
        raise ScheduleError(
            f"{schedule!r} counts steps, tokens or epochs of an unknown size; a study turns them "
            "into epochs, elsewhere use in_epochs(thrifty.space.EpochSize(steps=...))"
        )
    if schedule.span() > epochs:
        raise ScheduleError(
            f"{schedule!r} needs at least {schedule.span():g} epochs but the run has {epochs:g}; "
            "shorten the schedule or raise max_epochs"
        )
    return _merged(schedule.profile(epochs))


def _merged(segments: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Merge neighbours that follow the same piece, so that composition makes no difference."""
    out: list[Segment] = []
    for segment in segments:
        if out and out[-1].piece == segment.piece:
            out[-1] = Segment(out[-1].start, segment.stop, segment.piece)
        else:
            out.append(segment)
    return tuple(out)


@cache
def _names(kind: type[Schedule]) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))  # type: ignore[arg-type]


def _is_number(value: Any) -> bool:
    """Return whether a value is a number; amounts stand for the number of epochs that they are."""
    return isinstance(value, int | float | Amount) and not isinstance(value, bool)


def _has_domain(value: Any) -> bool:
    if isinstance(value, Schedule):
        return value.is_template()
    if isinstance(value, tuple):
        return any(_has_domain(item) for item in value)
    return isinstance(value, Domain)


def _encode(value: Any) -> Any:
    if isinstance(value, Schedule):
        return value.to_json()
    if isinstance(value, Amount):
        raise ScheduleError(f"{value!r} cannot be stored; turn the schedule into epochs first")
    return [_encode(v) for v in value] if isinstance(value, tuple) else value


def _decode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return schedule_from_json(value)
    return tuple(_decode(v) for v in value) if isinstance(value, list) else value


def last_value(schedule: Schedule, *, epochs: float) -> Any:
    """Return the value that a schedule has reached at the end of a run of ``epochs`` epochs.

    No step of the run uses this value.

    Raises:
        ScheduleError: The schedule is longer than the run.

    >>> from thrifty.space import REX, Step
    >>> last_value(REX(0.1), epochs=5), last_value(Step(0.5, [3], gamma=0.5), epochs=5)
    (0.0, 0.25)
    """
    piece = schedule.segments(epochs)[-1].piece
    if isinstance(piece, Hold):
        return piece.value
    return piece.at(np.array([float(epochs)])).tolist()[0]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Constant(Schedule):
    """The same value for the whole run, equivalent to giving the plain value.

    >>> Constant(0.1).values(0, 2, epochs=10).tolist()
    [0.1, 0.1]
    """

    value: Any

    def profile(self, epochs: float) -> tuple[Segment, ...]:
        """Return one hold."""
        return (Segment(0.0, epochs, hold(self.value)),)
