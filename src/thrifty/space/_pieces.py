"""The few shapes that every schedule consists of, in one normal form each.

Two schedules may share training only where their values are equal at *every* step, so schedules
are never compared by the class that made them. Each schedule is reduced to pieces. A piece that
degenerates to a simpler shape becomes that shape (a ramp that does not rise is a hold), and equal
pieces are evaluated by the same arithmetic. Equal pieces therefore give equal values, bit for bit,
at any sampling of time. Times are epochs since the start of training.

Pieces are tuples, because a plan compares and hashes millions of them. Their ``shape`` keeps
pieces of different classes apart.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from thrifty.core import ScheduleError


FloatArray = npt.NDArray[np.float64]


class Piece(Protocol):
    """One shape that ``at`` evaluates and ``shifted`` moves in time."""

    def at(self, epochs: FloatArray) -> FloatArray:
        """Return the values at the given times, in the same array shape."""
        ...

    def shifted(self, epochs: float) -> Piece:
        """Return the same shape, ``epochs`` later."""
        ...


class Segment(NamedTuple):
    """A piece on ``[start, stop)``."""

    start: float
    stop: float
    piece: Piece


class Hold(NamedTuple):
    """A constant value; ``kind`` keeps ``True``, ``1`` and ``1.0`` apart."""

    value: Any
    kind: str

    def at(self, epochs: FloatArray) -> FloatArray:
        """Return the values at the given times, in the same array shape."""
        return np.full(epochs.shape, self.value)

    def shifted(self, epochs: float) -> Hold:
        """Return the same shape, ``epochs`` later."""
        return self


class Ramp(NamedTuple):
    """A straight line from ``first`` at ``start`` to ``last`` at ``stop``."""

    first: float
    last: float
    start: float
    stop: float
    shape: str = "ramp"

    def at(self, epochs: FloatArray) -> FloatArray:
        """Return the values at the given times, in the same array shape."""
        return self.first + (self.last - self.first) * _progress(self, epochs)

    def shifted(self, epochs: float) -> Ramp:
        """Return the same shape, ``epochs`` later."""
        return Ramp(self.first, self.last, self.start + epochs, self.stop + epochs)


class CosineArc(NamedTuple):
    """Half a cosine period from ``first`` to ``last``."""

    first: float
    last: float
    start: float
    stop: float
    shape: str = "cosine"

    def at(self, epochs: FloatArray) -> FloatArray:
        """Return the values at the given times, in the same array shape."""
        half = 0.5 * (1.0 + np.cos(np.pi * _progress(self, epochs)))
        return self.last + (self.first - self.last) * half

    def shifted(self, epochs: float) -> CosineArc:
        """Return the same shape, ``epochs`` later."""
        return CosineArc(self.first, self.last, self.start + epochs, self.stop + epochs)


class PowerArc(NamedTuple):
    """A power law from ``first`` to ``last``, as ``(1 - progress) ** power``."""

    first: float
    last: float
    start: float
    stop: float
    power: float
    shape: str = "power"

    def at(self, epochs: FloatArray) -> FloatArray:
        """Return the values at the given times, in the same array shape."""
        left = (1.0 - _progress(self, epochs)) ** self.power
        return self.last + (self.first - self.last) * left

    def shifted(self, epochs: float) -> PowerArc:
        """Return the same shape, ``epochs`` later."""
        return PowerArc(self.first, self.last, self.start + epochs, self.stop + epochs, self.power)


class MirroredPowerArc(NamedTuple):
    """A power law from ``first`` to ``last``, as ``1 - progress ** power``."""

    first: float
    last: float
    start: float
    stop: float
    power: float
    shape: str = "mirrored power"

    def at(self, epochs: FloatArray) -> FloatArray:
        """Return the values at the given times, in the same array shape."""
        left = 1.0 - _progress(self, epochs) ** self.power
        return self.last + (self.first - self.last) * left

    def shifted(self, epochs: float) -> MirroredPowerArc:
        """Return the same shape, ``epochs`` later."""
        start, stop = self.start + epochs, self.stop + epochs
        return MirroredPowerArc(self.first, self.last, start, stop, self.power)


class RexArc(NamedTuple):
    """A REX profile from ``first`` to ``last``: ``z / ((1 - d) + d z)``, ``z = 1 - progress``."""

    first: float
    last: float
    start: float
    stop: float
    d: float
    shape: str = "rex"

    def at(self, epochs: FloatArray) -> FloatArray:
        """Return the values at the given times, in the same array shape."""
        left = 1.0 - _progress(self, epochs)
        return self.last + (self.first - self.last) * left / ((1.0 - self.d) + self.d * left)

    def shifted(self, epochs: float) -> RexArc:
        """Return the same shape, ``epochs`` later."""
        return RexArc(self.first, self.last, self.start + epochs, self.stop + epochs, self.d)


class Decay(NamedTuple):
    """An exponential decay, ``first * gamma ** (epochs since start)``."""

    first: float
    gamma: float
    start: float
    shape: str = "decay"

    def at(self, epochs: FloatArray) -> FloatArray:
        """Return the values at the given times, in the same array shape."""
        return self.first * self.gamma ** (epochs - self.start)

    def shifted(self, epochs: float) -> Decay:
        """Return the same shape, ``epochs`` later."""
        return Decay(self.first, self.gamma, self.start + epochs)


def hold(value: Any) -> Hold:
    """Return a piece that holds a constant value.

    Raises:
        ScheduleError: The value is a schedule, or a tuple that contains one. The nested schedule
            would never be evaluated.
    """
    if type(value) is float or type(value) is int:
        return _hold_number(value)  # the same few numbers occur again and again
    if _holds_schedule(value):
        raise ScheduleError(
            f"{value!r} holds a schedule, but this place needs a fixed value; make the schedule a "
            "hyper-parameter of its own"
        )
    return Hold(value, _kind(value))


def _holds_schedule(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(_holds_schedule, value))
    # Recognised by name, because this module cannot import the schedules.
    return hasattr(value, "segments")


@lru_cache(maxsize=4096, typed=True)
def _hold_number(value: float) -> Hold:
    return Hold(value, type(value).__name__)


def ramp(first: float, last: float, start: float, stop: float) -> Piece:
    """Return a straight line, or a hold if it is level."""
    return hold(first) if first == last else Ramp(first, last, start, stop)


def cosine_arc(first: float, last: float, start: float, stop: float) -> Piece:
    """Return half a cosine period, or a hold if it is level."""
    return hold(first) if first == last else CosineArc(first, last, start, stop)


def power_arc(first: float, last: float, start: float, stop: float, *, power: float) -> Piece:
    """Return a power law, or a simpler shape if it reduces to one."""
    if first == last or power == 1.0:
        return ramp(first, last, start, stop)
    return PowerArc(first, last, start, stop, power)


def mirrored_power_arc(
    first: float, last: float, start: float, stop: float, *, power: float
) -> Piece:
    """Return a power law of the progress, or a simpler shape if it reduces to one."""
    if first == last or power == 1.0:
        return ramp(first, last, start, stop)
    return MirroredPowerArc(first, last, start, stop, power)


def rex_arc(first: float, last: float, start: float, stop: float, *, d: float) -> Piece:
    """Return a REX profile, or a simpler shape if it reduces to one."""
    if first == last or d == 0.0:
        return ramp(first, last, start, stop)
    return RexArc(first, last, start, stop, d)


def decay(first: float, *, gamma: float, start: float) -> Piece:
    """Return an exponential decay, or a hold if it is level."""
    return hold(first) if gamma == 1.0 or first == 0.0 else Decay(first, gamma, start)


def exponential_arc(first: float, last: float, start: float, stop: float) -> Piece:
    """Return an exponential decay from ``first`` to ``last``, both above 0."""
    return decay(first, gamma=(last / first) ** (1.0 / (stop - start)), start=start)


def scaled(piece: Any, factor: float) -> Piece:
    """Return a piece with all values multiplied by a number.

    Raises:
        ScheduleError: A value of the piece is not a number.

    >>> scaled(ramp(1.0, 2.0, 0.0, 4.0), 0.5)
    Ramp(first=0.5, last=1.0, start=0.0, stop=4.0, shape='ramp')
    """
    if factor == 1.0:
        return piece  # type: ignore[no-any-return]
    if isinstance(piece, Hold):
        if isinstance(piece.value, bool) or not isinstance(piece.value, int | float):
            raise ScheduleError(f"{piece.value!r} cannot be multiplied by {factor!r}")
        return hold(piece.value * factor)
    if isinstance(piece, Decay):
        return decay(piece.first * factor, gamma=piece.gamma, start=piece.start)
    first, last = piece.first * factor, piece.last * factor
    return hold(first) if first == last else piece._replace(first=first, last=last)


def sample_and_hold(
    segments: tuple[Segment, ...], times: FloatArray, *, stop: float
) -> tuple[Segment, ...]:
    """Read a profile at the given times only and hold each value until the next.

    Neighbours of equal value become one segment, because only values decide what is shared.
    """
    out: list[Segment] = []
    ends = [*times[1:].tolist(), stop]
    for start, end, value in zip(times.tolist(), ends, values_at(segments, times), strict=True):
        piece = hold(value)
        if out and out[-1].piece == piece:
            out[-1] = Segment(out[-1].start, end, piece)
        else:
            out.append(Segment(start, end, piece))
    return tuple(out)


ROUNDING = 1e-9
"""Epochs by which rounding may move a boundary; a step is never that short."""


def values_at(segments: tuple[Segment, ...], times: FloatArray) -> list[Any]:
    """Evaluate segments that cover all the given ascending times.

    A segment that starts at a step has that step, also if rounding has moved its start by a hair.
    """
    starts = np.array([segment.start for segment in segments]) - ROUNDING
    which = np.searchsorted(starts, times, side="right") - 1
    out: list[Any] = []
    for index in np.unique(which):
        start, piece = segments[index].start, segments[index].piece
        here = np.maximum(times[which == index], start)
        # A held value may be a tuple, which a NumPy array would take apart.
        out.extend(
            [piece.value] * len(here) if isinstance(piece, Hold) else piece.at(here).tolist()
        )
    return out


def _kind(value: Any) -> str:
    """Return the type of a value and of its items.

    ``(1, 2)`` and ``(1.0, 2.0)`` are equal, but not the same.
    """
    if isinstance(value, tuple):
        return f"({','.join(_kind(item) for item in value)})"
    return type(value).__name__


def _progress(
    piece: Ramp | CosineArc | PowerArc | MirroredPowerArc | RexArc, epochs: FloatArray
) -> FloatArray:
    return (epochs - piece.start) / (piece.stop - piece.start)
