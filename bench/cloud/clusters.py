"""Measured clusters: ``estimate`` is fed with one device's profile, and asked for all placements.

The measurements are those of Pollux and Sia: five applications on four clusters, each of one type
of GPU and one network.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from bench.cloud.prediction import placement_of
from bench.common.harness import data_file
from thrifty.cloud import (
    ACCELERATORS,
    HardwareEstimates,
    Interval,
    NetworkPriors,
    Offer,
    Workload,
    estimate,
)
from thrifty.cloud._networks import NetworkKind
from thrifty.perf import StepProfile


Placement = tuple[int, ...]

GRADIENT_MB = {"bert": 438.0, "cifar10": 44.7, "deepspeech2": 140.0, "imagenet": 102.0, "ncf": 6.4}
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
    "azure": Cluster(instance_type="ND40rs_v2", accelerator="V100-32GB", gbps=100.0, fabric=True),
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
    path = data_file("systems", "sia_pollux", "measurements.csv")
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
        r.batch: r.step_s for r in rows if (r.cluster, r.app, r.placement) == (cluster, app, (1,))
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


Known = Callable[[str, str], HardwareEstimates]
"""Estimates for an application on a cluster."""


def by_priors(priors: NetworkPriors) -> Known:
    """Return estimates of clusters where nothing was measured."""

    def known(cluster: str, _: str) -> HardwareEstimates:
        return HardwareEstimates(profiled=CLUSTERS[cluster].accelerator, networks=priors)

    return known


def forecasts(rows: Sequence[Row], known: Known) -> np.ndarray:
    """Return the forecasts for setups of several devices: median, low, high, [setups, 3]."""
    profiles: dict[tuple[str, str], StepProfile] = {}
    estimates: dict[tuple[str, str], HardwareEstimates] = {}
    out = []
    for row in rows:
        key = row.cluster, row.app
        if key not in profiles:
            profiles[key] = profile_of(rows, cluster=row.cluster, app=row.app)
            estimates[key] = known(row.cluster, row.app)
        if sum(row.placement) == 1:
            continue
        work = Workload(
            profile=profiles[key], steps=1, global_batch=row.batch * sum(row.placement), setup_s=0.0
        )
        machines = [
            (offer_of(row.cluster, num), row.placement.count(num), False)
            for num in sorted(set(row.placement))
        ]
        step = estimate(work, machines, estimates=estimates[key]).step_s
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
_COVERAGE = 0.9
_FEW = 2
"""Clusters below which a kind of network counts as unknown."""
_LEAST_WIDTH = 0.1
_EVERY = 20
"""Every how manieth setup counts in the fit."""


def fitted(rows: Sequence[Row], *, every: int = _EVERY) -> NetworkPriors:
    """Return priors fitted to some clusters, starting from what vendors say."""
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
    return calibrated(NetworkPriors(**best, observed=1.0), some)


def calibrated(priors: NetworkPriors, rows: Sequence[Row]) -> NetworkPriors:
    """Return the priors with the width of intervals calibrated for each kind of network.

    On each cluster, nine of ten setups would lie in the interval. The mean over the kind's clusters
    counts, if it makes intervals wider: few clusters are no reason for narrower ones on the next. A
    kind of which fewer than two clusters were measured keeps its width.
    """
    plain = replace(priors, widths={})
    several = [row for row in rows if sum(row.placement) > 1]
    needed = needed_widths(several, forecasts(rows, by_priors(plain)))
    found: dict[NetworkKind, list[float]] = defaultdict(list)
    for cluster in sorted({row.cluster for row in several}):
        for kind, between in ((kind_of(cluster, several=each), each) for each in (False, True)):
            mine = [
                (row.cluster == cluster) and ((len(row.placement) > 1) == between)
                for row in several
            ]
            if any(mine):
                found[kind].append(math.log(np.quantile(needed[mine], _COVERAGE)))
    widths = {
        kind: math.exp(max(0.0, np.mean(each))) for kind, each in found.items() if len(each) >= _FEW
    }
    return replace(priors, widths=widths)


def needed_widths(rows: Sequence[Row], guessed: np.ndarray) -> np.ndarray:
    """Return the factor on the logarithm of each interval with which it just holds.

    Rented machines of one type differ by a tenth; this part of the interval is given.
    """
    away = np.log([row.step_s for row in rows] / guessed[:, 0])
    sides = np.where(away > 0, guessed[:, 2] / guessed[:, 0], guessed[:, 0] / guessed[:, 1])
    machine = math.log(1.1)
    out: np.ndarray = (np.abs(away) - machine) / np.maximum(np.log(sides) - machine, 1e-3)
    return np.maximum(out, _LEAST_WIDTH)


def kind_of(cluster: str, *, several: bool) -> NetworkKind:
    """Return the kind of network that sums use on one machine, or on several."""
    known = CLUSTERS[cluster]
    if several:
        return "fabric" if known.fabric else "tcp"
    return "linked" if ACCELERATORS[known.accelerator].inner_gb_s else "pcie"


def _loss(rows: Sequence[Row], values: Mapping[str, float]) -> float:
    """Return the mean over clusters of a robust error, and how far vendors' figures are away."""
    several = [row for row in rows if sum(row.placement) > 1]
    true = np.log([row.step_s for row in several])
    away = np.log(forecasts(rows, by_priors(NetworkPriors(**values)))[:, 0]) - true
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


def left_out(rows: Sequence[Row], cluster: str, priors: NetworkPriors) -> dict[str, Any]:
    """Return the errors on a cluster by priors that were fitted without it."""
    mine = [row for row in rows if row.cluster == cluster]
    found = summary(mine, forecasts(mine, by_priors(priors)))
    by_name = summary(mine, forecasts(mine, by_priors(NOMINAL)))
    for line, other in zip(found, by_name, strict=True):
        line["by data sheets %"] = other["median error %"]
    return {"cluster": cluster, "priors": asdict(priors), "rows": found}


def some_rows(*, quick: bool) -> list[Row]:
    """Return the measurements; few if the bench is to be quick."""
    rows = measured()
    if quick:
        alone = [row for row in rows if row.placement == (1,)]
        rows = alone + [row for row in rows if row.placement != (1,)][:: 20 * _EVERY]
    return rows


def priors_without(rows: Sequence[Row]) -> dict[str, NetworkPriors]:
    """Return priors for each cluster that were fitted to the others."""
    return {
        cluster: fitted([row for row in rows if row.cluster != cluster]) for cluster in CLUSTERS
    }
