"""One job profiled ten times on this machine, five of them beside a busy loop: is the choice one?

The loop runs on the core of the profile, where it takes half of the time, or on another one, where
it takes caches and clock. A profile may differ if thrifty says that the machine was busy, and a
choice may differ if its plan names the usual one as a close call.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from bench.cloud.local import BATCHES, Worker
from bench.common.processes import pinned
from thrifty.cloud import Catalogue, FleetOptions, Offer, Workload, plan_fleet
from thrifty.core import CloudError
from thrifty.perf import StepProfile


MODELS = ("LeNet", "LSTM", "Transformer")
PLACES = ("same core", "other core")
_CORE, _OTHER = 0, 1

_REPEATS = 5
"""Profiles of each model in quiet, and beside a loop in each place."""
_BUDGET_S = 2.5
_STEPS = 100_000
_DEADLINES = (0.25, 0.5, 0.75)
"""Where deadlines lie between the times of the fastest fleet and of the cheapest one."""

_LOOP = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@dataclass(frozen=True, kw_only=True)
class Run:
    """A profile, and where the loop ran: "quiet" for nowhere."""

    model: str
    beside: str
    profile: StepProfile


def repeated_profiles(*, quick: bool) -> dict[str, Any]:
    """Profile each job in turn in quiet and beside loops, and plan from every profile.

    Returns:
        ``rows``: for each model and place of the loop, how many choices agree with those from quiet
        profiles, how many of the others are called noisy, and how many plans name a close call;
        ``unsaid``: choices that differ although the profile is not called noisy and the plan does
        not name the usual choice, beside a loop and in quiet.
    """
    models, repeats = (MODELS[:1], 2) if quick else (MODELS, _REPEATS)
    runs = []
    began = time.monotonic()
    with pinned("bench.cloud.local_worker", core=_CORE) as process:
        worker = Worker(process)
        for repeat in range(repeats):
            for model in models:
                for beside in ("quiet", *PLACES):
                    runs.append(_profiled(worker, model, beside, budget_s=_BUDGET_S))
            seconds = time.monotonic() - began
            print(f"round {repeat + 1} of {repeats} after {seconds:.0f} s", flush=True)
    offers = list(Catalogue.shipped().where(cloud="aws"))
    rows = [line for model in models for line in _lines(model, runs, offers)]
    return {
        "rows": rows,
        "unsaid": {
            what: sum(row["differ unsaid"] for row in rows if (row["beside"] == "quiet") == quiet)
            for what, quiet in (("beside a loop", False), ("quiet", True))
        },
    }


def _profiled(worker: Worker, model: str, beside: str, *, budget_s: float) -> Run:
    with _busy({"same core": _CORE, "other core": _OTHER}.get(beside)):
        worker.ask("profile", model=model, batches=list(BATCHES[model]), budget_s=budget_s)
        return Run(model=model, beside=beside, profile=StepProfile.from_json(worker.answer()))


@contextmanager
def _busy(core: int | None) -> Iterator[None]:
    """Run a loop on a core meanwhile; None: nowhere."""
    if core is None:
        yield
        return
    loop = subprocess.Popen([sys.executable, "-c", _LOOP, str(core)])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


def _lines(model: str, runs: Sequence[Run], offers: Sequence[Offer]) -> Iterator[dict[str, Any]]:
    mine = [run for run in runs if run.model == model]
    quiet = [run for run in mine if run.beside == "quiet"]
    calm = [run for run in quiet if not run.profile.is_noisy] or quiet
    deadlines = _deadlines(min(calm, key=lambda run: _step_s(run.profile)), offers)
    chosen = [(run, [_chosen(run, each, offers) for each in deadlines]) for run in mine]
    usual = [
        Counter(fleets[at].best for run, fleets in chosen if run in calm).most_common(1)
        for at in range(len(deadlines))
    ]
    step_s = float(np.median([_step_s(run.profile) for run in calm]))
    for beside in ("quiet", *PLACES):
        those = [(run, fleets) for run, fleets in chosen if run.beside == beside]
        same = [
            [one.best == other for one, ((other, _),) in zip(fleets, usual, strict=True)]
            for _, fleets in those
        ]
        named = [
            [other in one.others for one, ((other, _),) in zip(fleets, usual, strict=True)]
            for _, fleets in those
        ]
        noisy = [run.profile.is_noisy for run, _ in those]
        steps = [_step_s(run.profile) / step_s for run, _ in those]
        yield {
            "model": model,
            "beside": beside,
            "profiles": len(those),
            "step / calm, least": min(steps),
            "most": max(steps),
            "noise, median": float(np.median([run.profile.noise for run, _ in those])),
            "called noisy": sum(noisy),
            "choices": sum(map(len, same)),
            "agree": sum(map(sum, same)),
            "close calls": sum(bool(one.others) for _, fleets in those for one in fleets),
            "differ, not noisy": sum(
                not agrees
                for each, said in zip(same, noisy, strict=True)
                for agrees in each
                if not said
            ),
            "differ unsaid": sum(
                not agrees and not is_named
                for each, told, said in zip(same, named, noisy, strict=True)
                for agrees, is_named in zip(each, told, strict=True)
                if not said
            ),
        }


def _step_s(profile: StepProfile) -> float:
    """Return the seconds of a step of the smallest batch, which every profile has."""
    return profile.forward_s[0] + profile.backward_s[0] + profile.optimizer_s


def _deadlines(run: Run, offers: Sequence[Offer]) -> list[float]:
    front = plan_fleet(_workload(run), offers).front
    ends = np.log([front[0].time_s.high, front[-1].time_s.high])
    return [float(np.exp(ends[0] + share * (ends[1] - ends[0]))) for share in _DEADLINES]


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """A choice, and what its plan names as close calls; "none" where no fleet meets the goal."""

    best: str
    others: tuple[str, ...]


def _chosen(run: Run, deadline_s: float, offers: Sequence[Offer]) -> Chosen:
    return _choice_of(_workload(run), deadline_s, offers)


def _choice_of(workload: Workload, deadline_s: float, offers: Sequence[Offer]) -> Chosen:
    try:
        plan = plan_fleet(workload, offers, FleetOptions(deadline_s=deadline_s))
    except CloudError as error:
        _, _, close = str(error).partition("; a close call: ")
        return Chosen(best="none", others=(close.partition(", it is ")[2],) if close else ())
    others = tuple("none" if call.fleet is None else str(call.fleet) for call in plan.close_calls)
    return Chosen(best=str(plan.best), others=others)


def _workload(run: Run) -> Workload:
    return Workload(profile=run.profile, steps=_STEPS, global_batch=4 * BATCHES[run.model][-1])


# -- drawn errors of a profile ----------------------------------------------------------------


ERRORS = (0.02, 0.05, 0.1)
"""Largest errors of a profile's steps that are drawn."""
_DRAWN = 40
_MODEL = StepProfile(
    device="CPU, 1 thread(s)",
    batches=(16, 64, 128),
    forward_s=(0.02, 0.07, 0.13),
    backward_s=(0.04, 0.13, 0.25),
    optimizer_s=0.002,
    peak_bytes=(2e8, 6e8, 1.1e9),
    bucket_bytes=(2.5e7, 2e7),
    bucket_ready=(0.4, 1.0),
    noise=0.03,
)


def drawn_errors(*, quick: bool) -> list[dict[str, Any]]:
    """Return how many choices an error of the profile changes, and how many plans name them.

    All steps of a made-up profile become longer or shorter by one factor, and each of them by a
    fifth as much besides. Each profile is planned for nine deadlines.
    """
    rng = np.random.default_rng(0)
    offers = list(Catalogue.shipped().where(cloud="aws"))
    front = plan_fleet(_drawn_workload(_MODEL), offers).front
    deadlines = np.geomspace(front[0].time_s.high, front[-1].time_s.high, 11)[1:-1].tolist()
    usual = [_chosen_for(_MODEL, each, offers) for each in deadlines]
    rows = []
    for error in ERRORS:
        found = []
        for _ in range(3 if quick else _DRAWN):
            profile = _with_errors(_MODEL, error, rng=rng)
            found += [
                (_chosen_for(profile, deadline_s, offers), choice)
                for deadline_s, choice in zip(deadlines, usual, strict=True)
            ]
        differ = [(one, other) for one, other in found if one.best != other.best]
        rows.append({
            "error of steps, up to %": 100 * error,
            "choices": len(found),
            "close calls": sum(bool(one.others) for one, _ in found),
            "differ": len(differ),
            "differ, not named": sum(other.best not in one.others for one, other in differ),
            "differ, nothing named": sum(not one.others for one, _ in differ),
        })
    return rows


def _with_errors(profile: StepProfile, error: float, *, rng: np.random.Generator) -> StepProfile:
    whole = profile.slowed(1 + rng.uniform(-error, error), device=profile.device)
    each = 1 + rng.uniform(-error / 5, error / 5, (2, len(profile.batches)))
    return replace(
        whole,
        forward_s=tuple((np.array(whole.forward_s) * each[0]).tolist()),
        backward_s=tuple((np.array(whole.backward_s) * each[1]).tolist()),
    )


def _drawn_workload(profile: StepProfile) -> Workload:
    return Workload(profile=profile, steps=_STEPS, global_batch=4 * profile.batches[-1])


def _chosen_for(profile: StepProfile, deadline_s: float, offers: Sequence[Offer]) -> Chosen:
    return _choice_of(_drawn_workload(profile), deadline_s, offers)
