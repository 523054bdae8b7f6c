"""Fleets of several kinds of machines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from thrifty.cloud._hardware import HardwareEstimates
from thrifty.cloud._offer import Fleet, Offer
from thrifty.cloud._workload import Workload
from thrifty.cloud.planning._estimate import Machines, estimate
from thrifty.core import CloudError, require
from thrifty.perf import StepProfile

from ._devices import Devices, kind_of, replayed_s
from ._fleet_options import FleetOptions, Goal


_MOST_PROGRAMS = 30
"""Most integer programs per step time; with few types, fewer suffice."""

_GAP = 0.01
"""Share of the price by which another fleet may still be cheaper.

Estimates of machines are much less exact than that.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Types of machines that can be mixed in one fleet.

    Given the number of machines and the slowest link, the times of all all-reduces are known, so
    each device can train a known number of samples within the step time. What remains is a covering
    program: enough devices for the global batch, at the lowest price. One program is solved for
    each number of machines and each slowest link, the most promising first, until no other can be
    cheaper by more than 1 %, or thirty are solved.

    Args:
        profile: Profile of a step.
        global_batch: Samples of a step.
        devices: Estimates for each type.
        end: End of the estimates that counts: 0 for medians, 2 for high ends.
        usd_h: Dollars per hour of a machine of each type.
        allowed: Most machines of each type, by all quotas that apply to it.
        shared: Most machines of several types together: a mask of the types, and the number.
        max_nodes: Most machines of all types together.
    """

    profile: StepProfile
    global_batch: int
    devices: Devices
    end: int
    usd_h: np.ndarray
    allowed: np.ndarray
    shared: Sequence[tuple[np.ndarray, int]]
    max_nodes: int

    def cheapest(self, step_s: float) -> np.ndarray | None:
        """Return the number of machines of each type; None if no fleet reaches this step time."""
        nodes = np.arange(1, self.max_nodes + 1)
        samples = self._samples(step_s, nodes)
        bounds = self._bounds(samples, nodes)
        best, best_usd_h = self._of_one_type(samples, nodes)
        for world in np.argsort(bounds, axis=None, kind="stable")[:_MOST_PROGRAMS]:
            link, size = np.unravel_index(world, bounds.shape)
            if not bounds[link, size] < best_usd_h * (1 - _GAP):
                break
            nums = self._program(samples[link, size], int(nodes[size]))
            if nums is not None and nums @ self.usd_h < best_usd_h:
                best, best_usd_h = nums, float(nums @ self.usd_h)
        return best

    def _of_one_type(
        self, samples: np.ndarray, nodes: np.ndarray
    ) -> tuple[np.ndarray | None, float]:
        """Return the cheapest fleet of one type, and its price.

        A mixed fleet must beat this price.
        """
        needed = -(-self.global_batch // np.maximum(samples, 1))
        possible = (samples > 0) & (needed <= np.minimum(nodes[:, None], self.allowed))
        usd_h = np.where(possible, needed * self.usd_h, np.inf)
        place = np.unravel_index(np.argmin(usd_h), usd_h.shape)
        if not possible[place]:
            return None, math.inf
        nums = np.zeros(len(self.usd_h), int)
        nums[place[-1]] = needed[place]
        return nums, float(usd_h[place])

    def _bounds(self, samples: np.ndarray, nodes: np.ndarray) -> np.ndarray:
        """Return lower bounds of the hourly price, by slowest link and number of machines.

        They are the optima for fractional numbers of machines. Such a fleet has at most two types:
        one that trains less than its share of the samples, and one that trains more.
        """
        share = self.global_batch / nodes[:, None, None]
        slow, quick = samples[..., :, None], samples[..., None, :]
        alone = np.where(samples >= share[..., 0], self.usd_h, np.inf).min(axis=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            part = (share - slow) / (quick - slow)
            both = part * self.usd_h + (1 - part) * self.usd_h[:, None]
        both = np.where((slow < share) & (quick > share), both, np.inf).min(axis=(-1, -2))
        out: np.ndarray = np.minimum(alone, both) * nodes
        return out

    def _samples(self, step_s: float, nodes: np.ndarray) -> np.ndarray:
        """Return the samples that a machine of each type can train within ``step_s``.

        The shape is [slowest links, sizes, types]. Types with a slower link have 0.
        """
        sums = self.devices.sums_s(self.profile.bucket_bytes, nodes)[self.end]
        paces = np.unique(sums.sum(axis=-1), axis=0)
        slower = paces[..., None] < sums.sum(axis=-1).T
        worlds = np.where(slower[..., None], 0.0, sums.transpose(1, 0, 2)).max(axis=2)
        most = self.devices.limit(self.global_batch)
        low = np.zeros(slower.shape, int)
        high = np.broadcast_to(most + 1, slower.shape)
        for _ in range(self.global_batch.bit_length() + 1):
            middle = (low + high) // 2
            took = replayed_s(
                self.profile,
                batch=middle[..., None],
                num_micro=self.devices.num_micro(middle)[..., None],
                compute=self.devices.compute[self.end][:, None],
                sums_s=worlds[:, :, None],
            )
            quick = (took <= step_s) & (middle > 0)
            low, high = np.where(quick, middle, low), np.where(quick, high, middle)
            high = np.maximum(high, low + 1)
        out: np.ndarray = np.where(slower, 0, low) * self.devices.per_node
        return out

    def _program(self, samples: np.ndarray, num: int) -> np.ndarray | None:
        """Return the cheapest ``num`` machines that can train the global batch, or None."""
        optimize = require("scipy.optimize", extra="cloud")
        Bounds = optimize.Bounds
        LinearConstraint = optimize.LinearConstraint
        milp = optimize.milp
        rows = [LinearConstraint(samples, self.global_batch, np.inf)]
        rows.append(LinearConstraint(np.ones(len(samples)), num, num))
        for places, most in self.shared:
            rows.append(LinearConstraint(places.astype(float), 0, most))
        found = milp(
            self.usd_h,
            integrality=np.ones(len(samples)),
            bounds=Bounds(0, np.where(samples > 0, self.allowed, 0)),
            constraints=rows,
            options={"mip_rel_gap": _GAP},
        )
        if found.x is None:
            return None
        nums = np.rint(found.x).astype(int)
        # Solvers meet constraints only up to a tolerance, but samples are whole numbers.
        return nums if nums @ samples >= self.global_batch else None


_MOST_REGIONS = 3
_MOST_TYPES = 12
_TRIES = 24
_FINER = 6
_SHORTER = 0.7
"""Factor from one step time to the next one that is tried."""


def mixed_fleets(workload: Workload, offers: Sequence[Offer], options: FleetOptions) -> list[Fleet]:
    """Return good on-demand fleets that may mix several types.

    For each of many step times, this is the fleet with the lowest hourly price. The search covers
    the twelve types with the most compute per dollar, in each of the three regions that have the
    best of them.

    Raises:
        CloudError: The workload is a study.
        MissingExtraError: scipy is not installed.
    """
    if workload.parallelism_phases is not None:
        raise CloudError("a study is planned for machines of one type: leave out mixed, or widths")
    goal = options.goal
    fleets: dict[str, Fleet] = {}
    for local in _regions(workload, offers, options):
        mix = mix_of(workload, local, options)
        make = partial(_fleet, workload, local, mix=mix, estimates=options.estimates)
        step_s = _longest_s(workload, mix, goal)
        found: list[Fleet] = []
        while len(found) < _TRIES and (fleet := make(step_s=step_s)) is not None:
            found.append(fleet)
            step_s *= _SHORTER
        best = goal.best_fleet(found)
        if best is not None:
            # The optimum lies between the step times that were tried before and after the best one.
            step_s = best.step_s.high if goal.conservative else best.step_s.median
            finer = np.geomspace(step_s * _SHORTER, step_s / _SHORTER, _FINER)
            found += [fleet for each in finer.tolist() if (fleet := make(step_s=each))]
        fleets |= {f"{fleet} {local[0].region}": fleet for fleet in found}
    return list(fleets.values())


def mix_of(workload: Workload, offers: Sequence[Offer], options: FleetOptions) -> Mix:
    """Return the input of the integer program for these offers."""
    quotas = options.quotas
    accelerators = {offer.accelerator for offer in offers}
    workload = replace(workload, precisions=None)
    return Mix(
        profile=workload.profile,
        global_batch=workload.global_batch,
        devices=Devices.of(offers, estimates=options.estimates, workload=workload),
        end=options.goal.end,
        usd_h=np.array([_usd_h(offer) for offer in offers]),
        allowed=np.array([options.allowance(offer) for offer in offers]),
        shared=[
            (np.array([offer.accelerator == name for offer in offers]), quotas[name])
            for name in sorted(accelerators & quotas.keys())
        ],
        max_nodes=options.max_nodes,
    )


def _usd_h(offer: Offer) -> float:
    return math.inf if offer.price_usd_h is None else offer.price_usd_h


def _regions(
    workload: Workload, offers: Sequence[Offer], options: FleetOptions
) -> list[list[Offer]]:
    """Return the best types of the best regions, ranked by the price of compute."""
    regions: dict[tuple[str, str], dict[object, Offer]] = {}
    for offer in sorted(offers, key=_usd_h):
        if options.allowance(offer) > 0:
            local = regions.setdefault((offer.cloud, offer.region), {})
            local.setdefault(kind_of(offer), offer)
    ranked: list[tuple[float, list[Offer]]] = []
    for local in regions.values():
        some = list(local.values())
        devices = Devices.of(some, estimates=options.estimates, workload=workload)
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
    full = devices.limit(workload.global_batch)
    full = np.minimum(full, -(-workload.global_batch // devices.per_node))
    longest = replayed_s(
        workload.profile,
        batch=full[:, None],
        num_micro=devices.num_micro(full)[:, None],
        compute=devices.compute[mix.end][:, None],
        sums_s=sums[mix.end, :, 0],
    ).max()
    if goal.deadline_s is None:
        return float(longest)
    return min(float(longest), (goal.deadline_s - workload.setup_s) / workload.steps)


def _fleet(
    workload: Workload,
    offers: Sequence[Offer],
    *,
    mix: Mix,
    estimates: HardwareEstimates,
    step_s: float,
) -> Fleet | None:
    """Return the fleet with the lowest hourly price for this step time, with its true forecast."""
    nums = mix.cheapest(step_s)
    if nums is None:
        return None
    machines: Machines = [
        (offer, num, False) for offer, num in zip(offers, nums.tolist(), strict=True) if num
    ]
    return estimate(workload, machines, estimates=estimates)
