"""Machines rented together, and what a training on them takes."""

from __future__ import annotations

from dataclasses import dataclass

from ._offer import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A forecast: the middle, and what it lies between in nine cases of ten."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Rented:
    """Equal machines of a fleet.

    Attributes:
        offer: what is rented.
        num: how many of it.
        batch: samples of each of its devices in a step.
        spot: rented as spot.
    """

    offer: Offer
    num: int
    batch: int
    spot: bool = False

    @property
    def usd_h(self) -> float:
        """Price of an hour of them all."""
        price = self.offer.usd_h(spot=self.spot)
        assert price is not None
        return self.num * price


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """All machines of a training, and the forecast for it.

    Attributes:
        machines: of one VM type, or of several.
        step_s: seconds of a step.
        time_s: from renting to the end.
        cost_usd: of all of it.
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
        """Price of an hour."""
        return sum(rented.usd_h for rented in self.machines)

    @property
    def num_devices(self) -> int:
        """Devices that compute."""
        return sum(rented.num * rented.offer.accelerator_count for rented in self.machines)

    def __str__(self) -> str:
        return " + ".join(
            f"{rented.num} x {rented.offer.instance_type}{' (spot)' if rented.spot else ''}"
            for rented in self.machines
        )
