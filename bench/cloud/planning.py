"""Planning time on generated catalogues."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import numpy as np

from thrifty.cloud import ACCELERATORS, FleetOptions, HardwareEstimates, Offer, Workload
from thrifty.cloud.planning._planner import plan_fleet
from thrifty.perf import StepProfile


NODES = 64
_BUCKETS = 12
_REGIONS = 10


def planning_times(rounds: int, quick: bool) -> dict[str, float]:
    """Return the median seconds of a plan for a deadline.

    In ``spread``, each type is offered in ten regions, as in clouds' catalogues. In ``distinct``,
    all types differ, which is the worst case. ``spot``, ``mixed`` and ``study`` are planned on the
    small catalogue and the spread one.
    """
    large = 500 if quick else 5000
    small, spread = catalogue(100, seed=0), catalogue(large, seed=1)
    distinct = catalogue(large, seed=2, regions=1)
    training = workload()
    study = workload(widths=((81, 1000), (27, 1000), (9, 1000), (3, 1000)))
    cases: dict[str, Callable[[], object]] = {
        "small_s": lambda: _plan(training, small),
        "spread_s": lambda: _plan(training, spread),
        "distinct_s": lambda: _plan(training, distinct),
        "small_spot_s": lambda: _plan(training, small, spot=True),
        "spread_spot_s": lambda: _plan(training, spread, spot=True),
        "distinct_spot_s": lambda: _plan(training, distinct, spot=True),
        "small_study_s": lambda: _plan(study, small),
        "spread_study_s": lambda: _plan(study, spread),
        "small_mixed_s": lambda: _plan(training, small, mixed=True),
        "spread_mixed_s": lambda: _plan(training, spread, mixed=True),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for plan in cases.values():
        plan()  # the first use imports modules and fills caches
    for _ in range(rounds):
        for name, plan in cases.items():
            began = time.perf_counter()
            plan()
            times[name].append(time.perf_counter() - began)
    return {name: median(seconds) for name, seconds in times.items()}


def catalogue(num: int, *, seed: int, regions: int = _REGIONS) -> list[Offer]:
    """Return offers of drawn machine types, each in ``regions`` regions."""
    rng = np.random.default_rng(seed)
    names = sorted(ACCELERATORS)
    offers: list[Offer] = []
    while len(offers) < num:
        name = names[int(rng.integers(len(names)))]
        count = int(2 ** rng.integers(0, 4))
        price = count * ACCELERATORS[name].speed / 60 * float(rng.uniform(0.5, 2.0))
        gbps = float(rng.choice([5.0, 10.0, 25.0, 50.0, 100.0, 400.0]))
        for region in range(min(regions, num - len(offers))):
            here = price * float(rng.uniform(1.0, 1.3))
            offers.append(
                Offer(
                    cloud="drawn",
                    region=f"region-{region}",
                    instance_type=f"type-{len(offers) // regions}",
                    accelerator=name,
                    accelerator_count=count,
                    accelerator_memory_gib=ACCELERATORS[name].memory_gib,
                    price_usd_h=here,
                    spot_usd_h=here * float(rng.uniform(0.2, 0.6)),
                    baseline_gbps=gbps,
                )
            )
    return offers


def workload(widths: tuple[tuple[int, int], ...] | None = None) -> Workload:
    """Return a workload like ResNet-50 on ImageNet."""
    profile = StepProfile(
        device="V100",
        batches=(8, 16, 32, 64, 128),
        forward_s=(0.01, 0.017, 0.031, 0.06, 0.118),
        backward_s=(0.02, 0.034, 0.062, 0.12, 0.236),
        optimizer_s=0.003,
        peak_bytes=(2e9, 3e9, 5e9, 9e9, 17e9),
        bucket_bytes=tuple([1e6] + [9e6] * (_BUCKETS - 1)),
        bucket_ready=tuple(np.linspace(0.1, 1.0, _BUCKETS).tolist()),
    )
    return Workload(
        profile=profile,
        steps=450_000,
        global_batch=1024,
        parallelism_phases=widths,
        state_bytes=2e8,
    )


def _plan(
    training: Workload, offers: list[Offer], *, spot: bool = False, mixed: bool = False
) -> object:
    return plan_fleet(
        training,
        offers,
        FleetOptions(
            deadline_s=72 * 3600,
            estimates=HardwareEstimates(profiled="V100"),
            max_nodes=NODES,
            spot=spot,
            mixed=mixed,
        ),
    )
