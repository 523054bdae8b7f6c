"""Jobs with deadlines and budgets, and fleets whose step times were measured.

The truth are the measurements of Pollux and Sia: five applications on four clusters, with the list
prices of comparable machines.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from bench.cloud.clusters import CLUSTERS, Row
from bench.cloud.prediction import USD_H


SETUP_S = 180.0
"""Seconds from renting to the first step, known to everyone who chooses."""

_HARDEST = 1.1
"""Tightest limit that is drawn, relative to the least that any candidate needs."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Equal machines of a cluster with a known step time."""

    cluster: str
    per_node: int
    nodes: int
    batch: int
    step_s: float

    @property
    def devices(self) -> int:
        """GPUs of all machines."""
        return self.per_node * self.nodes

    @property
    def usd_h(self) -> float:
        """Price in dollars per hour."""
        return self.devices * USD_H[self.cluster]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training, the cluster on whose GPU it was profiled, and its limit.

    Attributes:
        app: application.
        profiled: cluster of the GPU that was profiled.
        global_batch: samples of a step.
        steps: number of steps.
        candidates: fleets to choose among.
        largest: largest batch that was measured on one GPU, by cluster; it stands for the memory.
        deadline_s: limit in seconds; None: there is a budget.
        budget_usd: limit in dollars; None: there is a deadline.
    """

    app: str
    profiled: str
    global_batch: int
    steps: int
    candidates: tuple[Candidate, ...]
    largest: Mapping[str, int]
    deadline_s: float | None = None
    budget_usd: float | None = None

    @property
    def limit(self) -> float:
        """Seconds or dollars."""
        limit = self.budget_usd if self.deadline_s is None else self.deadline_s
        assert limit is not None
        return limit

    def bound_and_aim(self, step_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what the limit bounds and what is made least, if steps take so long.

        Args:
            step_s: seconds of a step on each candidate, [candidates].
        """
        time_s = SETUP_S + self.steps * step_s
        cost = time_s / 3600 * np.array([each.usd_h for each in self.candidates])
        return (time_s, cost) if self.deadline_s is not None else (cost, time_s)

    def by_forecast(self, step_s: np.ndarray, *, margin: float = 1.0) -> int:
        """Return the best candidate if steps take so long; if none meets the limit, the nearest.

        Args:
            step_s: seconds of a step on each candidate, [candidates].
            margin: factor on these seconds with which the limit has to be met.
        """
        bound, aim = self.bound_and_aim(step_s)
        meets = self.bound_and_aim(margin * step_s)[0] <= self.limit
        return int(np.argmin(np.where(meets, aim, np.inf) if meets.any() else bound))


class Truth:
    """Step times of equal machines: measured, interpolated between neighbours.

    Batches lie a factor of 1.4 apart. Of some numbers of machines (5, 7, 9 to 11 and 13 to 15 on
    AWS, 3 on Azure) there are no measurements, so their neighbours count there, too. All
    interpolation is linear in logarithms.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        found: dict[tuple[str, str, int], dict[int, list[tuple[int, float]]]] = defaultdict(
            lambda: defaultdict(list)
        )
        for row in rows:
            if len(set(row.placement)) == 1:
                fleet = row.app, row.cluster, row.placement[0]
                found[fleet][len(row.placement)].append((row.batch, row.step_s))
        self._tables = {
            fleet: {num: np.log(sorted(found[fleet][num])) for num in sorted(found[fleet])}
            for fleet in sorted(found)
        }
        self.apps = sorted({app for app, _, _ in self._tables})

    def batches(self, app: str, cluster: str) -> tuple[int, int]:
        """Return the smallest and the largest batch that were measured on one GPU."""
        sizes = np.exp(self._tables[app, cluster, 1][1][:, 0])
        return round(sizes[0]), round(sizes[-1])

    def global_batches(self, app: str) -> tuple[float, float]:
        """Return the range in which all fleets that hold a global batch were measured.

        It begins with eight devices of the smallest batch, and ends with 16 of the largest.
        """
        ends = [16.0 * min(self.batches(app, cluster)[1] for cluster in CLUSTERS)]
        for (each, cluster, per_node), table in self._tables.items():
            if each == app:
                largest = self.batches(app, cluster)[1]
                sizes = {num: round(np.exp(rows[-1, 0])) for num, rows in table.items()}
                ends += [per_node * n * size for n, size in sizes.items() if size < largest]
        return 8.0 * self.batches(app, "aws")[0], min(ends)

    def candidates(self, app: str, global_batch: int) -> Iterator[Candidate]:
        """Yield the fleets whose devices get a batch that was measured."""
        for (each, cluster, per_node), table in self._tables.items():
            smallest, largest = self.batches(app, cluster)
            for nodes in range(1, max(table) + 1):
                batch = -(-global_batch // (per_node * nodes))
                if each == app and smallest <= batch <= largest:
                    yield Candidate(
                        cluster=cluster,
                        per_node=per_node,
                        nodes=nodes,
                        batch=batch,
                        step_s=math.exp(_between(table, nodes, math.log(batch))),
                    )


def _between(table: Mapping[int, np.ndarray], nodes: int, log_batch: float) -> float:
    """Return the logarithm of a step's seconds."""
    few = max(num for num in table if num <= nodes)
    many = min(num for num in table if num >= nodes)
    ends = [np.interp(log_batch, *table[num].T) for num in (few, many)]
    share = 0.0 if few == many else math.log(nodes / few) / math.log(many / few)
    return float((1 - share) * ends[0] + share * ends[1])


def drawn(truth: Truth, *, num: int, seed: int) -> list[Job]:
    """Return jobs: applications, clusters of the profile, deadlines and budgets go in turn.

    A limit lies between 1.1 times the least that a candidate needs and what the best candidate
    without any limit needs; beyond that, the answer would be the same for all limits.
    """
    rng = np.random.default_rng(seed)
    out: list[Job] = []
    while len(out) < num:
        turn, at = divmod(len(out), len(truth.apps))
        app = truth.apps[at]
        batch = round(math.exp(rng.uniform(*np.log(truth.global_batches(app)))))
        job = Job(
            app=app,
            profiled=list(CLUSTERS)[turn % len(CLUSTERS)],
            global_batch=batch,
            steps=round(10 ** rng.uniform(4, 6)),
            candidates=tuple(truth.candidates(app, batch)),
            largest={each: truth.batches(app, each)[1] for each in CLUSTERS},
            deadline_s=None if turn // len(CLUSTERS) % 2 else 1.0,
            budget_usd=1.0 if turn // len(CLUSTERS) % 2 else None,
        )
        bound, aim = job.bound_and_aim(true_s(job))
        tightest, loosest = _HARDEST * bound.min(), bound[np.argmin(aim)]
        if tightest < loosest:
            limit = math.exp(rng.uniform(*np.log([tightest, loosest])))
            out.append(
                replace(job, budget_usd=limit)
                if job.deadline_s is None
                else replace(job, deadline_s=limit)
            )
    return out


def true_s(job: Job) -> np.ndarray:
    """Return the true seconds of a step on each candidate."""
    return np.array([each.step_s for each in job.candidates])
