"""Close calls: what would be chosen if the profile's steps were a little longer or shorter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thrifty.cloud._offer import Fleet, Offer
from thrifty.cloud._workload import Workload
from thrifty.perf import StepProfile

from ._estimate import estimate
from ._fleet_options import ALIKE, FleetOptions
from ._table import Table, best_of_tables, tables_of


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
    tables: Sequence[Table],
    options: FleetOptions,
    *,
    workload: Workload,
    best: Fleet | None,
    mixed: Sequence[Fleet] = (),
) -> tuple[CloseCall, ...]:
    """Return what would be chosen with longer and with shorter steps, where it differs.

    Steps become longer or shorter by 5 %, or by the profile's noise if that is more, up to 15 %.
    The seconds of sums and all factors between devices stay as they are. Of fleets of several
    types, only those in ``mixed`` are compared.

    Args:
        tables: all fleets of equal machines.
        options: goal, and which fleets are allowed.
        workload: training or study.
        best: chosen fleet; None if no fleet meets the goal.
        mixed: fleets of several types that were compared.
    """
    if options.goal.limit is None:
        return ()
    profiles = (workload.profile, *workload.other_profiles.values())
    margin = min(max(_MARGIN, *(each.noise for each in profiles)), _MOST)
    near = _near(tables, options, margin=margin)
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


def _near(tables: Sequence[Table], options: FleetOptions, *, margin: float) -> list[Offer]:
    """Return the offers that may be the choice if steps change by at most ``margin``."""
    goal = options.goal
    assert goal.limit is not None
    # Times and costs change by no more than the steps.
    more = 1 / (1 - margin)
    by_time = goal.deadline_s is not None
    times = np.concatenate([table.time_s for table in tables], axis=1)
    costs = np.concatenate([table.cost_usd for table in tables], axis=1)
    limited = (times if by_time else costs)[goal.end]
    other = (costs if by_time else times)[0]
    surely = limited * more <= goal.limit
    most = (1 + ALIKE) * more * other[surely].min() if surely.any() else np.inf
    rows = ((limited <= more * goal.limit) & (other <= more * most)).any(axis=1)
    lots = [lot for table in tables for lot in table.lots]
    return list(dict.fromkeys(lots[row].offer for row in np.flatnonzero(rows).tolist()))


def _choice(
    workload: Workload,
    near: Sequence[Offer],
    options: FleetOptions,
    *,
    factor: float,
    mixed: Sequence[Fleet],
) -> list[tuple[Offer, int, bool]] | None:
    """Return the machines that are chosen if the profile's steps take ``factor`` times as long."""
    slowed = replace(
        workload,
        profile=_slowed(workload.profile, factor),
        other_profiles={
            name: _slowed(each, factor) for name, each in workload.other_profiles.items()
        },
    )
    estimates = options.estimates
    if estimates.calibrated_to is not None:
        estimates = replace(estimates, calibrated_to=_slowed(estimates.calibrated_to, factor))
    options = replace(options, estimates=estimates)
    fleets = [
        estimate(slowed, _machines(fleet), estimates=estimates, spot_market=options.market)
        for fleet in mixed
    ]
    fleets += best_of_tables(tables_of(slowed, near, options), options.goal) if near else []
    best = options.goal.best_fleet(fleets)
    return None if best is None else _machines(best)


def _slowed(profile: StepProfile, factor: float) -> StepProfile:
    return profile.slowed(factor, device=profile.device)


def _machines(fleet: Fleet) -> list[tuple[Offer, int, bool]]:
    return [(each.offer, each.num, each.spot) for each in fleet.machines]
