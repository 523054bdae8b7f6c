"""Estimates of devices, networks and mixed precision, replaced by what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from thrifty.core import CloudError
from thrifty.perf import PRECISIONS, CollectiveModel, CollectiveTiming, Link, Precision, StepProfile

from ._networks import NetworkPriors
from ._offer import ACCELERATORS, VCPU, Interval, Offer
from ._workload import ObservedSteps


SpeedSource = Literal["probe", "profile", "measured pairs", "data sheets"]

_MEASURED = 2.1
"""Error factor of the ratio of two devices' speeds that were both measured.

The true ratio is within this factor in nine cases of ten, because it depends on the network: small
steps are bound by launches, which take equally long everywhere.
"""
_BY_SPECIFICATION = 2.4
"""The same where one of both is known by its data sheet."""
_ACROSS_KINDS = 5.0
"""The same between processors and accelerators, which have little in common."""

_SAME_DEVICE = Interval(median=1.0, low=1 / 1.1, high=1.1)
"""Factor on the profile's seconds for the profiled device itself.

Rented machines of one type differ, and a step of several devices waits for the slowest.
"""
_AS_MEASURED = Interval(median=1.0, low=1.0, high=1.0)
"""Factor where all-reduces were measured: their own quantiles make the interval."""

_USABLE = 0.88
"""A T4 of 16 GiB offers 14.6, of which the CUDA context takes 0.3 to 0.5; larger GPUs lose less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareEstimates:
    """Estimated compute time relative to the profiled device, and network time by bandwidth.

    Probes replace both estimates with measurements.

    Args:
        profiled: Name of the device that was profiled, among the known accelerators; "" for
            processor cores.
        profiled_vcpus: Number of processor cores that were profiled.
        measured_compute: By ``Offer.device``: measured factor on the profile's times.
        measured_network: By instance type: measured factor on the seconds that ``link`` gives for
            sums between machines.
        measured_inner: By instance type: the same for sums inside a machine.
        measured_sums: All-reduce timings from ``hetero.measure_all_reduce``, named by instance
            type. For these types they replace both the nominal bandwidth and the factors in
            ``measured_network`` and ``measured_inner``.
        networks: What networks reach that were not measured.
        usable_memory: Share of a device's nominal memory that a program is sure to get.
        observed: By instance type: steps of one training that were measured there, from
            ``calibrate``.
        calibrated_to: Profile of that training; None without measured steps. Estimates for another
            profile are refused, because how fast a device is depends on the training.

    >>> offer = Offer(
    ...     cloud="aws",
    ...     region="us-east-1",
    ...     instance_type="p3.2xlarge",
    ...     accelerator="V100",
    ...     price_usd_h=3.06,
    ... )
    >>> HardwareEstimates(profiled="V100").compute(offer).median
    1.0
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
    measured_inner: Mapping[str, Interval] = field(default_factory=dict)
    measured_sums: tuple[CollectiveTiming, ...] = ()
    networks: NetworkPriors = field(default_factory=NetworkPriors)
    usable_memory: float = _USABLE
    observed: Mapping[str, ObservedSteps] = field(default_factory=dict)
    calibrated_to: StepProfile | None = None

    def __post_init__(self) -> None:
        if not 0 < self.usable_memory <= 1:
            raise CloudError(
                f"`usable_memory` must be a share above 0 and up to 1, got {self.usable_memory}"
            )

    def check_profile(self, profile: StepProfile) -> None:
        """Check that the measured steps, if there are any, are those of this training.

        Raises:
            CloudError: They were measured with another profile.
        """
        if self.calibrated_to not in (None, profile):
            raise CloudError(
                "these estimates were calibrated to another profile (device "
                f"{self.calibrated_to.device!r}, batches {self.calibrated_to.batches}) than the "
                f"workload's (device {profile.device!r}, batches {profile.batches}): plan with "
                "that profile, or start from estimates without measured steps and call "
                "`calibrate` with this one"
            )

    def usable_bytes(self, offer: Offer) -> float:
        """Return the bytes of one device that a program is sure to get; inf if not known."""
        memory = offer.device_memory_bytes
        return math.inf if memory is None else self.usable_memory * memory

    def compute(self, offer: Offer) -> Interval:
        """Return this machine's compute time per device as a factor on the profile's times.

        Raises:
            CloudError: The device was not measured, and it is not in the table of accelerators or
                its number of processors is unknown.
        """
        seen = self.observed.get(offer.instance_type)
        known = seen.posterior[0] if seen else self.measured_compute.get(offer.device)
        if known is not None:
            return known
        if offer.accelerator and offer.accelerator == self.profiled:
            return _SAME_DEVICE
        if not offer.accelerator and math.isnan(offer.vcpus):
            raise CloudError(
                f"{offer} computes on processors, and how many it has is not known: add vCPUs "
                "to the catalogue"
            )
        here = _speed(self.profiled, self.profiled_vcpus)
        factor = here / _speed(offer.accelerator, offer.vcpus)
        error = _error(self.profiled, offer.accelerator)
        return Interval(median=factor, low=factor / error, high=factor * error)

    def speed_from(self, offer: Offer) -> SpeedSource:
        """Return what ``compute`` rests on."""
        if offer.device in self.measured_compute or offer.instance_type in self.observed:
            return "probe"
        if offer.accelerator and offer.accelerator == self.profiled:
            return "profile"
        both = self.profiled, offer.accelerator
        return "measured pairs" if _are_measured(*both) else "data sheets"

    def link(self, offer: Offer) -> Link:
        """Return the machine's network by its nominal bandwidth, without bursts."""
        return self.networks.link(offer)

    def network(self, offer: Offer) -> Interval:
        """Return the factor on the times of ``link`` for sums between machines.

        The low end allows for bursts; the high end is larger where only "up to 10 Gigabit" is
        known.
        """
        if self._has_sums(offer):
            return _AS_MEASURED
        seen = self.observed.get(offer.instance_type)
        known = seen.posterior[2] if seen else self.measured_network.get(offer.instance_type)
        return self.networks.spread(offer) if known is None else known

    def inner(self, offer: Offer) -> Interval:
        """Return the factor on the times of ``link`` for sums inside a machine."""
        if self._has_sums(offer):
            return _AS_MEASURED
        seen = self.observed.get(offer.instance_type)
        known = seen.posterior[1] if seen else self.measured_inner.get(offer.instance_type)
        return self.networks.inner_spread(offer) if known is None else known

    def _has_sums(self, offer: Offer) -> bool:
        return any(timing.name == offer.instance_type for timing in self.measured_sums)

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
        inner: Mapping[str, Interval] | None = None,
    ) -> HardwareEstimates:
        """Return a copy with these measurements added.

        Steps that ``calibrate`` was given of these machines no longer count.

        Args:
            compute: See ``measured_compute``.
            network: See ``measured_network``.
            inner: See ``measured_inner``.
        """
        kept = {
            name: seen
            for name, seen in self.observed.items()
            if name not in {*(network or {}), *(inner or {})}
            and seen.timings[0].offer.device not in (compute or {})
        }
        return replace(
            self,
            observed=kept,
            measured_compute={**self.measured_compute, **(compute or {})},
            measured_network={**self.measured_network, **(network or {})},
            measured_inner={**self.measured_inner, **(inner or {})},
        )


def _error(one: str, other: str) -> float:
    """Return the error factor of the ratio of two devices' speeds; "" are processors."""
    if bool(one) != bool(other):
        return _ACROSS_KINDS
    return _MEASURED if _are_measured(one, other) else _BY_SPECIFICATION


def _are_measured(*names: str) -> bool:
    known = [ACCELERATORS.get(name) for name in names]
    return all(each is not None and each.measured is not None for each in known)


def _speed(accelerator: str, vcpus: float) -> float:
    if not accelerator:
        return vcpus * VCPU.speed
    known = ACCELERATORS.get(accelerator)
    if known is None:
        raise CloudError(
            f"the speed of {accelerator!r} is not known: measure it (`probed`), or use one of "
            f"{', '.join(sorted(ACCELERATORS))}"
        )
    return known.speed


_SAME = Interval(median=1.0, low=1.0, high=1.0)

_VOLTA = Interval(median=1 / 2.5, low=1 / 4.0, high=1.0)
_AMPERE = Interval(median=1 / 1.7, low=1 / 3.5, high=1.0)
"""Factors of autocast on the seconds in single precision.

NVIDIA's DeepLearningExamples report 1.9 to 4.0 times the throughput for twelve trainings on one
V100, and 1.04 to 2.8 times for twenty on one A100, there compared with TF32. PyTorch multiplies
matrices without TF32 unless told otherwise, so the gain may be larger. Those networks were chosen
to show the gain, and small ones are bound by launches, so the other end is no gain at all. Newer
devices count like an A100, because there are no such measurements of them.
"""


def precision_of(
    offer: Offer,
    *,
    allowed: tuple[Precision, ...] | None,
    profile: StepProfile,
    estimates: HardwareEstimates,
) -> tuple[Precision, Interval]:
    """Return the fastest precision of a device, and its factor on the seconds it takes otherwise.

    Those are the seconds by ``estimates``, in the precision of the profile.

    Args:
        offer: Machine with the device.
        allowed: Precisions to choose among; None: only the profile's. Devices without units for any
            of them train in float32.
        profile: Profile of a step, with its precision.
        estimates: Tell whether the device itself was measured.
    """
    known = _mixed(offer.accelerator)
    wanted = (profile.precision,) if allowed is None else allowed
    possible = [each for each in PRECISIONS if each in wanted and each in known]
    if "float32" in wanted or not possible:
        possible.insert(0, "float32")
    measured = estimates.speed_from(offer) in {"probe", "profile"}
    here = offer.accelerator if measured else estimates.profiled
    before = _factor(here, profile.precision)
    choice = min(possible, key=lambda each: _factor(offer.accelerator, each).median)
    after = _factor(offer.accelerator, choice)
    if choice == profile.precision and after == before:
        return choice, _SAME
    return choice, Interval(
        median=after.median / before.median,
        low=after.low / before.high,
        high=after.high / before.low,
    )


def _factor(accelerator: str, precision: Precision) -> Interval:
    mixed = _mixed(accelerator)
    if precision not in mixed:
        return _SAME
    return _AMPERE if "bfloat16" in mixed else _VOLTA


def _mixed(accelerator: str) -> tuple[Precision, ...]:
    """Return the types of 16 bits that it has units for; none where its data sheet is not known."""
    known = ACCELERATORS.get(accelerator)
    return () if known is None else known.mixed
