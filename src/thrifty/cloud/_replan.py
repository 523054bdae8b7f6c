"""Replanning after an eviction, or when steps take longer than estimated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from thrifty.core import CloudError

from ._hardware import HardwareEstimates
from ._offer import Fleet, Interval, MachineGroup, Offer
from ._spot import SpotHistory
from ._workload import Workload
from .planning._estimate import estimate
from .planning._fleet_options import FleetOptions
from .planning._planner import FleetPlan, plan_fleet, unbeaten


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
        fleet: fleet that trains now.
        workload: workload as it was planned at first.
        offers: catalogue.
        options: deadline or budget from now on, current estimates, and which fleets are allowed.
        done_steps: completed steps of each training; for a study, completed steps of its
            ``parallelism_phases``.
        gone: machines that are not available. Those that were rented as spot may still be available
            on demand, the others not at all. A fleet with one of them is given up.

    Raises:
        CloudError: no step is left to train, or no fleet meets the goal.

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
    left = _left(workload, done_steps)
    lost = {_place(each.offer): each.spot for each in sorted(gone, key=lambda each: -each.spot)}
    present = None
    if not any(_is_gone(each, gone) for each in fleet.machines):
        present = _going_on(fleet, left, estimates=options.estimates, market=market)
    try:
        plan = plan_fleet(
            left,
            [kept for offer in offers if (kept := _kept(offer, lost)) is not None],
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


def _left(workload: Workload, done_steps: int) -> Workload:
    """Return the workload that is left to train."""
    if done_steps < 0:
        raise CloudError(f"done_steps is 0 or more, not {done_steps}")
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


def _going_on(
    fleet: Fleet, left: Workload, *, estimates: HardwareEstimates, market: SpotHistory | None
) -> Fleet:
    """Return the forecast for machines that are already running."""
    machines = [(each.offer, each.num, each.spot) for each in fleet.machines]
    whole = estimate(left, machines, estimates=estimates, spot_market=market)
    return replace(
        whole,
        time_s=_less(whole.time_s, left.setup_s),
        cost_usd=_less(whole.cost_usd, left.setup_s / 3600 * whole.usd_h),
    )


def _less(interval: Interval, by: float) -> Interval:
    return Interval(median=interval.median - by, low=interval.low - by, high=interval.high - by)


def _is_gone(rented: MachineGroup, gone: Sequence[MachineGroup]) -> bool:
    return any(
        _place(each.offer) == _place(rented.offer) and (rented.spot or not each.spot)
        for each in gone
    )


def _kept(offer: Offer, lost: Mapping[_Place, bool]) -> Offer | None:
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
