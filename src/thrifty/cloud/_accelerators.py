"""Data sheets of accelerators, and accelerators that are listed apart from their machines."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.resources import files

from thrifty.perf import PRECISIONS, Precision

from ._offer import Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Data sheet of one device.

    Args:
        tflops: peak TFLOP/s in single precision.
        gb_s: memory bandwidth in GB/s.
        memory_gib: memory in GiB.
        inner_gb_s: bandwidth in GB/s of a ring over the devices of one machine that are linked
            directly, roughly half of the data sheet's link; 0 if they share the host's PCIe.
        measured: speed in training relative to a V100, where public measurements have it; None: the
            data sheet counts.
        mixed: types of 16 bits that its matrix units train in.
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
