"""GPUs on which no speed was fitted and no rule was chosen: Sailor's and Zeus's measurements.

Sailor timed the layers of transformers on GPUs up to a GH200, Zeus epochs of six networks on an A40
and older ones. Each time on one GPU is forecast from that on each other one by the public API.
"""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Hashable
from itertools import permutations
from typing import Any

import numpy as np

from bench.cloud.devices import offer_of
from bench.common.harness import data_file
from thrifty.cloud import HardwareEstimates


_SAILOR = {"A100-40": "A100", "A100-80": "A100-80GB", "GH-96": "GH200", "V100-16": "V100"}
_ZEUS = {"a40": "A40", "p100": "P100", "v100": "V100"}

Times = dict[Hashable, dict[str, float]]
"""Seconds by GPU, for each network and batch."""


def forecasts(*, quick: bool) -> list[dict[str, Any]]:
    """Return errors and coverage for each GPU, asked from every other one, by source."""
    out = []
    for source, times in (("Sailor", _sailor()), ("Zeus", _zeus())):
        ratios: dict[str, list[float]] = defaultdict(list)
        inside: dict[str, list[bool]] = defaultdict(list)
        for by_gpu in list(times.values())[:: 10 if quick else 1]:
            for here, there in permutations(sorted(by_gpu), 2):
                true = by_gpu[there] / by_gpu[here]
                factor = HardwareEstimates(profiled=here).compute(offer_of(there))
                ratios[there].append(factor.median / true)
                inside[there].append(factor.low <= true <= factor.high)
        out += [
            {
                "source": source,
                "GPU": gpu,
                "steps": len(ratios[gpu]),
                "forecast / true, median": math.exp(float(np.median(np.log(ratios[gpu])))),
                "median error %": 100 * float(np.median(np.abs(np.subtract(ratios[gpu], 1)))),
                "in the 90 % interval": 100 * float(np.mean(inside[gpu])),
            }
            for gpu in sorted(ratios)
        ]
    return out


def _sailor() -> Times:
    """Return seconds of all layers of a network on one GPU, forward and backward."""
    found: Times = defaultdict(dict)
    folder = data_file("systems", "sailor", "profiles")
    for path in sorted(folder.glob("*/*/profile.json")):
        network, gpu = path.parts[-3:-1]
        for batch, profile in json.loads(path.read_text()).items():
            alone = [layer["TMPCs"].get("1") for layer in profile["nodes"]]
            if gpu in _SAILOR and all(alone):
                seconds = sum(each[0]["timePerSample"] for each in alone)
                found[network, batch][_SAILOR[gpu]] = seconds
    return found


def _zeus() -> Times:
    """Return seconds of an epoch at the highest power limit that was measured."""
    found: Times = defaultdict(dict)
    limits: dict[tuple[Hashable, str], float] = defaultdict(float)
    for name, gpu in _ZEUS.items():
        path = data_file("systems", "zeus", f"summary_power_{name}.csv")
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                key = row["dataset"], row["network"], row["batch_size"], row["optimizer"]
                if float(row["power_limit"]) > limits[key, gpu]:
                    limits[key, gpu] = float(row["power_limit"])
                    found[key][gpu] = float(row["time_per_epoch"])
    return found
