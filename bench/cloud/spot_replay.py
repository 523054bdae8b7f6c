"""Replay of one job on spot machines against history, in virtual time."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Protocol

from thrifty.cloud import Offer, PriceSeries, SpotMarket, spot_seconds
from thrifty.core import CloudError


_HOUR_S = 3600.0

_LEAST_S = 60.0
_LEAST_SAVES = 2
"""Limits on checkpoint intervals: 60 s of work, and twice the time to save near the deadline.

Shorter intervals are not worth it. Near the deadline a job saves more often, but saving must not
take more than half as long as work.
"""

_ROUNDING_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotJob:
    """A job to replay, and its deadline.

    Args:
        start_s: moment at which the job is submitted; seconds since 1970, UTC.
        work_s: seconds of work on one machine without evictions.
        save_s: seconds to write a checkpoint.
        restart_s: seconds from renting a machine until work resumes from the last checkpoint.
        on_demand_usd_h: dollars per hour of an on-demand machine, which is always available and
            never evicted.
        deadline_s: moment at which the job must be finished: an on-demand machine takes over while
            it still can. ``inf``: no deadline.

    Raises:
        CloudError: a number is out of range.
    """

    start_s: float
    work_s: float
    save_s: float
    restart_s: float
    on_demand_usd_h: float
    deadline_s: float = math.inf

    def __post_init__(self) -> None:
        numbers = (self.save_s, self.restart_s, self.on_demand_usd_h)
        if not (0 < self.work_s < math.inf and all(0 <= each < math.inf for each in numbers)):
            raise CloudError(
                f"a job has some work, and neither seconds nor prices are negative: {self}"
            )
        if not self.deadline_s >= self.start_s:
            raise CloudError(
                f"the deadline, {self.deadline_s}, is before the start, {self.start_s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPlace:
    """Availability and price of one spot machine type in one place.

    Args:
        offer: offer to rent.
        prices: its price over time.
        up: stretches of time in which a machine is available, ascending; it is evicted at the end
            of each. An end of ``inf``: it is never evicted.

    Raises:
        CloudError: the stretches overlap or do not ascend.
    """

    offer: Offer
    prices: PriceSeries
    up: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        ends = [moment for stretch in self.up for moment in stretch]
        if any(begin >= end for begin, end in self.up) or any(
            after < before for before, after in pairwise(ends)
        ):
            raise CloudError(f"{self.offer}: stretches of time ascend and do not overlap")

    def closes(self, moment: float) -> float | None:
        """Return when a machine that runs at ``moment`` is evicted; None if none is available."""
        index = bisect_right(self.up, moment, key=itemgetter(0)) - 1
        return self.up[index][1] if index >= 0 and moment < self.up[index][1] else None

    def opens(self, moment: float) -> float:
        """Return when a machine is next available after ``moment``; ``inf`` if never."""
        index = bisect_right(self.up, moment, key=itemgetter(0))
        return self.up[index][0] if index < len(self.up) else math.inf


class SpotPolicy(Protocol):
    """Policy that decides where a job continues, whenever it has no machine."""

    def choose(
        self, job: SpotJob, places: Sequence[SpotPlace], *, now_s: float, left_s: float
    ) -> tuple[SpotPlace, float] | None:
        """Return a place and the seconds of work between checkpoints; None: use on demand.

        An interval is a minute or more.

        Args:
            job: job with ``left_s`` seconds of work left.
            places: places with a machine available now; at least one.
            now_s: current moment.
            left_s: remaining seconds of ``job.work_s``.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Cheapest:
    """Policy that uses the place with the lowest current price, with fixed checkpoint intervals.

    Args:
        interval_s: seconds of work between checkpoints; ``inf``: none.
    """

    interval_s: float = math.inf

    def choose(
        self, job: SpotJob, places: Sequence[SpotPlace], *, now_s: float, left_s: float
    ) -> tuple[SpotPlace, float] | None:
        """Return the cheapest place and the fixed interval; see ``SpotPolicy``."""
        return min(places, key=lambda place: place.prices.at(now_s)), self.interval_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ByExpectedCost:
    """Policy that minimises the expected cost of the rest of the job.

    It goes on demand if that is cheapest, and adapts the checkpoint interval to the eviction rate.

    Args:
        market: eviction rates, as known at the start.
    """

    market: SpotMarket

    def choose(
        self, job: SpotJob, places: Sequence[SpotPlace], *, now_s: float, left_s: float
    ) -> tuple[SpotPlace, float] | None:
        """Return the place with the lowest expected cost and its interval; see ``SpotPolicy``."""
        best = None
        least = (job.restart_s + left_s) * job.on_demand_usd_h
        for place in places:
            seconds, interval_s = spot_seconds(
                left_s,
                evictions_per_h=self.market.evictions_per_h(place.offer),
                save_s=job.save_s,
                restart_s=job.restart_s,
            )
            cost = (job.restart_s + seconds) * place.prices.at(now_s)
            if cost < least:
                best, least = (place, interval_s), cost
        return best


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """Result of a replayed job.

    Attributes:
        finish_s: moment at which the job finished.
        cost_usd: dollars for all machines, each from the moment it was rented.
        evictions: number of evictions.
        checkpoints: number of checkpoints written.
        waited_s: seconds without a machine.
        on_demand_s: seconds on an on-demand machine.
    """

    finish_s: float
    cost_usd: float
    evictions: int
    checkpoints: int
    waited_s: float
    on_demand_s: float


def replay(job: SpotJob, places: Sequence[SpotPlace], policy: SpotPolicy) -> Replayed:
    """Run a job in virtual time against history.

    An eviction loses the work since the last checkpoint. While no place has a machine, the job
    waits. If no place ever has one again, it finishes on demand.

    The job also moves to an on-demand machine before it would miss its deadline. Until then, it
    saves so often that an eviction at any moment leaves enough time. So the deadline is met
    whenever an on-demand machine rented at the start would meet it.

    Args:
        job: job to run.
        places: places to run it.
        policy: decides at the start and after each eviction. The deadline is enforced separately.

    >>> prices = PriceSeries(times_s=(0.0,), usd_h=(1.0,))
    >>> offer = Offer(cloud="aws", region="a", instance_type="p2.xlarge", price_usd_h=3.0)
    >>> place = SpotPlace(offer=offer, prices=prices, up=((0.0, 5400.0), (9000.0, 99999.0)))
    >>> job = SpotJob(start_s=0.0, work_s=7200.0, save_s=0.0, restart_s=0.0, on_demand_usd_h=3.0)
    >>> run = replay(job, [place], Cheapest(interval_s=3600.0))
    >>> run.finish_s, run.cost_usd, run.evictions
    (12600.0, 2.5, 1)
    """
    run = _Run(job)
    while run.left_s > 0:
        there = [place for place in places if place.closes(run.now_s) is not None]
        if there:
            chosen = policy.choose(job, there, now_s=run.now_s, left_s=run.left_s)
            if chosen is None or not run.rent(*chosen):
                run.finish_on_demand()
        elif not run.wait(min((place.opens(run.now_s) for place in places), default=math.inf)):
            run.finish_on_demand()
    return run.replayed()


class _Run:
    """State of a running job."""

    def __init__(self, job: SpotJob) -> None:
        self._job = job
        self.now_s = job.start_s
        self.left_s = job.work_s
        self._usd = self._waited_s = self._on_demand_s = 0.0
        self._evictions = self._checkpoints = 0

    def wait(self, until_s: float) -> bool:
        """Wait for a machine.

        Returns:
            False if the deadline does not allow it, or no machine is ever available again.
        """
        job = self._job
        latest = job.deadline_s - job.restart_s - self.left_s
        until = min(until_s, max(latest, self.now_s))
        if until == math.inf:
            return False
        self._waited_s += until - self.now_s
        self.now_s = until
        return until == until_s

    def rent(self, place: SpotPlace, interval_s: float) -> bool:
        """Work at a place until the end or an eviction.

        Returns:
            False if the work stopped because the deadline requires an on-demand machine.
        """
        job, begin = self._job, self.now_s
        ends = place.closes(begin)
        assert ends is not None
        moment = begin + job.restart_s
        piece = self._piece(moment, interval_s)
        if piece is None:
            return False
        while piece:
            last = piece >= self.left_s - _ROUNDING_S
            done = moment + piece + (0.0 if last else job.save_s)
            if done > ends:
                moment = ends
                self._evictions += 1
                break
            moment = done
            self._checkpoints += not last
            self.left_s = 0.0 if last else self.left_s - piece
            piece = self._piece(moment, interval_s)
        self._usd += place.prices.usd(begin, moment)
        self.now_s = moment
        return piece is not None

    def _piece(self, moment: float, interval_s: float) -> float | None:
        """Return the seconds of work until the next checkpoint.

        They are 0 at the end, and None if they would be too few to be worth it before the deadline.
        """
        job = self._job
        piece = min(max(interval_s, _LEAST_S), self.left_s)
        room = job.deadline_s - moment - job.save_s - job.restart_s - self.left_s
        if room >= piece:
            return piece
        return room if room >= max(_LEAST_S, _LEAST_SAVES * job.save_s) else None

    def finish_on_demand(self) -> None:
        """Do the remaining work on demand."""
        seconds = self._job.restart_s + self.left_s
        self._on_demand_s += seconds
        self._usd += seconds * self._job.on_demand_usd_h / _HOUR_S
        self.now_s += seconds
        self.left_s = 0.0

    def replayed(self) -> Replayed:
        """Return the result of the job."""
        return Replayed(
            finish_s=self.now_s,
            cost_usd=self._usd,
            evictions=self._evictions,
            checkpoints=self._checkpoints,
            waited_s=self._waited_s,
            on_demand_s=self._on_demand_s,
        )
