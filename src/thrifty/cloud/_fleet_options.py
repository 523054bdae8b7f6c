"""For what a fleet is chosen, and which ones may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thrifty.core import CloudError

from ._beliefs import Beliefs
from ._plan_goal import Goal
from ._plan_spot import SpotHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What ``plan_fleet``, ``replan`` and ``Probes`` choose by.

    Args:
        deadline_s: from renting to the end; the cheapest fleet that meets it is chosen.
        budget_usd: for all of it; the fastest fleet that meets it is chosen. None as well: no fleet is chosen, and the front is all there is.
        confidence: the high end of the interval has to meet the deadline or the budget, not the median.
        beliefs: of devices and networks; data sheets unless told, the profile being of one processor core.
        spot: spot machines may be taken, too.
        mixed: several types on demand in one fleet may be taken, too.
        max_nodes: machines of a fleet.
        quotas: most machines by accelerator or instance type.
        market: prices and evictions of spot machines; None: the offers' prices, and one eviction in ten hours of a machine.

    Raises:
        CloudError: an option makes no sense.

    >>> FleetOptions(deadline_s=6 * 3600, quotas={"p3.2xlarge": 4}).goal.limit
    21600
    """

    deadline_s: float | None = None
    budget_usd: float | None = None
    confidence: bool = True
    beliefs: Beliefs = field(default_factory=Beliefs)
    spot: bool = False
    mixed: bool = False
    max_nodes: int = 64
    quotas: Mapping[str, int] = field(default_factory=dict)
    market: SpotHistory | None = None

    def __post_init__(self) -> None:
        _ = self.goal  # which refuses what is none
        if self.max_nodes < 1:
            raise CloudError(
                f"a fleet has at least one machine, not max_nodes={self.max_nodes}"
            )
        for name, most in self.quotas.items():
            if most < 0:
                raise CloudError(f"a quota is 0 or more, not {most} for {name!r}")

    @property
    def goal(self) -> Goal:
        """Deadline or budget, and the end of an interval that has to meet it."""
        return Goal(
            deadline_s=self.deadline_s, budget_usd=self.budget_usd, confidence=self.confidence
        )
