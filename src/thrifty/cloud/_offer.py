"""Offers of machines, fleets of them, and data sheets of their accelerators."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import date
from importlib.resources import files

from thrifty.core import CloudError
from thrifty.perf import PRECISIONS, Precision


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
        region: Region of that cloud; "any" if all regions have one price.
        zone: Zone in the region; "" if prices do not depend on the zone.
        instance_type: Name of the VM type.
        accelerator: Name of its GPUs; "" for none.
        accelerator_count: Devices that compute in one VM: its GPUs, or 1 for a VM without GPUs.
        vcpus: Virtual CPUs of the VM; NaN if unknown.
        memory_gib: Memory of the VM in GiB; NaN if unknown.
        accelerator_memory_gib: Memory of each GPU in GiB; None if unknown.
        price_usd_h: On-demand price in dollars per hour; None if offered as spot only.
        spot_usd_h: Spot price in dollars per hour; None if not offered as spot, or unknown.
        baseline_gbps: Network bandwidth that the VM always has, in Gbit/s; None if unknown.
        peak_gbps: Network bandwidth that the VM has in bursts, in Gbit/s.
        fabric: Whether its network gives remote memory access, as InfiniBand and EFA do; None:
            judged by its bandwidth.
        priced_on: Date of the prices; None if unknown.
        source: Where the prices were read, in a word; "" if unknown.

    Raises:
        CloudError: A number is out of range, or the offer has no price.

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
        offer: Offer that is rented.
        num: Number of machines.
        batch: Samples per device in a step.
        spot: Whether they are rented as spot machines.
        num_micro: Micro-batches that a device trains one after the other in a step; 1: no gradient
            accumulation.
        precision: Precision in which they train.
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
        machines: Machines of one VM type, or of several.
        step_s: Seconds of a step.
        time_s: Seconds from renting to the end.
        cost_usd: Total cost in dollars.
        checkpoint_s: Seconds between two checkpoints; None: no spot machines.
        why: What bounds the step, in words.
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


# -- accelerators ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Data sheet of one device.

    Args:
        tflops: Peak TFLOP/s in single precision.
        gb_s: Memory bandwidth in GB/s.
        memory_gib: Memory in GiB.
        inner_gb_s: Bandwidth in GB/s of a ring over the devices of one machine that are linked
            directly, roughly half of the data sheet's link; 0 if they share the host's PCIe.
        measured: Speed in training relative to a V100, where public measurements have it; None: the
            data sheet counts.
        mixed: Types of 16 bits that its matrix units train in.
    """

    tflops: float
    gb_s: float
    memory_gib: float
    inner_gb_s: float
    measured: float | None = None
    mixed: tuple[Precision, ...] = ()

    @property
    def speed(self) -> float:
        """The number to compare devices by: as measured, or else by the data sheet.

        Training is bound partly by arithmetic and partly by memory, so a data sheet counts with the
        geometric mean of compute and memory bandwidth.
        """
        if self.measured is not None:
            return self.measured * _V100_SPEED
        return math.sqrt(self.tflops * self.gb_s)


_V100_SPEED = math.sqrt(15.7 * 900)


def _from_data_sheets() -> dict[str, Accelerator]:
    text = (files(__package__) / "accelerators.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {
        row["Name"]: Accelerator(
            tflops=float(row["TFLOPS"]),
            gb_s=float(row["GBs"]),
            memory_gib=float(row["MemoryGiB"]),
            inner_gb_s=float(row["InnerGBs"]),
            measured=float(row["Measured"]) if row["Measured"] else None,
            mixed=tuple(each for each in PRECISIONS if each in row["Mixed"].split()),
        )
        for row in rows
    }


ACCELERATORS = _from_data_sheets()
"""Accelerators by SkyPilot's names.

The file ``accelerators.csv`` beside this module has their figures and the sources of these.
"""

VCPU = Accelerator(tflops=0.035, gb_s=4.0, memory_gib=0.0, inner_gb_s=0.0)
"""One hardware thread of a server processor, roughly."""


_BUILT_IN = {
    **{f"a2-highgpu-{num}g": ("A100", num) for num in (1, 2, 4, 8)},
    "a2-megagpu-16g": ("A100", 16),
    **{f"a2-ultragpu-{num}g": ("A100-80GB", num) for num in (1, 2, 4, 8)},
    **{f"a3-highgpu-{num}g": ("H100", num) for num in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("H100-MEGA", 8),
    "a3-ultragpu-8g": ("H200", 8),
    "a4-highgpu-8g": ("B200", 8),
    **{f"g2-standard-{vcpus}": ("L4", 1) for vcpus in (4, 8, 12, 16, 32)},
    "g2-standard-24": ("L4", 2),
    "g2-standard-48": ("L4", 4),
    "g2-standard-96": ("L4", 8),
    **{f"g4-standard-{48 * num}": ("RTXPRO6000", num) for num in (1, 2, 4, 8)},
}
"""GPUs that are built into a VM type, which cannot be rented without them."""

_FAMILIES = ("a2-", "a3-", "a4-", "a4x-", "g2-", "g4-")
"""Prefixes of VM types that come with GPUs only."""

_VCPUS_PER_GPU = 8
_ON_N1 = ("K80", "P4", "P100", "T4", "V100")
"""GPUs that n1 machines can carry; 8 vCPUs per GPU are within the limits for each."""


def attached(offers: Iterable[Offer]) -> list[Offer]:
    """Return machines with the GPUs of their zone attached, at the price of both.

    Offers without an instance type are GPUs alone; without any such offer, nothing changes.
    Machines that cannot be rented without GPUs are left out where their GPUs have no price.
    """
    machines: list[Offer] = []
    gpus: defaultdict[tuple[str, str, str], list[Offer]] = defaultdict(list)
    for offer in offers:
        if offer.instance_type:
            machines.append(offer)
        else:
            gpus[offer.cloud, offer.region, offer.zone].append(offer)
    if not gpus:
        return machines
    return [
        each
        for machine in machines
        for each in _variants(machine, gpus.get((machine.cloud, machine.region, machine.zone), []))
    ]


def _variants(machine: Offer, gpus: list[Offer]) -> Iterator[Offer]:
    """Yield the machine alone if it can be rented so, and with each GPU offer that fits it."""
    if machine.accelerator or not machine.instance_type.startswith(_FAMILIES):
        yield machine
    for gpu in gpus:
        if _fits(machine, gpu):
            price = _sum(machine.price_usd_h, gpu.price_usd_h)
            spot = _sum(machine.spot_usd_h, gpu.spot_usd_h)
            if price is not None or spot is not None:
                yield replace(
                    machine,
                    accelerator=gpu.accelerator,
                    accelerator_count=gpu.accelerator_count,
                    accelerator_memory_gib=gpu.accelerator_memory_gib,
                    price_usd_h=price,
                    spot_usd_h=spot,
                )


def _fits(machine: Offer, gpu: Offer) -> bool:
    if machine.instance_type in _BUILT_IN:
        return _BUILT_IN[machine.instance_type] == (gpu.accelerator, gpu.accelerator_count)
    vcpus = _VCPUS_PER_GPU * gpu.accelerator_count
    return gpu.accelerator in _ON_N1 and machine.instance_type == f"n1-standard-{vcpus}"


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other
