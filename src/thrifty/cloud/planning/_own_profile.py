"""The user's own measurements: profiles of several devices, and steps that correct estimates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from thrifty.cloud._hardware import HardwareEstimates
from thrifty.cloud._offer import Offer
from thrifty.cloud._workload import ObservedSteps, StepTiming, Workload
from thrifty.core import CloudError
from thrifty.perf import StepProfile

from ._devices import FACTORS, Devices, kind_of, replay_slopes


# -- profiles of several devices ---------------------------------------------------------


def profiled_on(
    workload: Workload, estimates: HardwareEstimates, accelerator: str
) -> tuple[Workload, HardwareEstimates]:
    """Return the workload and the estimates by the profile that serves for an accelerator.

    What was measured relative to another profile, the accelerator's speed and steps, is left out.

    Raises:
        CloudError: the estimates were calibrated to none of the workload's profiles.
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
        profile: profile of the training.
        timings: measured steps. Those of earlier calls remain.
        estimates: estimates to correct.

    Raises:
        CloudError: there are no timings, nothing is known of a device's speed, or the estimates
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
