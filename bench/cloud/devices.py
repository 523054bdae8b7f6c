"""Pairs of GPUs: how long a step takes on one, from its time on another.

The times are those of PROFET, Gavel and Sia: the same network and batch on several types of GPU.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np

from bench.cloud.clusters import CLUSTERS, measured
from bench.cloud.profet_vtrain import profet_times
from bench.common.harness import data_folder
from thrifty.cloud import ACCELERATORS, Accelerator, HardwareEstimates, Offer


Steps = list[dict[str, float]]
"""Seconds of a step by GPU; each entry is one network and batch."""

GAVEL_GPUS = {"k80": "K80", "p100": "P100", "v100": "V100"}
_ALSO = {"RTX2080Ti": Accelerator(tflops=13.4, gb_s=616, memory_gib=11, inner_gb_s=0)}
"""GPUs that no cloud rents, by the maker's data sheet."""
HOST_BOUND = "ncf"
"""Its steps take 7 ms on a T4 and 97 ms on Azure's V100: they measure the host."""

_UNMEASURED = "L4"
"""A GPU that is known by its data sheet only, to see how wide such an interval is."""
_HABITAT = 1.5
"""The factor that the intervals had before: errors of 10 to 40 % are published."""

_USUAL = 0.5
"""Standard deviation of the logarithm of a data sheet's error, with which the fit begins."""


def steps(*, sia: bool = True) -> Steps:
    """Return the measured steps that several types of GPU have in common.

    Args:
        sia: whether those of Sia's clusters are among them.
    """
    found: dict[tuple[Any, ...], dict[str, float]] = defaultdict(dict)
    times, _ = profet_times()
    for (gpu, network), by_setup in times.items():
        for setup, seconds in by_setup.items():
            found["profet", network, setup][gpu] = seconds
    path = data_folder() / "systems" / "gavel" / "isolated.csv"
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            rate = float(row["steps_per_s"])
            if row["gpus"] == "1" and row["worker"] in GAVEL_GPUS and rate > 0:
                key = "gavel", row["file"], row["model"], row["bs"]
                found[key][GAVEL_GPUS[row["worker"]]] = 1 / rate
    for each in measured() if sia else ():
        if each.placement == (1,) and each.app != HOST_BOUND:
            gpu = {"rtx": "RTX2080Ti", "azure": "V100"}.get(each.cluster)
            name = gpu or CLUSTERS[each.cluster].accelerator
            found["sia", each.app, each.batch][name] = each.step_s
    return [by_gpu for by_gpu in found.values() if len(by_gpu) > 1]


def sheet(gpu: str) -> float:
    """Return a GPU's speed by its data sheet, relative to a V100's."""
    known = {**ACCELERATORS, **_ALSO}
    one, v100 = known[gpu], known["V100"]
    return math.sqrt(one.tflops * one.gb_s / v100.tflops / v100.gb_s)


def fitted_speeds(some: Steps) -> dict[str, float]:
    """Return the speeds, relative to a V100's, with the smallest absolute errors of logarithms.

    Each pair of GPUs counts as much as any other; data sheets count a little.
    """
    gpus = sorted({gpu for by_gpu in some for gpu in by_gpu})
    place = {gpu: i for i, gpu in enumerate(gpus)}
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for by_gpu in some:
        for one, other in permutations(sorted(by_gpu), 2):
            if one < other:
                ratios[one, other].append(math.log(by_gpu[other] / by_gpu[one]))
    rows = [(one, other, each) for (one, other), all_of in ratios.items() for each in all_of]
    columns = np.zeros((len(rows), len(gpus)))
    for index, (one, other, _) in enumerate(rows):
        columns[index, place[one]], columns[index, place[other]] = 1, -1
    wanted = np.array([each for _, _, each in rows])
    weight = np.array([1 / len(ratios[one, other]) for one, other, _ in rows])
    prior = np.log([sheet(gpu) for gpu in gpus])
    speeds = prior.copy()
    for _ in range(50):  # reweighted least squares
        by_row = weight / np.maximum(np.abs(columns @ speeds - wanted), 0.05)
        curvature = (columns.T * by_row) @ columns + np.eye(len(gpus)) * 0.05 / _USUAL
        pull = columns.T @ (by_row * wanted) + 0.05 / _USUAL * prior
        speeds = np.linalg.solve(curvature, pull)
    base = speeds[place["V100"]] if "V100" in place else float(np.mean(speeds - prior))
    out = np.exp(speeds - base)
    return {gpu: float(out[i]) for gpu, i in place.items()}


def left_out_gpus(*, quick: bool) -> list[dict[str, Any]]:
    """Return errors and coverage for each GPU, asked from every other one.

    The columns are data sheets alone; ``HardwareEstimates`` as shipped, whose speeds have seen the
    GPU; and speeds fitted without the GPU, which then has its data sheet.
    """
    some = steps()[:: 40 if quick else 1]
    out = []
    for gpu in sorted({each for by_gpu in some for each in by_gpu}):
        speeds = {**fitted_speeds([_without(each, gpu) for each in some]), gpu: sheet(gpu)}
        out.append({"GPU": gpu, **_errors(some, gpu, speeds)})
    return out


def _without(by_gpu: Mapping[str, float], gpu: str) -> dict[str, float]:
    return {each: seconds for each, seconds in by_gpu.items() if each != gpu}


def _errors(some: Steps, gpu: str, speeds: Mapping[str, float]) -> dict[str, Any]:
    by_sheet, seen, unseen, inside_seen, inside = [], [], [], [], []
    unknown = HardwareEstimates(profiled="T4").compute(_offer(_UNMEASURED))
    for by_gpu in some:
        for other in by_gpu.keys() - {gpu} if gpu in by_gpu else ():
            true = by_gpu[gpu] / by_gpu[other]
            by_sheet.append(sheet(other) / sheet(gpu) / true)
            unseen.append(speeds[other] / speeds[gpu] / true)
            if {gpu, other} <= ACCELERATORS.keys():
                factor = HardwareEstimates(profiled=other).compute(_offer(gpu))
                seen.append(factor.median / true)
                inside_seen.append(factor.low <= true <= factor.high)
                wide = unknown.high / unknown.median
                inside.append(1 / wide <= true / (speeds[other] / speeds[gpu]) <= wide)
    return {
        "steps": len(unseen),
        "by data sheets: median error %": _median(by_sheet),
        "by data sheets: within a factor of 1.5, %": 100
        * float(np.mean(np.abs(np.log(by_sheet)) <= math.log(_HABITAT))),
        "left out: median error %": _median(unseen),
        "left out: in the 90 % interval": 100 * float(np.mean(inside)) if inside else None,
        "as shipped: median error %": _median(seen) if seen else None,
        "as shipped: in the 90 % interval": (
            100 * float(np.mean(inside_seen)) if inside_seen else None
        ),
    }


def _median(ratios: Sequence[float]) -> float:
    return 100 * float(np.median(np.abs(np.array(ratios) - 1)))


def _offer(gpu: str) -> Offer:
    return Offer(
        cloud="measured",
        region="any",
        instance_type="any",
        accelerator=gpu,
        price_usd_h=1.0,
    )
