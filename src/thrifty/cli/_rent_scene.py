"""All that a plan for renting is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thrifty.cloud import (
    Beliefs,
    FleetPlan,
    Measured,
    Offer,
    Probe,
    Probes,
    SpotMarket,
    Workload,
    plan_fleet,
)

from ._rent_options import Asked
from ._rent_show import show_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """All that a plan is made of.

    Attributes:
        asked: options.
        workload: what is trained.
        values: hyper-parameters that it was timed with; none: it was not.
        offers: that may be taken.
        beliefs: of them.
        market: of spot machines.
    """

    asked: Asked
    workload: Workload
    values: Mapping[str, Any]
    offers: tuple[Offer, ...]
    beliefs: Beliefs
    market: SpotMarket | None

    def plan(self) -> FleetPlan:
        """What to rent."""
        asked = self.asked
        return plan_fleet(
            self.workload,
            self.offers,
            deadline_s=asked.deadline,
            budget_usd=asked.budget,
            spot=asked.spot,
            beliefs=self.beliefs,
            max_nodes=asked.max_nodes,
            quotas=dict(asked.quota),
            mixed=asked.mixed,
            confidence=not asked.median,
            market=self.market,
        )

    def probes(self, cap_usd: float) -> tuple[list[Probe], str]:
        """What is worth measuring, each as if those before came out as believed; and why there are no more."""
        asked = self.asked
        probes = Probes(
            self.workload,
            self.offers,
            cap_usd=cap_usd,
            cap_s=asked.probe_time,
            deadline_s=asked.deadline,
            budget_usd=asked.budget,
            beliefs=self.beliefs,
            spot=asked.spot,
            max_nodes=asked.max_nodes,
            quotas=dict(asked.quota),
            confidence=not asked.median,
            market=self.market,
        )
        found = []
        while (probe := probes.next()) is not None:
            found.append(probe)
            believed = {
                what: (getattr(probes.beliefs, what)(probe.offer).median,)
                for what in probe.finds
            }
            probes.tell(probe, Measured(**believed))
        return found, probes.ended

    def notes(self, plan: FleetPlan) -> list[str]:
        """What a plan rests on."""
        workload, asked = self.workload, self.asked
        with_ = f" with {show_values(self.values)} (others by --hp)" if self.values else ""
        notes = [
            f"a step of up to {workload.profile.batches[-1]} samples was timed on {workload.profile.device}{with_}"
        ]
        notes += plan.notes
        if self.market is not None:
            notes.append(
                f"{asked.evictions:g} evictions of a spot machine in an hour are assumed"
            )
        guessed = {
            each.offer.device
            for each in (plan.best.machines if plan.best else ())
            if (speed := self.beliefs.compute(each.offer)).high > speed.low
        }
        if guessed:
            notes.append(
                f"the speed of {' and '.join(sorted(guessed))} is that of data sheets: --probe says what is worth measuring"
            )
        return notes
