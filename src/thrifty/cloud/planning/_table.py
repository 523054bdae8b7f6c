"""A table of all fleets to choose from, with time and price, and the close calls among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from thrifty.cloud._market import SpotHistory, slowdowns, spot_terms
from thrifty.cloud._offer import Fleet, Offer
from thrifty.cloud._workload import Workload
from thrifty.core import CloudError
from thrifty.perf import StepProfile

from ._devices import Devices, EqualSteps, bound_by, equal_steps, kind_of
from ._estimate import all_steps_s, estimate, fleet_of, machines_each
from ._fleet_options import ALIKE, FleetOptions, Goal, by_profile, profiled_on


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedOffer:
    """An on-demand or spot offer that no other offer of the same kind of machine beats."""

    offer: Offer
    kind: int
    usd_h: float
    spot: bool = False
    evictions_per_h: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Fleets of 1, 2, ... machines of each offer.

    Times and costs are infinite where a fleet cannot train.

    Attributes:
        workload: Training or study to plan for.
        rows: Rows of the table.
        kinds: One offer for each kind of machine.
        devices: Estimates for the kinds.
        allowed: Most machines of each kind.
        steps: Steps on machines of each kind.
        work_s: Seconds of all steps: median, low, high, [3, kinds, sizes].
        time_s: Seconds with setup and evictions, [3, rows, sizes].
        cost_usd: Dollars, [3, rows, sizes].
        num_fleets: Fleets of all offers, including offers that others beat.
        market: Prices and evictions of spot machines.
    """

    workload: Workload
    rows: tuple[PricedOffer, ...]
    kinds: tuple[Offer, ...]
    devices: Devices
    allowed: np.ndarray
    steps: EqualSteps
    work_s: np.ndarray
    time_s: np.ndarray
    cost_usd: np.ndarray
    num_fleets: int
    market: SpotHistory | None

    def fleet(self, at: int, num: int) -> Fleet:
        """Return the forecast for ``num`` machines of one offer, the row of this number."""
        row, workload = self.rows[at], self.workload
        each = machines_each(workload, self.steps.step_s[0, row.kind, :num]) - 1
        batch = self.steps.batch[row.kind, each : each + 1]
        num_micro = self.steps.num_micro[row.kind, each : each + 1]
        step_s = self.steps.step_s[:, row.kind, each]
        return fleet_of(
            workload,
            [(row.offer, num, row.spot)],
            batches=[(int(batch[0]), int(num_micro[0]))],
            precisions=self.devices.precisions[row.kind : row.kind + 1],
            step_s=step_s,
            work_s=self.work_s[:, row.kind, num - 1],
            spot_market=self.market,
            why=bound_by(
                workload.profile,
                batch=batch,
                num_micro=num_micro,
                compute=self.devices.compute[0, row.kind],
                replay_s=float(self.steps.replay_s[row.kind, each]),
            ),
        )


def table_of(workload: Workload, offers: Sequence[Offer], options: FleetOptions) -> Table:
    """Return the table for these offers.

    Machines of one kind take equally long everywhere. So only the cheapest of each kind stays, and
    those spot machines that are evicted less often than all cheaper ones. Spot machines without a
    known history are left out.

    Raises:
        CloudError: There are no offers, or none is allowed.
    """
    if not offers:
        raise CloudError(
            "there are no offers to choose among: loosen the filters, or load a catalogue"
        )
    members: dict[object, list[Offer]] = {}
    for offer in offers:
        members.setdefault(kind_of(offer), []).append(offer)
    groups = list(members.values())
    kinds = tuple(group[0] for group in groups)
    devices = Devices.of(kinds, estimates=options.estimates, workload=workload)
    steps = equal_steps(
        workload.profile, devices, global_batch=workload.global_batch, most_nodes=options.max_nodes
    )
    allowed = np.array([options.allowance(offer) for offer in kinds])
    work_s = np.where(
        np.arange(options.max_nodes) < allowed[:, None],
        all_steps_s(workload, devices, steps.step_s),
        np.inf,
    )
    rows: list[PricedOffer] = []
    num_rented = np.zeros(len(groups), int)
    for kind, group in enumerate(groups):
        offered = list(_offered(group, kind, options))
        num_rented[kind] = len(offered)
        rows += _unbeaten(offered)
    if not rows:
        raise CloudError("no offer has a price on demand: allow spot machines, or load prices")
    time_s, cost_usd = _times_and_costs(workload, rows, work_s)
    return Table(
        workload=workload,
        rows=tuple(rows),
        kinds=kinds,
        devices=devices,
        allowed=allowed,
        steps=steps,
        work_s=work_s,
        time_s=time_s,
        cost_usd=cost_usd,
        num_fleets=int(num_rented @ np.isfinite(work_s[0]).sum(axis=1)),
        market=options.market,
    )


def tables_of(workload: Workload, offers: Sequence[Offer], options: FleetOptions) -> list[Table]:
    """Return a table for each profile of the workload that serves for some of the offers.

    Raises:
        CloudError: As ``table_of``, where all offers have one profile; others are left out.
    """
    groups = by_profile(workload, offers)
    tables, failed = [], None
    for accelerator, mine in groups or [("", [])]:
        seen, estimates = profiled_on(workload, options.estimates, accelerator)
        try:
            tables.append(table_of(seen, mine, replace(options, estimates=estimates)))
        except CloudError as error:
            failed = error
    if failed is not None and not tables:
        raise failed
    return tables


def best_of_tables(tables: Sequence[Table], goal: Goal) -> list[Fleet]:
    """Return the best fleet of all tables in a list; an empty one if none meets the goal."""
    place = goal.best_of(*flat(tables))
    return [] if place is None else [fleet_at(tables, place)]


def flat(tables: Sequence[Table]) -> tuple[np.ndarray, np.ndarray]:
    """Return the times and costs of all fleets: median, low, high, [3, fleets]."""
    times = np.concatenate([table.time_s.reshape(3, -1) for table in tables], axis=1)
    costs = np.concatenate([table.cost_usd.reshape(3, -1) for table in tables], axis=1)
    return times, costs


def fleet_at(tables: Sequence[Table], place: int) -> Fleet:
    """Return a fleet by its place in ``flat``."""
    ends = np.cumsum([table.time_s[0].size for table in tables])
    at = int(np.searchsorted(ends, place, side="right"))
    table = tables[at]
    row, size = divmod(place - int(ends[at]) + table.time_s[0].size, table.time_s.shape[-1])
    return table.fleet(row, size + 1)


def _offered(group: Iterable[Offer], kind: int, options: FleetOptions) -> Iterable[PricedOffer]:
    for offer in group:
        if offer.price_usd_h is not None:
            yield PricedOffer(offer=offer, kind=kind, usd_h=offer.price_usd_h)
        terms = _terms(offer, options.market) if options.spot else None
        if terms is not None:
            yield PricedOffer(
                offer=offer, kind=kind, usd_h=terms[0], spot=True, evictions_per_h=terms[1]
            )


def _terms(offer: Offer, spot_market: SpotHistory | None) -> tuple[float, float] | None:
    try:
        return spot_terms(offer, spot_market)
    except CloudError:
        return None  # the offer may still be used on demand


def _unbeaten(rows: Sequence[PricedOffer]) -> list[PricedOffer]:
    """Return the Pareto front of price and evictions per hour; of equal ones, the first."""
    out: list[PricedOffer] = []
    for priced in sorted(rows, key=lambda priced: (priced.usd_h, priced.evictions_per_h)):
        if not out or priced.evictions_per_h < out[-1].evictions_per_h:
            out.append(priced)
    return out


def _times_and_costs(
    workload: Workload, rows: Sequence[PricedOffer], work_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    nodes = np.arange(1, work_s.shape[-1] + 1)
    time_s = work_s[:, [priced.kind for priced in rows]]
    spot = np.array([priced.spot for priced in rows])
    if spot.any():
        rates = np.array([priced.evictions_per_h for priced in rows])[spot, None] * nodes
        time_s[:, spot] *= slowdowns(workload, rates)[0]
    time_s += workload.setup_s
    usd_h = np.array([priced.usd_h for priced in rows])[:, None] * nodes
    possible = np.isfinite(time_s)
    # An infinite time must cost an infinite amount even if the hourly price is 0.
    cost_usd = np.where(possible, time_s, 0.0) / 3600 * usd_h
    return time_s, np.where(possible, cost_usd, np.inf)


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
        factor: Factor on the profile's steps with which another fleet would be chosen.
        fleet: That fleet, with its forecast by the profile as it is; None: no fleet would meet the
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
        tables: All fleets of equal machines.
        options: Goal, and which fleets are allowed.
        workload: Training or study.
        best: Chosen fleet; None if no fleet meets the goal.
        mixed: Fleets of several types that were compared.
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
    possible = ((limited <= more * goal.limit) & (other <= more * most)).any(axis=1)
    rows = [priced for table in tables for priced in table.rows]
    return list(dict.fromkeys(rows[row].offer for row in np.flatnonzero(possible).tolist()))


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
