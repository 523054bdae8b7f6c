"""Measured clusters: ``estimate`` is fed with one device's profile, and asked for all placements.

The measurements are those of Pollux and Sia: five applications on four clusters, each of one type
of GPU and one network.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from bench.cloud.prediction import placement_of
from bench.common.harness import data_folder
from thrifty.cloud import (
    HardwareEstimates,
    Interval,
    NetworkPriors,
    Offer,
    Spread,
    Workload,
    estimate,
)
from thrifty.perf import StepProfile


Placement = tuple[int, ...]

GRADIENT_MB = {
    "bert": 438.0,
    "cifar10": 44.7,
    "deepspeech2": 140.0,
    "imagenet": 102.0,
    "ncf": 6.4,
}
"""Gradients in single precision.

BERT base has 110 million parameters, ResNet-18 11.2, ResNet-50 25.6, NeuMF on MovieLens-1M 1.6. The
size of DeepSpeech2 is not published with the measurements; this one is a guess.
"""

_BUCKET_MB = 25.0
"""PyTorch's default size of a gradient bucket."""
_FORWARD, _BACKWARD = 0.33, 0.62
"""Shares of a step: measurements have only the sum. A backward pass does twice the arithmetic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """What a catalogue says about the machines of a cluster."""

    instance_type: str
    accelerator: str
    gbps: float
    fabric: bool


CLUSTERS = {
    "aws": Cluster(instance_type="g4dn.12xlarge", accelerator="T4", gbps=50.0, fabric=False),
    "azure": Cluster(
        instance_type="ND40rs_v2", accelerator="V100-32GB", gbps=100.0, fabric=True
    ),
    "dgx": Cluster(instance_type="DGX A100", accelerator="A100", gbps=1600.0, fabric=True),
    "rtx": Cluster(instance_type="8 x RTX 2080 Ti", accelerator="T4", gbps=100.0, fabric=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One application, placement and batch: the median of its repetitions."""

    cluster: str
    app: str
    placement: Placement
    batch: int
    step_s: float


def measured() -> list[Row]:
    """Return all measurements, without setups whose batch was not measured on one device."""
    found: dict[tuple[str, str, Placement, int], list[float]] = defaultdict(list)
    path = data_folder() / "systems" / "sia_pollux" / "measurements.csv"
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            key = row["gpu"], row["app"], placement_of(row), int(float(row["local_bsz"]))
            found[key].append(float(row["step_time"]))
    rows = [
        Row(cluster=c, app=a, placement=p, batch=b, step_s=float(np.median(times)))
        for (c, a, p, b), times in sorted(found.items())
    ]
    alone = {(r.cluster, r.app, r.batch) for r in rows if r.placement == (1,)}
    return [r for r in rows if (r.cluster, r.app, r.batch) in alone]


def profile_of(rows: Sequence[Row], *, cluster: str, app: str) -> StepProfile:
    """Return the profile of one device."""
    alone = {
        r.batch: r.step_s
        for r in rows
        if (r.cluster, r.app, r.placement) == (cluster, app, (1,))
    }
    sizes = sorted(alone)
    times = [alone[size] for size in sizes]
    num = max(1, round(GRADIENT_MB[app] / _BUCKET_MB))
    return StepProfile(
        device=CLUSTERS[cluster].accelerator,
        batches=tuple(sizes),
        forward_s=tuple(_FORWARD * each for each in times),
        backward_s=tuple(_BACKWARD * each for each in times),
        optimizer_s=(1 - _FORWARD - _BACKWARD) * min(times),
        peak_bytes=tuple(1.0 * size for size in sizes),
        bucket_bytes=(GRADIENT_MB[app] * 1e6 / num,) * num,
        bucket_ready=tuple((i + 1) / num for i in range(num)),
    )


def offer_of(cluster: str, num_devices: int) -> Offer:
    """Return a machine of a cluster of which a job uses some devices."""
    known = CLUSTERS[cluster]
    return Offer(
        cloud="measured",
        region=cluster,
        instance_type=known.instance_type,
        accelerator=known.accelerator,
        accelerator_count=num_devices,
        price_usd_h=1.0,
        baseline_gbps=known.gbps,
        peak_gbps=known.gbps,
        fabric=known.fabric,
    )


def forecasts(rows: Sequence[Row], priors: NetworkPriors | None = None) -> np.ndarray:
    """Return the forecasts for setups of several devices: median, low, high, [setups, 3]."""
    profiles: dict[tuple[str, str], StepProfile] = {}
    out = []
    for row in rows:
        key = row.cluster, row.app
        if key not in profiles:
            profiles[key] = profile_of(rows, cluster=row.cluster, app=row.app)
        if sum(row.placement) == 1:
            continue
        work = Workload(
            profile=profiles[key],
            steps=1,
            global_batch=row.batch * sum(row.placement),
            setup_s=0.0,
        )
        machines = [
            (offer_of(row.cluster, num), row.placement.count(num), False)
            for num in sorted(set(row.placement))
        ]
        known = HardwareEstimates(
            profiled=CLUSTERS[row.cluster].accelerator, networks=priors or NetworkPriors()
        )
        step = estimate(work, machines, estimates=known).step_s
        out.append((step.median, step.low, step.high))
    return np.array(out)


def summary(rows: Sequence[Row], guessed: np.ndarray) -> list[dict[str, Any]]:
    """Return errors and coverage by cluster, and by application in each."""
    several = [row for row in rows if sum(row.placement) > 1]
    true = np.array([row.step_s for row in several])
    error = guessed[:, 0] / true - 1
    inside = (guessed[:, 1] <= true) & (true <= guessed[:, 2])
    width = np.sqrt(guessed[:, 2] / guessed[:, 1]) - 1
    out = []
    for cluster in dict.fromkeys(row.cluster for row in several):
        for app in ("all", *dict.fromkeys(row.app for row in several)):
            mine = np.array([r.cluster == cluster and app in ("all", r.app) for r in several])
            if not mine.any():
                continue
            out.append({
                "cluster": cluster,
                "application": app,
                "setups": int(mine.sum()),
                "median error %": 100 * float(np.median(np.abs(error[mine]))),
                "bias %": 100 * float(np.median(error[mine])),
                "in the 90 % interval": 100 * float(inside[mine].mean()),
                "half its width %": 100 * float(width[mine].mean()),
            })
    return out


# -- priors fitted without a cluster -----------------------------------------------------------


VENDORS: dict[str, tuple[float, float]] = {
    "tcp_gbps": (7.0, 0.35),
    "fabric_share": (0.5, 0.7),
    "linked_share": (0.7, 0.7),
    "pcie_gb_s": (4.0, 0.7),
    "pcie_contention": (0.5, 0.5),
}
"""What vendors' pages suggest, with the standard deviation of its logarithm.

AWS limits one flow to 5 Gbit/s, or 10 in a placement group. PCIe 3.0 carries 12 GB/s, half of that
through the host. The shares are those of a ring at large messages.
"""

_STEPS = (0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0)
_SPREADS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
_COVERAGE = 0.9
_EVERY = 20
"""Every how manieth setup counts in the fit."""


def fitted(rows: Sequence[Row], *, every: int = _EVERY) -> NetworkPriors:
    """Return priors fitted to some clusters, starting from what vendors say.

    The spreads are then scaled to the smallest for which, on the mean of the clusters, nine of ten
    setups lie in the interval.
    """
    alone = [row for row in rows if row.placement == (1,)]
    some = alone + [row for row in rows if row.placement != (1,)][::every]
    start = {name: middle for name, (middle, _) in VENDORS.items()}
    best, least = start, _loss(some, start)
    for _ in range(2):
        for name in VENDORS:
            for step in _STEPS:
                tried = {**best, name: best[name] * step}
                loss = _loss(some, tried)
                if loss < least:
                    best, least = tried, loss
    priors = NetworkPriors(**best)
    for spread in _SPREADS:
        scaled = scaled_spreads(priors, spread)
        found = [
            line["in the 90 % interval"]
            for line in summary(some, forecasts(some, scaled))
            if line["application"] == "all"
        ]
        if np.mean(found) >= 100 * _COVERAGE:
            break
    return scaled


def scaled_spreads(priors: NetworkPriors, power: float) -> NetworkPriors:
    """Return the priors with the logarithms of all spreads times ``power``."""
    names = ("tcp", "fabric", "linked", "pcie")
    return replace(
        priors,
        **{
            name: Spread(faster=each.faster**power, slower=each.slower**power)
            for name in names
            for each in [getattr(priors, name)]
        },
    )


def _loss(rows: Sequence[Row], values: Mapping[str, float]) -> float:
    """Return the mean over clusters of a robust error, and how far vendors' figures are away."""
    several = [row for row in rows if sum(row.placement) > 1]
    true = np.log([row.step_s for row in several])
    away = np.log(forecasts(rows, NetworkPriors(**values))[:, 0]) - true
    clusters = np.array([row.cluster for row in several])
    errors = [np.mean(np.sqrt(0.01 + away[clusters == each] ** 2)) for each in set(clusters)]
    unlikely = sum(
        (np.log(values[name] / middle) / deviation) ** 2
        for name, (middle, deviation) in VENDORS.items()
    )
    return float(np.mean(errors) + 0.01 * unlikely)


NOMINAL = NetworkPriors(
    tcp_share=1.0,
    tcp_gbps=math.inf,
    fabric_share=1.0,
    linked_share=1.0,
    pcie_gb_s=8.0,
    pcie_contention=0.0,
    straggling=Interval(median=0.0, low=0.0, high=0.0),
)
"""Networks as fast as their names say: data-sheet scaling."""


def left_out(rows: Sequence[Row], cluster: str) -> dict[str, Any]:
    """Return the errors on a cluster by priors that were fitted without it."""
    priors = fitted([row for row in rows if row.cluster != cluster])
    mine = [row for row in rows if row.cluster == cluster]
    found = summary(mine, forecasts(mine, priors))
    by_name = summary(mine, forecasts(mine, NOMINAL))
    for line, other in zip(found, by_name, strict=True):
        line["by data sheets %"] = other["median error %"]
    return {"cluster": cluster, "priors": asdict(priors), "rows": found}


def clusters_left_out(*, quick: bool) -> list[dict[str, Any]]:
    """Return the errors on each cluster by priors that were fitted to the others."""
    rows = measured()
    if quick:
        alone = [row for row in rows if row.placement == (1,)]
        rows = alone + [row for row in rows if row.placement != (1,)][:: 20 * _EVERY]
    return [left_out(rows, cluster) for cluster in CLUSTERS]
