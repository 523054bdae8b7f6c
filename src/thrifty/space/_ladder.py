"""The space of a ladder: horizons that share one constant-rate trunk for each rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from thrifty.core import ScheduleError, SpaceError

from ._domain import Choice, amounts_in, in_epochs
from ._space import Config, Space
from ._units import Amount, EpochSize
from .schedules import WSD, Trunk
from .schedules._budgeted import AVERAGES, COOLDOWN_SHAPES, cooldown_of


class Ladder(Space):
    """A space of training runs that end at several horizons and share their trunks.

    Each trial holds a rate and cools down to ``floor`` at the end of its own horizon, where it is
    done. Trials with one rate share the constant phase, so a ladder trains one trunk for each rate
    and one cooldown for each rate, shape and horizon. Train it with ``GridSearch``, or draw from it
    with ``RandomSearch``; other algorithms compare trials after the same number of epochs, where
    some have cooled down and others have not, and refuse a ladder.

    Args:
        horizons: The epochs at which trials end, ascending; or amounts such as ``steps(5_000)``
            that are whole epochs.
        rates: The learning rates of the trunks.
        cooldown: The length of each cooldown: a share of its horizon, above 0 and below 1, or a
            number of epochs, 1 or more, or an amount. Cooldowns start at a whole epoch, so a share
            is rounded up to whole epochs.
        shapes: The shapes of cooldowns; see ``WSD``.
        warmup: The epochs of a linear warm-up from 0, part of the trunk.
        floor: The rate at the end of each cooldown.
        averages: ``"ema"``, ``"swa"`` or both: adds a trial for each rate and each horizon on the
            trunk whose metrics are those of the averaged weights. These trials need no training of
            their own. The task must keep these averages (``average = th.SWA()``).
        name: The hyper-parameter that the rates are for.
        params: Further hyper-parameters, as in a ``Space``. Each combination has trunks of its
            own.

    Raises:
        SpaceError: A horizon, a rate or an option is invalid.
        ScheduleError: A cooldown or the warm-up does not fit into a horizon.

    >>> ladder = Ladder(horizons=[5, 10], rates=[0.1], shapes=["linear", "1-sqrt"])
    >>> for config in ladder.grid():
    ...     print(config["lr"])
    WSD(0.1, cooldown=1.0, epochs=5)
    WSD(0.1, cooldown=2.0, epochs=10)
    WSD(0.1, cooldown=1.0, shape='1-sqrt', epochs=5)
    WSD(0.1, cooldown=2.0, shape='1-sqrt', epochs=10)
    >>> ladder.trunk_epochs, [ladder.horizon_of(config) for config in ladder.grid()]
    (8, [5, 10, 5, 10])

    References:
        Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations",
        NeurIPS 2024.
    """

    def __init__(
        self,
        *,
        horizons: Sequence[int],
        rates: Sequence[float],
        cooldown: float = 0.2,
        shapes: Sequence[str] = ("linear",),
        warmup: float = 0.0,
        floor: float = 0.0,
        averages: str | Sequence[str] = (),
        name: str = "lr",
        **params: Any,
    ) -> None:
        self._averages = _names("averages", averages, known=AVERAGES)
        self._name = name
        kinds = _names("shapes", shapes, known=tuple(COOLDOWN_SHAPES))
        if not kinds:
            raise SpaceError("Ladder(shapes=[]): give at least one shape of cooldowns")
        if name in params:
            raise SpaceError(f"Ladder({name}=...): {name!r} follows the rates; leave it out")
        self._times: dict[str, Any] = {
            "horizons": tuple(horizons),
            "cooldown": cooldown,
            "warmup": warmup,
        }
        self._others: dict[str, Any] = {
            "rates": _rates(rates),
            "shapes": kinds,
            "floor": floor,
            "averages": self._averages,
            "name": name,
        }
        self._further = params
        self.horizons: tuple[int, ...] = ()
        """The epochs at which trials end; empty while they are amounts of another unit."""
        self.trunk_epochs = 0
        """The epochs of each trunk: up to the latest start of a cooldown."""
        if self.amounts():  # no schedule is known before ``in_epochs``
            super().__init__(**{name: Choice(list(_rates(rates)))}, **params)
            return
        self.horizons = _ascending(horizons)
        lengths = {end: _cooldown(cooldown, end) for end in self.horizons}
        self.trunk_epochs = int(max(end - length for end, length in lengths.items()))
        schedules: list[WSD | Trunk] = [
            WSD(rate, cooldown=length, warmup=warmup, floor=floor, shape=shape, epochs=end)
            for rate in _rates(rates)
            for shape in kinds
            for end, length in lengths.items()
        ]
        schedules += [
            Trunk(rate, epochs=end, warmup=warmup, average=average)
            for rate in _rates(rates)
            for average in self._averages
            for end in self.horizons
            if end <= self.trunk_epochs
        ]
        super().__init__(**{name: Choice(schedules)}, **params)

    @property
    def has_horizons(self) -> bool:
        """Whether trials end at horizons of their own: True."""
        return True

    @property
    def averages(self) -> tuple[str, ...]:
        """The averages of weights whose metrics some trials have."""
        return self._averages

    def amounts(self) -> tuple[Amount, ...]:
        """Return the times that are amounts of steps, tokens or epochs."""
        return amounts_in((*self._times.values(), *self._further.values()))

    def in_epochs(self, size: EpochSize) -> Ladder:
        """Return the same ladder with all times in epochs.

        Raises:
            UsageError: A horizon or a cooldown is no whole number of epochs, or the size of an
                epoch is unknown in a unit.

        >>> from thrifty.space import steps
        >>> ladder = Ladder(horizons=[steps(5_000), steps(10_000)], rates=[0.1])
        >>> ladder.in_epochs(EpochSize(steps=1_000)).horizons
        (5, 10)
        """
        times = dict(self._times)
        for name in ("horizons", "cooldown"):
            each = times[name]
            given = each if isinstance(each, tuple) else (each,)
            found = tuple(
                size.whole(value, what=f"Ladder: {name}") if isinstance(value, Amount) else value
                for value in given
            )
            times[name] = found if isinstance(each, tuple) else found[0]
        if isinstance(times["warmup"], Amount):
            times["warmup"] = size.in_epochs(times["warmup"])
        further = {name: in_epochs(value, size) for name, value in self._further.items()}
        return Ladder(**times, **self._others, **further)

    def horizon_of(self, config: Config) -> int | None:
        """Return the epoch at which a configuration's training ends."""
        return int(config[self._name].epochs)

    def check(self, *, max_epochs: int) -> None:
        """Raise ScheduleError if a schedule does not fit ``max_epochs`` or the first horizon."""
        if self.horizons[-1] > max_epochs:
            raise ScheduleError(
                f"the last horizon of the ladder is {self.horizons[-1]} epochs but max_epochs is "
                f"{max_epochs}; raise max_epochs or drop the horizon"
            )
        for name in self.names:
            if name != self._name:
                self._check_schedules(name, epochs=self.horizons[0])


def averaged_by(config: Config) -> str:
    """Return which average of the weights a configuration is judged by; "" for the weights.

    >>> averaged_by({"lr": Trunk(0.1, epochs=3, average="swa")}), averaged_by({"lr": 0.1})
    ('swa', '')
    """
    return next((str(v.average) for v in config.values() if isinstance(v, Trunk)), "")


def _ascending(horizons: Sequence[int]) -> tuple[int, ...]:
    found = tuple(horizons)
    for end in found:
        if isinstance(end, bool) or not isinstance(end, int | float) or end != int(end) or end < 1:
            raise SpaceError(
                f"Ladder(horizons={list(found)!r}): {end!r} is no whole number of epochs, 1 or "
                "more; whole epochs are shared, so let horizons end at whole epochs"
            )
    if not found or list(found) != sorted(set(found)):
        raise SpaceError(
            f"Ladder(horizons={list(found)!r}): give at least one horizon, each later than the one "
            "before"
        )
    return tuple(map(int, found))


def _rates(rates: Sequence[float]) -> tuple[float, ...]:
    found = tuple(rates)
    for rate in found:
        number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not number or not 0 < rate < math.inf:
            raise SpaceError(f"Ladder(rates={list(found)!r}): a rate must be above 0, got {rate!r}")
    if not found or len(set(found)) < len(found):
        raise SpaceError(f"Ladder(rates={list(found)!r}): give at least one rate, each once")
    return found


def _cooldown(cooldown: float, end: int) -> float:
    number = isinstance(cooldown, int | float) and not isinstance(cooldown, bool)
    if not number or not cooldown > 0 or (cooldown >= 1 and cooldown != int(cooldown)):
        raise SpaceError(
            f"Ladder(cooldown={cooldown!r}): give a share of the horizon, above 0 and below 1, or "
            "a whole number of epochs, 1 or more"
        )
    if cooldown < 1:
        return cooldown_of(end, share=cooldown)
    if cooldown > end:
        raise ScheduleError(
            f"Ladder(cooldown={cooldown!r}): it does not fit into the horizon of {end} epochs; "
            "shorten it or drop the horizon"
        )
    return float(cooldown)


def _names(option: str, given: str | Sequence[str], *, known: tuple[str, ...]) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) else tuple(given)
    for name in found:
        if name not in known:
            raise SpaceError(
                f"Ladder({option}={given!r}): {name!r} is unknown; give some of "
                f"{', '.join(map(repr, known))}"
            )
    if len(set(found)) < len(found):
        raise SpaceError(f"Ladder({option}={given!r}): name each once")
    return found
