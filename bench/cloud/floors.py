"""Whether a part of a step takes equally long on all GPUs: the floor of launches and host work.

The floor is the intercept of a step's time over the batch, as a profile could measure it. It is
tried in forecasts of a GPU that the fit of the speeds has not seen, as in ``devices``.
"""

from __future__ import annotations

import csv
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np

from bench.cloud.clusters import CLUSTERS, measured
from bench.cloud.devices import GAVEL_GPUS, HOST_BOUND, sheet
from bench.cloud.profet_vtrain import profet_times
from bench.common.harness import data_file
from thrifty.perf import StepCurve


Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Seconds on another GPU from those on this one, their floor, and the ratio of speeds."""

RULES: dict[str, Rule] = {
    "no floor": lambda step_s, _floor_s, ratio: step_s * ratio,
    "floor on faster GPUs": lambda step_s, floor_s, ratio: np.where(
        ratio < 1, floor_s + (step_s - floor_s) * ratio, step_s * ratio
    ),
    "floor on all GPUs": lambda step_s, floor_s, ratio: floor_s + (step_s - floor_s) * ratio,
}

_WITHIN = 2.4
"""Factor of the interval of a GPU that was not measured."""


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A step measured on two GPUs.

    Attributes:
        here: GPU that is known.
        there: GPU that is asked.
        step_s: seconds here.
        floor_s: intercept of the seconds here over the batch.
        true_s: seconds there.
    """

    here: str
    there: str
    step_s: float
    floor_s: float
    true_s: float


def floors_left_out(*, quick: bool) -> list[dict[str, Any]]:
    """Return errors and coverage of each rule for each GPU, asked from every other one."""
    pairs = _pairs()[:: 10 if quick else 1]
    gpus = sorted({pair.there for pair in pairs})
    out = []
    for gpu in gpus:
        asked = [pair for pair in pairs if pair.there == gpu]
        seen = [pair for pair in pairs if gpu not in {pair.here, pair.there}]
        line: dict[str, Any] = {"GPU": gpu, "steps": len(asked)}
        for name, rule in RULES.items():
            speeds = {**_fitted(seen, rule), gpu: sheet(gpu)}
            error = _errors(asked, speeds, rule)
            inside = np.abs(error) <= np.log(_WITHIN)
            line[f"{name}: median error %"] = 100 * float(np.median(np.abs(np.expm1(error))))
            line[f"{name}: in the interval, %"] = 100 * float(np.mean(inside))
        out.append(line)
    return out


def _pairs() -> list[_Pair]:
    pairs = []
    for by_gpu in _curves():
        for here, there in permutations(sorted(by_gpu), 2):
            known = by_gpu[here]
            sizes = sorted(known)
            if len(sizes) < 2:
                continue
            line = StepCurve.fit(sizes, [known[size] for size in sizes])
            floor_s = min(line.fixed_s, *known.values())
            pairs += [
                _Pair(
                    here=here,
                    there=there,
                    step_s=known[size],
                    floor_s=floor_s,
                    true_s=by_gpu[there][size],
                )
                for size in sizes
                if size in by_gpu[there]
            ]
    return pairs


def _curves() -> list[Mapping[str, Mapping[int, float]]]:
    """Return seconds by GPU and batch, for each network on inputs of one size."""
    found: dict[Any, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    times, _ = profet_times()
    for (gpu, network), by_setup in times.items():
        for (batch, pixels), seconds in by_setup.items():
            found["profet", network, pixels][gpu][batch] = seconds
    path = data_file("systems", "gavel", "isolated.csv")
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            rate, of_gavel = float(row["steps_per_s"]), GAVEL_GPUS.get(row["worker"])
            if row["gpus"] == "1" and of_gavel and rate > 0 and row["bs"].isdecimal():
                found["gavel", row["file"], row["model"]][of_gavel][int(row["bs"])] = 1 / rate
    for each in measured():
        if each.placement == (1,) and each.app != HOST_BOUND:
            other = {"rtx": "RTX2080Ti", "azure": "V100"}
            gpu = other.get(each.cluster, CLUSTERS[each.cluster].accelerator)
            found["sia", each.app][gpu][each.batch] = each.step_s
    return list(found.values())


def _fitted(pairs: Sequence[_Pair], rule: Rule) -> dict[str, float]:
    """Return the speeds with the smallest absolute errors of logarithms under a rule.

    Each pair of GPUs counts as much as any other; data sheets count a little.
    """
    from scipy.optimize import minimize  # noqa: PLC0415 -- takes a second to import

    gpus = sorted({pair.here for pair in pairs} | {pair.there for pair in pairs})
    count = Counter((pair.here, pair.there) for pair in pairs)
    weight = np.array([1 / count[pair.here, pair.there] for pair in pairs])
    prior = np.log([sheet(gpu) for gpu in gpus])

    def loss(logs: np.ndarray) -> float:
        error = _errors(pairs, dict(zip(gpus, np.exp(logs), strict=True)), rule)
        near = 0.05 * float(((logs - prior) ** 2).sum())
        return float(weight @ np.sqrt(error**2 + 0.05**2)) + near

    found = minimize(loss, prior, method="L-BFGS-B").x
    return dict(zip(gpus, np.exp(found).tolist(), strict=True))


def _errors(pairs: Sequence[_Pair], speeds: Mapping[str, float], rule: Rule) -> np.ndarray:
    """Return the logarithm of forecast over truth for each pair."""
    step_s, floor_s, true_s = (
        np.array([getattr(pair, name) for pair in pairs])
        for name in ("step_s", "floor_s", "true_s")
    )
    ratio = np.array([speeds[pair.here] / speeds[pair.there] for pair in pairs])
    out: np.ndarray = np.log(rule(step_s, floor_s, ratio) / true_s)
    return out
