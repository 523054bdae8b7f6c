"""The rule of sub-sampling as a bandit with one pull a step, against published regrets.

    python -m bench.bench_bandits [--quick] [--problems 2000] [--rules SSMC,TS]

The problems are random, with ten arms: Bernoulli with means uniform on [0, 1], and Gaussian with
standard normal means and standard deviation 1. The published regrets are from Baudry, Kaufmann and
Maillard, "Sub-sampling for Efficient Non-Parametric Bandit Exploration", NeurIPS 2020, tables 9 and
10, means over 10,000 problems. One run to the longest horizon gives the regret at all of them.

The published figures of SSMC are those of the rule without forced exploration (the threshold 1).
With sqrt(log(n)) every arm is pulled three times in the first hundred steps, which alone costs more
than the published regret on Gaussian problems. ``SSMC sqrt-log``, the default of ``SubSampling``,
is shown beside it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, get_args

import numpy as np

from bench.bandits.rules import (
    Family,
    Floats,
    means_of,
    puller,
    random_blocks,
    sub_samples,
    thompson,
)
from bench.common.harness import Goal, at_most, finish, parser, table
from thrifty.search._sub_sampling_rule import Threshold


NUM_ARMS = 10
CHUNK = 250
HORIZONS = (100, 1_000, 10_000, 20_000)
PUBLISHED = {
    ("SSMC", "Bernoulli"): (16.5, 34.2, 55.0, 61.9),
    ("SSMC", "Gaussian"): (40.6, 76.2, 120.1, 135.1),
    ("SSMC sqrt-log", "Bernoulli"): (16.5, 34.2, 55.0, 61.9),
    ("SSMC sqrt-log", "Gaussian"): (40.6, 76.2, 120.1, 135.1),
    ("TS", "Bernoulli"): (13.8, 27.8, 45.8, 52.2),
    ("TS", "Gaussian"): (41.2, 76.4, 118.5, 132.6),
    ("RB-SDA", "Bernoulli"): (14.8, 31.8, 51.1, 57.7),
    ("RB-SDA", "Gaussian"): (38.1, 70.4, 111.8, 125.7),
}
THRESHOLDS: dict[str, Threshold] = {"SSMC": 1, "SSMC sqrt-log": "sqrt-log"}


def regrets(
    rule: str, family: Family, chunk: int, num: int, horizons: Sequence[int]
) -> tuple[Floats, float]:
    """Return the regrets of ``num`` problems at the horizons, and the seconds it took.

    All rules meet the same problems.
    """
    began = time.process_time()
    key = [get_args(Family).index(family), chunk]
    means = means_of(family, num=num, num_arms=NUM_ARMS, rng=np.random.default_rng(key))
    # The random draws of each rule are its own.
    names = [name for name, _ in PUBLISHED]
    pull_rng, rule_rng = np.random.default_rng([*key, 1 + names.index(rule)]).spawn(2)
    pull = puller(family, means, pull_rng)
    if rule in THRESHOLDS:
        out = sub_samples(pull, means, horizons=horizons, kind=THRESHOLDS[rule])
    elif rule == "TS":
        out = thompson(family, pull, means, horizons=horizons, rng=rule_rng)
    else:
        out = random_blocks(pull, means, horizons=horizons, rng=rule_rng)
    return out, time.process_time() - began


def row(
    rule: str, family: Family, runs: Sequence[tuple[Floats, float]], horizons: Sequence[int]
) -> dict[str, Any]:
    """Return the mean regret and the half width of its 95 % confidence interval.

    What is published stands beside it.
    """
    every = np.concatenate([regret for regret, _ in runs])
    out: dict[str, Any] = {"rule": rule, "family": family, "problems": len(every)}
    for i, horizon in enumerate(horizons):
        out[f"T={horizon}"] = float(every[:, i].mean())
        out[f"± {horizon}"] = float(1.96 * every[:, i].std(ddof=1) / len(every) ** 0.5)
        out[f"published {horizon}"] = PUBLISHED[rule, family][i]
    out["cpu_s"] = sum(seconds for _, seconds in runs)
    return out


def goals(rows: Sequence[dict[str, Any]], horizons: Sequence[int]) -> list[Goal]:
    return [
        at_most(
            f"{r['rule']}, {r['family']}, T={horizon}: |regret / published - 1|",
            abs(r[f"T={horizon}"] / r[f"published {horizon}"] - 1),
            0.10,
        )
        for r in rows
        if r["rule"] == "SSMC"
        for horizon in horizons
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--problems", type=int, default=2000, help="of each family")
    options.add_argument("--rules", default=",".join(dict.fromkeys(rule for rule, _ in PUBLISHED)))
    args = options.parse_args()
    num = 200 if args.quick else args.problems
    horizons = HORIZONS[:2] if args.quick else HORIZONS
    sizes = [min(CHUNK, num - first) for first in range(0, num, CHUNK)]
    began = time.perf_counter()
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        running = {
            (rule, family): [
                pool.submit(regrets, rule, family, chunk, size, horizons)
                for chunk, size in enumerate(sizes)
            ]
            for rule, family in PUBLISHED
            if rule in args.rules.split(",")
        }
        rows = [
            row(rule, family, [run.result() for run in runs], horizons)
            for (rule, family), runs in running.items()
        ]
    seconds = time.perf_counter() - began
    table(rows)
    print(f"\n{seconds:.0f} s with two processes")
    finish("bandits", {"rows": rows, "seconds": seconds}, goals(rows, horizons))


if __name__ == "__main__":
    main()
