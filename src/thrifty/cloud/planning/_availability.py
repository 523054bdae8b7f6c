"""Quotas and capacity: what a price list does not say about machines."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from thrifty.cloud._offer import Rented


_AWS_GPUS = {"g": "G and VT", "p": "P"}
"""Quotas of AWS for machines with GPUs, by the first letter of the instance type."""


def availability_notes(
    machines: Sequence[Rented], *, quotas: Mapping[str, int]
) -> tuple[str, ...]:
    """Return what limits the renting of these machines beside their price.

    Machines without GPUs are left out: an account seldom lacks them.

    Args:
        machines: machines of a fleet.
        quotas: quotas that the user gave, by accelerator or instance type; of these machines,
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


def _quota(rented: Rented) -> str | None:
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
        return (
            f"{count} in {offer.region} take {gpus} {offer.accelerator} of the quota of {kind}"
        )
    if offer.cloud == "nebius":
        return f"{count} in {offer.region} take {gpus} of the quota of GPUs"
    return None
