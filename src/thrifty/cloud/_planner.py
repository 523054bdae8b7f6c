"""Fleet planning: the cheapest fleet for a deadline, the fastest for a budget, the Pareto front."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from thrifty.core import CloudError

from ._fleet import Fleet
from ._fleet_options import FleetOptions
from ._mixed import mixed_fleets
from ._offer import Offer
from ._plan_goal import Goal
from ._plan_notes import known_offers, missed, notes_on, nothing_trains
from ._plan_spot import SpotHistory
from ._plan_table import Table, table_of
from ._workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Chosen fleet and its alternatives.

    Attributes:
        best: best fleet for the deadline or the budget; None if neither was given.
        front: Pareto front of time and cost by their medians, the fastest fleet first.
        num_considered: number of fleets that were compared.
        notes: assumptions of the choice that may not hold.
    """

    best: Fleet | None
    front: tuple[Fleet, ...]
    num_considered: int
    notes: tuple[str, ...] = ()


def plan_fleet(
    workload: Workload, offers: Sequence[Offer], options: FleetOptions | None = None
) -> FleetPlan:
    """Return the cheapest fleet that meets a deadline, or the fastest within a budget.

    For equal machines, all numbers of all offers are tried, so the choice is exact. Fleets of
    several types are searched with a bounded number of integer programs. All machines of a fleet
    are in one region: all-reduces across regions are not supported.

    Args:
        workload: training or study.
        offers: catalogue; filter it for regions, clouds or types.
        options: goal, and which fleets are allowed.

    Raises:
        CloudError: an argument is invalid, or no fleet meets the goal; the message says what binds,
            and by how much.

    >>> from thrifty.cloud import Beliefs
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
    ...     FleetOptions(deadline_s=24 * 3600, beliefs=Beliefs(profiled="V100")),
    ... )
    >>> str(plan.best), round(plan.best.time_s.high / 3600, 1)
    ('1 x p3.8xlarge', 16.8)
    """
    options = options or FleetOptions()
    goal, beliefs = options.goal, options.beliefs
    known, unknown = known_offers(offers, beliefs)
    table = table_of(
        workload,
        known,
        beliefs=beliefs,
        max_nodes=options.max_nodes,
        quotas=options.quotas,
        spot=options.spot,
        spot_market=options.market,
    )
    fleets = [
        table.fleet(lot, num, spot_market=options.market) for lot, num in _worth_it(table, goal)
    ]
    mix = partial(
        mixed_fleets,
        workload,
        known,
        beliefs=beliefs,
        quotas=options.quotas,
        max_nodes=options.max_nodes,
    )
    of_several = mix(goal=goal) if options.mixed else []
    fleets += of_several
    if not fleets:
        raise CloudError(nothing_trains(table))
    best = goal.best_fleet(fleets)
    if best is None and goal.limit is not None:
        # With a deadline, ``mix`` searched only fleets that may meet it.
        others = mix(goal=Goal(confidence=options.confidence)) if options.mixed else []
        nearest = _nearest(table, goal, others, market=options.market)
        raise CloudError(missed(nearest, goal, max_nodes=options.max_nodes))
    return FleetPlan(
        best=best,
        front=unbeaten(fleets),
        num_considered=table.num_fleets + len(of_several),
        notes=notes_on(
            workload, best, unknown=unknown, market=options.market, spot=options.spot
        ),
    )


def unbeaten(fleets: Iterable[Fleet]) -> tuple[Fleet, ...]:
    """Return the Pareto front of time and cost by their medians, the fastest fleet first."""
    out: list[Fleet] = []
    for fleet in sorted(fleets, key=lambda each: (each.time_s.median, each.cost_usd.median)):
        if not out or fleet.cost_usd.median < out[-1].cost_usd.median:
            out.append(fleet)
    return tuple(out)


def _worth_it(table: Table, goal: Goal) -> list[tuple[int, int]]:
    """Return lot and size of the fleets on the front, and of the best fleet for the goal."""
    possible = np.flatnonzero(np.isfinite(table.time_s[0]))
    time_s = table.time_s.reshape(3, -1)[:, possible]
    cost_usd = table.cost_usd.reshape(3, -1)[:, possible]
    order = np.lexsort((cost_usd[0], time_s[0]))
    least = np.minimum.accumulate(np.append(np.inf, cost_usd[0, order]))
    chosen = order[cost_usd[0, order] < least[:-1]].tolist()
    best = goal.best_of(time_s, cost_usd)
    if best is not None and best not in chosen:
        chosen.append(best)
    sizes = table.time_s.shape[-1]
    return [(int(at) // sizes, int(at) % sizes + 1) for at in possible[chosen]]


def _nearest(
    table: Table, goal: Goal, others: Sequence[Fleet], *, market: SpotHistory | None
) -> Fleet:
    """Return the fleet that misses the goal by the least."""
    values = (table.cost_usd if goal.deadline_s is None else table.time_s)[goal.end]
    lot, size = np.unravel_index(np.argmin(values), values.shape)
    some = list(others)
    if np.isfinite(values[lot, size]):
        some.append(table.fleet(int(lot), int(size) + 1, spot_market=market))
    return min(
        some,
        key=lambda each: goal.bound(each.cost_usd if goal.deadline_s is None else each.time_s),
    )
