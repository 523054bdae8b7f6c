"""Accelerators, hosts and their bandwidth, and estimates for those not measured yet."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from thrifty.core import CloudError
from thrifty.perf import CollectiveModel, CollectiveTiming, Link

from ._offer import Interval, Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """Data sheet of one device.

    Args:
        tflops: peak TFLOP/s in single precision.
        gb_s: memory bandwidth in GB/s.
        memory_gib: memory in GiB.
        inner_gb_s: bandwidth in GB/s of a ring over the devices of one machine, roughly half of the
            data sheet's link.
    """

    tflops: float
    gb_s: float
    memory_gib: float
    inner_gb_s: float

    @property
    def speed(self) -> float:
        """Geometric mean of compute and memory bandwidth, to compare devices by.

        Training is bound partly by arithmetic and partly by memory, so both count.
        """
        return math.sqrt(self.tflops * self.gb_s)


ACCELERATORS = {
    "K80": Accelerator(tflops=4.1, gb_s=240, memory_gib=12, inner_gb_s=5),
    "M60": Accelerator(tflops=4.8, gb_s=160, memory_gib=8, inner_gb_s=5),
    "P4": Accelerator(tflops=5.5, gb_s=192, memory_gib=8, inner_gb_s=5),
    "P100": Accelerator(tflops=9.3, gb_s=732, memory_gib=16, inner_gb_s=8),
    "V100": Accelerator(tflops=15.7, gb_s=900, memory_gib=16, inner_gb_s=60),
    "V100-32GB": Accelerator(tflops=15.7, gb_s=900, memory_gib=32, inner_gb_s=60),
    "T4": Accelerator(tflops=8.1, gb_s=320, memory_gib=16, inner_gb_s=6),
    "L4": Accelerator(tflops=30.3, gb_s=300, memory_gib=24, inner_gb_s=10),
    "A10": Accelerator(tflops=31.2, gb_s=600, memory_gib=24, inner_gb_s=10),
    "A10G": Accelerator(tflops=31.2, gb_s=600, memory_gib=24, inner_gb_s=10),
    "L40S": Accelerator(tflops=91.6, gb_s=864, memory_gib=48, inner_gb_s=20),
    "A100": Accelerator(tflops=19.5, gb_s=1555, memory_gib=40, inner_gb_s=150),
    "A100-80GB": Accelerator(tflops=19.5, gb_s=2039, memory_gib=80, inner_gb_s=150),
    "H100": Accelerator(tflops=67.0, gb_s=3350, memory_gib=80, inner_gb_s=220),
    "H200": Accelerator(tflops=67.0, gb_s=4800, memory_gib=141, inner_gb_s=220),
}
"""Accelerators by SkyPilot's names; figures from the makers' data sheets."""

VCPU = Accelerator(tflops=0.035, gb_s=4.0, memory_gib=0.0, inner_gb_s=5.0)
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
        for each in _variants(
            machine, gpus.get((machine.cloud, machine.region, machine.zone), [])
        )
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


# AWS states two numbers for each type. For the large g3, p2 and p3 the lower one contradicts the
# type's name ("10 Gigabit" with a baseline of 5), and for the large g6e and p6 it adds up links. In
# these cases the table follows the name.
AWS_GBPS: dict[str, tuple[float, float]] = {
    "c5.large": (0.75, 10.0),
    "c5.xlarge": (1.25, 10.0),
    "c5.2xlarge": (2.5, 10.0),
    "c5.4xlarge": (5.0, 10.0),
    "c5.9xlarge": (12.0, 12.0),
    "c5.12xlarge": (12.0, 12.0),
    "c5.18xlarge": (25.0, 25.0),
    "c5.24xlarge": (25.0, 25.0),
    "c5.metal": (25.0, 25.0),
    "c5n.large": (3.0, 25.0),
    "c5n.xlarge": (5.0, 25.0),
    "c5n.2xlarge": (10.0, 25.0),
    "c5n.4xlarge": (15.0, 25.0),
    "c5n.9xlarge": (50.0, 50.0),
    "c5n.18xlarge": (100.0, 100.0),
    "c5n.metal": (100.0, 100.0),
    "dl1.24xlarge": (400.0, 400.0),
    "g3s.xlarge": (1.25, 10.0),
    "g3.4xlarge": (5.0, 10.0),
    "g3.8xlarge": (10.0, 10.0),
    "g3.16xlarge": (25.0, 25.0),
    "g4ad.xlarge": (2.0, 10.0),
    "g4ad.2xlarge": (4.167, 10.0),
    "g4ad.4xlarge": (8.333, 10.0),
    "g4ad.8xlarge": (15.0, 15.0),
    "g4ad.16xlarge": (25.0, 25.0),
    "g4dn.xlarge": (5.0, 25.0),
    "g4dn.2xlarge": (10.0, 25.0),
    "g4dn.4xlarge": (20.0, 25.0),
    "g4dn.8xlarge": (50.0, 50.0),
    "g4dn.12xlarge": (50.0, 50.0),
    "g4dn.16xlarge": (50.0, 50.0),
    "g4dn.metal": (100.0, 100.0),
    "g5.xlarge": (2.5, 10.0),
    "g5.2xlarge": (5.0, 10.0),
    "g5.4xlarge": (10.0, 25.0),
    "g5.8xlarge": (25.0, 25.0),
    "g5.12xlarge": (40.0, 40.0),
    "g5.16xlarge": (25.0, 25.0),
    "g5.24xlarge": (50.0, 50.0),
    "g5.48xlarge": (100.0, 100.0),
    "g5g.xlarge": (1.25, 10.0),
    "g5g.2xlarge": (2.5, 10.0),
    "g5g.4xlarge": (5.0, 10.0),
    "g5g.8xlarge": (12.0, 12.0),
    "g5g.16xlarge": (25.0, 25.0),
    "g5g.metal": (25.0, 25.0),
    "g6.xlarge": (2.5, 10.0),
    "g6.2xlarge": (5.0, 10.0),
    "g6.4xlarge": (10.0, 25.0),
    "g6.8xlarge": (25.0, 25.0),
    "g6.12xlarge": (40.0, 40.0),
    "g6.16xlarge": (25.0, 25.0),
    "g6.24xlarge": (50.0, 50.0),
    "g6.48xlarge": (100.0, 100.0),
    "g6e.xlarge": (2.5, 20.0),
    "g6e.2xlarge": (5.0, 20.0),
    "g6e.4xlarge": (20.0, 20.0),
    "g6e.8xlarge": (25.0, 25.0),
    "g6e.12xlarge": (100.0, 100.0),
    "g6e.16xlarge": (35.0, 35.0),
    "g6e.24xlarge": (200.0, 200.0),
    "g6e.48xlarge": (400.0, 400.0),
    "g7.2xlarge": (40.0, 60.0),
    "g7.4xlarge": (80.0, 100.0),
    "g7.8xlarge": (100.0, 100.0),
    "g7.12xlarge": (175.0, 175.0),
    "g7.24xlarge": (350.0, 350.0),
    "g7.48xlarge": (700.0, 700.0),
    "g7e.2xlarge": (50.0, 50.0),
    "g7e.4xlarge": (50.0, 50.0),
    "g7e.8xlarge": (100.0, 100.0),
    "g7e.12xlarge": (400.0, 400.0),
    "g7e.24xlarge": (800.0, 800.0),
    "g7e.48xlarge": (1600.0, 1600.0),
    "gr6.4xlarge": (10.0, 25.0),
    "gr6.8xlarge": (25.0, 25.0),
    "m5.large": (0.75, 10.0),
    "m5.xlarge": (1.25, 10.0),
    "m5.2xlarge": (2.5, 10.0),
    "m5.4xlarge": (5.0, 10.0),
    "m5.8xlarge": (10.0, 10.0),
    "m5.12xlarge": (12.0, 12.0),
    "m5.16xlarge": (20.0, 20.0),
    "m5.24xlarge": (25.0, 25.0),
    "m5.metal": (25.0, 25.0),
    "p2.xlarge": (1.25, 10.0),
    "p2.8xlarge": (10.0, 10.0),
    "p2.16xlarge": (25.0, 25.0),
    "p3.2xlarge": (2.5, 10.0),
    "p3.8xlarge": (10.0, 10.0),
    "p3.16xlarge": (25.0, 25.0),
    "p3dn.24xlarge": (100.0, 100.0),
    "p4d.24xlarge": (400.0, 400.0),
    "p4de.24xlarge": (400.0, 400.0),
    "p5.4xlarge": (100.0, 100.0),
    "p5.48xlarge": (3200.0, 3200.0),
    "p5e.48xlarge": (3200.0, 3200.0),
    "p5en.48xlarge": (3200.0, 3200.0),
    "p6-b200.48xlarge": (3200.0, 3200.0),
    "p6-b300.48xlarge": (6400.0, 6400.0),
}
"""Bandwidth in Gbit/s by VM type: baseline, and peak in bursts."""


_BY_SPECIFICATION = 1.5
"""Error factor of a device's speed estimated from its data sheet.

The true speed is within this factor in nine cases of ten. Habitat and PROFET report errors of 10 to
40 % for such scaling.
"""

_BY_NAME = 1.25
"""Error factor of a network's speed estimated from its nominal bandwidth."""

_UNNAMED = 5.0
"""Error factor of a network's speed where no baseline bandwidth is known.

The network may be slower than its "up to" figure by this factor. If there is no figure at all, it
may be slower or faster than the guess by this factor.
"""

_GBPS = 1e9 / 8
_UNKNOWN_GBPS = 5.0
_LATENCY_S = 50e-6
_INNER_LATENCY_S = 10e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareEstimates:
    """Estimated compute time relative to the profiled device, and network time by bandwidth.

    Probes replace both estimates with measurements.

    Args:
        profiled: name of the device that was profiled, among the known accelerators; "" for
            processor cores.
        profiled_vcpus: number of processor cores that were profiled.
        measured_compute: by ``Offer.device``: measured factor on the profile's times.
        measured_network: by instance type: measured factor on the times that ``link`` gives.
        measured_sums: all-reduce timings from ``hetero.measure_all_reduce``, named by instance
            type. For these types they replace both the nominal bandwidth and the factor in
            ``measured_network``.

    >>> offer = Offer(
    ...     cloud="aws",
    ...     region="us-east-1",
    ...     instance_type="p3.2xlarge",
    ...     accelerator="V100",
    ...     price_usd_h=3.06,
    ... )
    >>> HardwareEstimates(profiled="V100").compute(offer)
    Interval(median=1.0, low=1.0, high=1.0)
    >>> measured = HardwareEstimates(profiled="T4").probed(
    ...     compute={"V100": Interval(median=0.4, low=0.38, high=0.42)}
    ... )
    >>> measured.compute(offer).median
    0.4
    """

    profiled: str = ""
    profiled_vcpus: float = 1.0
    measured_compute: Mapping[str, Interval] = field(default_factory=dict)
    measured_network: Mapping[str, Interval] = field(default_factory=dict)
    measured_sums: tuple[CollectiveTiming, ...] = ()

    def compute(self, offer: Offer) -> Interval:
        """Return this machine's compute time per device as a factor on the profile's times.

        Raises:
            CloudError: the device was not measured, and it is not in the table of accelerators or
                its number of processors is unknown.
        """
        known = self.measured_compute.get(offer.device)
        if known is not None:
            return known
        if offer.accelerator and offer.accelerator == self.profiled:
            return Interval(median=1.0, low=1.0, high=1.0)
        if not offer.accelerator and math.isnan(offer.vcpus):
            raise CloudError(
                f"{offer} computes on processors, and how many it has is not known: add vCPUs "
                "to the catalogue"
            )
        here = _speed(self.profiled, self.profiled_vcpus)
        factor = here / _speed(offer.accelerator, offer.vcpus)
        return Interval(
            median=factor, low=factor / _BY_SPECIFICATION, high=factor * _BY_SPECIFICATION
        )

    def link(self, offer: Offer) -> Link:
        """Return the machine's network by its nominal bandwidth, without bursts."""
        gbps = offer.baseline_gbps or offer.peak_gbps or _UNKNOWN_GBPS
        inner = ACCELERATORS.get(offer.accelerator)
        return Link(
            bytes_per_s=gbps * _GBPS,
            latency_s=_LATENCY_S,
            inner_bytes_per_s=(inner.inner_gb_s if inner else 10.0) * 1e9,
            inner_latency_s=_INNER_LATENCY_S,
        )

    def network(self, offer: Offer) -> Interval:
        """Return the factor on the times of ``link``.

        The low end allows for bursts; the high end is larger where only "up to 10 Gigabit" is
        known.
        """
        if any(timing.name == offer.instance_type for timing in self.measured_sums):
            return Interval(median=1.0, low=1.0, high=1.0)
        known = self.measured_network.get(offer.instance_type)
        if known is not None:
            return known
        faster, slower = 1.0, 1.0
        if not offer.baseline_gbps:
            slower = _UNNAMED
            faster = 1.0 if offer.peak_gbps else _UNNAMED
        elif offer.peak_gbps:
            faster = max(1.0, offer.peak_gbps / offer.baseline_gbps)
        return Interval(median=1.0, low=1.0 / faster / _BY_NAME, high=slower * _BY_NAME)

    def collectives(self, offers: Iterable[Offer]) -> CollectiveModel | None:
        """Return a model of the measured all-reduces of these types; None if none was measured.

        For numbers of machines without a measurement, the model falls back on the nominal
        bandwidth.
        """
        names = {timing.name for timing in self.measured_sums}
        prior = {
            offer.instance_type: self.link(offer)
            for offer in offers
            if offer.instance_type in names
        }
        if not prior:
            return None
        timings = [timing for timing in self.measured_sums if timing.name in prior]
        return CollectiveModel.fit(timings, prior=prior)

    def probed(
        self,
        *,
        compute: Mapping[str, Interval] | None = None,
        network: Mapping[str, Interval] | None = None,
    ) -> HardwareEstimates:
        """Return a copy with these measurements added."""
        return replace(
            self,
            measured_compute={**self.measured_compute, **(compute or {})},
            measured_network={**self.measured_network, **(network or {})},
        )


def _speed(accelerator: str, vcpus: float) -> float:
    if not accelerator:
        return vcpus * VCPU.speed
    known = ACCELERATORS.get(accelerator)
    if known is None:
        raise CloudError(
            f"how fast {accelerator!r} is, is not known: measure it (probe), or use one of "
            f"{', '.join(sorted(ACCELERATORS))}"
        )
    return known.speed
