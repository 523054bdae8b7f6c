"""The cheapest fleet for a deadline, the fastest for a budget, the Pareto front, and replanning."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from thrifty.cloud._hardware import HardwareEstimates
from thrifty.cloud._market import ASSUMED_PER_H, SpotHistory
from thrifty.cloud._offer import Fleet, Interval, MachineGroup, Offer
from thrifty.cloud._workload import Workload
from thrifty.core import CloudError

from ._devices import misfit, spell_s
from ._estimate import estimate
from ._fleet_options import FleetOptions, Goal, availability_notes, one_profile_only, profiled_on
from ._mixed import mixed_fleets
from ._table import CloseCall, Table, close_calls, flat, fleet_at, tables_of


# -- what a plan says --------------------------------------------------------------------


def known_offers(
    offers: Sequence[Offer], estimates: HardwareEstimates, *, profiled: Collection[str] = ()
) -> tuple[list[Offer], tuple[str, ...]]:
    """Return the offers of devices with a known speed, and the names of the other devices.

    Args:
        offers: Offers to tell apart.
        estimates: Estimates of the devices' speed.
        profiled: Accelerators with a profile of their own.

    Raises:
        CloudError: No device has a known speed.
    """
    speeds: dict[tuple[str, str, float], bool] = {}
    known: list[Offer] = []
    unknown: set[str] = set()
    for offer in offers:
        device = offer.accelerator, offer.device, offer.vcpus
        if device not in speeds:
            try:
                estimates.compute(offer)
                speeds[device] = True
            except CloudError:
                speeds[device] = offer.accelerator in profiled
        if speeds[device]:
            known.append(offer)
        else:
            unknown.add(offer.device)
    if offers and not known:
        raise CloudError(
            f"thrifty knows no speed of these devices: {', '.join(sorted(unknown))}; "
            "measure them (probe)"
        )
    return known, tuple(sorted(unknown))


def notes_on(
    workload: Workload, best: Fleet | None, options: FleetOptions, *, unknown: Sequence[str]
) -> tuple[str, ...]:
    """Return the assumptions of the choice that may not hold."""
    notes = []
    machines = best.machines if best else ()
    devices = {rented.offer.accelerator for rented in machines}
    alone = devices.pop() if len(devices) == 1 else ""
    workload, _ = profiled_on(workload, options.estimates, alone)
    if unknown:
        notes.append(f"left out, because their speed is unknown: {', '.join(unknown)}")
    if not any(workload.profile.peak_bytes):
        notes.append("the model's memory was not measured: whether the samples fit is not known")
    for rented in machines:
        notes += _notes_on_machines(workload, rented)
    if options.spot and options.market is None:
        notes.append(
            f"no history of spot machines is given: {ASSUMED_PER_H:g} evictions in an hour of "
            "each are assumed"
        )
    if any(rented.spot for rented in machines):
        notes.append(
            "with spot machines the time is the expected one: evictions come when they like"
        )
    notes.extend(availability_notes(machines, quotas=options.quotas))
    dates = [rented.offer.priced_on for rented in machines]
    if None in dates:
        notes.append("the chosen fleet's price has no date")
    elif dates:
        notes.append(f"the chosen fleet's price is of {min(date for date in dates if date)}")
    return tuple(notes)


def _notes_on_machines(workload: Workload, rented: MachineGroup) -> list[str]:
    notes = []
    if rented.offer.device_memory_bytes is None:
        notes.append(
            f"the memory of {rented.offer} is not known: whether {rented.batch} samples "
            "fit is not known"
        )
    if rented.precision != workload.profile.precision:
        notes.append(
            f"{rented.offer.device} trains in {rented.precision}, and the step was measured in "
            f"{workload.profile.precision}: how much that changes its time is known roughly "
            "only, and results differ"
        )
    if rented.num_micro > 1:
        notes.append(
            f"a step of a device is {rented.num_micro} micro-batches of up to "
            f"{rented.micro_batch} samples: the script has to accumulate gradients, and batch "
            'normalisation sees a micro-batch; exclude this with accumulation="never"'
        )
    return notes


def missed(nearest: Fleet, goal: Goal, *, max_nodes: int, calls: Sequence[CloseCall] = ()) -> str:
    """Return by how much the fastest or the cheapest fleet misses the goal."""
    closely = "".join(f"; a close call: {call}" for call in calls)
    where = "at the 90 % end" if goal.conservative else "by the median"
    if goal.deadline_s is not None:
        least = goal.bound(nearest.time_s)
        return (
            f"the fastest fleet ({nearest}) takes {spell_s(least)} {where}, "
            f"{spell_s(least - goal.deadline_s)} over the deadline of "
            f"{spell_s(goal.deadline_s)}: "
            f"set a later one, allow more than {max_nodes} machines, or take other offers{closely}"
        )
    assert goal.budget_usd is not None
    least = goal.bound(nearest.cost_usd)
    return (
        f"the cheapest fleet ({nearest}) costs ${least:,.2f} {where}, "
        f"${least - goal.budget_usd:,.2f} over the budget of ${goal.budget_usd:,.2f}: "
        f"raise it, allow spot machines, or take other offers{closely}"
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
        roomy = int(max(allowed, key=lambda kind: devices.usable[kind]))
        return (
            f"{_misfit(table, roomy, batch=1)}, and no other has more: take offers with larger "
            "devices, or a smaller model"
        )
    others = "" if devices.accumulates else ", allow accumulation"
    return (
        "no fleet that may be rented holds the global batch: "
        f"{_nearest_batch(table, allowed, batch)}: allow more machines{others}, or lower the "
        "global batch"
    )


def _nearest_batch(table: Table, allowed: np.ndarray, batch: np.ndarray) -> str:
    """Describe the fleet whose devices come closest to holding their samples."""
    most_nodes = np.minimum(
        table.allowed[allowed],
        np.maximum(1, table.workload.global_batch // table.devices.per_node[allowed]),
    )
    samples = batch[allowed, most_nodes - 1]
    place = int(np.argmin(samples / np.maximum(1, table.devices.most[allowed])))
    text = _misfit(table, int(allowed[place]), batch=int(samples[place]))
    return f"on {most_nodes[place]} machines {text}"


def _misfit(table: Table, kind: int, *, batch: int) -> str:
    usable = float(table.devices.usable[kind])
    return misfit(table.workload.profile, table.kinds[kind], batch=batch, usable=usable)


# -- planning ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Chosen fleet and its alternatives.

    Attributes:
        best: Best fleet for the deadline or the budget; None if neither was given.
        front: Pareto front of time and cost by their medians, the fastest fleet first.
        num_considered: Number of fleets that were compared.
        notes: Assumptions of the choice that may not hold.
        close_calls: What would be chosen if the profile's steps were 5 % longer or shorter, where
            that is another fleet. If there are any, these fleets are about as good a choice.
    """

    best: Fleet | None
    front: tuple[Fleet, ...]
    num_considered: int
    notes: tuple[str, ...] = ()
    close_calls: tuple[CloseCall, ...] = ()

    def __str__(self) -> str:
        if self.best is None:
            return f"no goal; {len(self.front)} of {self.num_considered:,} fleets are on the front"
        time_s, usd = self.best.time_s, self.best.cost_usd
        choice = (
            f"{self.best}: {spell_s(time_s.median)}, ${usd.median:,.2f}; at the 90 % ends "
            f"{spell_s(time_s.high)}, ${usd.high:,.2f}"
        )
        return "\n".join([choice, *(f"close call: {call}" for call in self.close_calls)])


def plan_fleet(
    workload: Workload, offers: Sequence[Offer], options: FleetOptions | None = None
) -> FleetPlan:
    """Return the cheapest fleet that meets a deadline, or the fastest within a budget.

    For equal machines, all numbers of all offers are tried, so the choice is exact. Fleets of
    several types are searched with a bounded number of integer programs. All machines of a fleet
    are in one region: all-reduces across regions are not supported.

    Args:
        workload: Training or study.
        offers: Catalogue; filter it for regions, clouds or types.
        options: Goal, and which fleets are allowed.

    Raises:
        CloudError: An argument is invalid, or no fleet meets the goal; the message says what binds,
            and by how much. With several profiles, only fleets of equal machines are planned.

    >>> from thrifty.cloud import HardwareEstimates
    >>> from thrifty.perf import StepProfile
    >>> profile = StepProfile(
    ...     device="V100",
    ...     batches=(8, 16),
    ...     forward_s=(0.1, 0.2),
    ...     backward_s=(0.2, 0.4),
    ...     optimizer_s=0.0,
    ...     peak_bytes=(2e9, 4e9),
    ...     bucket_bytes=(1e8,),
    ...     bucket_ready=(1.0,),
    ... )
    >>> workload = Workload(profile=profile, steps=100_000, global_batch=64)
    >>> offers = [
    ...     Offer(
    ...         cloud="aws",
    ...         region="us-east-1",
    ...         instance_type=name,
    ...         accelerator="V100",
    ...         accelerator_count=count,
    ...         price_usd_h=price,
    ...         baseline_gbps=10,
    ...     )
    ...     for name, count, price in [("p3.2xlarge", 1, 3.06), ("p3.8xlarge", 4, 12.24)]
    ... ]
    >>> plan = plan_fleet(
    ...     workload,
    ...     offers,
    ...     FleetOptions(deadline_s=36 * 3600, estimates=HardwareEstimates(profiled="V100")),
    ... )
    >>> str(plan.best), round(plan.best.time_s.high / 3600, 1)
    ('1 x p3.8xlarge (4 V100)', 35.8)
    """
    options = options or FleetOptions()
    if options.mixed:
        one_profile_only(workload, "fleets of several types are planned")
    goal = options.goal
    known, unknown = known_offers(offers, options.estimates, profiled=workload.other_profiles)
    tables = tables_of(workload, known, options)
    fleets = [fleet_at(tables, place) for place in _worth_it(tables, goal)]
    of_several = mixed_fleets(workload, known, options) if options.mixed else []
    fleets += of_several
    if not fleets:
        raise CloudError(nothing_trains(tables[0]))
    best = goal.best_fleet(fleets)
    if best is None and goal.limit is not None:
        # With a deadline, ``mixed_fleets`` searched only fleets that may meet it.
        free = replace(options, deadline_s=None, budget_usd=None)
        others = mixed_fleets(workload, known, free) if options.mixed else []
        nearest = _nearest(tables, goal, others)
        calls = close_calls(tables, options, workload=workload, best=None)
        raise CloudError(missed(nearest, goal, max_nodes=options.max_nodes, calls=calls))
    calls = close_calls(tables, options, workload=workload, best=best, mixed=of_several)
    return FleetPlan(
        best=best,
        front=unbeaten(fleets),
        num_considered=sum(table.num_fleets for table in tables) + len(of_several),
        notes=notes_on(workload, best, options, unknown=unknown),
        close_calls=calls,
    )


def unbeaten(fleets: Iterable[Fleet]) -> tuple[Fleet, ...]:
    """Return the Pareto front of time and cost by their medians, the fastest fleet first."""
    out: list[Fleet] = []
    for fleet in sorted(fleets, key=lambda each: (each.time_s.median, each.cost_usd.median)):
        if not out or fleet.cost_usd.median < out[-1].cost_usd.median:
            out.append(fleet)
    return tuple(out)


def _worth_it(tables: Sequence[Table], goal: Goal) -> list[int]:
    """Return the places in ``flat`` of the fleets on the front, and of the best for the goal."""
    time_s, cost_usd = flat(tables)
    possible = np.flatnonzero(np.isfinite(time_s[0]))
    time_s, cost_usd = time_s[:, possible], cost_usd[:, possible]
    order = np.lexsort((cost_usd[0], time_s[0]))
    least = np.minimum.accumulate(np.append(np.inf, cost_usd[0, order]))
    chosen = order[cost_usd[0, order] < least[:-1]].tolist()
    best = goal.best_of(time_s, cost_usd)
    if best is not None and best not in chosen:
        chosen.append(best)
    out: list[int] = possible[chosen].tolist()
    return out


def _nearest(tables: Sequence[Table], goal: Goal, others: Sequence[Fleet]) -> Fleet:
    """Return the fleet that misses the goal by the least."""
    time_s, cost_usd = flat(tables)
    values = (cost_usd if goal.deadline_s is None else time_s)[goal.end]
    place = int(np.argmin(values))
    some = list(others)
    if np.isfinite(values[place]):
        some.append(fleet_at(tables, place))
    return min(
        some, key=lambda each: goal.bound(each.cost_usd if goal.deadline_s is None else each.time_s)
    )


# -- replanning --------------------------------------------------------------------------


def replan(
    fleet: Fleet,
    workload: Workload,
    offers: Sequence[Offer],
    *,
    options: FleetOptions | None = None,
    done_steps: int,
    gone: Sequence[MachineGroup] = (),
) -> FleetPlan:
    """Return the best fleet for the remaining steps: the present one, without setup, or another.

    Args:
        fleet: Fleet that trains now.
        workload: Workload as it was planned at first.
        offers: Catalogue.
        options: Deadline or budget from now on, current estimates, and which fleets are allowed.
        done_steps: Completed steps of each training; for a study, completed steps of its
            ``parallelism_phases``.
        gone: Machines that are not available. Those that were rented as spot may still be available
            on demand, the others not at all. A fleet with one of them is given up.

    Raises:
        CloudError: No step is left to train, or no fleet meets the goal.

    >>> from thrifty.perf import StepProfile
    >>> profile = StepProfile(
    ...     device="V100",
    ...     batches=(8, 16),
    ...     forward_s=(0.1, 0.2),
    ...     backward_s=(0.2, 0.4),
    ...     optimizer_s=0.0,
    ...     peak_bytes=(2e9, 4e9),
    ...     bucket_bytes=(1e8,),
    ...     bucket_ready=(1.0,),
    ... )
    >>> workload = Workload(profile=profile, steps=100_000, global_batch=16)
    >>> offers = [
    ...     Offer(
    ...         cloud="aws",
    ...         region="us-east-1",
    ...         instance_type=name,
    ...         accelerator="V100",
    ...         accelerator_count=count,
    ...         price_usd_h=price,
    ...         baseline_gbps=10,
    ...     )
    ...     for name, count, price in [("p3.2xlarge", 1, 3.06), ("p3.8xlarge", 4, 12.24)]
    ... ]
    >>> options = FleetOptions(deadline_s=20 * 3600, estimates=HardwareEstimates(profiled="V100"))
    >>> first = plan_fleet(workload, offers, options).best
    >>> later = replan(
    ...     first, workload, offers, options=options, done_steps=50_000, gone=first.machines
    ... ).best
    >>> print(first, "->", later)
    1 x p3.2xlarge (1 V100) -> 1 x p3.8xlarge (4 V100)
    """
    options = options or FleetOptions()
    goal, market = options.goal, options.market
    left = _remaining(workload, done_steps)
    lost = {_place(each.offer): each.spot for each in sorted(gone, key=lambda each: -each.spot)}
    present = None
    if not any(_is_gone(each, gone) for each in fleet.machines):
        present = _continued(fleet, left, estimates=options.estimates, market=market)
    try:
        plan = plan_fleet(
            left,
            [rest for offer in offers if (rest := _without_lost_spot(offer, lost)) is not None],
            options
            if market is None
            else replace(options, market=_Without(market=market, lost=lost)),
        )
    except CloudError:
        if present is None or goal.best_fleet([present]) is None:
            raise
        return FleetPlan(best=present, front=(present,), num_considered=1)
    if present is None:
        return plan
    best = goal.best_fleet([each for each in (present, plan.best) if each is not None])
    return replace(
        plan,
        best=best,
        close_calls=plan.close_calls if best is plan.best else (),
        front=unbeaten([present, *plan.front]),
        num_considered=plan.num_considered + 1,
    )


_Place = tuple[str, str, str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Without:
    """A spot market in which some machines are not available."""

    market: SpotHistory
    lost: Mapping[_Place, bool]

    def evictions_per_h(self, offer: Offer) -> float:
        return self.market.evictions_per_h(offer)

    def spot_usd_h(self, offer: Offer) -> float:
        if _place(offer) in self.lost:
            raise CloudError(f"{offer} is not available as spot now")
        return self.market.spot_usd_h(offer)


def _remaining(workload: Workload, done_steps: int) -> Workload:
    """Return the workload that is left to train."""
    if done_steps < 0:
        raise CloudError(f"`done_steps` must be at least 0, got {done_steps}")
    parallelism_phases = workload.parallelism_phases
    whole = (
        workload.steps
        if parallelism_phases is None
        else sum(steps for _, steps in parallelism_phases)
    )
    if done_steps >= whole:
        raise CloudError(f"all {whole} steps are trained, so no machines are needed")
    if parallelism_phases is None:
        return replace(workload, steps=workload.steps - done_steps)
    phases = []
    for width, steps in parallelism_phases:
        passed = min(done_steps, steps)
        done_steps -= passed
        if steps > passed:
            phases.append((width, steps - passed))
    return replace(workload, parallelism_phases=tuple(phases))


def _continued(
    fleet: Fleet, left: Workload, *, estimates: HardwareEstimates, market: SpotHistory | None
) -> Fleet:
    """Return the forecast for machines that are already running."""
    machines = [(each.offer, each.num, each.spot) for each in fleet.machines]
    whole = estimate(left, machines, estimates=estimates, spot_market=market)
    return replace(
        whole,
        time_s=_minus(whole.time_s, left.setup_s),
        cost_usd=_minus(whole.cost_usd, left.setup_s / 3600 * whole.usd_h),
    )


def _minus(interval: Interval, by: float) -> Interval:
    return Interval(median=interval.median - by, low=interval.low - by, high=interval.high - by)


def _is_gone(rented: MachineGroup, gone: Sequence[MachineGroup]) -> bool:
    return any(
        _place(each.offer) == _place(rented.offer) and (rented.spot or not each.spot)
        for each in gone
    )


def _without_lost_spot(offer: Offer, lost: Mapping[_Place, bool]) -> Offer | None:
    """Return the offer without its lost spot price; None if nothing is left of it."""
    only_spot = lost.get(_place(offer))
    if only_spot is None:
        return offer
    if not only_spot or offer.price_usd_h is None:
        return None
    return replace(offer, spot_usd_h=None)


def _place(offer: Offer) -> _Place:
    """Return the key of an offer without its prices, which may have changed since it was rented."""
    return offer.cloud, offer.region, offer.zone, offer.instance_type, offer.accelerator
