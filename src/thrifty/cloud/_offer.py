"""Offers of machines, and fleets of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date

from thrifty.core import CloudError
from thrifty.perf import Precision


GIB = 2**30

ANYWHERE = "any"
"""Region of an offer whose price is the same in all regions of its cloud."""

_NOT_NEGATIVE = (
    "price_usd_h",
    "spot_usd_h",
    "baseline_gbps",
    "peak_gbps",
    "accelerator_memory_gib",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A VM type in a region or zone, with its prices: one row of a catalogue.

    Args:
        cloud: "aws", "gcp", ...
        region: region of that cloud; "any" if all regions have one price.
        zone: zone in the region; "" if prices do not depend on the zone.
        instance_type: name of the VM type.
        accelerator: name of its GPUs; "" for none.
        accelerator_count: devices that compute in one VM: its GPUs, or 1 for a VM without GPUs.
        vcpus: virtual CPUs of the VM; NaN if unknown.
        memory_gib: memory of the VM in GiB; NaN if unknown.
        accelerator_memory_gib: memory of each GPU in GiB; None if unknown.
        price_usd_h: on-demand price in dollars per hour; None if offered as spot only.
        spot_usd_h: spot price in dollars per hour; None if not offered as spot, or unknown.
        baseline_gbps: network bandwidth that the VM always has, in Gbit/s; None if unknown.
        peak_gbps: network bandwidth that the VM has in bursts, in Gbit/s.
        fabric: whether its network gives remote memory access, as InfiniBand and EFA do; None:
            judged by its bandwidth.
        priced_on: date of the prices; None if unknown.
        source: where the prices were read, in a word; "" if unknown.

    Raises:
        CloudError: a number is out of range, or the offer has no price.

    >>> offer = Offer(
    ...     cloud="aws",
    ...     region="us-east-1",
    ...     instance_type="p3.2xlarge",
    ...     accelerator="V100",
    ...     price_usd_h=3.06,
    ... )
    >>> print(offer, offer.usd_h(spot=False), offer.usd_h(spot=True))
    aws p3.2xlarge in us-east-1 3.06 None
    """

    cloud: str
    region: str
    zone: str = ""
    instance_type: str
    accelerator: str = ""
    accelerator_count: int = 1
    vcpus: float = math.nan
    memory_gib: float = math.nan
    accelerator_memory_gib: float | None = None
    price_usd_h: float | None
    spot_usd_h: float | None = None
    baseline_gbps: float | None = None
    peak_gbps: float | None = None
    fabric: bool | None = None
    priced_on: date | None = None
    source: str = ""

    def __post_init__(self) -> None:
        for name in _NOT_NEGATIVE:
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise CloudError(f"{self}: {name} is {value}, and has to be 0 or more")
        for name in ("vcpus", "memory_gib"):
            value = getattr(self, name)
            if not (math.isnan(value) or 0 < value < math.inf):
                raise CloudError(f"{self}: {name} is {value}, and has to be more than 0")
        if self.accelerator_count < 1:
            raise CloudError(
                f"{self}: accelerator_count is {self.accelerator_count}, and has to be 1 or more"
            )
        if self.price_usd_h is None and self.spot_usd_h is None:
            raise CloudError(f"{self} has no price: give price_usd_h, spot_usd_h or both")

    def __str__(self) -> str:
        place = "any region" if self.region == ANYWHERE else self.zone or self.region
        return f"{self.cloud} {self.instance_type} in {place}"

    @property
    def device(self) -> str:
        """Name of the computing device: the accelerator, or the VM type of a VM without GPUs."""
        return self.accelerator or self.instance_type

    @property
    def device_memory_bytes(self) -> float | None:
        """Memory of one computing device in bytes; None if unknown."""
        gib = self.accelerator_memory_gib if self.accelerator else self.memory_gib
        return None if gib is None or math.isnan(gib) else gib * GIB

    def spell(self, num: int, *, spot: bool = False) -> str:
        """Return a number of these machines in words, with their accelerators.

        >>> offer = Offer(
        ...     cloud="aws",
        ...     region="us-east-1",
        ...     instance_type="g5.12xlarge",
        ...     accelerator="A10G",
        ...     accelerator_count=4,
        ...     price_usd_h=5.67,
        ... )
        >>> print(offer.spell(2))
        2 x g5.12xlarge (4 A10G each)
        """
        each = " each" if num > 1 else ""
        has = [f"{self.accelerator_count} {self.accelerator}{each}"] if self.accelerator else []
        notes = ", ".join(has + ["spot"] * spot)
        return f"{num} x {self.instance_type}{f' ({notes})' if notes else ''}"

    def usd_h(self, *, spot: bool) -> float | None:
        """Return the price in dollars per hour, or None if the VM is not offered this way."""
        return self.spot_usd_h if spot else self.price_usd_h


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """Forecast: its median, and the range that holds in nine cases of ten."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineGroup:
    """A group of equal machines in a fleet.

    Attributes:
        offer: offer that is rented.
        num: number of machines.
        batch: samples per device in a step.
        spot: whether they are rented as spot machines.
        num_micro: micro-batches that a device trains one after the other in a step; 1: no gradient
            accumulation.
        precision: precision in which they train.
    """

    offer: Offer
    num: int
    batch: int
    spot: bool = False
    num_micro: int = 1
    precision: Precision = "float32"

    @property
    def micro_batch(self) -> int:
        """Samples of the largest micro-batch of a device."""
        return -(-self.batch // self.num_micro)

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

    machines: tuple[MachineGroup, ...]
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
            rented.offer.spell(rented.num, spot=rented.spot) for rented in self.machines
        )
