"""Probes: a few measured steps, and what measuring more of them is worth."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, fmean, median, stdev
from typing import Literal

import numpy as np

from thrifty.core import CloudError, derive_seed

from ._hardware import HardwareEstimates
from ._offer import Interval, Offer
from ._workload import StepTiming, Workload
from .planning._devices import equal_steps
from .planning._estimate import all_steps_s
from .planning._fleet_options import FleetOptions, Goal, calibrate, one_profile_only
from .planning._planner import FleetPlan, known_offers, plan_fleet
from .planning._table import Table, table_of


_MACHINES: Mapping[What, int] = {"compute": 1, "inner": 1, "network": 2}
"""How many machines show a factor at least; more of them show what fewer do."""

_TOGETHER = 4
"""How many machines measure a network, if as many are allowed.

Two of them may be connected better or worse than most: on one measured cluster, forecasts from two
were worse than from data sheets, and those from four were better (docs/design/cloud.md).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A measurement on rented machines.

    One machine shows how fast its devices compute and all-reduce inside it; several, four if
    allowed, show how fast machines all-reduce between them.

    Attributes:
        offer: Offer to rent.
        num: Number of machines.
        spot: Whether they are rented as spot machines.
        finds: What is measured: the factors in ``HardwareEstimates`` that it updates.
        usd: Cost in dollars.
        seconds: Time from renting to the end.
        gain: Expected improvement of the plan: dollars with a deadline, seconds with a budget.
        why: Where the gain comes from, in words.
    """

    offer: Offer
    num: int
    spot: bool
    finds: tuple[What, ...]
    usd: float
    seconds: float
    gain: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        return f"{' and '.join(self.finds)} on {self.offer.spell(self.num, spot=self.spot)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Result of a probe, with one value for each repeat.

    Args:
        compute: Factors on the profile's seconds that a device takes.
        inner: Factors on the seconds of ``HardwareEstimates.link`` that all-reduces inside a
            machine take.
        network: The same between machines.

    Raises:
        CloudError: A factor is not positive.
    """

    compute: tuple[float, ...] = ()
    inner: tuple[float, ...] = ()
    network: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        factors = (*self.compute, *self.inner, *self.network)
        if not all(0 < factor < math.inf for factor in factors):
            raise CloudError(
                f"`compute`, `inner` and `network` must be positive and finite, got "
                f"compute={self.compute}, "
                f"inner={self.inner}, network={self.network}"
            )


class Probes:
    """Choice of what to measure next, within caps of dollars and seconds, with replanning.

    For every possible probe, outcomes are drawn from the current estimates, and the best fleet
    under each outcome is compared with the present choice. Both are compared by their medians; a
    fleet that misses the goal is penalised by the factor by which it misses. A probe is worth it if
    the plan's expected improvement exceeds the price of the probe: in dollars with a deadline, in
    seconds with a budget. The present choice and its rivals are fleets of equal machines.

    If no fleet meets the goal at the high end of its interval, the plan is the one that meets it by
    the medians.

    Args:
        workload: Training or study.
        offers: Catalogue.
        options: Options with a deadline or a budget. Probes also use spot machines where those are
            allowed and cheaper. ``mixed`` is ignored.
        cap_usd: Most dollars for all probes together, in addition to the budget.
        cap_s: Most seconds for all probes one after the other, in addition to the deadline.
        probe_s: Seconds of measuring; the workload's setup is added.
        draws: Number of outcomes drawn for each probe.
        seed: Seed of the draws.

    Attributes:
        plan: Best plan by the current estimates.
        spent_usd: Dollars spent on probes.
        spent_s: Seconds spent on probes.
        ended: Why ``next`` returned None; "" before.

    Raises:
        CloudError: No fleet meets the goal even by its median, an argument is out of range, or the
            workload has several profiles.

    >>> from thrifty.perf import StepProfile
    >>> profile = StepProfile(
    ...     device="T4",
    ...     batches=(8, 16),
    ...     forward_s=(0.1, 0.2),
    ...     backward_s=(0.2, 0.4),
    ...     optimizer_s=0.0,
    ...     peak_bytes=(2e9, 4e9),
    ...     bucket_bytes=(1e6,),
    ...     bucket_ready=(1.0,),
    ... )
    >>> workload = Workload(profile=profile, steps=100_000, global_batch=64)
    >>> offers = [
    ...     Offer(
    ...         cloud="aws",
    ...         region="us-east-1",
    ...         instance_type=name,
    ...         accelerator=gpu,
    ...         price_usd_h=price,
    ...         baseline_gbps=10,
    ...     )
    ...     for name, gpu, price in [("g4dn.xlarge", "T4", 0.53), ("g6.xlarge", "L4", 1.0)]
    ... ]
    >>> probes = Probes(
    ...     workload,
    ...     offers,
    ...     FleetOptions(deadline_s=100 * 3600, estimates=HardwareEstimates(profiled="T4")),
    ...     cap_usd=2,
    ...     cap_s=600,
    ... )
    >>> probe = probes.next()
    >>> print(probes.plan.best, "|", probe)
    1 x g4dn.xlarge (1 T4) | compute on 1 x g6.xlarge (1 L4)
    >>> probes.record(probe, ProbeResult(compute=(0.25, 0.26)))
    >>> print(probes.plan.best, probes.next(), probes.ended)
    1 x g6.xlarge (1 L4) None no probe is worth its price
    """

    def __init__(
        self,
        workload: Workload,
        offers: Sequence[Offer],
        options: FleetOptions,
        *,
        cap_usd: float,
        cap_s: float,
        probe_s: float = 60.0,
        draws: int = 32,
        seed: int = 0,
    ) -> None:
        if options.goal.limit is None:
            raise CloudError("probes improve a choice: give a deadline or a budget")
        if not (cap_usd >= 0 and cap_s >= 0 and 0 <= probe_s < math.inf) or draws < 1:
            raise CloudError(
                "`cap_usd`, `cap_s` and `probe_s` must be at least 0 and `draws` at least 1, got "
                f"cap_usd={cap_usd}, cap_s={cap_s}, probe_s={probe_s}, draws={draws}"
            )
        one_profile_only(workload, "probes compare devices")
        self.spent_usd, self.spent_s, self.ended = 0.0, 0.0, ""
        # Probes compare fleets of equal machines, so the plan must be one of them.
        self._options = replace(options, mixed=False)
        self._workload, self._offers, self._goal = workload, offers, options.goal
        self._cap_usd, self._cap_s = cap_usd, cap_s
        self._probe_s, self._draws, self._seed = probe_s, draws, seed
        self._done: set[tuple[What, str]] = set()
        self.plan = self._planned()

    @property
    def estimates(self) -> HardwareEstimates:
        """Estimates after all probes so far."""
        return self._options.estimates

    def next(self) -> Probe | None:
        """Return the probe with the highest gain per dollar; None if none is left (see ``ended``).

        Raises:
            CloudError: No fleet meets the goal any more.
        """
        contenders = self._contenders()
        judged = [self._judged(probe, contenders) for probe in self._possible(contenders)]
        worth = [probe for probe in judged if probe.gain > self._price(probe)]
        payable = [probe for probe in worth if self._is_payable(probe)]
        if payable:
            return max(payable, key=lambda probe: probe.gain / max(probe.usd, 1e-9))
        self.ended = "no probe is worth its price"
        if worth:
            self.ended = (
                f"the cap leaves ${self._cap_usd - self.spent_usd:.2f} and "
                f"{self._cap_s - self.spent_s:.0f} s, too little for "
                f"{', '.join(map(str, worth))}"
            )
        return None

    def record(self, probe: Probe, measured: ProbeResult | Sequence[StepTiming]) -> None:
        """Record a result and replan; the probe's price and seconds count as spent.

        Args:
            probe: Probe that was made.
            measured: Factors that it found, or seconds of steps of this training, from which
                ``calibrate`` works them out.

        Raises:
            CloudError: The result does not match what the probe finds or where, or no fleet meets
                the goal any more.
        """
        if isinstance(measured, ProbeResult):
            estimates = self._with_factors(probe, measured)
        else:
            estimates = self._with_steps(probe, measured)
        self._spend(probe)
        self._options = replace(self._options, estimates=estimates)
        self.plan = self._planned()

    def _with_factors(self, probe: Probe, measured: ProbeResult) -> HardwareEstimates:
        found = {what: factors for what in _MACHINES if (factors := getattr(measured, what))}
        if set(found) != set(probe.finds):
            raise CloudError(
                f"the probe finds {' and '.join(probe.finds)}, and "
                f"{' and '.join(found) or 'nothing'} was recorded: give ProbeResult at least one "
                "factor for each of its finds, and no other"
            )
        return self.estimates.probed(**{
            what: {subject_of(what, probe.offer): measured_interval(factors)}
            for what, factors in found.items()
        })

    def _with_steps(self, probe: Probe, timings: Sequence[StepTiming]) -> HardwareEstimates:
        for timing in timings:
            if timing.offer.instance_type != probe.offer.instance_type or timing.num > probe.num:
                raise CloudError(
                    f"the probe rents {probe.offer.spell(probe.num)}, and a step was recorded on "
                    f"{timing.offer.spell(timing.num)}: give steps on the probe's machines, or "
                    "on fewer of them"
                )
        if probe.num > 1 and not any(timing.num > 1 for timing in timings):
            raise CloudError(
                "the probe finds how fast machines all-reduce, and all steps are of one machine: "
                f"give one on {probe.offer.spell(probe.num)}"
            )
        return calibrate(self._workload.profile, timings, estimates=self.estimates)

    def missed(self, probe: Probe, *, usd: float = 0.0, seconds: float = 0.0) -> None:
        """Record that the probe's machines were not available or failed; it is not proposed again.

        Args:
            probe: Probe that failed.
            usd: Dollars spent on it nevertheless.
            seconds: Seconds spent on it nevertheless.
        """
        # If two machines were not available, a probe on one machine may still work.
        most = max(_MACHINES[what] for what in probe.finds)
        lost = tuple(what for what in probe.finds if _MACHINES[what] == most)
        self._spend(replace(probe, usd=usd, seconds=seconds, finds=lost))

    def _spend(self, probe: Probe) -> None:
        self.spent_usd += probe.usd
        self.spent_s += probe.seconds
        self._done |= {(what, subject_of(what, probe.offer)) for what in probe.finds}

    def _is_payable(self, probe: Probe) -> bool:
        return (
            self.spent_usd + probe.usd <= self._cap_usd
            and self.spent_s + probe.seconds <= self._cap_s
        )

    def _price(self, probe: Probe) -> float:
        """Return the probe's price in the unit of the gains."""
        return probe.usd if self._goal.deadline_s is not None else probe.seconds

    def _planned(self) -> FleetPlan:
        try:
            return plan_fleet(self._workload, self._offers, self._options)
        except CloudError as error:
            by_median = replace(self._options, conservative=False)
            try:
                plan = plan_fleet(self._workload, self._offers, by_median)
            except CloudError:
                raise error from None  # says by how much the high end misses the goal
        return replace(
            plan, notes=(*plan.notes, "it meets the goal by its median, not at its high end")
        )

    def _contenders(self) -> Contenders:
        known, _ = known_offers(self._offers, self.estimates)
        return Contenders.of(table_of(self._workload, known, self._options), self._goal)

    def _possible(self, contenders: Contenders) -> list[Probe]:
        """Return the cheapest probe for each factor of the rivals that is not known well enough."""
        unsure = self._unsure(contenders)
        machines = sorted(
            (
                (usd_h, place, offer, spot)
                for place, offer in enumerate(self._offers)
                for spot in (False, True)[: 1 + self._options.spot]
                if (usd_h := self._usd_h(offer, spot=spot)) is not None
            ),
            key=lambda each: each[:2],
        )
        seconds = self._workload.setup_s + self._probe_s
        probes: dict[tuple[What, str], Probe] = {}
        for usd_h, _, offer, spot in machines:
            allowed = self._options.allowance(offer)
            mine = tuple(w for w in _MACHINES if (w, subject_of(w, offer)) in unsure)
            for what in mine:
                num = _MACHINES[what]
                subject = what, subject_of(what, offer)
                if subject not in probes and num <= allowed:
                    if what == "network":
                        num = max(num, int(min(_TOGETHER, allowed)))
                    probes[subject] = Probe(
                        offer=offer,
                        num=num,
                        spot=spot,
                        finds=tuple(w for w in mine if _MACHINES[w] <= num),
                        usd=num * usd_h * seconds / 3600,
                        seconds=seconds,
                    )
        # One probe may show several factors.
        return list(dict.fromkeys(probes.values()))

    def _usd_h(self, offer: Offer, *, spot: bool) -> float | None:
        market = self._options.market
        if spot and market is not None:
            try:
                return market.spot_usd_h(offer)
            except CloudError:
                return None
        return offer.usd_h(spot=spot)

    def _unsure(self, contenders: Contenders) -> set[tuple[What, str]]:
        """Return the rivals' factors that are known less well than a probe would measure them."""
        unsure: set[tuple[What, str]] = set()
        for offer in contenders.rivals:
            for what in _MACHINES:
                if what == "inner" and offer.accelerator_count == 1:
                    continue
                subject, believed = (
                    subject_of(what, offer),
                    _believed(what, offer, self.estimates),
                )
                if believed.high / believed.low > NOISE**2 and (what, subject) not in self._done:
                    unsure.add((what, subject))
        return unsure

    def _judged(self, probe: Probe, contenders: Contenders) -> Probe:
        """Return the probe with its expected gain, from draws of its outcome."""
        rng = np.random.default_rng(derive_seed(self._seed, "probe", str(probe)))
        drawn = {
            what: outcomes(_believed(what, probe.offer, self.estimates), self._draws, rng=rng)
            for what in probe.finds
        }
        gains, why = contenders.gains({
            what: (subject_of(what, probe.offer), values) for what, values in drawn.items()
        })
        return replace(probe, gain=fmean(gains), why=why)


def _believed(what: What, offer: Offer, estimates: HardwareEstimates) -> Interval:
    known: Interval = getattr(estimates, what)(offer)
    return known


# -- the value of a measurement --------------------------------------------------------------------


_NORMAL = NormalDist()

END = _NORMAL.inv_cdf(0.95)
"""Standard deviations from the median to the ends of an interval."""

NOISE = 1.03
"""Error factor of a measurement in nine cases of ten, however well its repeats agree."""

_MOST_RIVALS = 60
"""Most offers to compare; all of them must turn out expensive before another can be best."""

What = Literal["compute", "inner", "network"]
"""Factor in ``HardwareEstimates`` that a probe measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contenders:
    """The present choice among fleets of equal machines, and its rivals.

    Attributes:
        goal: Goal of the choice.
        table: Fleets of the rivals.
        choice: Index of the choice in the flattened table.
        rivals: Offers in the table.
    """

    goal: Goal
    table: Table
    choice: int
    rivals: tuple[Offer, ...]

    @classmethod
    def of(cls, table: Table, goal: Goal) -> Contenders:
        """Return the choice and the sixty most promising offers.

        These are the offers that would be best if all estimates came out at their low ends. Offers
        that only cost more than the choice count as well: they can replace a choice that turns out
        to miss the goal.

        Raises:
            CloudError: No fleet meets the goal, even by the medians.
        """
        choice = goal.best_of(_flat(table.time_s), _flat(table.cost_usd))
        if choice is None:
            goal = replace(goal, conservative=False)
            choice = goal.best_of(_flat(table.time_s), _flat(table.cost_usd))
        if choice is None:
            raise CloudError(
                "no fleet meets the goal, even by the medians: set a later deadline or a "
                "higher budget"
            )
        limit = limit_of(goal)
        limited, objective = _ends(table.time_s, table.cost_usd, goal)
        low = np.where(limited[1] <= limit, objective[1], np.inf).min(axis=1)
        sizes = table.time_s.shape[-1]
        own, num = divmod(choice, sizes)
        likely = np.argsort(low, kind="stable")[:_MOST_RIVALS]
        kept = sorted({own, *likely.tolist()})
        return cls(
            goal=goal,
            table=replace(
                table,
                rows=tuple(table.rows[row] for row in kept),
                time_s=table.time_s[:, kept],
                cost_usd=table.cost_usd[:, kept],
            ),
            choice=kept.index(own) * sizes + num,
            rivals=tuple(dict.fromkeys(table.rows[row].offer for row in kept)),
        )

    def gains(self, found: Mapping[What, tuple[str, np.ndarray]]) -> tuple[list[float], str]:
        """Return how much better than the present choice the best fleet is in each case, and why.

        The second value says in how many cases another fleet is better, and which one most often.

        Args:
            found: For each measured factor, its subject and its value in each case.
        """
        kinds, work_s = self._works(found)
        rows = [row for row, priced in enumerate(self.table.rows) if priced.kind in kinds]
        places = [kinds.index(self.table.rows[row].kind) for row in rows]
        gains: list[float] = []
        names = Counter[str]()
        for case in range(work_s.shape[2]):
            time_s, cost_usd = self._with(rows, work_s[:, places, case])
            best = self.goal.best_of(_flat(time_s), _flat(cost_usd))
            if best is None or best == self.choice:
                gains.append(0.0)
                continue
            limited, objective = _ends(time_s, cost_usd, self.goal)
            score = objective[0] * np.maximum(1.0, limited[0] / limit_of(self.goal))
            gains.append(float(score.flat[self.choice] - score.flat[best]))
            names[self._name(best)] += 1
        name = names.most_common(1)[0][0] if names else ""
        return gains, f"in {names.total()} of {len(gains)} cases another fleet is better" + (
            f", mostly {name}" if name else ""
        )

    def _works(self, found: Mapping[What, tuple[str, np.ndarray]]) -> tuple[list[int], np.ndarray]:
        """Return the kinds that change, and the seconds of all steps, [3, kinds, cases, sizes]."""
        table = self.table
        kinds = [
            kind
            for kind in sorted({priced.kind for priced in table.rows})
            if any(
                subject_of(what, table.kinds[kind]) == subject
                for what, (subject, _) in found.items()
            )
        ]
        cases = len(next(iter(found.values()))[1])
        devices = table.devices[np.repeat(kinds, cases)]
        for what, (subject, factors) in found.items():
            known = [measured_interval([factor]) for factor in factors.tolist()]
            ends = np.array([(each.median, each.low, each.high) for each in known]).T
            mine = np.repeat(
                [subject_of(what, table.kinds[kind]) == subject for kind in kinds], cases
            )
            told = np.tile(ends, len(kinds)) * (devices.gain if what == "compute" else 1.0)
            now = np.where(mine, told, getattr(devices, what))
            devices = devices.with_factors({what: now})
        workload, sizes = table.workload, table.time_s.shape[-1]
        steps = equal_steps(
            workload.profile, devices, global_batch=workload.global_batch, most_nodes=sizes
        )
        work_s = all_steps_s(workload, devices, steps.step_s)
        return kinds, work_s.reshape(3, len(kinds), cases, sizes)

    def _with(self, rows: Sequence[int], work_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return times and costs if some rows need ``work_s``; evictions and prices stay."""
        table, setup_s = self.table, self.table.workload.setup_s
        time_s, cost_usd = table.time_s.copy(), table.cost_usd.copy()
        before = table.work_s[:, [table.rows[row].kind for row in rows]]
        possible = np.isfinite(time_s[:, rows])
        slow = np.divide(
            time_s[:, rows] - setup_s, before, out=np.ones_like(before), where=possible
        )
        now = np.where(possible, setup_s + slow * np.where(possible, work_s, 0.0), np.inf)
        usd_s = np.divide(
            cost_usd[:, rows], time_s[:, rows], out=np.ones_like(before), where=possible
        )
        time_s[:, rows], cost_usd[:, rows] = now, usd_s * now
        return time_s, cost_usd

    def _name(self, place: int) -> str:
        row, num = divmod(place, self.table.time_s.shape[-1])
        priced = self.table.rows[row]
        spelled: str = priced.offer.spell(num + 1, spot=priced.spot)
        return spelled


def outcomes(interval: Interval, num: int, *, rng: np.random.Generator) -> np.ndarray:
    """Draw ``num`` values from the distribution that an interval describes.

    It is lognormal on either side of the median. The draws are stratified: one value comes from
    each of ``num`` equally likely parts.
    """
    places = (rng.permutation(num) + rng.uniform(1e-6, 1.0, num)) / num
    far = np.array([_NORMAL.inv_cdf(place) for place in places.tolist()]) / END
    sides = np.where(far > 0, interval.high / interval.median, interval.median / interval.low)
    out: np.ndarray = interval.median * sides**far
    return out


def _flat(ends: np.ndarray) -> np.ndarray:
    return ends.reshape(3, -1)


def _ends(time_s: np.ndarray, cost_usd: np.ndarray, goal: Goal) -> tuple[np.ndarray, np.ndarray]:
    """Return the limited quantity, and the one to minimise."""
    both = time_s, cost_usd
    return both if goal.deadline_s is not None else both[::-1]


def limit_of(goal: Goal) -> float:
    """Return the seconds or dollars of a goal that has a limit."""
    assert goal.limit is not None
    return goal.limit


def subject_of(what: What, offer: Offer) -> str:
    """Return the name under which a factor is known: the device's or the instance type's."""
    return offer.device if what == "compute" else offer.instance_type


def measured_interval(factors: Sequence[float]) -> Interval:
    """Return the interval for the next measurement, from repeats of it."""
    logs = [math.log(factor) for factor in factors]
    spread = END * stdev(logs) if len(logs) > 1 else 0.0
    middle, ratio = median(factors), max(NOISE, math.exp(spread))
    return Interval(median=middle, low=middle / ratio, high=middle * ratio)
