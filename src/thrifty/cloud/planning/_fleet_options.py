"""What the user gives a plan of a fleet: its goal and options, and measurements.

Options include the quotas and capacity that limit a plan. Measurements are profiles of several
devices, and steps that correct estimates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from thrifty.cloud._hardware import HardwareEstimates
from thrifty.cloud._market import SpotHistory
from thrifty.cloud._offer import Fleet, Interval, MachineGroup, Offer
from thrifty.cloud._workload import ObservedSteps, StepTiming, Workload
from thrifty.core import CloudError
from thrifty.perf import StepProfile

from ._devices import FACTORS, Devices, kind_of, replay_slopes


ALIKE = 0.02
"""Relative difference up to which fleets count as one choice, of which the cheapest is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A deadline, a budget, or neither.

    Args:
        deadline_s: Seconds from renting to the end.
        budget_usd: Total dollars.
        conservative: Whether the high end of the interval must meet the goal, rather than its
            median.

    Raises:
        CloudError: Both are given, or one is not positive.
    """

    deadline_s: float | None = None
    budget_usd: float | None = None
    conservative: bool = True

    def __post_init__(self) -> None:
        if self.deadline_s is not None and self.budget_usd is not None:
            raise CloudError(
                "give a deadline or a budget, not both: one is met, and the other is made least"
            )
        limit = self.limit
        if limit is not None and not 0 < limit < math.inf:
            raise CloudError(
                f"`deadline_s` and `budget_usd` must be positive and finite, got {limit}"
            )

    @property
    def limit(self) -> float | None:
        """Seconds or dollars; None if there is no goal."""
        return self.deadline_s if self.deadline_s is not None else self.budget_usd

    @property
    def end(self) -> int:
        """Index, in (median, low, high), of the end of the interval that must meet the goal."""
        return 2 if self.conservative else 0

    def best_of(self, time_s: np.ndarray, cost_usd: np.ndarray) -> int | None:
        """Return the index of the best fleet; None if no fleet meets the goal or there is no goal.

        Fleets within 2 % of the fastest are one choice: the cheapest of them is taken.

        Args:
            time_s: Seconds of each fleet: median, low, high, [3, fleets].
            cost_usd: Dollars of each fleet: median, low, high, [3, fleets].
        """
        limited, other = (time_s, cost_usd) if self.deadline_s is not None else (cost_usd, time_s)
        if self.limit is None:
            return None
        meets = np.flatnonzero(limited[self.end] <= self.limit)
        if not meets.size:
            return None
        alike = meets[other[0, meets] <= (1 + ALIKE) * other[0, meets].min()]
        return int(alike[np.lexsort((limited[0, alike], cost_usd[0, alike]))[0]])

    def bound(self, interval: Interval) -> float:
        """Return the end of the interval that must meet the goal."""
        return interval.high if self.conservative else interval.median

    def best_fleet(self, fleets: Iterable[Fleet]) -> Fleet | None:
        """Return the best of these fleets, by the rules of ``best_of``."""
        some = list(fleets)
        if not some:
            return None
        place = self.best_of(
            np.array([_ends(fleet.time_s) for fleet in some]).T,
            np.array([_ends(fleet.cost_usd) for fleet in some]).T,
        )
        return None if place is None else some[place]


def _ends(interval: Interval) -> tuple[float, float, float]:
    return interval.median, interval.low, interval.high


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Options of ``plan_fleet``, ``replan`` and ``Probes``.

    Args:
        deadline_s: Seconds from renting to the end; the cheapest fleet that meets it is chosen.
        budget_usd: Total dollars; the fastest fleet within it is chosen. If neither a deadline nor
            a budget is given, no fleet is chosen and the plan has only the front.
        conservative: Whether the high end of the forecast must meet the deadline or budget, rather
            than its median.
        estimates: Estimates of devices and networks. By default they come from data sheets, for a
            profile of one processor core.
        spot: Whether spot machines are allowed.
        mixed: Whether fleets of several on-demand types are allowed.
        max_nodes: Most machines of a fleet.
        quotas: Most machines, by accelerator or instance type.
        market: Prices and evictions of spot machines; None: the offers' prices, and one eviction
            per ten machine hours.

    Raises:
        CloudError: An option is out of range, or the options contradict each other.

    >>> FleetOptions(deadline_s=6 * 3600, quotas={"p3.2xlarge": 4}).goal.limit
    21600
    """

    deadline_s: float | None = None
    budget_usd: float | None = None
    conservative: bool = True
    estimates: HardwareEstimates = field(default_factory=HardwareEstimates)
    spot: bool = False
    mixed: bool = False
    max_nodes: int = 64
    quotas: Mapping[str, int] = field(default_factory=dict)
    market: SpotHistory | None = None

    def __post_init__(self) -> None:
        _ = self.goal  # raises CloudError if deadline and budget are invalid
        if self.max_nodes < 1:
            raise CloudError(f"a fleet has at least one machine, not max_nodes={self.max_nodes}")
        for name, most in self.quotas.items():
            if most < 0:
                raise CloudError(f"a quota must be at least 0, got {most} for {name!r}")

    def allowance(self, offer: Offer) -> int:
        """Return the most machines of an offer, by the quotas of its type and its accelerator."""
        most = self.max_nodes
        quotas = self.quotas
        return min(most, quotas.get(offer.instance_type, most), quotas.get(offer.accelerator, most))

    @property
    def goal(self) -> Goal:
        """Deadline or budget, and which end of a forecast must meet it."""
        return Goal(
            deadline_s=self.deadline_s, budget_usd=self.budget_usd, conservative=self.conservative
        )


_AWS_GPUS = {"g": "G and VT", "p": "P"}
"""Quotas of AWS for machines with GPUs, by the first letter of the instance type."""


def availability_notes(
    machines: Sequence[MachineGroup], *, quotas: Mapping[str, int]
) -> tuple[str, ...]:
    """Return what limits the renting of these machines beside their price.

    Machines without GPUs are left out: an account seldom lacks them.

    Args:
        machines: Machines of a fleet.
        quotas: Quotas that the user gave, by accelerator or instance type; of these machines,
            nothing is said about quotas.
    """
    scarce = [each for each in machines if each.offer.accelerator]
    notes = []
    for rented in scarce:
        offer = rented.offer
        if not {offer.instance_type, offer.accelerator} & quotas.keys():
            needed = _quota(rented)
            if needed is not None:
                notes.append(f"quota: {needed}; check it, because a new account may have none")
    if scarce:
        fleet = " + ".join(each.offer.spell(each.num, spot=each.spot) for each in scarce)
        notes.append(f"capacity: whether {fleet} can be rented now is not known")
    return tuple(notes)


def _quota(rented: MachineGroup) -> str | None:
    """Return what the cloud counts these machines against; None if that is not known."""
    offer = rented.offer
    count = f"{rented.num} x {offer.instance_type}"
    vcpus = rented.num * offer.vcpus
    cores = "their vCPUs" if math.isnan(vcpus) else f"{vcpus:.0f} vCPUs"
    gpus = rented.num * offer.accelerator_count
    if offer.cloud == "aws" and offer.instance_type[:1] in _AWS_GPUS:
        family = _AWS_GPUS[offer.instance_type[:1]]
        name = (
            f"All {family} Spot Instance Requests"
            if rented.spot
            else f"Running On-Demand {family} instances"
        )
        return f"{count} in {offer.region} take {cores} of the quota {name!r}"
    if offer.cloud == "azure":
        name = "for spot machines" if rented.spot else "of its VM family"
        return f"{count} in {offer.region} take {cores} of the quota {name}"
    if offer.cloud == "gcp":
        kind = "preemptible GPUs, or else of GPUs" if rented.spot else "GPUs"
        return f"{count} in {offer.region} take {gpus} {offer.accelerator} of the quota of {kind}"
    if offer.cloud == "nebius":
        return f"{count} in {offer.region} take {gpus} of the quota of GPUs"
    return None


# -- profiles of several devices ---------------------------------------------------------


def profiled_on(
    workload: Workload, estimates: HardwareEstimates, accelerator: str
) -> tuple[Workload, HardwareEstimates]:
    """Return the workload and the estimates by the profile that serves for an accelerator.

    What was measured relative to another profile, the accelerator's speed and steps, is left out.

    Raises:
        CloudError: The estimates were calibrated to none of the workload's profiles.
    """
    if not workload.other_profiles:
        return workload, estimates
    profile = workload.other_profiles.get(accelerator, workload.profile)
    if estimates.calibrated_to not in (None, profile):
        if estimates.calibrated_to not in (workload.profile, *workload.other_profiles.values()):
            estimates.check_profile(profile)
        estimates = replace(estimates, observed={}, calibrated_to=None)
    if accelerator in workload.other_profiles:
        factors = {
            name: each
            for name, each in estimates.measured_compute.items()
            if name != accelerator or estimates.calibrated_to is not None
        }
        estimates = replace(estimates, profiled=accelerator, measured_compute=factors)
    return replace(workload, profile=profile, other_profiles={}), estimates


def by_profile(workload: Workload, offers: Sequence[Offer]) -> list[tuple[str, list[Offer]]]:
    """Return the offers of each profile: an accelerator with its own one, or "" for the others."""
    groups: dict[str, list[Offer]] = defaultdict(list)
    for offer in offers:
        own = offer.accelerator if offer.accelerator in workload.other_profiles else ""
        groups[own].append(offer)
    return sorted(groups.items())


def one_profile_only(workload: Workload, what: str) -> None:
    """Refuse a workload with several profiles.

    Raises:
        CloudError: The workload has several.
    """
    if workload.other_profiles:
        raise CloudError(
            f"{what} by one profile, and `other_profiles` has "
            f"{', '.join(sorted(workload.other_profiles))}: leave it out"
        )


_ITERATIONS = 12
_DAMPING = 0.7
_FARTHEST = 2.0
"""Largest move of a factor's logarithm in one iteration."""


# -- steps that were measured ------------------------------------------------------------


def calibrate(
    profile: StepProfile, timings: Sequence[StepTiming], *, estimates: HardwareEstimates
) -> HardwareEstimates:
    """Correct estimates by measured steps of the training.

    Two short runs suffice: one on a single machine, one on several, each at some of the batch sizes
    that were profiled. A run on one machine tells how fast it computes and how fast its devices
    sum; a run on several tells how fast machines sum. All three factors are fitted together to all
    steps, starting from the estimates; each moves the less, the better it was known. What they do
    not explain is kept as errors of the replay, by batch size and placement.

    For these types of machines, ``estimate`` and the planners then return the posterior's interval.
    The factors also replace those in the estimates, so that other machines with the same device
    profit. Measure on as many machines as you mean to rent, up to four: two of them may have a
    faster or slower connection than most.

    Args:
        profile: Profile of the training.
        timings: Measured steps. Those of earlier calls remain.
        estimates: Estimates to correct.

    Raises:
        CloudError: There are no timings, nothing is known of a device's speed, or the estimates
            were calibrated to another profile before.

    >>> from thrifty.cloud import Offer
    >>> profile = StepProfile(
    ...     device="V100",
    ...     batches=(8, 16),
    ...     forward_s=(0.1, 0.2),
    ...     backward_s=(0.2, 0.4),
    ...     optimizer_s=0.0,
    ...     peak_bytes=(2e9, 4e9),
    ...     bucket_bytes=(1e9,),
    ...     bucket_ready=(1.0,),
    ... )
    >>> offer = Offer(
    ...     cloud="aws",
    ...     region="us-east-1",
    ...     instance_type="p3.2xlarge",
    ...     accelerator="V100",
    ...     price_usd_h=3.06,
    ...     baseline_gbps=10.0,
    ... )
    >>> known = HardwareEstimates(profiled="V100")
    >>> runs = [StepTiming(offer=offer, num=2, batch=16, seconds=1.4)]
    >>> found = calibrate(profile, runs, estimates=known)
    >>> round(known.network(offer).median, 2), round(found.network(offer).median, 2)
    (1.0, 0.68)
    """
    if not timings:
        raise CloudError("`timings` must have at least one measured step, got none")
    estimates.check_profile(profile)
    groups: dict[str, list[StepTiming]] = defaultdict(list)
    for timing in timings:
        groups[timing.offer.instance_type].append(timing)
    for group in groups.values():
        estimates = _observed(profile, group, estimates=estimates)
    return estimates


def _observed(
    profile: StepProfile, timings: Sequence[StepTiming], *, estimates: HardwareEstimates
) -> HardwareEstimates:
    """Return the estimates, corrected by steps on one type of machine."""
    offer = timings[0].offer
    name = offer.instance_type
    earlier = estimates.observed.get(name)
    prior = (estimates.compute(offer), estimates.inner(offer), estimates.network(offer))
    together = tuple(timings)
    if earlier is not None:
        prior, together = earlier.prior, (*earlier.timings, *timings)
    measured_s = np.log([each.seconds for each in together])
    start = np.log([each.median for each in prior])
    factors = start
    for _ in range(_ITERATIONS):
        forecast, slopes = _replays(profile, together, estimates=estimates, factors=np.exp(factors))
        seen = ObservedSteps.of(
            together,
            prior=prior,
            slopes=slopes,
            residuals=measured_s - forecast + slopes @ (factors - start),
        )
        wanted = np.log([each.median for each in seen.posterior])
        factors = factors + _DAMPING * np.clip(wanted - factors, -_FARTHEST, _FARTHEST)
    return replace(
        estimates,
        measured_compute={**estimates.measured_compute, offer.device: seen.posterior[0]},
        observed={**estimates.observed, name: seen},
        calibrated_to=profile,
    )


def _replays(
    profile: StepProfile,
    timings: Sequence[StepTiming],
    *,
    estimates: HardwareEstimates,
    factors: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logarithms of the steps with these factors, and their derivatives."""
    forecast = np.empty(len(timings))
    slopes = np.empty((len(timings), len(FACTORS)))
    groups: dict[object, list[int]] = defaultdict(list)
    for place, timing in enumerate(timings):
        groups[kind_of(timing.offer)].append(place)
    # Only the profile counts: the measured steps fitted, whole and in the profile's precision.
    workload = Workload(profile=profile, steps=1, global_batch=1)
    for places in groups.values():
        mine = [timings[place] for place in places]
        devices = Devices.of([mine[0].offer], estimates=estimates, workload=workload)
        ends = factors[:, None, None] * np.ones((len(FACTORS), 3, 1))
        seconds, slopes[places] = replay_slopes(
            profile,
            devices.with_factors(dict(zip(FACTORS, ends, strict=True))),
            batch=np.array([each.batch for each in mine]),
            num_micro=np.ones(len(mine), int),
            nodes=np.array([each.num for each in mine]),
        )
        forecast[places] = np.log(seconds)
    return forecast, slopes
