"""Texts on the assumptions of a plan, and on why there is no plan."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from thrifty.core import CloudError

from ._beliefs import Beliefs
from ._fleet import Fleet
from ._offer import Offer
from ._plan_goal import Goal
from ._plan_reasons import misfit, spell_s
from ._plan_spot import ASSUMED_PER_H, SpotHistory
from ._plan_table import Table
from ._workload import Workload


def known_offers(
    offers: Sequence[Offer], beliefs: Beliefs
) -> tuple[list[Offer], tuple[str, ...]]:
    """Return the offers of devices with a known speed, and the names of the other devices.

    Raises:
        CloudError: no device has a known speed.
    """
    speeds: dict[tuple[str, str, float], bool] = {}
    known: list[Offer] = []
    unknown: set[str] = set()
    for offer in offers:
        device = offer.accelerator, offer.device, offer.vcpus
        if device not in speeds:
            try:
                beliefs.compute(offer)
                speeds[device] = True
            except CloudError:
                speeds[device] = False
        if speeds[device]:
            known.append(offer)
        else:
            unknown.add(offer.device)
    if offers and not known:
        raise CloudError(
            f"of none of the devices the speed is known ({', '.join(sorted(unknown))}): "
            "measure them (probe)"
        )
    return known, tuple(sorted(unknown))


def notes_on(
    workload: Workload,
    best: Fleet | None,
    *,
    unknown: Sequence[str],
    market: SpotHistory | None,
    spot: bool,
) -> tuple[str, ...]:
    """Return the assumptions of the choice that may not hold."""
    notes = []
    machines = best.machines if best else ()
    if unknown:
        notes.append(f"left out, since nobody knows their speed: {', '.join(unknown)}")
    if not any(workload.profile.peak_bytes):
        notes.append(
            "the model's memory was not measured: whether the samples fit is not known"
        )
    for rented in machines:
        if rented.offer.device_memory_bytes is None:
            notes.append(
                f"the memory of {rented.offer} is not known: whether {rented.batch} samples "
                "fit is not known"
            )
    if spot and market is None:
        notes.append(
            f"no history of spot machines is given: {ASSUMED_PER_H:g} evictions in an hour of "
            "each are assumed"
        )
    if any(rented.spot for rented in machines):
        notes.append(
            "with spot machines the time is the expected one: evictions come when they like"
        )
    dates = [rented.offer.priced_on for rented in machines]
    if None in dates:
        notes.append("the prices have no date")
    elif dates:
        notes.append(f"prices are those of {min(date for date in dates if date)}")
    return tuple(notes)


def missed(nearest: Fleet, goal: Goal, *, max_nodes: int) -> str:
    """Return by how much the fastest or the cheapest fleet misses the goal."""
    where = "at the 90 % end" if goal.confidence else "by the median"
    if goal.deadline_s is not None:
        least = goal.bound(nearest.time_s)
        return (
            f"the fastest fleet ({nearest}) takes {spell_s(least)} {where}, "
            f"{spell_s(least - goal.deadline_s)} over the deadline of "
            f"{spell_s(goal.deadline_s)}: "
            f"set a later one, allow more than {max_nodes} machines, or take other offers"
        )
    assert goal.budget_usd is not None
    least = goal.bound(nearest.cost_usd)
    return (
        f"the cheapest fleet ({nearest}) costs ${least:,.2f} {where}, "
        f"${least - goal.budget_usd:,.2f} over the budget of ${goal.budget_usd:,.2f}: "
        "raise it, allow spot machines, or take other offers"
    )


def nothing_trains(table: Table) -> str:
    """Return why no fleet of equal machines can train at all."""
    workload, batch = table.workload, table.steps.batch
    allowed = np.flatnonzero(table.allowed)
    if not allowed.size:
        return "the quotas allow no machine of any offer: raise one"
    devices = table.devices
    smallest = int(devices.per_node[allowed].min())
    if smallest > workload.global_batch:
        return (
            f"a global batch of {workload.global_batch} samples feeds as many devices, and "
            f"the smallest machine has {smallest}: raise the global batch, or take other "
            "offers"
        )
    if not devices.most[allowed].any():
        roomy = max(
            (table.kinds[kind] for kind in allowed),
            key=lambda kind: kind.device_memory_bytes or 0,
        )
        return (
            f"{misfit(workload.profile, roomy, batch=1)}, and no other has more: take offers "
            "with larger devices, or a smaller model"
        )
    return (
        "no fleet that may be rented holds the global batch: "
        f"{_nearest(table, allowed, batch)}: allow more machines, or lower the global batch"
    )


def _nearest(table: Table, allowed: np.ndarray, batch: np.ndarray) -> str:
    """Describe the fleet whose devices come closest to holding their samples."""
    most_nodes = np.minimum(
        table.allowed[allowed],
        np.maximum(1, table.workload.global_batch // table.devices.per_node[allowed]),
    )
    samples = batch[allowed, most_nodes - 1]
    place = int(np.argmin(samples / np.maximum(1, table.devices.most[allowed])))
    text = misfit(
        table.workload.profile, table.kinds[allowed[place]], batch=int(samples[place])
    )
    return f"on {most_nodes[place]} machines {text}"
