"""All ways to choose, on the same jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from bench.cloud.choices import Choice, Chooser, Knowledge, judged, planner, summary, trying
from bench.cloud.choices_peers import Known, cheapest_listed, skypilot
from bench.cloud.choices_runs import ShortRuns
from bench.cloud.clusters import CLUSTERS, Row, fitted, measured
from bench.cloud.devices import fitted_speeds, steps
from bench.cloud.jobs import Job, Truth, drawn, true_s
from bench.cloud.prediction import RISK
from thrifty.cloud import NetworkPriors


SEED, REHEARSAL_SEED = 2000, 77
"""Seeds of the jobs that are judged, and of those that margins are rehearsed with."""

ONE_PROFILE = "thrifty, one profile"
EACH_GPU = "thrifty, each GPU profiled"
PROBED = "thrifty, two probes"
RUNS = "thrifty, three runs, margin"
TRIED = "thrifty, each GPU profiled, up to 4 choices tried"

MARGINS = (1.0, 1.03, 1.06, 1.1, 1.15, 1.2, 1.3, 1.5)
"""Factors on a forecast step that may be kept free; the smallest that suffices is taken."""

_SEEN = {"V100": "V100-32GB"}
"""Names of GPUs in the tables of pairs that the catalogue spells otherwise."""


def choices(*, quick: bool, num: int = 2000) -> dict[str, Any]:
    """Return the figures of all ways to choose, and of parts of the jobs."""
    rows = measured()
    truth = Truth(rows)
    jobs = drawn(truth, num=80 if quick else num, seed=SEED)
    rehearsal = drawn(truth, num=80 if quick else 600, seed=REHEARSAL_SEED)
    priors = {each: _without(rows, each, quick=quick) for each in CLUSTERS}
    runs = ShortRuns(rows, priors=priors)
    ways, margins = _ways(rows, rehearsal, priors=priors, runs=runs)
    found = {name: judged(jobs, choose) for name, choose in ways.items()}
    return {
        "jobs": len(jobs),
        "candidates": float(np.mean([len(job.candidates) for job in jobs])),
        "margins": margins,
        "table": [{"chooses": name, **summary(each)} for name, each in found.items()],
        "parts": [
            {"chooses": name, **line}
            for name in (ONE_PROFILE, EACH_GPU, TRIED, PROBED, RUNS)
            for line in _parts(found[name])
        ],
    }


def _without(rows: Sequence[Row], cluster: str, *, quick: bool) -> NetworkPriors:
    if quick:
        return NetworkPriors()
    return fitted([row for row in rows if row.cluster != cluster])


def _ways(
    rows: Sequence[Row],
    rehearsal: Sequence[Job],
    *,
    priors: Mapping[str, NetworkPriors],
    runs: ShortRuns,
) -> tuple[dict[str, Chooser], dict[str, Mapping[str, float]]]:
    """Return all ways by name, and the margins of those that have one.

    Thrifty's estimates have not seen the clusters unless the name says so.
    """
    speeds = fitted_speeds(steps(sia=False))
    known = Knowledge(
        rows, priors=priors, speeds={_SEEN.get(gpu, gpu): speed for gpu, speed in speeds.items()}
    )
    learned = Known(rows)
    ways: dict[str, Chooser] = {
        ONE_PROFILE: planner(known.left_out),
        f"{ONE_PROFILE}, as shipped": planner(known.shipped),
        f"{ONE_PROFILE}, by medians": planner(known.left_out, conservative=False),
        EACH_GPU: planner(known.each_gpu),
        f"{EACH_GPU}, by medians": planner(known.each_gpu, conservative=False),
        TRIED.replace("4", "2"): trying(known.each_gpu, num=2),
        TRIED: trying(known.each_gpu, num=4),
        PROBED: planner(known.calibrated),
        f"{PROBED}, by medians": planner(known.calibrated, conservative=False),
        "thrifty, three runs, by medians": planner(runs.views(1.0), conservative=False),
        "cheapest listed, and SkyPilot by default": cheapest_listed,
        "SkyPilot, times from data sheets": skypilot,
        "data sheets, one profile": learned.data_sheets,
        "boosting, one profile": learned.boosting(each_gpu=False),
        "boosting, each GPU profiled": learned.boosting(each_gpu=True),
        "Ernest, three runs": learned.ernest(),
        "the truth, 5 % off": nearly_true(0.05),
    }
    cautious: dict[str, Callable[[float], Chooser]] = {
        RUNS: lambda margin: planner(runs.views(margin)),
        "Ernest, three runs, margin": learned.ernest,
        "the truth, 5 % off, margin": lambda margin: nearly_true(0.05, margin=margin),
    }
    margins: dict[str, Mapping[str, float]] = {}
    for name, make in cautious.items():
        margins[name] = rehearsed(make, rehearsal, risk=RISK)
        ways[name] = _with_margins(make, margins[name])
    return ways, margins


def rehearsed(
    make: Callable[[float], Chooser], jobs: Sequence[Job], *, risk: float
) -> dict[str, float]:
    """Return each application's margin: the least that suffices for the other applications.

    Args:
        make: way to choose with a margin.
        jobs: jobs to rehearse with; none of them is judged later.
        risk: share of their deadlines, and of their budgets, that may be missed.
    """
    found = {each: judged(jobs, make(each)) for each in MARGINS}

    def missed(margin: float, app: str) -> float:
        others = [row for row in found[margin] if row["app"] != app]
        return max(
            float(np.mean([row["missed"] for row in others if row["for"] == what]))
            for what in ("deadline", "budget")
        )

    return {
        app: next((each for each in MARGINS if missed(each, app) <= risk), MARGINS[-1])
        for app in sorted({job.app for job in jobs})
    }


def _with_margins(make: Callable[[float], Chooser], margins: Mapping[str, float]) -> Chooser:
    ways = {margin: make(margin) for margin in set(margins.values())}
    return lambda job: ways[margins[job.app]](job)


def nearly_true(error: float, *, margin: float = 1.0, seed: int = 0) -> Chooser:
    """Return choices by true times with a normal error: what repetitions differ by."""
    rng = np.random.default_rng(seed)

    def choose(job: Job) -> Choice:
        true = true_s(job)
        forecast = true * np.exp(rng.normal(0, error, true.size))
        return Choice(place=job.by_forecast(forecast, margin=margin))

    return choose


def _parts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return figures by application, by cluster of the profile, and by what is limited."""
    out = []
    for key in ("app", "profiled", "for"):
        for value in sorted({row[key] for row in rows}):
            mine = [row for row in rows if row[key] == value]
            out.append({
                "jobs": f"{key} {value}",
                "regret, mean %": 100 * float(np.mean([row["regret"] for row in mine])),
                "missed %": 100 * float(np.mean([row["missed"] for row in mine])),
                "refused %": 100 * float(np.mean([row["refused"] for row in mine])),
            })
    return out
