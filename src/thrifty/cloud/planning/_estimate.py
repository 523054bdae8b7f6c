"""Estimate of the time and cost of a training on machines where it has not run yet."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from thrifty.cloud._hardware import HardwareEstimates
from thrifty.cloud._market import SpotHistory, slowdowns, spot_terms
from thrifty.cloud._offer import Fleet, Interval, MachineGroup, Offer
from thrifty.cloud._workload import Workload, study_s
from thrifty.core import CloudError, UsageError
from thrifty.perf import Precision, StepCurve, split_batch

from ._devices import (
    Devices,
    bound_by,
    equal_steps,
    kind_of,
    misfit,
    replayed_s,
    slopes_of,
    widened,
)
from ._fleet_options import profiled_on


Machines = Sequence[tuple[Offer, int, bool]]
"""Offers, the number of machines of each, and whether they are rented as spot."""


def estimate(
    workload: Workload,
    machines: Machines,
    *,
    estimates: HardwareEstimates,
    spot_market: SpotHistory | None = None,
) -> Fleet:
    """Estimate the seconds and dollars of a training on these machines, with intervals.

    The global batch is split equally among equal devices, and otherwise so that all devices compute
    equally long. The step is then simulated with an all-reduce of each gradient bucket: a ring over
    all machines and one inside each machine, at the pace of the slowest link. The ends of the
    intervals take all estimates at their low or all at their high ends, so the intervals are rather
    too wide than too narrow. Times include the expected delay from evictions of spot machines; one
    eviction stops all machines.

    Args:
        workload: Training to estimate.
        machines: Offers, the number of machines of each, and whether they are rented as spot; all
            in one region.
        estimates: Estimates of their devices and networks.
        spot_market: Prices and evictions of spot machines; None: the offers' prices, and one
            eviction per ten machine hours.

    Raises:
        CloudError: The samples do not fit, or the machines cannot be rented together this way.

    >>> from thrifty.perf import StepProfile
    >>> profile = StepProfile(
    ...     device="V100",
    ...     batches=(8, 16),
    ...     forward_s=(0.1, 0.2),
    ...     backward_s=(0.2, 0.4),
    ...     optimizer_s=0.0,
    ...     peak_bytes=(2e9, 4e9),
    ...     bucket_bytes=(0.0,),
    ...     bucket_ready=(1.0,),
    ... )
    >>> workload = Workload(profile=profile, steps=10_000, global_batch=32, setup_s=0.0)
    >>> offer = Offer(
    ...     cloud="aws",
    ...     region="us-east-1",
    ...     instance_type="p3.2xlarge",
    ...     accelerator="V100",
    ...     price_usd_h=3.06,
    ... )
    >>> fleet = estimate(
    ...     workload, [(offer, 2, False)], estimates=HardwareEstimates(profiled="V100")
    ... )
    >>> round(fleet.time_s.median), round(fleet.cost_usd.median, 2), fleet.why
    (6091, 10.35, 'compute')
    """
    _check(machines)
    devices_of = {offer.accelerator for offer, _, _ in machines}
    # Machines of several types are compared by one profile.
    alone = devices_of.pop() if len(devices_of) == 1 else ""
    workload, estimates = profiled_on(workload, estimates, alone)
    kinds = {kind_of(offer): offer for offer, _, _ in machines}
    places = {kind: place for place, kind in enumerate(kinds)}
    # Devices of several types train in one precision, where they can.
    told = workload if len(kinds) == 1 else replace(workload, precisions=None)
    devices = Devices.of(list(kinds.values()), estimates=estimates, workload=told)
    nums = np.zeros(len(kinds), int)
    for offer, num, _ in machines:
        nums[places[kind_of(offer)]] += num
    if len(kinds) == 1:
        found = _equal(workload, devices, offer=machines[0][0], num=int(nums[0]))
    else:
        found = _unequal(workload, devices, offers=list(kinds.values()), nums=nums)
    return fleet_of(
        workload,
        machines,
        batches=[found.of_device(places[kind_of(offer)]) for offer, _, _ in machines],
        precisions=[devices.precisions[places[kind_of(offer)]] for offer, _, _ in machines],
        step_s=found.step_s,
        work_s=found.work_s,
        spot_market=spot_market,
        why=bound_by(
            workload.profile,
            batch=found.batch,
            num_micro=found.num_micro,
            compute=devices.compute[0] * (found.batch > 0),
            replay_s=found.replay_s,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """Steps on some machines.

    Attributes:
        batch: Samples per device of each kind, [kinds].
        num_micro: Micro-batches per device of each kind, [kinds].
        step_s: Seconds of a step: median, low, high.
        work_s: Seconds of all steps: median, low, high.
        replay_s: Median seconds of a step by the replay alone.
    """

    batch: np.ndarray
    num_micro: np.ndarray
    step_s: np.ndarray
    work_s: np.ndarray
    replay_s: float

    def of_device(self, kind: int) -> tuple[int, int]:
        """Return the samples and the micro-batches of a device of this kind."""
        return int(self.batch[kind]), int(self.num_micro[kind])


def fleet_of(
    workload: Workload,
    machines: Machines,
    *,
    batches: Sequence[tuple[int, int]],
    precisions: Sequence[Precision],
    step_s: np.ndarray,
    work_s: np.ndarray,
    spot_market: SpotHistory | None,
    why: str,
) -> Fleet:
    """Return a fleet with known step times: add the setup, evictions and prices.

    Args:
        workload: Training to estimate.
        machines: Machines as in ``estimate``.
        batches: Samples and micro-batches of a device for each entry of ``machines``.
        precisions: Precision in which each entry of ``machines`` trains.
        step_s: Seconds of a step: median, low, high.
        work_s: Seconds of all steps: median, low, high.
        spot_market: See ``estimate``.
        why: What bounds the step.

    Raises:
        CloudError: An offer is not available on demand or as spot, as wanted.
    """
    rented, evictions = _rented(
        machines, batches=batches, precisions=precisions, spot_market=spot_market
    )
    time_s, every_s = work_s, None
    if any(each.spot for each in rented):
        slow, every = slowdowns(workload, np.array([evictions]))
        time_s, every_s = slow[0] * work_s, float(every[0])
    time_s = workload.setup_s + time_s
    usd_h = sum(each.usd_h for each in rented)
    return Fleet(
        machines=tuple(rented),
        step_s=_interval(step_s),
        time_s=_interval(time_s),
        cost_usd=_interval(time_s / 3600 * usd_h),
        checkpoint_s=every_s,
        why=why,
    )


def _rented(
    machines: Machines,
    *,
    batches: Sequence[tuple[int, int]],
    precisions: Sequence[Precision],
    spot_market: SpotHistory | None,
) -> tuple[list[MachineGroup], float]:
    """Return the machines of a fleet with their prices, and how often they are evicted in an hour.

    The arguments are those of ``fleet_of``.

    Raises:
        CloudError: An offer is not available on demand or as spot, as wanted.
    """
    rented: list[MachineGroup] = []
    evictions = 0.0
    for (offer, num, spot), (batch, num_micro), precision in zip(
        machines, batches, precisions, strict=True
    ):
        priced = offer
        if not spot and offer.price_usd_h is None:
            raise CloudError(
                f"{offer} is offered as spot only: rent it so, or give its price_usd_h"
            )
        if spot:
            terms = spot_terms(offer, spot_market)
            if terms is None:
                raise CloudError(
                    f"{offer} is not offered as spot: rent it on demand, or give its spot_usd_h"
                )
            priced = replace(offer, spot_usd_h=terms[0])
            evictions += num * terms[1]
        rented.append(
            MachineGroup(
                offer=priced,
                num=num,
                batch=batch,
                spot=spot,
                num_micro=num_micro,
                precision=precision,
            )
        )
    return rented, evictions


def all_steps_s(workload: Workload, devices: Devices, step_s: np.ndarray) -> np.ndarray:
    """Return the seconds of all steps from those of one, [3, kinds, sizes]."""
    if workload.parallelism_phases is None:
        return workload.steps * step_s
    seconds = study_s(
        np.moveaxis(step_s, -1, 0), workload.parallelism_phases, devices.pack_ratio[:, None]
    )
    return np.moveaxis(seconds, 0, -1)


def machines_each(workload: Workload, step_s: np.ndarray) -> int:
    """Return how many machines one training has when a study is at its widest.

    A workload of one training has all of them.

    Args:
        workload: Training or study.
        step_s: Seconds of a step on 1, 2, ... machines; infinite where the samples do not fit.
    """
    if workload.parallelism_phases is None:
        return len(step_s)
    fair = max(1, len(step_s) // max(width for width, _ in workload.parallelism_phases))
    possible = np.flatnonzero(np.isfinite(step_s)) + 1
    enough = possible[possible >= fair]
    return int(enough[0] if enough.size else possible[-1])


def _check(machines: Machines) -> None:
    if not machines or any(num < 1 for _, num, _ in machines):
        raise CloudError(f"`machines` must name offers, each at least once, got {list(machines)!r}")
    regions = sorted({f"{offer.cloud} {offer.region}" for offer, _, _ in machines})
    if len(regions) > 1:
        raise CloudError(
            f"machines of one fleet are in one region, not in {', '.join(regions)}: sums "
            "across regions are not foreseen"
        )


def _equal(workload: Workload, devices: Devices, *, offer: Offer, num: int) -> _Steps:
    """Return the steps on equal machines."""
    steps = equal_steps(
        workload.profile, devices, global_batch=workload.global_batch, most_nodes=num
    )
    work = all_steps_s(workload, devices, steps.step_s)[:, 0, -1]
    if not np.isfinite(work).all():
        if num * offer.accelerator_count > workload.global_batch:
            raise CloudError(
                f"a global batch of {workload.global_batch} samples feeds as many devices, "
                f"not the {num * offer.accelerator_count} of {num} x {offer.instance_type}: "
                "rent fewer, or raise the global batch"
            )
        needs = 1 if devices.most[0] < 1 else int(steps.batch[0, -1])
        text = misfit(workload.profile, offer, batch=needs, usable=float(devices.usable[0]))
        raise CloudError(
            f"{text}: rent more of them or others{_or_accumulate(devices)}, or lower the global "
            "batch"
        )
    size = machines_each(workload, steps.step_s[0, 0]) - 1
    return _Steps(
        batch=steps.batch[:, size],
        num_micro=steps.num_micro[:, size],
        step_s=steps.step_s[:, 0, size],
        work_s=work,
        replay_s=float(steps.replay_s[0, size]),
    )


def _unequal(
    workload: Workload, devices: Devices, *, offers: Sequence[Offer], nums: np.ndarray
) -> _Steps:
    """Return the steps on machines of several kinds."""
    profile = workload.profile
    if workload.parallelism_phases is not None:
        raise CloudError(
            "a study is planned for machines of one type: leave out widths, or take equal machines"
        )
    for offer, most, usable in zip(offers, devices.most, devices.usable.tolist(), strict=True):
        if most < 1:
            text = misfit(profile, offer, batch=1, usable=usable)
            raise CloudError(f"{text}: leave it out")
    num = nums.sum(keepdims=True)

    def replay(batch: np.ndarray, devices: Devices = devices) -> np.ndarray:
        return replayed_s(
            profile,
            batch=batch,
            num_micro=devices.num_micro(batch),
            compute=devices.compute * (batch > 0),
            sums_s=_slowest_sums_s(workload, devices, num),
        )

    splits = _splits(workload, devices, nums, sums_s=_slowest_sums_s(workload, devices, num)[0])
    batch = min(splits, key=lambda split: float(replay(split)[0]))
    replay_s = replay(batch)
    rest = devices.priors.rest((nums * devices.per_node * (batch > 0)).sum())
    steps = widened(
        replay_s * rest,
        compute=devices.compute.max(axis=1),
        widths=devices.widths[int(nums.sum() > 1)].max(),
    )
    if devices.observed[0] is not None and len(set(devices.observed)) == 1:
        # All are of one type, of which some machines lend only some of their devices.
        near = replay(batch, devices.nearby())
        steps = devices.observed[0].ends(
            near[:1] * rest[0],
            slopes_of(near)[None],
            nodes=num,
            per_node=devices.per_node.max(keepdims=True),
            batch=batch.max(keepdims=True),
            wider=devices.priors.observed,
        )[:, 0]
    return _Steps(
        batch=batch,
        num_micro=devices.num_micro(batch),
        step_s=steps,
        work_s=workload.steps * steps,
        replay_s=float(replay_s[0]),
    )


def _slowest_sums_s(workload: Workload, devices: Devices, num: np.ndarray) -> np.ndarray:
    """Return the seconds of each bucket's sum on ``num`` machines, [ends, buckets]."""
    sums = devices.sums_s(workload.profile.bucket_bytes, num)
    out: np.ndarray = sums.max(axis=1)[:, 0]
    return out


def _splits(
    workload: Workload, devices: Devices, nums: np.ndarray, *, sums_s: np.ndarray
) -> list[np.ndarray]:
    """Return the splits worth trying: whole batches, and micro-batches where memory binds."""
    whole = _whole_batches(workload, devices, nums)
    if devices.accumulates and (whole is None or (whole >= devices.most).any()):
        micro = _micro_batches(workload, devices, nums, sums_s=sums_s)
        return [micro] if whole is None else [whole, micro]
    if whole is None:
        held = int((nums * devices.per_node * devices.most).sum())
        raise CloudError(
            f"a global batch of {workload.global_batch} samples does not fit into the memory "
            f"of {(nums * devices.per_node).sum()} devices, which hold {held}: rent "
            f"more{_or_accumulate(devices)}, or lower the global batch"
        )
    return [whole]


def _or_accumulate(devices: Devices) -> str:
    return "" if devices.accumulates else ", allow accumulation"


def _micro_batches(
    workload: Workload, devices: Devices, nums: np.ndarray, *, sums_s: np.ndarray
) -> np.ndarray:
    """Return samples per device of each kind for the shortest step, in micro-batches if needed."""
    samples = np.arange(1, workload.global_batch + 1)
    # All devices wait for the slowest optimizer, whatever their samples.
    took = replayed_s(
        replace(workload.profile, optimizer_s=0.0, overhead_s=0.0),
        batch=samples[:, None, None],
        num_micro=devices.num_micro(samples[:, None])[..., None],
        compute=devices.compute[0][:, None],
        sums_s=sums_s,
    )
    # A few samples more may take less time, where they make full micro-batches.
    took = np.minimum.accumulate(took[::-1])[::-1]
    of_kind = nums * devices.per_node

    def batches(step_s: float) -> np.ndarray:
        return np.array([np.searchsorted(each, step_s, side="right") for each in took.T])

    times = np.unique(took)
    first = bisect_left(times, workload.global_batch, key=lambda each: int(batches(each) @ of_kind))
    return batches(float(times[first]))


def _whole_batches(workload: Workload, devices: Devices, nums: np.ndarray) -> np.ndarray | None:
    """Return samples per device of each kind so that all devices compute equally long.

    Equal devices get the same number of samples, rounded up. It is None if they do not fit.
    """
    profile = workload.profile
    seconds = np.add(profile.forward_s, profile.backward_s)
    line = StepCurve.fit(profile.batches, seconds.tolist())
    of_kind = [
        replace(line.scaled(float(factor)), max_samples=int(most))
        for factor, most in zip(devices.compute[0], devices.most, strict=True)
    ]
    kinds = np.repeat(np.arange(len(nums)), nums * devices.per_node)
    try:
        sizes = split_batch([of_kind[kind] for kind in kinds], workload.global_batch)
    except UsageError:
        return None
    batch = np.zeros(len(nums), int)
    np.maximum.at(batch, kinds, sizes)
    return batch


def _interval(ends: np.ndarray) -> Interval:
    return Interval(median=float(ends[0]), low=float(ends[1]), high=float(ends[2]))
