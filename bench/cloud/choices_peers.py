"""Other ways to choose machines: price lists, data sheets, Ernest, boosting, and SkyPilot's rule.

Each forecasts the steps of all candidates, and takes the best candidate that meets the limit by
this forecast, or else the one that misses it by the least. None of them has an interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.cloud.choices import GPUS, Choice, Chooser
from bench.cloud.clusters import CLUSTERS, GRADIENT_MB, Row, profile_of
from bench.cloud.devices import sheet
from bench.cloud.jobs import Candidate, Job
from bench.cloud.prediction import Table, probes
from bench.cloud.step_time_models import Ernest
from thrifty.perf import StepProfile
from thrifty.perf.steptime import Setup


_EVERY = 3
"""Every how manieth measurement the trees learn from."""


def cheapest_listed(job: Job) -> Choice:
    """Choose the least dollars per hour, whatever the limit.

    This is also what SkyPilot's optimizer does unless it is given a time estimator: it takes every
    machine to need one hour.
    """
    return Choice(place=int(np.argmin([each.usd_h for each in job.candidates])))


def skypilot(job: Job) -> Choice:
    """Choose as SkyPilot does with times from data sheets: no limit, the least cost or time.

    Its user asks for the least cost if there is a deadline, and for the least time if there is a
    budget. Of equal costs, the least dollars per hour counts, as with one hour for every machine.
    """
    _, aim = job.bound_and_aim(_by_sheet(job))
    usd_h = np.array([each.usd_h for each in job.candidates])
    return Choice(place=int(np.lexsort((usd_h, np.round(aim, 9)))[0]))


def _by_sheet(job: Job) -> np.ndarray:
    here = sheet(GPUS[job.profiled])
    return np.array([here / sheet(GPUS[each.cluster]) * each.batch for each in job.candidates])


class Known:
    """Ways to choose that learn from measurements.

    Args:
        rows: measurements of ``clusters.py``.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = list(rows)
        self._profiles = {
            (app, cluster): profile_of(rows, cluster=cluster, app=app)
            for app in sorted({row.app for row in rows})
            for cluster in CLUSTERS
        }
        self._ernest: dict[tuple[str, str], Ernest] = {}
        self._trees: dict[tuple[str, bool], Any] = {}

    def data_sheets(self, job: Job) -> Choice:
        """Choose by perfect scaling of the profile with the speeds of data sheets."""
        profile, here = self._profiles[job.app, job.profiled], sheet(GPUS[job.profiled])
        step_s = [
            _alone_s(profile, each.batch) * here / sheet(GPUS[each.cluster])
            for each in job.candidates
        ]
        return Choice(place=job.by_forecast(np.array(step_s)))

    def ernest(self, margin: float = 1.0) -> Chooser:
        """Return choices by Ernest's law, fitted to runs of the job on every cluster.

        These are one GPU at all batch sizes, and three runs on up to 16 GPUs; nobody pays for them.
        """

        def choose(job: Job) -> Choice:
            step_s = np.array([
                self._law(job.app, each.cluster).predict([_setup(each)])[0]
                for each in job.candidates
            ])
            return Choice(place=job.by_forecast(step_s, margin=margin))

        return choose

    def _law(self, app: str, cluster: str) -> Ernest:
        if (app, cluster) not in self._ernest:
            setups, step_s = zip(*self.runs(app, cluster), strict=True)
            law = Ernest()
            law.fit(setups, step_s)
            self._ernest[app, cluster] = law
        return self._ernest[app, cluster]

    def runs(self, app: str, cluster: str) -> list[tuple[Setup, float]]:
        """Return the runs that Ernest gets: one GPU at all batches, and three of several GPUs."""
        mine = [row for row in self._rows if (row.app, row.cluster) == (app, cluster)]
        table = Table(
            key=(cluster, app),
            setups=tuple(Setup(placement=row.placement, batch=float(row.batch)) for row in mine),
            step_s=np.array([row.step_s for row in mine]),
            noise=(),
        )
        return list(zip(*table.part(probes(table)), strict=True))

    def boosting(self, *, each_gpu: bool) -> Chooser:
        """Return choices by trees that learned from the other applications on all clusters.

        The trees foretell the ratio to a step of one GPU at the same batch.

        Args:
            each_gpu: whether that GPU is the candidate's own, rather than the profiled one.
        """

        def choose(job: Job) -> Choice:
            if (job.app, each_gpu) not in self._trees:
                self._trees[job.app, each_gpu] = self._learned(job.app, each_gpu=each_gpu)
            known, alone_s = [], []
            for each in job.candidates:
                of = each.cluster if each_gpu else job.profiled
                alone_s.append(_alone_s(self._profiles[job.app, of], each.batch))
                known.append(_features(job.app, of, each.cluster, _setup(each), alone_s[-1]))
            ratios = np.exp(self._trees[job.app, each_gpu].predict(np.array(known)))
            return Choice(place=job.by_forecast(np.array(alone_s) * ratios))

        return choose

    def _learned(self, app: str, *, each_gpu: bool) -> Any:
        from sklearn.ensemble import GradientBoostingRegressor  # noqa: PLC0415

        known, ratios = [], []
        for at, row in enumerate(row for row in self._rows[::_EVERY] if row.app != app):
            of = row.cluster if each_gpu else list(CLUSTERS)[at % len(CLUSTERS)]
            alone_s = _alone_s(self._profiles[row.app, of], row.batch)
            setup = Setup(placement=row.placement, batch=float(row.batch))
            known.append(_features(row.app, of, row.cluster, setup, alone_s))
            ratios.append(math.log(row.step_s / alone_s))
        return GradientBoostingRegressor(random_state=0).fit(np.array(known), np.array(ratios))


def _alone_s(profile: StepProfile, batch: int) -> float:
    seconds = profile.forward_at(batch) + profile.backward_at(batch) + profile.optimizer_s
    return float(seconds)


def _setup(candidate: Candidate) -> Setup:
    return Setup(placement=(candidate.per_node,) * candidate.nodes, batch=float(candidate.batch))


def _features(app: str, profiled: str, cluster: str, setup: Setup, alone_s: float) -> list[float]:
    return [
        math.log(setup.batch),
        math.log(alone_s),
        math.log(GRADIENT_MB[app]),
        math.log2(len(setup.placement)),
        math.log2(setup.num_devices),
        max(setup.placement),
        *[float(each == profiled) for each in CLUSTERS],
        *[float(each == cluster) for each in CLUSTERS],
    ]
