"""Search for fleets of several machine types."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from thrifty.core import CloudError

from ._beliefs import Beliefs
from ._estimate import Machines, estimate
from ._fleet import Fleet
from ._offer import Offer
from ._plan_devices import Devices, kind_of
from ._plan_goal import Goal
from ._plan_mix import Mix
from ._plan_steps import replayed_s
from ._plan_table import allowance
from ._workload import Workload


_MOST_REGIONS = 3
_MOST_TYPES = 12
_TRIES = 24
_FINER = 6
_SHORTER = 0.7
"""Factor from one step time to the next one that is tried."""


def mixed_fleets(
    workload: Workload,
    offers: Sequence[Offer],
    *,
    beliefs: Beliefs,
    goal: Goal,
    quotas: Mapping[str, int],
    max_nodes: int,
) -> list[Fleet]:
    """Return good on-demand fleets that may mix several types.

    For each of many step times, this is the fleet with the lowest hourly price. The search covers
    the twelve types with the most compute per dollar, in each of the three regions that have the
    best of them.

    Raises:
        CloudError: the workload is a study.
        MissingExtraError: scipy is not installed.
    """
    if workload.widths is not None:
        raise CloudError(
            "a study is planned for machines of one type: leave out mixed, or widths"
        )
    fleets: dict[str, Fleet] = {}
    for local in _regions(workload, offers, beliefs=beliefs, quotas=quotas, most=max_nodes):
        mix = mix_of(
            workload, local, beliefs=beliefs, end=goal.end, quotas=quotas, max_nodes=max_nodes
        )
        make = partial(_fleet, workload, local, mix=mix, beliefs=beliefs)
        step_s = _longest_s(workload, mix, goal)
        found: list[Fleet] = []
        while len(found) < _TRIES and (fleet := make(step_s=step_s)) is not None:
            found.append(fleet)
            step_s *= _SHORTER
        best = goal.best_fleet(found)
        if best is not None:
            # The optimum lies between the step times that were tried before and after the best one.
            step_s = best.step_s.high if goal.confidence else best.step_s.median
            finer = np.geomspace(step_s * _SHORTER, step_s / _SHORTER, _FINER)
            found += [fleet for each in finer.tolist() if (fleet := make(step_s=each))]
        fleets |= {f"{fleet} {local[0].region}": fleet for fleet in found}
    return list(fleets.values())


def mix_of(
    workload: Workload,
    offers: Sequence[Offer],
    *,
    beliefs: Beliefs,
    end: int,
    quotas: Mapping[str, int],
    max_nodes: int,
) -> Mix:
    """Return the input of the integer program for these offers."""
    accelerators = {offer.accelerator for offer in offers}
    return Mix(
        profile=workload.profile,
        global_batch=workload.global_batch,
        devices=Devices.of(offers, beliefs=beliefs, profile=workload.profile),
        end=end,
        usd_h=np.array([_usd_h(offer) for offer in offers]),
        allowed=np.array([allowance(offer, quotas, max_nodes) for offer in offers]),
        shared=[
            (np.array([offer.accelerator == name for offer in offers]), quotas[name])
            for name in sorted(accelerators & quotas.keys())
        ],
        max_nodes=max_nodes,
    )


def _usd_h(offer: Offer) -> float:
    return math.inf if offer.price_usd_h is None else offer.price_usd_h


def _regions(
    workload: Workload,
    offers: Sequence[Offer],
    *,
    beliefs: Beliefs,
    quotas: Mapping[str, int],
    most: int,
) -> list[list[Offer]]:
    """Return the best types of the best regions, ranked by the price of compute."""
    regions: dict[tuple[str, str], dict[object, Offer]] = {}
    for offer in sorted(offers, key=_usd_h):
        if allowance(offer, quotas, most) > 0:
            local = regions.setdefault((offer.cloud, offer.region), {})
            local.setdefault(kind_of(offer), offer)
    ranked: list[tuple[float, list[Offer]]] = []
    for local in regions.values():
        some = list(local.values())
        devices = Devices.of(some, beliefs=beliefs, profile=workload.profile)
        usd = np.array([_usd_h(offer) for offer in some])
        usd = np.where(devices.most > 0, usd * devices.compute[0] / devices.per_node, np.inf)
        order = np.argsort(usd, kind="stable")[: min(_MOST_TYPES, int(np.isfinite(usd).sum()))]
        if order.size > 1:
            ranked.append((float(usd[order[0]]), [some[place] for place in order]))
    ranked.sort(key=lambda each: each[0])
    return [local for _, local in ranked[:_MOST_REGIONS]]


def _longest_s(workload: Workload, mix: Mix, goal: Goal) -> float:
    """Return the longest step time worth trying.

    It is the one that just meets the deadline, or that of the slowest machines when as full as
    possible, whichever is shorter.
    """
    devices = mix.devices
    sums = devices.sums_s(workload.profile.bucket_bytes, np.array([mix.max_nodes]))
    full = np.minimum(devices.most, -(-workload.global_batch // devices.per_node))
    longest = replayed_s(
        workload.profile,
        batch=full[:, None],
        compute=devices.compute[mix.end][:, None],
        sums_s=sums[mix.end, :, 0],
    ).max()
    if goal.deadline_s is None:
        return float(longest)
    return min(float(longest), (goal.deadline_s - workload.setup_s) / workload.steps)


def _fleet(
    workload: Workload, offers: Sequence[Offer], *, mix: Mix, beliefs: Beliefs, step_s: float
) -> Fleet | None:
    """Return the fleet with the lowest hourly price for this step time, with its true forecast."""
    nums = mix.cheapest(step_s)
    if nums is None:
        return None
    machines: Machines = [
        (offer, num, False) for offer, num in zip(offers, nums.tolist(), strict=True) if num
    ]
    return estimate(workload, machines, beliefs=beliefs)
