"""Value of information: the present choice, its rivals, and outcomes of measurements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist, median, stdev
from typing import Literal

import numpy as np

from thrifty.core import CloudError

from ._offer import Interval, Offer
from .planning._devices import equal_steps
from .planning._estimate import all_steps_s
from .planning._fleet_options import Goal
from .planning._table import Table


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
class Arena:
    """The present choice among fleets of equal machines, and its rivals.

    Attributes:
        goal: goal of the choice.
        table: fleets of the rivals.
        choice: index of the choice in the flattened table.
        rivals: offers in the table.
    """

    goal: Goal
    table: Table
    choice: int
    rivals: tuple[Offer, ...]

    @classmethod
    def of(cls, table: Table, goal: Goal) -> Arena:
        """Return the arena of the choice and the sixty most promising offers.

        These are the offers that would be best if all estimates came out at their low ends. Offers
        that only cost more than the choice count as well: they can replace a choice that turns out
        to miss the goal.

        Raises:
            CloudError: no fleet meets the goal, even by the medians.
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
                lots=tuple(table.lots[lot] for lot in kept),
                time_s=table.time_s[:, kept],
                cost_usd=table.cost_usd[:, kept],
            ),
            choice=kept.index(own) * sizes + num,
            rivals=tuple(dict.fromkeys(table.lots[lot].offer for lot in kept)),
        )

    def gains(self, found: Mapping[What, tuple[str, np.ndarray]]) -> tuple[list[float], str]:
        """Return how much better than the present choice the best fleet is in each case, and why.

        The second value says in how many cases another fleet is better, and which one most often.

        Args:
            found: for each measured factor, its subject and its value in each case.
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

    def _works(self, found: Mapping[What, tuple[str, np.ndarray]]) -> tuple[list[int], np.ndarray]:
        """Return the kinds that change, and the seconds of all steps, [3, kinds, cases, sizes]."""
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
        spelled: str = lot.offer.spell(num + 1, spot=lot.spot)
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
