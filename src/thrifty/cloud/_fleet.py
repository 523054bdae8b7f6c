"""Machines rented together, and the forecast for a training on them."""

from __future__ import annotations

from dataclasses import dataclass

from ._offer import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Forecast: its median, and the range that holds in nine cases of ten."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """Equal machines in a fleet.

    Attributes:
        offer: offer that is rented.
        num: number of machines.
        batch: samples per device in a step.
        spot: whether they are rented as spot machines.
    """

    offer: Offer
    num: int
    batch: int
    spot: bool = False

    @property
    def usd_h(self) -> float:
        """Price of all of them together, in dollars per hour."""
        price = self.offer.usd_h(spot=self.spot)
        assert price is not None
        return self.num * price


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All machines of a training, and the forecast for it.

    Attributes:
        machines: machines of one VM type, or of several.
        step_s: seconds of a step.
        time_s: seconds from renting to the end.
        cost_usd: total cost in dollars.
        checkpoint_s: seconds between two checkpoints; None: no spot machines.
        why: what bounds the step, in words.
    """

    machines: tuple[Rented, ...]
    step_s: Interval
    time_s: Interval
    cost_usd: Interval
    checkpoint_s: float | None = None
    why: str = ""

    @property
    def usd_h(self) -> float:
        """Price of the fleet in dollars per hour."""
        return sum(rented.usd_h for rented in self.machines)

    @property
    def num_devices(self) -> int:
        """Number of devices that compute."""
        return sum(rented.num * rented.offer.accelerator_count for rented in self.machines)

    def __str__(self) -> str:
        return " + ".join(
            f"{rented.num} x {rented.offer.instance_type}{' (spot)' if rented.spot else ''}"
            for rented in self.machines
        )
