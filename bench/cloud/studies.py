"""One study on one machine, on one machine a trial, and on the fleet that is planned for it.

The study is a grid of step schedules for a ResNet-18 on CIFAR-10, whose trials share training. The
step was measured on a T4 by Sia; prices are those of the shipped catalogue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from bench.cloud.clusters import measured, profile_of
from thrifty.cloud import (
    Catalogue,
    Fleet,
    FleetOptions,
    HardwareEstimates,
    Interval,
    Offer,
    Workload,
    estimate,
    parallelism_phases_of,
    plan_fleet,
)
from thrifty.perf import PackCurve
from thrifty.plan import SearchPlan, stage_forest
from thrifty.space import Step, Timeline


_EPOCHS = 100
_BATCH = 128
_STEPS_PER_EPOCH = 391
_RATES = (0.05, 0.1, 0.2)
_FIRST, _SECOND = (30, 40, 50), (60, 70, 80)
_TYPE = "g4dn.xlarge"
"""The machine that was measured: one T4."""
_DEADLINES_H = (2, 12)
_MOST = 32

ASSUMED_PACKS = PackCurve(backend="fused", step_s={1: 1.0, 2: 1.4, 4: 2.5})
"""No public table has packs of this network; four trainings in 2.5 times the step is a guess."""


def trials() -> list[Timeline]:
    """Return the learning-rate schedules of all trials."""
    return [
        Timeline({"lr": Step(lr, [first, second])}, epochs=_EPOCHS)
        for lr, first, second in product(_RATES, _FIRST, _SECOND)
    ]


def studies() -> list[dict[str, Any]]:
    """Return time and dollars with their intervals, for each way to rent."""
    plan = SearchPlan()
    timelines = trials()
    for trial, timeline in enumerate(timelines):
        plan.request(trial, plan.insert(timeline), _EPOCHS)
    phases = parallelism_phases_of(stage_forest(plan, ends={}), steps_per_epoch=_STEPS_PER_EPOCH)
    alone = Workload(
        profile=profile_of(measured(), cluster="aws", app="cifar10"),
        steps=_EPOCHS * _STEPS_PER_EPOCH,
        global_batch=_BATCH,
        state_bytes=1e8,
    )
    study = replace(alone, parallelism_phases=phases)
    offers = list(Catalogue.shipped().where(cloud="aws", region="us-east-1"))
    one = next(offer for offer in offers if offer.instance_type == _TYPE)
    known = HardwareEstimates(profiled=one.accelerator)
    num = len(timelines)
    all_alone = replace(alone, parallelism_phases=((num, alone.steps),))
    rows = [
        _row("one machine, nothing shared", _on(all_alone, one, 1, known)),
        _row("one machine, shared prefixes", _on(study, one, 1, known)),
        _row("one machine a trial", _times(_on(alone, one, 1, known), num)),
    ]
    for hours in _DEADLINES_H:
        for name, work in (
            ("", study),
            (", with packs (assumed)", replace(study, packs=ASSUMED_PACKS)),
        ):
            fleet = _planned(work, offers, known, hours=hours)
            rows.append(_row(f"planned for {hours} h{name}", fleet))
        fleet = _planned(study, offers, known, hours=hours, spot=True)
        rows.append(_row(f"planned for {hours} h, spot allowed", fleet))
    return rows


def _on(work: Workload, offer: Offer, num: int, known: HardwareEstimates) -> Fleet:
    return estimate(work, [(offer, num, False)], estimates=known)


def _planned(
    work: Workload,
    offers: Sequence[Offer],
    known: HardwareEstimates,
    *,
    hours: float,
    spot: bool = False,
) -> Fleet:
    """Return the cheapest fleet that ends in time at the 90 % end."""
    options = FleetOptions(deadline_s=hours * 3600, estimates=known, max_nodes=_MOST, spot=spot)
    best = plan_fleet(work, offers, options).best
    assert best is not None
    return best


def _times(fleet: Fleet, num: int) -> Fleet:
    """Return as many of a fleet, each for a trial of its own."""
    cost = fleet.cost_usd
    return replace(
        fleet,
        machines=tuple(replace(each, num=each.num * num) for each in fleet.machines),
        cost_usd=Interval(median=cost.median * num, low=cost.low * num, high=cost.high * num),
    )


def _row(way: str, fleet: Fleet) -> dict[str, Any]:
    hours = [each / 3600 for each in _ends(fleet.time_s)]
    median, low, high = _ends(fleet.cost_usd)
    return {
        "way": way,
        "machines": str(fleet),
        "h": hours[0],
        "h, low": hours[1],
        "h, high": hours[2],
        "$": median,
        "$, low": low,
        "$, high": high,
    }


def _ends(interval: Interval) -> tuple[float, float, float]:
    return interval.median, interval.low, interval.high
