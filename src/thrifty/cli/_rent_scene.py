"""The inputs of a rental plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from thrifty.cloud import (
    Beliefs,
    FleetOptions,
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
    """The inputs of a rental plan.

    Attributes:
        asked: Options of the command.
        workload: The training job.
        values: Hyper-parameters that it was timed with; empty if it was not timed.
        offers: Offers to choose from.
        beliefs: Hardware estimates of the offers.
        market: Spot market.
    """

    asked: Asked
    workload: Workload
    values: Mapping[str, Any]
    offers: tuple[Offer, ...]
    beliefs: Beliefs
    market: SpotMarket | None

    @property
    def options(self) -> FleetOptions:
        """Goal of the choice, and limits on the machines."""
        asked = self.asked
        return FleetOptions(
            deadline_s=asked.deadline,
            budget_usd=asked.budget,
            confidence=not asked.median,
            beliefs=self.beliefs,
            spot=asked.spot,
            mixed=asked.mixed,
            max_nodes=asked.max_nodes,
            quotas=dict(asked.quota),
            market=self.market,
        )

    def plan(self) -> FleetPlan:
        """Plan what to rent."""
        return plan_fleet(self.workload, self.offers, self.options)

    def probes(self, cap_usd: float) -> tuple[list[Probe], str]:
        """Return what to measure first, and why there are no further probes.

        Each probe assumes that the earlier ones confirmed the estimates.
        """
        probes = Probes(
            self.workload,
            self.offers,
            self.options,
            cap_usd=cap_usd,
            cap_s=self.asked.probe_time,
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
        """Return the assumptions of a plan."""
        workload, asked = self.workload, self.asked
        with_ = f" with {show_values(self.values)} (others by --hp)" if self.values else ""
        notes = [
            (
                f"a step of up to {workload.profile.batches[-1]} samples was timed on "
                f"{workload.profile.device}{with_}"
            )
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
                f"the speed of {' and '.join(sorted(guessed))} is that of data sheets: --probe "
                "says what is worth measuring"
            )
        return notes
