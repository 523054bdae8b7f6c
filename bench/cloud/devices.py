"""Pairs of GPUs: how long a step takes on one, from its time on another.

The times are those of PROFET, Gavel and Sia: the same network and batch on several types of GPU.
"""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import permutations
from typing import Any

import numpy as np

from bench.cloud.clusters import CLUSTERS, measured
from bench.cloud.profet_vtrain import profet_times
from bench.cloud.step_time_models import Ernest
from bench.common.harness import data_file
from thrifty.cloud import ACCELERATORS, Accelerator, HardwareEstimates, Interval, Offer
from thrifty.perf.steptime import Setup


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
    return list(keyed_steps(sia=sia).values())


def keyed_steps(*, sia: bool = True) -> dict[tuple[Hashable, int], dict[str, float]]:
    """Return the same steps by network and batch; images of another size are another network.

    A batch that is not known is 0.
    """
    found: dict[tuple[Hashable, int], dict[str, float]] = defaultdict(dict)
    times, _ = profet_times()
    for (gpu, network), by_setup in times.items():
        for (batch, pixels), seconds in by_setup.items():
            found[("profet", network, pixels), batch][gpu] = seconds
    path = data_file("systems", "gavel", "isolated.csv")
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            rate = float(row["steps_per_s"])
            if row["gpus"] == "1" and row["worker"] in GAVEL_GPUS and rate > 0:
                key = ("gavel", row["file"], row["model"]), int(row["bs"] or 0)
                found[key][GAVEL_GPUS[row["worker"]]] = 1 / rate
    for each in measured() if sia else ():
        if each.placement == (1,) and each.app != HOST_BOUND:
            others = {"rtx": "RTX2080Ti", "azure": "V100"}
            name = others.get(each.cluster, CLUSTERS[each.cluster].accelerator)
            found[("sia", each.app), each.batch][name] = each.step_s
    return {key: by_gpu for key, by_gpu in found.items() if len(by_gpu) > 1}


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


def with_two_runs(*, quick: bool) -> list[dict[str, Any]]:
    """Return errors on each GPU after two runs of the network on it, beside Ernest's.

    Ernest knows nothing of hardware, so without runs on a GPU it has no forecast for it. On one
    GPU its law is a line over the batch, for which its experiment design takes the smallest and the
    largest batch; if runs have to be cheap, as it wants them, the two smallest. Then
    ``HardwareEstimates.probed`` gets the same two runs and the profile of another GPU. All other
    batches are forecast, of networks with three or more.
    """
    found: dict[Hashable, dict[int, dict[str, float]]] = defaultdict(dict)
    for (network, batch), by_gpu in keyed_steps().items():
        if batch:
            found[network][batch] = by_gpu
    networks = list(found.values())[:: 5 if quick else 1]
    gpus = sorted({
        each for by_batch in networks for by_gpu in by_batch.values() for each in by_gpu
    })
    out = []
    for gpu in gpus:
        for runs in ("ends", "two smallest"):
            each = [_after(by_batch, gpu, runs=runs) for by_batch in networks]
            ernest, ours, none = (
                [ratio for ratios in column for ratio in ratios]
                for column in zip(*each, strict=True)
            )
            if ernest:
                out.append({
                    "GPU": gpu,
                    "runs": runs,
                    "steps": len(ernest),
                    "no run, data sheets: median error %": _median(none),
                    "thrifty: median error %": _median(ours),
                    "Ernest: median error %": _median(ernest),
                })
    return out


def _after(
    by_batch: Mapping[int, Mapping[str, float]], gpu: str, *, runs: str
) -> tuple[list[float], list[float], list[float]]:
    """Return forecasts by Ernest, by ours and by data sheets, relative to the truth."""
    ernest: list[float] = []
    ours: list[float] = []
    none: list[float] = []
    sizes = sorted(batch for batch, by_gpu in by_batch.items() if gpu in by_gpu)
    if len(sizes) < 3:
        return ernest, ours, none
    two = (sizes[0], sizes[-1]) if runs == "ends" else (sizes[0], sizes[1])
    law = Ernest()
    law.fit([_alone(size) for size in two], [by_batch[size][gpu] for size in two])
    for size in sizes:
        if size in two:
            continue
        true = by_batch[size][gpu]
        ernest.append(float(law.predict([_alone(size)])[0]) / true)
        for other in by_batch[size].keys() - {gpu}:
            ratios = [
                by_batch[run][gpu] / by_batch[run][other] for run in two if other in by_batch[run]
            ]
            if ratios:  # otherwise the other GPU's profile has neither of the two runs
                here_s = by_batch[size][other]
                ours.append(_probed(gpu, ratios, other=other) * here_s / true)
                none.append(sheet(other) / sheet(gpu) * here_s / true)
    return ernest, ours, none


def _probed(gpu: str, ratios: Sequence[float], *, other: str) -> float:
    """Return the factor that ``HardwareEstimates`` has for a GPU after some runs on it."""
    found = Interval(
        median=float(np.exp(np.mean(np.log(ratios)))), low=min(ratios), high=max(ratios)
    )
    known = HardwareEstimates(profiled=other).probed(compute={gpu: found})
    return known.compute(offer_of(gpu)).median


def _alone(batch: int) -> Setup:
    return Setup(placement=(1,), batch=float(batch))


def _without(by_gpu: Mapping[str, float], gpu: str) -> dict[str, float]:
    return {each: seconds for each, seconds in by_gpu.items() if each != gpu}


def _errors(some: Steps, gpu: str, speeds: Mapping[str, float]) -> dict[str, Any]:
    by_sheet, seen, unseen, inside_seen, inside = [], [], [], [], []
    unknown = HardwareEstimates(profiled="T4").compute(offer_of(_UNMEASURED))
    for by_gpu in some:
        for other in by_gpu.keys() - {gpu} if gpu in by_gpu else ():
            true = by_gpu[gpu] / by_gpu[other]
            by_sheet.append(sheet(other) / sheet(gpu) / true)
            unseen.append(speeds[other] / speeds[gpu] / true)
            if {gpu, other} <= ACCELERATORS.keys():
                factor = HardwareEstimates(profiled=other).compute(offer_of(gpu))
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


def offer_of(gpu: str) -> Offer:
    """Return an offer with this GPU, of which nothing else is known."""
    return Offer(
        cloud="measured", region="any", instance_type="any", accelerator=gpu, price_usd_h=1.0
    )
