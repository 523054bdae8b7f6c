"""Networks of machines: what vendors state, and what all-reduces reach before one was measured."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from thrifty.core import CloudError
from thrifty.perf import Link

from ._accelerators import ACCELERATORS
from ._offer import Interval, Offer


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

_GBPS = 1e9 / 8
_LATENCY_S = 50e-6
_INNER_LATENCY_S = 10e-6

_UNKNOWN_GBPS = 5.0
"""Bandwidth of a machine about whose network nothing is known."""
_UNNAMED = 5.0
"""Factor by which a network may be slower than its "up to" figure.

If there is no figure at all, it may be slower or faster than the guess by this factor.
"""

_FABRIC_GBPS = 100.0
"""Bandwidth above which a network is taken for one with remote memory access.

Over TCP, machines have no more than this; EFA, InfiniBand and GPUDirect carry the rest.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Factors by which a time may be shorter and longer, in nine cases of ten.

    Raises:
        CloudError: a factor is below 1.
    """

    faster: float
    slower: float

    def __post_init__(self) -> None:
        if not (self.faster >= 1 and self.slower >= 1):
            raise CloudError(
                f"a spread has factors of 1 or more, not faster={self.faster}, "
                f"slower={self.slower}"
            )

    def widest(self, other: Spread) -> Spread:
        """Return the wider of both on either side."""
        return Spread(
            faster=max(self.faster, other.faster), slower=max(self.slower, other.slower)
        )


_TCP = Spread(faster=2.5, slower=1.8)
_FABRIC = Spread(faster=3.0, slower=2.5)
_LINKED = Spread(faster=2.0, slower=8.0)
"""Machines whose links are not in use, as on one of the measured clusters, are far slower."""
_PCIE = Spread(faster=2.0, slower=2.0)
_STEP = Spread(faster=1.15, slower=1.1)
_STRAGGLING = Interval(median=0.015, low=0.0, high=0.06)


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPriors:
    """What all-reduces reach on a kind of network, before one was measured there.

    The defaults are fitted to public measurements of four clusters (Sia, SOSP 2023), and to the
    limits that AWS states for a single flow: 5 Gbit/s, and 10 in a placement group. The table in
    ``bench/results/cloud_2core_202611.md`` has the errors on clusters that were left out.

    Args:
        tcp_share: share of the nominal bandwidth that a ring over TCP reaches at most.
        tcp_gbps: bandwidth in Gbit/s that it does not exceed, because it has few flows.
        fabric_share: share of the nominal bandwidth on InfiniBand, EFA and the like.
        linked_share: share of the data sheet's ring on NVLink and the like.
        pcie_gb_s: bandwidth in GB/s of two devices that share the host's PCIe.
        pcie_contention: exponent of the number of devices by which that falls.
        tcp: spread of the time between machines over TCP.
        fabric: spread of the time between machines on InfiniBand and the like.
        linked: spread of the time inside a machine on NVLink and the like.
        pcie: spread of the time inside a machine over PCIe.
        step: spread of the step of several devices besides: launches, other jobs' traffic.
        straggling: by how much a step is longer for each doubling of the devices, which wait for
            the slowest.

    Raises:
        CloudError: a number is not positive, or a spread makes an interval empty.
    """

    tcp_share: float = 0.8
    tcp_gbps: float = 6.0
    fabric_share: float = 0.4
    linked_share: float = 0.7
    pcie_gb_s: float = 2.4
    pcie_contention: float = 0.5
    tcp: Spread = _TCP
    fabric: Spread = _FABRIC
    linked: Spread = _LINKED
    pcie: Spread = _PCIE
    step: Spread = _STEP
    straggling: Interval = _STRAGGLING

    def __post_init__(self) -> None:
        for name in ("tcp_share", "tcp_gbps", "fabric_share", "linked_share", "pcie_gb_s"):
            if not getattr(self, name) > 0:
                raise CloudError(f"{name} is {getattr(self, name)}, and has to be positive")
        low, median, high = (getattr(self.straggling, end) for end in ("low", "median", "high"))
        if not 0 <= low <= median <= high or not self.pcie_contention >= 0:
            raise CloudError(
                "a step of more devices is not shorter, and 0 <= low <= median <= high: not "
                f"straggling={self.straggling}, pcie_contention={self.pcie_contention}"
            )

    def link(self, offer: Offer) -> Link:
        """Return the links that a machine's all-reduces are expected to see, without bursts."""
        gbps = offer.baseline_gbps or offer.peak_gbps or _UNKNOWN_GBPS
        return Link(
            bytes_per_s=self._reached(gbps, is_fabric=_is_fabric(offer)) * _GBPS,
            latency_s=_LATENCY_S,
            inner_bytes_per_s=self._inner_gb_s(offer) * 1e9,
            inner_latency_s=_INNER_LATENCY_S,
        )

    def spread(self, offer: Offer) -> Interval:
        """Return the factor on the times of ``link`` that holds in nine cases of ten.

        The low end allows for bursts; the high end is larger where only "up to 10 Gigabit" is
        known.
        """
        own = self.fabric if _is_fabric(offer) else self.tcp
        faster, slower = own.faster, own.slower
        if not offer.baseline_gbps:
            slower *= _UNNAMED
            faster *= 1.0 if offer.peak_gbps else _UNNAMED
        elif offer.peak_gbps:
            peak, baseline = (
                self._reached(gbps, is_fabric=_is_fabric(offer))
                for gbps in (offer.peak_gbps, offer.baseline_gbps)
            )
            faster *= max(1.0, peak / baseline)
        both = Spread(faster=faster, slower=slower)
        if offer.accelerator_count > 1:
            both = both.widest(self.linked if _inner_of(offer) else self.pcie)
        return Interval(median=1.0, low=1.0 / both.faster, high=both.slower)

    def rest(self, devices: ArrayLike) -> np.ndarray:
        """Return the factor on a step's time for what its replay leaves out.

        Args:
            devices: devices that take part, [...].

        Returns:
            Median, low and high, [3, ...]; all are 1 for a single device.
        """
        doublings = np.log2(np.maximum(np.asarray(devices, float), 1.0))
        several = doublings > 0
        ends = (1.0, 1 / self.step.faster, self.step.slower)
        straggling = (self.straggling.median, self.straggling.low, self.straggling.high)
        return np.stack([
            np.where(several, end, 1.0) * (1 + each * doublings)
            for end, each in zip(ends, straggling, strict=True)
        ])

    def _reached(self, gbps: float, *, is_fabric: bool) -> float:
        """Return what a ring between machines reaches, of a nominal bandwidth in Gbit/s."""
        if is_fabric:
            return self.fabric_share * gbps
        return min(self.tcp_share * gbps, self.tcp_gbps)

    def _inner_gb_s(self, offer: Offer) -> float:
        linked = _inner_of(offer)
        if linked:
            return self.linked_share * linked
        pairs = max(offer.accelerator_count, 2) / 2
        return self.pcie_gb_s * math.pow(pairs, -self.pcie_contention)


def _is_fabric(offer: Offer) -> bool:
    if offer.fabric is not None:
        return offer.fabric
    return (offer.baseline_gbps or offer.peak_gbps or 0.0) > _FABRIC_GBPS


def _inner_of(offer: Offer) -> float:
    """Return the bandwidth of a direct link between a machine's accelerators; 0 for none."""
    known = ACCELERATORS.get(offer.accelerator)
    return known.inner_gb_s if known else 0.0
