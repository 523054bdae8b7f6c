"""Close calls: what would be chosen if the profile's steps were a little longer or shorter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thrifty.cloud._offer import Fleet, Offer
from thrifty.cloud._workload import Workload

from ._estimate import estimate
from ._fleet_options import ALIKE, FleetOptions
from ._table import Table, table_of


_MARGIN = 0.05
"""Relative difference of a profile's steps that tips a close call.

Profiles of one model on one idle machine differed by this much (``bench_cloud --only profiles``).
"""
_MOST = 0.15
"""The same where a profile is noisy: its warning says more than a list of fleets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseCall:
    """A choice that a small error of the profile would change.

    Attributes:
        factor: factor on the profile's steps with which another fleet would be chosen.
        fleet: that fleet, with its forecast by the profile as it is; None: no fleet would meet the
            goal.
    """

    factor: float
    fleet: Fleet | None

    def __str__(self) -> str:
        changed = f"{100 * abs(self.factor - 1):.0f} % {'longer' if self.factor > 1 else 'shorter'}"
        choice = "no fleet would meet the goal" if self.fleet is None else f"it is {self.fleet}"
        return f"with steps {changed} than profiled, {choice}"


def close_calls(
    table: Table, options: FleetOptions, *, best: Fleet | None, mixed: Sequence[Fleet] = ()
) -> tuple[CloseCall, ...]:
    """Return what would be chosen with longer and with shorter steps, where it differs.

    Steps become longer or shorter by 5 %, or by the profile's noise if that is more, up to 15 %.
    The seconds of sums and all factors between devices stay as they are. Of fleets of several
    types, only those in ``mixed`` are compared.

    Args:
        table: all fleets of equal machines.
        options: goal, and which fleets are allowed.
        best: chosen fleet; None if no fleet meets the goal.
        mixed: fleets of several types that were compared.
    """
    if options.goal.limit is None:
        return ()
    workload = table.workload
    margin = min(max(_MARGIN, workload.profile.noise), _MOST)
    near = _near(table, options, margin=margin)
    now = None if best is None else _machines(best)
    calls = []
    for factor in (1 + margin, 1 - margin):
        machines = _choice(workload, near, options, factor=factor, mixed=mixed)
        if machines == now:
            continue
        fleet = None
        if machines is not None:
            fleet = estimate(
                workload, machines, estimates=options.estimates, spot_market=options.market
            )
        calls.append(CloseCall(factor=factor, fleet=fleet))
    return tuple(calls)


def _near(table: Table, options: FleetOptions, *, margin: float) -> Table:
    """Return the lots that may be the choice if steps change by at most ``margin``."""
    goal = options.goal
    assert goal.limit is not None
    # Times and costs change by no more than the steps.
    more = 1 / (1 - margin)
    by_time = goal.deadline_s is not None
    limited = (table.time_s if by_time else table.cost_usd)[goal.end]
    other = (table.cost_usd if by_time else table.time_s)[0]
    surely = limited * more <= goal.limit
    most = (1 + ALIKE) * more * other[surely].min() if surely.any() else np.inf
    rows = ((limited <= more * goal.limit) & (other <= more * most)).any(axis=1)
    return replace(table, lots=tuple(np.array(table.lots, object)[rows]))


def _choice(
    workload: Workload, near: Table, options: FleetOptions, *, factor: float, mixed: Sequence[Fleet]
) -> list[tuple[Offer, int, bool]] | None:
    """Return the machines that are chosen if the profile's steps take ``factor`` times as long."""
    profile = workload.profile
    slowed = replace(workload, profile=profile.slowed(factor, device=profile.device))
    estimates = options.estimates
    if estimates.calibrated_to is not None:
        estimates = replace(estimates, calibrated_to=slowed.profile)
    options = replace(options, estimates=estimates)
    fleets = [
        estimate(slowed, _machines(fleet), estimates=estimates, spot_market=options.market)
        for fleet in mixed
    ]
    if near.lots:
        offers = list(dict.fromkeys(lot.offer for lot in near.lots))
        table = table_of(slowed, offers, options)
        flat = table.time_s.reshape(3, -1), table.cost_usd.reshape(3, -1)
        place = options.goal.best_of(*flat)
        if place is not None:
            lot, num = divmod(place, table.time_s.shape[-1])
            fleets.append(table.fleet(lot, num + 1))
    best = options.goal.best_fleet(fleets)
    return None if best is None else _machines(best)


def _machines(fleet: Fleet) -> list[tuple[Offer, int, bool]]:
    return [(each.offer, each.num, each.spot) for each in fleet.machines]
