"""One machine that can be rented."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import date

from thrifty.core import CloudError


GIB = 2**30

_NOT_NEGATIVE = (
    "price_usd_h",
    "spot_usd_h",
    "baseline_gbps",
    "peak_gbps",
    "accelerator_memory_gib",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A VM type in a place, with its prices; one row of a catalogue.

    Args:
        cloud: "aws", "gcp", ...
        region: of it.
        zone: in the region; "" where prices do not depend on it.
        instance_type: the VM's name.
        accelerator: its GPUs' name; "" for none.
        accelerator_count: devices that compute in one VM: GPUs, or 1 for a VM without.
        vcpus: of the VM; NaN: not known.
        memory_gib: of the VM; NaN: not known.
        accelerator_memory_gib: of each GPU; None: not known.
        price_usd_h: of an hour; None: only as spot.
        spot_usd_h: of an hour while nobody else wants it; None: not offered, or not known.
        baseline_gbps: network that the VM always has; None: not known.
        peak_gbps: network that it has for a while.
        priced_on: date of the prices; None: not known.

    Raises:
        CloudError: a number makes no sense, or there is no price.

    >>> offer = Offer(cloud="aws", region="us-east-1", instance_type="p3.2xlarge", accelerator="V100", price_usd_h=3.06)
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
    priced_on: date | None = None

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
        return f"{self.cloud} {self.instance_type} in {self.zone or self.region}"

    @property
    def device(self) -> str:
        """What its devices are known by: the accelerator, or the VM type where processors compute."""
        return self.accelerator or self.instance_type

    @property
    def device_memory_bytes(self) -> float | None:
        """Of one device that computes; None: not known."""
        gib = self.accelerator_memory_gib if self.accelerator else self.memory_gib
        return None if gib is None or math.isnan(gib) else gib * GIB

    def usd_h(self, *, spot: bool) -> float | None:
        """Price of an hour; None: not offered so."""
        return self.spot_usd_h if spot else self.price_usd_h
