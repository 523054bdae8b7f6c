"""Networks of machines: their stated bandwidth, and what all-reduces reach before a measurement."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from thrifty.core import CloudError
from thrifty.perf import Link

from ._offer import ACCELERATORS, Interval, Offer


@dataclass(frozen=True, slots=True, kw_only=True)
class Bandwidth:
    """Network of a VM type in Gbit/s.

    Args:
        baseline_gbps: Bandwidth that the VM always has; None if unknown.
        peak_gbps: Bandwidth that the VM has in bursts; None if unknown.
        fabric: Whether the network gives remote memory access; None: judged by its bandwidth.
    """

    baseline_gbps: float | None = None
    peak_gbps: float | None = None
    fabric: bool | None = None


_UNKNOWN = Bandwidth()


def bandwidth_of(cloud: str, instance_type: str) -> Bandwidth:
    """Return the stated network of a VM type; all of it is None for a type without a figure.

    >>> bandwidth_of("aws", "g5.xlarge").baseline_gbps
    2.5
    """
    return _stated().get((cloud, instance_type), _UNKNOWN)


@cache
def _stated() -> dict[tuple[str, str], Bandwidth]:
    text = (files(__package__) / "networks.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {
        (row["Cloud"], row["InstanceType"]): Bandwidth(
            baseline_gbps=_gbps(row["BaselineGbps"]),
            peak_gbps=_gbps(row["PeakGbps"]),
            fabric={"yes": True, "no": False, "": None}[row["Fabric"]],
        )
        for row in rows
    }


def _gbps(text: str) -> float | None:
    return float(text) if text else None


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
class UncertaintyFactor:
    """Factors by which a time may be shorter and longer, in nine cases of ten.

    Raises:
        CloudError: A factor is below 1.
    """

    faster: float
    slower: float

    def __post_init__(self) -> None:
        if not (self.faster >= 1 and self.slower >= 1):
            raise CloudError(
                f"UncertaintyFactor takes factors of 1 or more, not faster={self.faster}, "
                f"slower={self.slower}"
            )


_TCP = UncertaintyFactor(faster=2.5, slower=1.8)
_FABRIC = UncertaintyFactor(faster=3.0, slower=2.5)
_LINKED = UncertaintyFactor(faster=2.0, slower=8.0)
"""Machines whose links are not in use, as on one of the measured clusters, are far slower."""
_PCIE = UncertaintyFactor(faster=2.0, slower=2.0)
_STEP = UncertaintyFactor(faster=1.15, slower=1.1)
_STRAGGLING = Interval(median=0.015, low=0.0, high=0.35)
"""The upper end is that of hosts too busy for their devices, which no data sheet tells.

One of four measured clusters had such hosts; with an end of 0.06, which suffices for the other
three, half of its steps were beyond their intervals.
"""


NetworkKind = Literal["tcp", "fabric", "linked", "pcie"]

_WIDTHS: dict[NetworkKind, float] = {"tcp": 1.0, "fabric": 1.0, "linked": 1.0, "pcie": 1.0}
"""Means over measured clusters of what covers nine of ten steps there, and no less than 1.

All means are below 1, but one or two clusters of a kind say little of the next one.
"""
_OBSERVED = 1.2
"""The same after two probes of each application on each cluster."""

_POSITIVE = ("tcp_share", "tcp_gbps", "fabric_share", "linked_share", "pcie_gb_s", "observed")


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPriors:
    """What all-reduces reach on a kind of network, before one was measured there.

    The defaults are fitted to public measurements of four clusters (Sia, SOSP 2023), and to the
    limits that AWS states for a single flow: 5 Gbit/s, and 10 in a placement group. The table in
    ``bench/results/cloud_2core_202611.md`` has the errors on clusters that were left out.

    Args:
        tcp_share: Share of the nominal bandwidth that a ring over TCP reaches at most.
        tcp_gbps: Bandwidth in Gbit/s that it does not exceed, because it has few flows.
        fabric_share: Share of the nominal bandwidth on InfiniBand, EFA and the like.
        linked_share: Share of the data sheet's ring on NVLink and the like.
        pcie_gb_s: Bandwidth in GB/s of two devices that share the host's PCIe.
        pcie_contention: Exponent of the number of devices by which that falls.
        tcp: Spread of the time between machines over TCP.
        fabric: Spread of the time between machines on InfiniBand and the like.
        linked: Spread of the time inside a machine on NVLink and the like.
        pcie: Spread of the time inside a machine over PCIe.
        step: Spread of the step of several devices besides: launches, other jobs' traffic.
        straggling: By how much a step is longer for each doubling of the devices, which wait for
            the slowest.
        widths: By kind ("tcp", "fabric", "linked", "pcie"): factor on the logarithm of the interval
            of a step whose sums go over it, apart from the device's speed. 1 takes all spreads at
            their ends at once. Steps on several machines count as their network's.
        observed: Factor on the logarithm of the interval where steps of the training were measured.

    Raises:
        CloudError: A number is not positive, or a spread makes an interval empty.
    """

    tcp_share: float = 0.8
    tcp_gbps: float = 6.0
    fabric_share: float = 0.4
    linked_share: float = 0.7
    pcie_gb_s: float = 2.4
    pcie_contention: float = 0.5
    tcp: UncertaintyFactor = _TCP
    fabric: UncertaintyFactor = _FABRIC
    linked: UncertaintyFactor = _LINKED
    pcie: UncertaintyFactor = _PCIE
    step: UncertaintyFactor = _STEP
    straggling: Interval = _STRAGGLING
    widths: Mapping[NetworkKind, float] = field(default_factory=_WIDTHS.copy)
    observed: float = _OBSERVED

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise CloudError(f"{name} is {getattr(self, name)}, and has to be positive")
        if not set(self.widths) <= set(_WIDTHS) or min(self.widths.values(), default=1.0) <= 0:
            raise CloudError(
                f"`widths` must have positive factors by {', '.join(_WIDTHS)}, "
                f"got {dict(self.widths)}"
            )
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
        """Return the factor on the times between machines that holds in nine cases of ten.

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
        return Interval(median=1.0, low=1.0 / faster, high=slower)

    def inner_spread(self, offer: Offer) -> Interval:
        """Return the factor on the times inside a machine that holds in nine cases of ten."""
        own = self.linked if _inner_of(offer) else self.pcie
        return Interval(median=1.0, low=1.0 / own.faster, high=own.slower)

    def rest(self, devices: ArrayLike) -> np.ndarray:
        """Return the factor on a step's time for what its replay leaves out.

        Args:
            devices: Devices that take part, [...].

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

    def width(self, offer: Offer, *, several: bool) -> float:
        """Return the factor in ``widths`` for one machine, or for several."""
        if several:
            return self.widths.get("fabric" if _is_fabric(offer) else "tcp", 1.0)
        return self.widths.get("linked" if _inner_of(offer) else "pcie", 1.0)

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
