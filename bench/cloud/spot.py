"""Jobs replayed on spot machines of 2019 and 2020.

The data are prices of AWS, and logs of machines of AWS and GCP.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from bench.cloud.spot_replay import ByExpectedCost, Cheapest, Replayed, SpotJob, SpotPlace, replay
from bench.common.harness import data_file, table
from thrifty.cloud._market import ObservedLifetime, PriceSeries, SpotMarket
from thrifty.cloud._offer import Offer


HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
SEED = 8
LENGTHS_H = (2, 8, 24)
DEADLINE = 1.5
SAVE_S, RESTART_S = 30.0, 300.0
LEARNED_DAYS, LEARNED_H = 14, 12
UNKNOWN_PER_H = 0.1
HORIZON = 20

ASSUMPTIONS = (
    (
        f"a job: one machine, {SAVE_S:g} s to save, {RESTART_S:g} s from renting to working, "
        f"done within {DEADLINE:g} times its work; an on-demand machine can always be had"
    ),
    (
        "checkpoints can be read from every zone of the job's region (GCP, whose logs have "
        "one zone in each region: from all of them), moving costs nothing but the restart"
    ),
    "costs are billed by the second, from renting on; nothing is refunded",
    (
        f"the first {LEARNED_DAYS} days of prices and {LEARNED_H} h of a log are only "
        f"learned from; prices and lifetimes after a job's start are unknown to it"
    ),
    (
        "no price of AWS was ever above that of on demand, so bidding that much, nobody was "
        "outbid: evictions are not in the prices; world 1 has none, world 2 takes them from "
        "logs"
    ),
    (
        f"world 2: each zone of a job follows one log, drawn among those of as many GPUs (4 "
        f"and 16: as 8) of the same kind, from both clouds; its first half is known, its "
        f"second half is what comes, from a moment drawn, over and over; who is not done "
        f"after {HORIZON} times the work goes on on demand"
    ),
    (
        "logs looked every 10 to 16 minutes: a machine is taken to go half way between two "
        "looks, and there is none until the next one is had"
    ),
    (
        "a job that starts while the log's machine is up gets one that goes when that goes; "
        "a machine still alive at the log's end stays; a slot that is empty then stays "
        "empty, and whoever waits for it goes on on demand"
    ),
    (
        "the GCP log of 2020-03-04 is cut after 71.8 h: within six minutes all its machines "
        "go, and all requests fail at once from then on"
    ),
    (
        "prices of GCP: GPUs alone, on demand and preemptible: V100 2.48 and 0.74, P100 1.46 "
        "and 0.43, K80 0.45 and 0.135 USD/h, the lists of 2020 as remembered; only their "
        "ratio matters"
    ),
    (
        f"a machine type of which no machine was seen yet is thought to be taken away "
        f"{UNKNOWN_PER_H:g} times an hour"
    ),
    (
        "starts overlap, and logs are 2 to 3 days of 7 zones: differences of a few per cent "
        "mean little"
    ),
)  # fmt: skip

P2, P3 = 0.90, 3.06
ON_DEMAND = {
    "p2": {
        "us-east-1": P2, "us-east-2": P2, "us-west-2": P2, "eu-west-1": 0.972, "eu-central-1": 1.326
    },
    "p3": {
        "us-east-1": P3, "us-east-2": P3, "us-west-2": P3, "eu-west-1": 3.305, "eu-west-2": 3.589,
        "eu-central-1": 3.823
    },
}  # fmt: skip
"""On-demand price of the smallest machine; in the data, a zone's floor is 30 % of it."""

SIZES = {
    "p2.xlarge": 1,
    "p2.8xlarge": 8,
    "p2.16xlarge": 16,
    "p3.2xlarge": 1,
    "p3.8xlarge": 4,
    "p3.16xlarge": 8,
}
LOGGED = {
    "1xk80": "p2.xlarge", "8xk80": "p2.8xlarge", "1xv100": "p3.2xlarge", "8xv100": "p3.16xlarge"
}  # fmt: skip
KIND = {"p2": "k80", "p3": "v100"}
GCP_USD_H = {"v100": (2.48, 0.74), "p100": (1.46, 0.43), "k80": (0.45, 0.135)}

PRICES = "aws_spot_2020.csv"
AWS_LOG = "aws_availability_persistent_2020-03-15.out"
GCP_LOGS = {
    "gcp_availability_persistent_2020-03-01.out": math.inf,
    "gcp_availability_persistent_2020-03-04.out": 71.8,
}


def path(name: str) -> Path:
    return data_file("systems", "prices", name)


# -- the logs --------------------------------------------------------------------------------

_CREATED = re.compile(r"Created instance (\S+) with (\d+) GPU\(s\) of type (\S+) in zone (\S+)")
_LOOKED = re.compile(r"Instance (\S+) (not )?running in zone")


@dataclass(frozen=True, kw_only=True)
class Log:
    """Lifetimes by machine type and zone, and the period that was watched."""

    lifetimes: dict[tuple[str, str], list[ObservedLifetime]]
    begin_s: float
    end_s: float


def read_log(file: Path, *, hours: float = math.inf) -> Log:
    """Read the first hours of a log."""
    lines = [(_moment(line), line) for line in file.read_text().splitlines() if line]
    begin = lines[0][0]
    lines = [each for each in lines if each[0] <= begin + hours * HOUR_S]
    end = lines[-1][0]
    ended = sorted(
        _lifetimes(lines, end), key=lambda life: (life.instance_type, life.zone, life.begin_s)
    )  # fmt: skip
    slots = groupby(ended, key=lambda life: (life.instance_type, life.zone))
    return Log(lifetimes={slot: list(of_it) for slot, of_it in slots}, begin_s=begin, end_s=end)


def _lifetimes(lines: Iterable[tuple[float, str]], end: float) -> Iterator[ObservedLifetime]:
    alive: dict[str, tuple[str, str, float]] = {}
    last_seen: dict[str, float] = {}
    for moment, line in lines:
        if created := _CREATED.search(line):
            name, count, kind, zone = created.groups()
            alive[name] = (f"{count}x{kind.removeprefix('nvidia-tesla-')}", zone, moment)
            last_seen[name] = moment
        elif looked := _LOOKED.search(line):
            name = looked[1]
            if name in alive and looked[2]:
                kind, zone, begin = alive.pop(name)
                gone = (last_seen[name] + moment) / 2
                yield ObservedLifetime(
                    instance_type=kind, zone=zone, begin_s=begin, end_s=gone, evicted=True
                )
            last_seen[name] = moment
    for kind, zone, begin in alive.values():
        yield ObservedLifetime(
            instance_type=kind, zone=zone, begin_s=begin, end_s=end, evicted=False
        )


def _moment(line: str) -> float:
    return datetime.fromisoformat(line[1 : line.index("]")]).timestamp()


# -- worlds ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """One job, the places where it can run, and what is known at its start."""

    job: SpotJob
    places: list[SpotPlace]
    market: SpotMarket


class World(Protocol):
    name: str

    def draw(self, rng: np.random.Generator, work_s: float) -> Case: ...


def _job(start_s: float, work_s: float, on_demand_usd_h: float) -> SpotJob:
    return SpotJob(
        start_s=start_s,
        work_s=work_s,
        save_s=SAVE_S,
        restart_s=RESTART_S,
        on_demand_usd_h=on_demand_usd_h,
        deadline_s=start_s + DEADLINE * work_s,
    )


def _on_demand(instance_type: str, region: str) -> float:
    return SIZES[instance_type] * ON_DEMAND[instance_type[:2]][region]


def _offer(cloud: str, instance_type: str, zone: str, usd_h: float) -> Offer:
    region = zone[:-1] if cloud == "aws" else zone[:-2]
    return Offer(
        cloud=cloud, region=region, zone=zone, instance_type=instance_type, price_usd_h=usd_h
    )  # fmt: skip


class Priced:
    """Prices of 93 days, with machines that come and go as in one of the logs, or never."""

    def __init__(self, market: SpotMarket, logs: Sequence[Log], *, name: str) -> None:
        self.name, self._market = name, market
        self._logs = logs
        self._end = max(prices.times_s[-1] for prices in market.prices.values())
        offered: dict[tuple[str, str], list[str]] = {}
        for (kind, zone), prices in sorted(market.prices.items()):
            # AWS repeats each price daily; one that it stopped repeating is not offered.
            if prices.times_s[-1] > self._end - 2 * DAY_S:
                offered.setdefault((kind, zone[:-1]), []).append(zone)
        self._offered = list(offered.items())

    def draw(self, rng: np.random.Generator, work_s: float) -> Case:
        (kind, region), zones = self._offered[int(rng.integers(len(self._offered)))]
        usd_h = _on_demand(kind, region)
        first = max(self._market.prices[kind, zone].times_s[0] for zone in zones)
        start = rng.uniform(first + LEARNED_DAYS * DAY_S, self._end - DEADLINE * work_s)
        places, lifetimes = [], []
        for zone in zones:
            up, known = self._zone(rng, kind, zone, start, work_s)
            offer = _offer("aws", kind, zone, usd_h)
            places.append(SpotPlace(offer=offer, prices=self._market.prices[kind, zone], up=up))
            lifetimes += known
        market = SpotMarket.from_lifetimes(lifetimes)
        market = replace(market, unknown_evictions_per_h=UNKNOWN_PER_H, until_s=start)
        return Case(job=_job(start, work_s, usd_h), places=places, market=market)

    def _zone(
        self, rng: np.random.Generator, kind: str, zone: str, start: float, work_s: float
    ) -> tuple[tuple[tuple[float, float], ...], list[ObservedLifetime]]:
        if not self._logs:
            return ((0.0, math.inf),), []
        like = f"{1 if SIZES[kind] == 1 else 8}x{KIND[kind[:2]]}"
        slots = [(log, slot) for log in self._logs for slot in log.lifetimes if slot[0] == like]
        log, slot = slots[int(rng.integers(len(slots)))]
        half = (log.begin_s + log.end_s) / 2
        known = [
            ObservedLifetime(
                instance_type=kind,
                zone=zone,
                begin_s=life.begin_s - half + start,
                end_s=min(life.end_s, half) - half + start,
                evicted=life.evicted and life.end_s < half,
            )
            for life in log.lifetimes[slot]
            if life.begin_s < half
        ]
        later = [
            (max(life.begin_s, half) - half, life.end_s - half)
            for life in log.lifetimes[slot] if life.end_s > half
        ]  # fmt: skip
        length = log.end_s - half
        return _repeated(
            later, length, start - rng.uniform(0, length), start + HORIZON * work_s
        ), known  # fmt: skip


def _repeated(
    stretches: Sequence[tuple[float, float]], length: float, begin: float, end: float
) -> tuple[tuple[float, float], ...]:
    """Repeat the stretches of a log until the end, and merge those that touch."""
    out: list[tuple[float, float]] = []
    while begin < end:
        for first, last in stretches:
            if out and begin + first <= out[-1][1] + 1e-3:
                out[-1] = (out[-1][0], begin + last)
            else:
                out.append((begin + first, begin + last))
        begin += length
    return tuple(out)


class Logged:
    """Machines as in a log, at its own time."""

    def __init__(self, logs: Sequence[Log], market: SpotMarket | None, *, name: str) -> None:
        self.name, self._prices = name, market
        self._kinds = [
            (log, kind) for log in logs for kind in sorted({slot[0] for slot in log.lifetimes})
        ]

    def draw(self, rng: np.random.Generator, work_s: float) -> Case:
        log, kind = self._kinds[int(rng.integers(len(self._kinds)))]
        start = rng.uniform(log.begin_s + LEARNED_H * HOUR_S, log.end_s - DEADLINE * work_s)
        places = [
            self._place(kind, zone, lifetimes)
            for (name, zone), lifetimes in log.lifetimes.items() if name == kind
        ]  # fmt: skip
        market = SpotMarket.from_lifetimes(
            life for lifetimes in log.lifetimes.values() for life in lifetimes
        )
        market = replace(market, unknown_evictions_per_h=UNKNOWN_PER_H, until_s=start)
        return Case(
            job=_job(start, work_s, places[0].offer.price_usd_h), places=places, market=market
        )

    def _place(self, kind: str, zone: str, lifetimes: Sequence[ObservedLifetime]) -> SpotPlace:
        if self._prices is None:
            count, gpu = kind.split("x")
            on_demand, spot = (int(count) * usd_h for usd_h in GCP_USD_H[gpu])
            offer = _offer("gcp", kind, zone, on_demand)
            prices = PriceSeries(times_s=(0.0,), usd_h=(spot,))
        else:
            offer = _offer("aws", kind, zone, _on_demand(LOGGED[kind], zone[:-1]))
            prices = self._prices.prices[LOGGED[kind], zone]
        up = tuple((life.begin_s, life.end_s if life.evicted else math.inf) for life in lifetimes)
        return SpotPlace(offer=offer, prices=prices, up=up)


def worlds() -> list[World]:
    prices = SpotMarket.from_aws_csv(path(PRICES))
    aws = read_log(path(AWS_LOG))
    gcp = [read_log(path(name), hours=hours) for name, hours in GCP_LOGS.items()]
    return [
        Priced(prices, [], name="1 AWS prices, no evictions"),
        Priced(prices, [aws, *gcp], name="2 AWS prices, evictions of the logs"),
        Logged([aws], prices, name="3 AWS log with its days' prices"),
        Logged(gcp, None, name="4 GCP logs, fixed prices"),
    ]


# -- policies --------------------------------------------------------------------------------


def on_demand(case: Case) -> Replayed:
    return replay(replace(case.job, deadline_s=math.inf), [], Cheapest())


def _stays(case: Case, interval_s: float) -> Replayed:
    """Stay for ever in the zone that is cheapest at the start, and ignore the deadline.

    Only zones that have a machine at the start are considered, if there are any.
    """
    start = case.job.start_s
    there = [place for place in case.places if place.closes(start)] or case.places
    place = min(there, key=lambda each: each.prices.at(start))
    return replay(
        replace(case.job, deadline_s=math.inf), [place], Cheapest(interval_s=interval_s)
    )  # fmt: skip


def naive(case: Case) -> Replayed:
    return _stays(case, math.inf)


def hourly(case: Case) -> Replayed:
    return _stays(case, HOUR_S)


def hourly_moving(case: Case) -> Replayed:
    return replay(case.job, case.places, Cheapest(interval_s=HOUR_S))


def planned_without_deadline(case: Case) -> Replayed:
    job = replace(case.job, deadline_s=math.inf)
    return replay(job, case.places, ByExpectedCost(market=case.market))


def planned(case: Case) -> Replayed:
    return replay(case.job, case.places, ByExpectedCost(market=case.market))


POLICIES = {
    "on demand": on_demand,
    "naive: no checkpoints, one zone": naive,
    "hourly checkpoints, one zone": hourly,
    "hourly, cheapest zone, falls back": hourly_moving,
    "thrifty, never falls back": planned_without_deadline,
    "thrifty": planned,
}


# -- figures ---------------------------------------------------------------------------------


def replay_spot(starts: int, quick: bool) -> dict[str, Any]:
    """Replay every policy on the same jobs: ``starts`` of each length in each world."""
    above = _above_on_demand()
    if above:
        raise RuntimeError(f"{above} spot prices are above on demand: say so in ASSUMPTIONS")
    rows = []
    for index, world in enumerate(worlds()):
        for hours in LENGTHS_H[:2] if quick else LENGTHS_H:
            rng = np.random.default_rng([SEED, index, hours])
            cases = [world.draw(rng, hours * HOUR_S) for _ in range(starts)]
            for name, policy in POLICIES.items():
                runs = [(case, policy(case)) for case in cases]
                rows.append({"world": world.name, "work, h": hours, "policy": name, **_row(runs)})
    return {"assumptions": list(ASSUMPTIONS), "starts": starts, "rows": rows}


def _above_on_demand() -> int:
    """Count spot prices that are above the on-demand price."""
    prices = SpotMarket.from_aws_csv(path(PRICES)).prices
    return sum(
        usd_h > _on_demand(kind, zone[:-1]) + 1e-9
        for (kind, zone), series in prices.items()
        for usd_h in series.usd_h
    )


def _row(runs: Sequence[tuple[Case, Replayed]]) -> dict[str, float]:
    whole = [
        (case.job.restart_s + case.job.work_s) * case.job.on_demand_usd_h / HOUR_S
        for case, _ in runs
    ]  # fmt: skip
    cost = np.array([run.cost_usd for _, run in runs]) / whole
    took = np.array([(run.finish_s - case.job.start_s) / case.job.work_s for case, run in runs])
    return {
        "cost / on demand": float(cost.mean()),
        "median": float(np.median(cost)),
        "p95": float(np.percentile(cost, 95)),
        "finish / work": float(took.mean()),
        "finish p95": float(np.percentile(took, 95)),
        "missed, %": 100 * float(np.mean(took > DEADLINE + 1e-6)),
        "evictions": float(np.mean([run.evictions for _, run in runs])),
        "checkpoints": float(np.mean([run.checkpoints for _, run in runs])),
        "on demand at the end, %": 100 * float(np.mean([run.on_demand_s > 0 for _, run in runs])),
    }


def show(figures: dict[str, Any]) -> None:
    """Print the assumptions and the figures."""
    for assumption in figures["assumptions"]:
        print(f"- {assumption}")
    print(f"\n{figures['starts']} starts of each length in each world\n")
    table(figures["rows"])
