"""Profiles of several devices: a machine is forecast from that of its own device, if any."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from thrifty.cloud._hardware import HardwareEstimates
from thrifty.cloud._offer import Offer
from thrifty.cloud._workload import Workload
from thrifty.core import CloudError


def seen_from(
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
