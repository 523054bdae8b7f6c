"""What knowing more would be worth: the present choice, its rivals, and outcomes of measurements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median, stdev
from typing import Literal

import numpy as np

from thrifty.core import CloudError

from ._estimate import all_steps_s
from ._fleet import Interval
from ._offer import Offer
from ._plan_goal import Goal
from ._plan_steps import equal_steps
from ._plan_table import Table


_NORMAL = NormalDist()

END = _NORMAL.inv_cdf(0.95)
"""Standard deviations from the middle to the ends of an interval."""

NOISE = 1.03
"""A measurement is right within this factor, nine times of ten, however well its repeats agree."""

_MOST_RIVALS = 60
"""Offers that are compared; sixty would have to turn out dear before another is best."""

What = Literal["compute", "network"]
"""A factor that ``Beliefs`` has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arena:
    """The present choice among fleets of equal machines, and all that may take its place.

    Attributes:
        goal: what the choice is for.
        table: the rivals' fleets.
        choice: place of the choice in it.
        rivals: offers of the table.
    """

    goal: Goal
    table: Table
    choice: int
    rivals: tuple[Offer, ...]

    @classmethod
    def of(cls, table: Table, goal: Goal) -> Arena:
        """Keeps the sixty offers that would be best if all beliefs came out at their low ends, and the choice. What only costs more is one of them, too: it takes the place of a choice found to miss the goal.

        Raises:
            CloudError: no fleet meets the goal, even by the medians.
        """
        choice = goal.best_of(_flat(table.time_s), _flat(table.cost_usd))
        if choice is None:
            goal = replace(goal, confidence=False)
            choice = goal.best_of(_flat(table.time_s), _flat(table.cost_usd))
        if choice is None:
            raise CloudError(
                "no fleet meets the goal, even by the medians: set a later deadline or a higher budget"
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
                lots=tuple(table.lots[lot] for lot in kept),
                time_s=table.time_s[:, kept],
                cost_usd=table.cost_usd[:, kept],
            ),
            choice=kept.index(own) * sizes + num,
            rivals=tuple(dict.fromkeys(table.lots[lot].offer for lot in kept)),
        )

    def gains(self, found: Mapping[What, tuple[str, np.ndarray]]) -> tuple[list[float], str]:
        """How much better than the present choice the best one is in each of several cases, and the name that it has most often if it is another.

        Args:
            found: of what is measured: its subject, and the factors of each case.
        """
        kinds, work_s = self._works(found)
        rows = [row for row, lot in enumerate(self.table.lots) if lot.kind in kinds]
        places = [kinds.index(self.table.lots[row].kind) for row in rows]
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

    def _works(
        self, found: Mapping[What, tuple[str, np.ndarray]]
    ) -> tuple[list[int], np.ndarray]:
        """Kinds that change, and seconds of all steps on machines of each, [3, kinds, cases, sizes]."""
        table = self.table
        kinds = [
            kind
            for kind in sorted({lot.kind for lot in table.lots})
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
            now = np.where(mine, np.tile(ends, len(kinds)), getattr(devices, what))
            devices = (
                replace(devices, compute=now)
                if what == "compute"
                else replace(devices, network=now)
            )
        workload, sizes = table.workload, table.time_s.shape[-1]
        steps = equal_steps(
            workload.profile, devices, global_batch=workload.global_batch, most_nodes=sizes
        )
        work_s = all_steps_s(workload, steps.step_s)
        return kinds, work_s.reshape(3, len(kinds), cases, sizes)

    def _with(self, rows: Sequence[int], work_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Times and costs if the steps of some rows take so long: evictions and prices stay."""
        table, setup_s = self.table, self.table.workload.setup_s
        time_s, cost_usd = table.time_s.copy(), table.cost_usd.copy()
        before = table.work_s[:, [table.lots[row].kind for row in rows]]
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
        lot = self.table.lots[row]
        return f"{num + 1} x {lot.offer.instance_type}{' (spot)' if lot.spot else ''}"


def outcomes(interval: Interval, num: int, *, rng: np.random.Generator) -> np.ndarray:
    """Equally likely values of something believed to be in an interval: lognormal to both sides, one from each of ``num`` equal parts."""
    places = (rng.permutation(num) + rng.uniform(1e-6, 1.0, num)) / num
    far = np.array([_NORMAL.inv_cdf(place) for place in places.tolist()]) / END
    sides = np.where(far > 0, interval.high / interval.median, interval.median / interval.low)
    out: np.ndarray = interval.median * sides**far
    return out


def _flat(ends: np.ndarray) -> np.ndarray:
    return ends.reshape(3, -1)


def _ends(
    time_s: np.ndarray, cost_usd: np.ndarray, goal: Goal
) -> tuple[np.ndarray, np.ndarray]:
    """What is limited, and what is made least."""
    both = time_s, cost_usd
    return both if goal.deadline_s is not None else both[::-1]


def limit_of(goal: Goal) -> float:
    """Seconds or dollars of a goal that is one."""
    assert goal.limit is not None
    return goal.limit


def subject_of(what: What, offer: Offer) -> str:
    """What a factor is known by."""
    return offer.device if what == "compute" else offer.instance_type


def measured_interval(factors: Sequence[float]) -> Interval:
    """What repeats of a measurement say of the next time."""
    logs = [math.log(factor) for factor in factors]
    spread = END * stdev(logs) if len(logs) > 1 else 0.0
    middle, ratio = median(factors), max(NOISE, math.exp(spread))
    return Interval(median=middle, low=middle / ratio, high=middle * ratio)
