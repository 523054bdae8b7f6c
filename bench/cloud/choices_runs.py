"""Network priors fitted to three short runs of a job on each cluster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product

import numpy as np

from bench.cloud.choices import GPUS, View, Views
from bench.cloud.choices_peers import Known
from bench.cloud.clusters import CLUSTERS, Row, offer_of, profile_of
from bench.cloud.jobs import Job
from thrifty.cloud import (
    HardwareEstimates,
    Interval,
    NetworkPriors,
    UncertaintyFactor,
    Workload,
    estimate,
)
from thrifty.perf import StepProfile
from thrifty.perf.steptime import Setup


_NOISE = 0.03
"""Error of a measured step, as a logarithm: what repetitions differ by."""
_WIDTHS = np.array([1.0, 0.7, 1.5])
"""Standard deviations, as logarithms, of the links inside and between machines, and of waiting."""
_STARTS = ((-2.0, 0.0), (-1.0, 0.0), (0.0, 2.0))
"""Where the search begins: it has several minima."""

_EXACT = UncertaintyFactor(faster=1.0, slower=1.0)


class ShortRuns:
    """What the planner knows after three short runs of the job on each cluster.

    These are the runs that Ernest gets, too: one full machine, single GPUs of several machines, and
    several full machines, at a middle batch. Nobody pays for them.

    Args:
        rows: measurements of ``clusters.py``.
        priors: for each cluster, network priors that were fitted without it.
    """

    def __init__(self, rows: Sequence[Row], *, priors: Mapping[str, NetworkPriors]) -> None:
        known = Known(rows)
        self._profiles: dict[tuple[str, str], StepProfile] = {}
        self._fitted: dict[tuple[str, str], NetworkPriors] = {}
        for app, cluster in sorted({(row.app, row.cluster) for row in rows}):
            profile = profile_of(rows, cluster=cluster, app=app)
            self._profiles[app, cluster] = profile
            self._fitted[app, cluster] = _fitted(
                _several_gpus(known.runs(app, cluster)),
                cluster=cluster,
                profile=profile,
                prior=priors[cluster],
            )

    def views(self, margin: float) -> Views:
        """Return what is known; the upper end of a step is ``margin`` times its median."""

        def known(job: Job) -> list[View]:
            return [
                View(
                    clusters=(cluster,),
                    profile=self._profiles[job.app, cluster],
                    estimates=HardwareEstimates(
                        profiled=GPUS[cluster],
                        measured_compute={GPUS[cluster]: Interval(median=1.0, low=1.0, high=1.0)},
                        networks=_with_margin(self._fitted[job.app, cluster], margin),
                    ),
                )
                for cluster in CLUSTERS
            ]

        return known


def _several_gpus(runs: Sequence[tuple[Setup, float]]) -> list[tuple[Setup, float]]:
    """Return the runs on more than one GPU: the profile has the others."""
    return [(setup, seconds) for setup, seconds in runs if setup.num_devices > 1]


def _with_margin(priors: NetworkPriors, margin: float) -> NetworkPriors:
    waiting = priors.straggling.median
    return replace(
        priors,
        tcp=_EXACT,
        fabric=_EXACT,
        linked=_EXACT,
        pcie=_EXACT,
        step=UncertaintyFactor(faster=1.0, slower=margin),
        straggling=Interval(median=waiting, low=waiting, high=waiting),
    )


def _fitted(
    runs: Sequence[tuple[Setup, float]], *, cluster: str, profile: StepProfile, prior: NetworkPriors
) -> NetworkPriors:
    """Return priors with which the forecasts of some runs come close to their times."""
    from scipy.optimize import least_squares  # noqa: PLC0415

    wanted = np.log([seconds for _, seconds in runs])

    def misses(logs: np.ndarray) -> np.ndarray:
        scaled = _scaled(prior, np.exp(logs))
        known = HardwareEstimates(profiled=CLUSTERS[cluster].accelerator, networks=scaled)
        steps = [_step_s(setup, cluster=cluster, profile=profile, known=known) for setup, _ in runs]
        return np.append((np.log(steps) - wanted) / _NOISE, logs / _WIDTHS)

    tried = [least_squares(misses, start, diff_step=0.05) for start in product(*_STARTS)]
    return _scaled(prior, np.exp(min(tried, key=lambda each: each.cost).x))


def _scaled(prior: NetworkPriors, factors: np.ndarray) -> NetworkPriors:
    """Return priors with other links inside and between machines, and other waiting."""
    inside, between, waiting = factors.tolist()
    straggling = prior.straggling.median * waiting
    return replace(
        prior,
        pcie_gb_s=prior.pcie_gb_s * inside,
        linked_share=prior.linked_share * inside,
        # The limit of a few flows binds on TCP, rather than the share of the bandwidth.
        tcp_share=math.inf,
        tcp_gbps=prior.tcp_gbps * between,
        fabric_share=prior.fabric_share * between,
        straggling=Interval(median=straggling, low=straggling, high=straggling),
    )


def _step_s(setup: Setup, *, cluster: str, profile: StepProfile, known: HardwareEstimates) -> float:
    work = Workload(
        profile=profile, steps=1, global_batch=int(setup.batch) * setup.num_devices, setup_s=0.0
    )
    machines = [(offer_of(cluster, setup.placement[0]), len(setup.placement), False)]
    return estimate(work, machines, estimates=known).step_s.median
