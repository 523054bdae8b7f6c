"""Choices of ``plan_fleet`` for drawn deadlines and budgets, judged by measured step times.

The planner sees profiles of single GPUs and what a catalogue says of the clusters, and it chooses
among fleets whose step times are known (``jobs.py``). Other ways to choose are in
``choices_peers.py``.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from bench.cloud.clusters import CLUSTERS, Row, profile_of
from bench.cloud.devices import sheet
from bench.cloud.jobs import SETUP_S, Job, true_s
from bench.cloud.prediction import USD_H
from bench.cloud.probed_clusters import Runs, rows_of, timings_of
from thrifty.cloud import (
    ACCELERATORS,
    Fleet,
    FleetOptions,
    HardwareEstimates,
    Interval,
    NetworkPriors,
    Offer,
    StepTiming,
    Workload,
    calibrate,
    plan_fleet,
)
from thrifty.core import CloudError
from thrifty.perf import StepProfile


GPUS = {"aws": "T4", "azure": "V100-32GB", "dgx": "A100", "rtx": "RTX2080Ti"}
"""Type of GPU of each cluster."""

RUN_S = SETUP_S + 60.0
"""Seconds for which a fleet is rented to try it."""

_GOOD = 0.05
_GIB = 2**30


def _error_of(profiled: str, accelerator: str) -> float:
    """Return the error factor of ``HardwareEstimates`` for the ratio of two devices' speeds."""
    offer = Offer(cloud="", region="", instance_type="", accelerator=accelerator, price_usd_h=1.0)
    known = HardwareEstimates(profiled=profiled).compute(offer)
    return known.high / known.median


_PAIR_ERROR = _error_of("V100", "T4")
_SHEET_ERROR = _error_of("V100", "A100")
"""Error factors for speeds that it does not know or must not know."""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A chosen candidate.

    Attributes:
        place: which candidate.
        refused: whether the planner said that nothing meets the limit for certain.
        tried: candidates that were rented for some minutes before.
    """

    place: int
    refused: bool = False
    tried: tuple[int, ...] = ()


Chooser = Callable[[Job], Choice]


@dataclass(frozen=True, kw_only=True)
class View:
    """What the planner knows of some clusters.

    Attributes:
        clusters: clusters that are offered.
        profile: profile of a step on one GPU.
        estimates: estimates of devices and networks.
    """

    clusters: tuple[str, ...]
    profile: StepProfile
    estimates: HardwareEstimates


Views = Callable[[Job], Sequence[View]]
"""What is known for a job; each view is planned by itself, and the best of all plans counts."""


def planner(views: Views, *, conservative: bool = True) -> Chooser:
    """Return the choices of ``plan_fleet``.

    Where no fleet meets the limit at the upper end of its forecast, the fleet that meets it by the
    median is taken, and otherwise the one that misses it by the least.
    """

    def choose(job: Job) -> Choice:
        known = views(job)
        for careful in (True, False) if conservative else (False,):
            found = [fleet for view in known for fleet in _planned(job, view, careful)]
            if found:
                best = min(found, key=lambda each: _rank(job, each))
                return Choice(place=_place(job, best), refused=conservative and not careful)
        nearest = min(
            (_nearest(job, view) for view in known if _offers(job, view)),
            key=lambda each: (each.time_s if job.deadline_s else each.cost_usd).median,
        )
        return Choice(place=_place(job, nearest), refused=True)

    return choose


_NOISE = 0.03
"""Error of a step that was timed for some minutes, as a logarithm."""


def trying(views: Views, *, num: int, seed: int = 0) -> Chooser:
    """Return the choices of ``plan_fleet`` after short runs on the fleets that it would choose.

    The best fleet by the medians is rented for some minutes, its steps go to ``calibrate``, and so
    on until the best fleet is one that was tried. Then the fleet is chosen that meets the limit at
    the upper end; if there is none, the one that meets it by the median.

    Args:
        views: what is known before.
        num: most fleets to try.
        seed: seed of the errors of the short runs.
    """
    rng = np.random.default_rng(seed)

    def choose(job: Job) -> Choice:
        known = list(views(job))
        plans: dict[tuple[int, bool], list[Fleet]] = {}

        def best(conservative: bool) -> tuple[int, Fleet] | None:
            for at, view in enumerate(known):
                if (at, conservative) not in plans:
                    plans[at, conservative] = _planned(job, view, conservative)
            some = [(at, fleet) for at in range(len(known)) for fleet in plans[at, conservative]]
            return min(some, key=lambda each: _rank(job, each[1]), default=None)

        tried: set[int] = set()
        while len(tried) < num and (found := best(False)) is not None:
            at, fleet = found
            if (place := _place(job, fleet)) in tried:
                break
            tried.add(place)
            step_s = true_s(job)[place] * math.exp(rng.normal(0, _NOISE))
            known[at] = _after_run(known[at], fleet, step_s)
            plans = {key: each for key, each in plans.items() if key[0] != at}
        for careful in (True, False):
            if (found := best(careful)) is not None:
                return Choice(
                    place=_place(job, found[1]), refused=not careful, tried=tuple(sorted(tried))
                )
        nearest = min(
            (_nearest(job, view) for view in known if _offers(job, view)),
            key=lambda each: (each.time_s if job.deadline_s else each.cost_usd).median,
        )
        return Choice(place=_place(job, nearest), refused=True, tried=tuple(sorted(tried)))

    return choose


def _after_run(view: View, fleet: Fleet, step_s: float) -> View:
    """Return what is known after a short run on a fleet."""
    (rented,) = fleet.machines
    timing = StepTiming(offer=rented.offer, num=rented.num, batch=rented.batch, seconds=step_s)
    found = calibrate(view.profile, [timing], estimates=view.estimates)
    return replace(view, estimates=_on_all_sizes(found, rented.offer))


def _on_all_sizes(found: HardwareEstimates, offer: Offer) -> HardwareEstimates:
    """Return estimates for all parts of a machine; each is a type of machine of its own here."""
    seen = found.observed[offer.instance_type]
    types = {_type_of(offer.region, num): seen for num in range(1, 17)}
    return replace(found, observed=types)


def _planned(job: Job, view: View, conservative: bool) -> list[Fleet]:
    """Return the best fleet of a view, if one meets the limit."""
    offers = _offers(job, view)
    if not offers:
        return []
    try:
        plan = plan_fleet(
            _workload(job, view),
            offers,
            FleetOptions(
                deadline_s=job.deadline_s,
                budget_usd=job.budget_usd,
                conservative=conservative,
                **_options(job, view),
            ),
        )
    except CloudError:
        return []
    assert plan.best is not None
    return [plan.best]


def _nearest(job: Job, view: View) -> Fleet:
    """Return the fastest fleet for a deadline, and the cheapest for a budget."""
    plan = plan_fleet(_workload(job, view), _offers(job, view), FleetOptions(**_options(job, view)))
    return plan.front[0 if job.deadline_s else -1]


def _rank(job: Job, fleet: Fleet) -> tuple[float, float]:
    time_s, cost_usd = fleet.time_s.median, fleet.cost_usd.median
    return (cost_usd, time_s) if job.deadline_s else (time_s, cost_usd)


def _workload(job: Job, view: View) -> Workload:
    return Workload(
        profile=view.profile,
        steps=job.steps,
        global_batch=job.global_batch,
        setup_s=SETUP_S,
        accumulation="never",  # micro-batches were never measured
    )


def _options(job: Job, view: View) -> dict[str, Any]:
    most: dict[str, int] = defaultdict(int)
    for each in job.candidates:
        name = _type_of(each.cluster, each.per_node)
        most[name] = max(most[name], each.nodes)
    return {"estimates": view.estimates, "quotas": dict(most), "max_nodes": max(most.values())}


def _offers(job: Job, view: View) -> list[Offer]:
    """Return the machines of the candidates.

    Memory was not measured: a machine's is just enough for its largest batch. Profiles of
    ``clusters.py`` have one byte a sample.
    """
    out = []
    usable = view.estimates.usable_memory
    for cluster, per_node in sorted({(each.cluster, each.per_node) for each in job.candidates}):
        if cluster in view.clusters:
            known = CLUSTERS[cluster]
            needed = float(view.profile.high_peak_at(job.largest[cluster]))
            out.append(
                Offer(
                    cloud="measured",
                    region=cluster,
                    instance_type=_type_of(cluster, per_node),
                    accelerator=GPUS[cluster],
                    accelerator_count=per_node,
                    accelerator_memory_gib=(needed + 0.5) / usable / _GIB,
                    price_usd_h=per_node * USD_H[cluster],
                    baseline_gbps=known.gbps,
                    peak_gbps=known.gbps,
                    fabric=known.fabric,
                )
            )
    return out


def _place(job: Job, fleet: Fleet) -> int:
    """Return which candidate a fleet is."""
    (rented,) = fleet.machines
    wanted = rented.offer.region, rented.offer.accelerator_count, rented.num, rented.batch
    for place, each in enumerate(job.candidates):
        if (each.cluster, each.per_node, each.nodes, each.batch) == wanted:
            return place
    raise LookupError(f"the plan's fleet is none of the measured ones: {fleet}, {wanted}")


def _type_of(cluster: str, per_node: int) -> str:
    return f"{CLUSTERS[cluster].instance_type}, {per_node} GPUs"


# -- what the planner knows --------------------------------------------------------------------


class Knowledge:
    """What the planner may know, from one GPU's profile to measurements of each cluster.

    Args:
        rows: measurements of ``clusters.py``.
        priors: for each cluster, network priors that were fitted without it.
        speeds: speeds of GPUs relative to a V100's that were fitted without these clusters; a GPU
            that is not among them has its data sheet.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        *,
        priors: Mapping[str, NetworkPriors],
        speeds: Mapping[str, float],
    ) -> None:
        self._rows, self._priors, self._speeds = rows, priors, speeds
        self._calibrated = cache(self._after_probes)
        self._profiles = {
            (app, cluster): profile_of(rows, cluster=cluster, app=app)
            for app in sorted({row.app for row in rows})
            for cluster in CLUSTERS
        }

    def shipped(self, job: Job) -> list[View]:
        """Return the profile of one GPU, and estimates as shipped, which have seen the clusters.

        The RTX 2080 Ti is not among thrifty's accelerators, so its data sheet is added.
        """
        here = GPUS[job.profiled]
        v100 = ACCELERATORS["V100"].speed
        speeds = {name: each.speed / v100 for name, each in ACCELERATORS.items()}
        added = {
            gpu: _factor(speeds.get(here) or sheet(here), speeds.get(gpu) or sheet(gpu))
            for gpu in GPUS.values()
            if gpu != here and {gpu, here} - ACCELERATORS.keys()
        }
        estimates = HardwareEstimates(profiled=here, measured_compute=added)
        return [
            View(
                clusters=tuple(CLUSTERS),
                profile=self._profiles[job.app, job.profiled],
                estimates=estimates,
            )
        ]

    def left_out(self, job: Job) -> list[View]:
        """Return the profile of one GPU, and estimates that have not seen the cluster."""
        here = GPUS[job.profiled]
        known = {gpu: self._speeds.get(gpu, sheet(gpu)) for gpu in GPUS.values()}
        factors = {
            gpu: _factor(
                known[here],
                known[gpu],
                error=_PAIR_ERROR if {here, gpu} <= self._speeds.keys() else _SHEET_ERROR,
            )
            for gpu in GPUS.values()
            if gpu != here
        }
        return [
            View(
                clusters=(cluster,),
                profile=self._profiles[job.app, job.profiled],
                estimates=HardwareEstimates(
                    profiled=here, measured_compute=factors, networks=self._priors[cluster]
                ),
            )
            for cluster in CLUSTERS
        ]

    def each_gpu(self, job: Job) -> list[View]:
        """Return a profile of each type of GPU, and network priors that miss the cluster."""
        return [
            View(
                clusters=(cluster,),
                profile=self._profiles[job.app, cluster],
                estimates=HardwareEstimates(profiled=GPUS[cluster], networks=self._priors[cluster]),
            )
            for cluster in CLUSTERS
        ]

    def calibrated(self, job: Job) -> list[View]:
        """Return the same after two short runs of the application on each cluster.

        One is on a machine, the other on four (or on all); ``calibrate`` learns from their steps.
        """
        return [self._calibrated(job.app, cluster) for cluster in CLUSTERS]

    def _after_probes(self, app: str, cluster: str) -> View:
        profile = self._profiles[app, cluster]
        known = HardwareEstimates(profiled=GPUS[cluster], networks=self._priors[cluster])
        mine = rows_of(self._rows, (cluster, app))
        timings = [
            replace(each, offer=replace(each.offer, accelerator=GPUS[cluster]))
            for each in timings_of(Runs().of(mine))
        ]
        found = calibrate(profile, timings, estimates=known)
        return View(
            clusters=(cluster,), profile=profile, estimates=_on_all_sizes(found, timings[0].offer)
        )


def _factor(here: float, there: float, *, error: float = _SHEET_ERROR) -> Interval:
    return Interval(median=here / there, low=here / there / error, high=here / there * error)


# -- regret ------------------------------------------------------------------------------------


def judged(jobs: Sequence[Job], choose: Chooser) -> list[dict[str, Any]]:
    """Return the regret of each choice, and whether it misses its limit.

    Regret compares a choice with the best candidate that truly meets the limit: dollars with a
    deadline, seconds with a budget. A choice that misses its limit for less counts as no regret.
    """
    out = []
    for job in jobs:
        choice = choose(job)
        bound, aim = job.bound_and_aim(true_s(job))
        best = aim[bound <= job.limit].min()
        out.append({
            "app": job.app,
            "profiled": job.profiled,
            "for": "deadline" if job.deadline_s is not None else "budget",
            "cluster": job.candidates[choice.place].cluster,
            "regret": max(0.0, float(aim[choice.place] / best) - 1),
            "missed": bool(bound[choice.place] > job.limit),
            "refused": choice.refused,
            "tried": len(choice.tried),
            **_with_runs(job, choice, best=best),
        })
    return out


def _with_runs(job: Job, choice: Choice, *, best: float) -> dict[str, Any]:
    """Return regret and misses if the short runs are paid for, in dollars and in time."""
    seconds = len(choice.tried) * RUN_S
    usd = RUN_S / 3600 * sum(job.candidates[place].usd_h for place in choice.tried)
    bound, aim = job.bound_and_aim(true_s(job))
    more, besides = (seconds, usd) if job.deadline_s is not None else (usd, seconds)
    return {
        "regret, runs paid": max(0.0, float((aim[choice.place] + besides) / best) - 1),
        "missed, runs paid": bool(bound[choice.place] + more > job.limit),
    }


def summary(rows: Sequence[Mapping[str, Any]], *, seed: int = 0) -> dict[str, Any]:
    """Return the figures of all choices; means have a 90 % interval by bootstrap over jobs."""
    rng = np.random.default_rng(seed)
    regret = 100 * np.array([row["regret"] for row in rows])
    out: dict[str, Any] = {
        "jobs": len(rows),
        "regret, median %": float(np.median(regret)),
        "regret, mean %": float(regret.mean()),
        "... 90 %": _interval(regret, rng),
    }
    for what in ("deadline", "budget"):
        mine = [row for row in rows if row["for"] == what]
        missed = 100.0 * np.array([row["missed"] for row in mine])
        out[f"{what}s missed %"] = float(missed.mean()) if mine else 0.0
        out[f"{what}s, 90 %"] = _interval(missed, rng)
    good = [row["regret"] <= _GOOD and not row["missed"] for row in rows]
    out["met, within 5 % of the best, %"] = 100 * float(np.mean(good))
    if any(row["tried"] for row in rows):
        out["fleets tried"] = float(np.mean([row["tried"] for row in rows]))
        out["regret %, runs paid"] = 100 * float(
            np.mean([row["regret, runs paid"] for row in rows])
        )
        out["deadlines missed %, runs paid"] = 100 * float(
            np.mean([row["missed, runs paid"] for row in rows if row["for"] == "deadline"])
        )
    out["refused %"] = 100 * float(np.mean([row["refused"] for row in rows]))
    out["missed, not refused %"] = 100 * float(
        np.mean([row["missed"] and not row["refused"] for row in rows])
    )
    return out


def _interval(values: np.ndarray, rng: np.random.Generator, *, num: int = 1000) -> str:
    if not values.size:
        return ""
    means = rng.choice(values, (num, values.size)).mean(axis=1)
    low, high = np.quantile(means, [0.05, 0.95])
    return f"{low:.1f} to {high:.1f}"
