"""What to measure before renting: probes whose expected improvement is worth their price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from thrifty.core import CloudError, derive_seed

from ._beliefs import Beliefs
from ._fleet import Interval
from ._fleet_options import FleetOptions
from ._offer import Offer
from ._plan_notes import known_offers
from ._plan_table import allowance, table_of
from ._planner import FleetPlan, plan_fleet
from ._probe_gain import NOISE, Arena, What, measured_interval, outcomes, subject_of
from ._workload import Workload


_FINDS: tuple[What, ...] = ("compute", "network")
"""What is measured on one machine, and on two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A measurement on rented machines: on one of them how fast its devices compute, on two how fast they sum.

    Attributes:
        offer: what is rented.
        num: machines of it.
        spot: rented as spot.
        finds: what is measured: the factors that ``Beliefs`` has for it.
        usd: what it costs.
        seconds: what it takes, from renting to the end.
        gain: expected improvement of the plan: dollars where there is a deadline, seconds where there is a budget.
        why: where the gain comes from, in words.
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
        return f"{' and '.join(self.finds)} on {self.num} x {self.offer.instance_type}{' (spot)' if self.spot else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a probe has found, once for each repeat.

    Args:
        compute: times the profile's seconds that a device takes.
        network: times the seconds of ``Beliefs.link`` that sums over two machines take.

    Raises:
        CloudError: a factor is not positive.
    """

    compute: tuple[float, ...] = ()
    network: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not all(0 < factor < math.inf for factor in (*self.compute, *self.network)):
            raise CloudError(
                f"factors are positive and finite, not compute={self.compute}, network={self.network}"
            )


class Probes:
    """Chooses what to measure next, for at most so many dollars and seconds, and plans anew after each.

    For every possible probe outcomes are drawn from what is believed, and the choice under each is compared with the present one: both by their medians, and what misses the goal counts for as many times more as it misses it by. A probe
    is worth it if the plan gets better by more than the probe costs (with a budget: by more seconds than it takes). The present choice and its rivals are fleets of equal machines.

    Where no fleet meets the goal at the high end of its interval, the plan is the one that meets it by the medians.

    Args:
        workload: a training or a study.
        offers: a catalogue.
        options: with a deadline or a budget; probes are on spot machines, too, where they may be taken and are cheaper. ``mixed`` does not count.
        cap_usd: that probes may cost together, besides the budget.
        cap_s: that they may take, one after the other, besides the deadline.
        probe_s: that measuring takes; the workload's setup comes besides.
        draws: outcomes of each probe.
        seed: of the draws.

    Attributes:
        plan: by all that is known so far.
        spent_usd: on probes.
        spent_s: the same.
        ended: why ``next`` gave None; "" before.

    Raises:
        CloudError: no fleet meets the goal even by its median, or an argument makes no sense.

    >>> from thrifty.perf import StepProfile
    >>> profile = StepProfile(device="T4", batches=(8, 16), forward_s=(0.1, 0.2), backward_s=(0.2, 0.4), optimizer_s=0.0,
    ...     peak_bytes=(2e9, 4e9), bucket_bytes=(1e6,), bucket_ready=(1.0,))
    >>> workload = Workload(profile=profile, steps=100_000, global_batch=64)
    >>> offers = [Offer(cloud="aws", region="us-east-1", instance_type=name, accelerator=gpu, price_usd_h=price, baseline_gbps=10)
    ...     for name, gpu, price in [("g4dn.xlarge", "T4", 0.53), ("g6.xlarge", "L4", 1.0)]]
    >>> probes = Probes(workload, offers, FleetOptions(deadline_s=100 * 3600, beliefs=Beliefs(profiled="T4")), cap_usd=2, cap_s=600)
    >>> probe = probes.next()
    >>> print(probes.plan.best, "|", probe)
    1 x g4dn.xlarge | compute on 1 x g6.xlarge
    >>> probes.tell(probe, Measured(compute=(0.25, 0.26)))
    >>> print(probes.plan.best, probes.next(), probes.ended)
    1 x g6.xlarge None no probe is worth its price
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
                f"caps and seconds are not negative, and there is a draw at least, not cap_usd={cap_usd}, cap_s={cap_s}, probe_s={probe_s}, draws={draws}"
            )
        self.spent_usd, self.spent_s, self.ended = 0.0, 0.0, ""
        # Probes judge fleets of equal machines, so the plan is one of them.
        self._options = replace(options, mixed=False)
        self._workload, self._offers, self._goal = workload, offers, options.goal
        self._cap_usd, self._cap_s = cap_usd, cap_s
        self._probe_s, self._draws, self._seed = probe_s, draws, seed
        self._done: set[tuple[What, str]] = set()
        self.plan = self._planned()

    @property
    def beliefs(self) -> Beliefs:
        """All that is known so far."""
        return self._options.beliefs

    def next(self) -> Probe | None:
        """The probe that improves the plan most for a dollar; None: ``ended`` says why.

        Raises:
            CloudError: no fleet meets the goal any more.
        """
        arena = self._arena()
        judged = [self._judged(probe, arena) for probe in self._possible(arena)]
        worth = [probe for probe in judged if probe.gain > self._price(probe)]
        payable = [probe for probe in worth if self._is_payable(probe)]
        if payable:
            return max(payable, key=lambda probe: probe.gain / max(probe.usd, 1e-9))
        self.ended = "no probe is worth its price"
        if worth:
            self.ended = f"the cap leaves ${self._cap_usd - self.spent_usd:.2f} and {self._cap_s - self.spent_s:.0f} s, too little for {', '.join(map(str, worth))}"
        return None

    def tell(self, probe: Probe, measured: Measured) -> None:
        """Takes a result in, and plans anew; the probe's price and seconds are spent.

        Raises:
            CloudError: it is not what the probe finds, or no fleet meets the goal any more.
        """
        found = {what: factors for what in _FINDS if (factors := getattr(measured, what))}
        if set(found) != set(probe.finds):
            raise CloudError(
                f"the probe finds {' and '.join(probe.finds)}, and {' and '.join(found) or 'nothing'} is told: give Measured at least one factor for each of its finds, and no other"
            )
        self._spend(probe)
        beliefs = self.beliefs.probed(**{
            what: {subject_of(what, probe.offer): measured_interval(factors)}
            for what, factors in found.items()
        })
        self._options = replace(self._options, beliefs=beliefs)
        self.plan = self._planned()

    def missed(self, probe: Probe, *, usd: float = 0.0, seconds: float = 0.0) -> None:
        """The probe's machines were not to be had, or broke; it is not proposed again.

        Args:
            probe: that failed.
            usd: spent on it nevertheless.
            seconds: the same.
        """
        # Of two machines that were not to be had one may be.
        self._spend(replace(probe, usd=usd, seconds=seconds, finds=probe.finds[-1:]))

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
        """In the unit of gains."""
        return probe.usd if self._goal.deadline_s is not None else probe.seconds

    def _planned(self) -> FleetPlan:
        try:
            return plan_fleet(self._workload, self._offers, self._options)
        except CloudError as error:
            by_median = replace(self._options, confidence=False)
            try:
                plan = plan_fleet(self._workload, self._offers, by_median)
            except CloudError:
                raise error from None  # by how much its end misses the goal says more
        return replace(
            plan, notes=(*plan.notes, "it meets the goal by its median, not at its high end")
        )

    def _arena(self) -> Arena:
        known, _ = known_offers(self._offers, self.beliefs)
        table = table_of(
            self._workload,
            known,
            beliefs=self.beliefs,
            max_nodes=self._options.max_nodes,
            quotas=self._options.quotas,
            spot=self._options.spot,
            spot_market=self._options.market,
        )
        return Arena.of(table, self._goal)

    def _possible(self, arena: Arena) -> list[Probe]:
        """Probes of what is not known of the rivals, the cheapest for each."""
        unsure = self._unsure(arena)
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
            allowed = allowance(offer, self._options.quotas, self._options.max_nodes)
            mine = tuple(what for what in _FINDS if (what, subject_of(what, offer)) in unsure)
            for what in mine:
                num = _FINDS.index(what) + 1
                subject = what, subject_of(what, offer)
                if subject not in probes and num <= allowed:
                    probes[subject] = Probe(
                        offer=offer,
                        num=num,
                        spot=spot,
                        # Two machines show what one does.
                        finds=mine[:num],
                        usd=num * usd_h * seconds / 3600,
                        seconds=seconds,
                    )
        return list(probes.values())

    def _usd_h(self, offer: Offer, *, spot: bool) -> float | None:
        market = self._options.market
        if spot and market is not None:
            try:
                return market.spot_usd_h(offer)
            except CloudError:
                return None
        return offer.usd_h(spot=spot)

    def _unsure(self, arena: Arena) -> set[tuple[What, str]]:
        """What rivals depend on, and is known less well than a probe would find it."""
        unsure: set[tuple[What, str]] = set()
        for offer in arena.rivals:
            for what in _FINDS:
                subject, believed = (
                    subject_of(what, offer),
                    _believed(what, offer, self.beliefs),
                )
                if (
                    believed.high / believed.low > NOISE**2
                    and (what, subject) not in self._done
                ):
                    unsure.add((what, subject))
        return unsure

    def _judged(self, probe: Probe, arena: Arena) -> Probe:
        """The same with its gain, by draws of what it may find."""
        rng = np.random.default_rng(derive_seed(self._seed, "probe", str(probe)))
        drawn = {
            what: outcomes(_believed(what, probe.offer, self.beliefs), self._draws, rng=rng)
            for what in probe.finds
        }
        gains, why = arena.gains({
            what: (subject_of(what, probe.offer), values) for what, values in drawn.items()
        })
        return replace(probe, gain=fmean(gains), why=why)


def _believed(what: What, offer: Offer, beliefs: Beliefs) -> Interval:
    return beliefs.compute(offer) if what == "compute" else beliefs.network(offer)
