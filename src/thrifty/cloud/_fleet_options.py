"""Options of fleet planning: the goal, and which fleets are allowed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from thrifty.core import CloudError

from ._beliefs import Beliefs
from ._plan_goal import Goal
from ._plan_spot import SpotHistory


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """Options of ``plan_fleet``, ``replan`` and ``Probes``.

    Args:
        deadline_s: seconds from renting to the end; the cheapest fleet that meets it is chosen.
        budget_usd: total dollars; the fastest fleet within it is chosen. If neither a deadline nor
            a budget is given, no fleet is chosen and the plan has only the front.
        confidence: whether the high end of the forecast must meet the deadline or budget, rather
            than its median.
        beliefs: estimates of devices and networks. By default they come from data sheets, for a
            profile of one processor core.
        spot: whether spot machines are allowed.
        mixed: whether fleets of several on-demand types are allowed.
        max_nodes: most machines of a fleet.
        quotas: most machines, by accelerator or instance type.
        market: prices and evictions of spot machines; None: the offers' prices, and one eviction
            per ten machine hours.

    Raises:
        CloudError: an option is out of range, or the options contradict each other.

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
        _ = self.goal  # raises CloudError if deadline and budget are invalid
        if self.max_nodes < 1:
            raise CloudError(
                f"a fleet has at least one machine, not max_nodes={self.max_nodes}"
            )
        for name, most in self.quotas.items():
            if most < 0:
                raise CloudError(f"a quota is 0 or more, not {most} for {name!r}")

    @property
    def goal(self) -> Goal:
        """Deadline or budget, and which end of a forecast must meet it."""
        return Goal(
            deadline_s=self.deadline_s, budget_usd=self.budget_usd, confidence=self.confidence
        )
