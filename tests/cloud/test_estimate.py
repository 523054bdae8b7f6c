"""Forecasts for fleets, against a replay in plain Python."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from tests.cloud._drawn_fleets import (
    AS_NAMED,
    ESTIMATES,
    GIB,
    History,
    a_profile,
    a_workload,
    an_offer,
    drawn,
    exactly,
    offers,
    workloads,
)
from thrifty.cloud import HardwareEstimates, Interval, NetworkPriors, Offer, Workload
from thrifty.cloud._market import spot_seconds
from thrifty.cloud.planning._estimate import estimate
from thrifty.core import CloudError
from thrifty.perf import (
    CollectiveTiming,
    PackCurve,
    StepCurve,
    StepProfile,
    forecast_split,
    split_batch,
)


pytestmark = pytest.mark.slow


ENDS = ("median", "low", "high")


def ends(interval):
    return [getattr(interval, end) for end in ENDS]


def fits(profile, offer, batch):
    needed = profile.peak_at(batch) * (1 + profile.peak_error) + sum(profile.bucket_bytes)
    memory = offer.device_memory_bytes
    return memory is None or needed <= ESTIMATES.usable_memory * memory


def parts(workload, offer, batch):
    """Return in how few micro-batches a device can train its samples, or None."""
    most = 1 if workload.accumulation == "never" else batch
    numbers = range(1, most + 1)
    return next(
        (num for num in numbers if fits(workload.profile, offer, math.ceil(batch / num))), None
    )


def step_s(workload, offer, num, end):
    """Return one step of ``num`` equal machines by definition, or None if it does not fit."""
    profile, devices = workload.profile, num * offer.accelerator_count
    batch = math.ceil(workload.global_batch / devices)
    micro = parts(workload, offer, batch)
    if devices > workload.global_batch or micro is None:
        return None
    factor = getattr(ESTIMATES.compute(offer), end)
    if workload.precisions and offer.accelerator == "A10":
        factor *= {"median": 1 / 1.7, "low": 1 / 3.5, "high": 1.0}[end]
    between = getattr(ESTIMATES.network(offer), end)
    inside = getattr(ESTIMATES.inner(offer), end)
    forward, backward = (
        factor * float(at(batch / micro)) for at in (profile.forward_at, profile.backward_at)
    )
    # All micro-batches but the last exchange nothing.
    began = sum(forward + backward for _ in range(micro - 1))
    free = 0.0
    for num_bytes, ready in zip(profile.bucket_bytes, profile.bucket_ready, strict=True):
        link = ESTIMATES.link(offer)
        took = between * link.all_reduce_s(num_bytes=num_bytes, nodes=num) + (
            inside
            * link.all_reduce_s(num_bytes=num_bytes, nodes=1, per_node=offer.accelerator_count)
        )
        free = max(free, began + forward + ready * backward) + took
    after = factor * (profile.optimizer_s + profile.overhead_s)
    computed = began + forward + backward
    replayed = max(max(free, computed) + after, batch * profile.sample_input_s)
    return replayed * rest(devices)[end]


def rest(devices):
    """Return the factors on the step of some devices, by the end of the interval."""
    return dict(zip(ENDS, ESTIMATES.networks.rest(devices).tolist(), strict=True))


@given(workloads.filter(lambda some: some.parallelism_phases is None), offers, st.integers(1, 8))
@drawn
def test_equal_machines_take_what_the_replay_says(workload, offer, num):
    expected = [step_s(workload, offer, num, end) for end in ENDS]
    spot = offer.price_usd_h is None
    if expected[0] is None:
        with pytest.raises(CloudError, match=r"feeds as many devices|needs? .* GiB"):
            estimate(workload, [(offer, num, spot)], estimates=ESTIMATES)
        return
    fleet = estimate(workload, [(offer, num, spot)], estimates=ESTIMATES)
    assert ends(fleet.step_s) == pytest.approx(expected)
    if not spot:
        times = [workload.setup_s + workload.steps * each for each in expected]
        assert ends(fleet.time_s) == pytest.approx(times)
        assert ends(fleet.cost_usd) == pytest.approx([
            each / 3600 * num * offer.price_usd_h for each in times
        ])
        assert fleet.checkpoint_s is None
    (rented,) = fleet.machines
    assert rented.batch == math.ceil(workload.global_batch / (num * offer.accelerator_count))
    assert rented.num_micro == parts(workload, offer, rented.batch)
    assert rented.micro_batch == math.ceil(rented.batch / rented.num_micro)


def test_a_step_by_hand():
    # 8 samples on each of 4 devices: 0.5 + 1.0 + 0.125 s, and no gradients to sum.
    workload = a_workload(profile=a_profile(bucket_bytes=(0.0, 0.0)), setup_s=25.0)
    offer = an_offer(accelerator_count=4)
    fleet = estimate(workload, [(offer, 1, False)], estimates=ESTIMATES)
    # Each of two buckets needs six messages inside the machine.
    assert fleet.step_s.median == pytest.approx(1.625 + 6 * 10e-6)
    assert fleet.time_s.median == pytest.approx(25 + 1625.06)
    assert (fleet.num_devices, fleet.usd_h, str(fleet)) == (4, 3.0, "1 x v1 (4 V100)")


@given(workloads, offers, st.integers(1, 8))
@drawn
def test_intervals_are_in_order(workload, offer, num):
    try:
        fleet = estimate(workload, [(offer, num, True)], estimates=ESTIMATES)
    except CloudError:
        return
    for interval in (fleet.step_s, fleet.time_s, fleet.cost_usd):
        assert 0 < interval.low <= interval.median <= interval.high < math.inf


def test_neither_place_nor_price_changes_the_step():
    steps = {
        estimate(a_workload(), [(offer, 3, False)], estimates=ESTIMATES).step_s
        for offer in (an_offer(), an_offer(region="west", zone="b", price_usd_h=9.0))
    }
    assert len(steps) == 1


@pytest.mark.parametrize("num", [2, 16])
@pytest.mark.parametrize(("changes", "why"), [({}, "compute"), ({"sample_input_s": 5.0}, "input")])
def test_waiting_for_stragglers_is_not_waiting_for_sums(changes, why, num):
    workload = a_workload(profile=a_profile(bucket_bytes=(0.0, 0.0), **changes), global_batch=512)
    estimates = HardwareEstimates(profiled="V100", networks=NetworkPriors(straggling=exactly(0.3)))
    offers = [an_offer(name, accelerator_memory_gib=None) for name in ("v1", "v2")]
    equal = estimate(workload, [(offers[0], num, False)], estimates=estimates)
    unequal = estimate(workload, [(each, num // 2, False) for each in offers], estimates=estimates)
    assert (equal.why, unequal.why) == (why, why)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"bucket_bytes": (1e6, 1e6)}, "compute"),
        ({"sample_input_s": 5.0}, "input"),
        ({"bucket_bytes": (1e9, 1e9)}, "network: 64 % of the step waits for sums"),
    ],
)
def test_it_says_what_bounds_the_step(changes, why):
    # 16 samples: 1 + 2 + 0.125 s; from 2 s on two sums of 1 GB at 10 Gb/s, which take 4.125 times
    # 0.8 s each.
    estimates = HardwareEstimates(
        profiled="V100", networks=AS_NAMED, measured_network={"v1": exactly(4.125)}
    )
    workload = a_workload(profile=a_profile(**changes))
    assert estimate(workload, [(an_offer(), 2, False)], estimates=estimates).why == why


def test_the_width_of_an_interval_spares_the_speed_of_the_devices():
    heavy = a_workload(profile=a_profile(bucket_bytes=(1e9, 1e9)))
    wide = replace(ESTIMATES, networks=replace(AS_NAMED, widths={"tcp": 2.0}))
    offer = an_offer(baseline_gbps=10.0)
    alone, sums = (
        [estimate(work, [(offer, num, False)], estimates=each).step_s for each in (ESTIMATES, wide)]
        for work, num in ((replace(heavy, global_batch=8), 1), (heavy, 4))
    )
    assert alone[0] == alone[1]
    assert sums[0].median == sums[1].median
    for end in ("low", "high"):
        plain, widened = (math.log(getattr(each, end) / each.median) for each in sums)
        assert widened == pytest.approx(2 * plain)
    slower = replace(wide, measured_compute={"V100": Interval(median=1.0, low=1.0, high=2.0)})
    light = a_workload(profile=a_profile(bucket_bytes=(0.0, 0.0)))
    step = estimate(light, [(offer, 4, False)], estimates=slower).step_s
    assert step.high / step.median == pytest.approx(2.0, rel=1e-3)


# -- several types ---------------------------------------------------------------------


def test_unequal_machines_end_together():
    estimates = HardwareEstimates(
        profiled="V100", networks=AS_NAMED, measured_compute={"T4": exactly(3.0)}
    )
    workload = a_workload(profile=a_profile(bucket_bytes=(0.0, 0.0)), global_batch=16)
    fast, slow = an_offer(), an_offer("t4", accelerator="T4")
    fleet = estimate(workload, [(fast, 1, False), (slow, 1, False)], estimates=estimates)
    assert [each.batch for each in fleet.machines] == [12, 4]
    # Both compute for 2.25 s; the slower optimizer takes three times 0.125 s; two rounds of two
    # buckets.
    assert fleet.step_s.median == pytest.approx(2.25 + 0.375 + 2 * 50e-6, abs=1e-9)
    assert fleet.usd_h == 6.0


def test_the_slowest_link_sets_the_pace():
    fast, slow = an_offer(baseline_gbps=100.0), an_offer("v2", baseline_gbps=1.0)
    workload = a_workload(profile=a_profile(bucket_bytes=(0.0, 1e9)))
    fleet = estimate(workload, [(fast, 1, False), (slow, 3, False)], estimates=ESTIMATES)
    equal = estimate(workload, [(slow, 4, False)], estimates=ESTIMATES)
    assert fleet.step_s == equal.step_s


@given(st.lists(st.integers(1, 4), min_size=2, max_size=3), st.integers(10, 64))
@drawn
def test_no_split_computes_sooner(nums, global_batch):
    names = ["V100", "T4", "A10"]
    machines = [
        (an_offer(name, accelerator=name, accelerator_count=2), num, False)
        for name, num in zip(names, nums, strict=False)
    ]
    fleet = estimate(a_workload(global_batch=global_batch), machines, estimates=ESTIMATES)
    factors = [1.0, 3.0, 0.75]
    curves = [
        StepCurve(sample_s=0.1875 * factors[place])
        for place, num in enumerate(nums)
        for _ in range(2 * num)
    ]
    quickest = forecast_split(curves, split_batch(curves, global_batch)).step_s
    ends = [
        0.1875 * factor * each.batch for factor, each in zip(factors, fleet.machines, strict=False)
    ]
    assert max(ends) == pytest.approx(quickest)
    assert sum(2 * each.num * each.batch for each in fleet.machines) >= global_batch


def test_memory_limits_the_share_of_a_fast_device():
    # 4 samples need 2 GiB, 8 need 3 GiB, and 6 MB of gradients.
    estimates = HardwareEstimates(
        profiled="V100", networks=AS_NAMED, measured_compute={"T4": exactly(9.0)}
    )
    small = an_offer(accelerator_memory_gib=3.5)
    slow = an_offer("t4", accelerator="T4")
    machines = [(small, 1, False), (slow, 1, False)]
    whole, micro = (
        estimate(
            a_workload(global_batch=16, accumulation=accumulation), machines, estimates=estimates
        )
        for accumulation in ("never", "allowed")
    )
    assert [(each.batch, each.num_micro) for each in whole.machines] == [(8, 1), (8, 1)]
    # Two micro-batches of 7 or 8 on the fast device take less time than 8 samples on the slow one.
    assert [(each.batch, each.num_micro) for each in micro.machines] == [(15, 2), (1, 1)]
    assert micro.step_s.median < whole.step_s.median


def test_micro_batches_by_hand():
    # 4 samples need 2 GiB: 16 of them are 4 micro-batches of 0.25 + 0.5 s, and 0.125 s more.
    workload = a_workload(profile=a_profile(bucket_bytes=(0.0, 0.0)), global_batch=16)
    offer = an_offer(accelerator_memory_gib=2.25)
    fleet = estimate(workload, [(offer, 1, False)], estimates=ESTIMATES)
    (rented,) = fleet.machines
    assert (rented.batch, rented.num_micro, rented.micro_batch) == (16, 4, 4)
    assert fleet.step_s.median == pytest.approx(4 * 0.75 + 0.125)


def test_the_exchange_overlaps_with_the_last_micro_batch_only():
    # Two sums of 1 s: the first can start after half of the last backward pass of 0.5 s.
    sums = {"v1": exactly(1.0)}
    estimates = HardwareEstimates(profiled="V100", networks=AS_NAMED, measured_network=sums)
    profile = a_profile(bucket_bytes=(1.25e9, 1.25e9), optimizer_s=0.0, peak_bytes=(5e9, 6e9))
    offer = an_offer(accelerator_memory_gib=10.0)
    fleet = estimate(a_workload(profile=profile), [(offer, 2, False)], estimates=estimates)
    rented = fleet.machines[0]
    each_s = 0.1875 * 16 / rented.num_micro
    began_s = each_s * (rented.num_micro - 1) + each_s * (1 / 3 + 1 / 3)
    assert rented.num_micro > 1
    assert fleet.step_s.median == pytest.approx(began_s + 2 * 1.0, rel=1e-3)


def test_machines_that_hold_too_little_together_accumulate_at_one_pace():
    estimates = HardwareEstimates(
        profiled="V100", networks=AS_NAMED, measured_compute={"T4": exactly(3.0)}, usable_memory=1.0
    )
    workload = a_workload(profile=a_profile(bucket_bytes=(0.0, 0.0)), global_batch=32)
    # 4 samples need 2 GiB on each.
    fast = an_offer(accelerator_memory_gib=2.0)
    slow = an_offer("t4", accelerator="T4", accelerator_memory_gib=2.0)
    fleet = estimate(workload, [(fast, 1, False), (slow, 1, False)], estimates=estimates)
    assert [(each.batch, each.num_micro) for each in fleet.machines] == [(24, 6), (8, 2)]
    assert fleet.step_s.median == pytest.approx(24 * 0.1875 + 3 * 0.125 + 2 * 50e-6)


def test_a_machine_without_samples_does_not_compute():
    estimates = HardwareEstimates(
        profiled="V100", networks=AS_NAMED, measured_compute={"T4": exactly(1000.0)}
    )
    workload = a_workload(profile=a_profile(bucket_bytes=(0.0, 0.0)), global_batch=4)
    machines = [(an_offer(), 1, False), (an_offer("t4", accelerator="T4"), 1, False)]
    fleet = estimate(workload, machines, estimates=estimates)
    assert [each.batch for each in fleet.machines] == [4, 0]
    assert fleet.step_s.median == pytest.approx(0.875 + 2 * 50e-6)


def test_the_same_type_on_demand_and_as_spot_is_one_kind():
    offer = an_offer(spot_usd_h=1.0)
    fleet = estimate(a_workload(), [(offer, 1, False), (offer, 3, True)], estimates=ESTIMATES)
    equal = estimate(a_workload(), [(offer, 4, False)], estimates=ESTIMATES)
    assert fleet.step_s == equal.step_s
    assert fleet.usd_h == 6.0
    assert fleet.time_s.median > equal.time_s.median
    assert str(fleet) == "1 x v1 (1 V100) + 3 x v1 (1 V100 each, spot)"


# -- spot ------------------------------------------------------------------------------


def test_evictions_of_all_machines_count():
    market = History(v1=(0.75, 0.2))
    workload = a_workload(steps=10**6, state_bytes=1e9, setup_s=60.0)
    fleet = estimate(
        workload, [(an_offer(spot_usd_h=2.0), 4, True)], estimates=ESTIMATES, spot_market=market
    )
    work_s = 10**6 * fleet.step_s.median
    # Saving takes 1 s, and 1 GB at 200 MB/s; reading it again takes as long.
    expected, every_s = spot_seconds(work_s, evictions_per_h=0.8, save_s=6.0, restart_s=66.0)
    assert fleet.time_s.median == pytest.approx(60 + expected, rel=1e-3)
    assert fleet.checkpoint_s == pytest.approx(every_s, rel=1e-3)
    assert fleet.usd_h == 3.0
    assert fleet.cost_usd.median == pytest.approx(fleet.time_s.median / 3600 * 3.0)


def test_without_history_the_offers_price_counts_and_a_rate_is_assumed():
    offer = an_offer(spot_usd_h=0.75)
    found, assumed = (
        estimate(a_workload(), [(offer, 2, True)], estimates=ESTIMATES, spot_market=market)
        for market in (History(v1=(0.75, 0.1)), None)
    )
    assert found == assumed


def test_machines_that_nobody_takes_away():
    fleet = estimate(
        a_workload(),
        [(an_offer(), 2, True)],
        estimates=ESTIMATES,
        spot_market=History(v1=(1.0, 0.0)),
    )
    demand = estimate(a_workload(), [(an_offer(), 2, False)], estimates=ESTIMATES)
    assert (fleet.time_s, fleet.checkpoint_s) == (demand.time_s, math.inf)


# -- studies ---------------------------------------------------------------------------


def test_a_study_takes_as_long_as_its_phases():
    workload = a_workload(parallelism_phases=((1, 100), (4, 50), (6, 10)), setup_s=10.0)
    single = a_workload()
    one, two, four = (
        estimate(single, [(an_offer(), num, False)], estimates=ESTIMATES).step_s.median
        for num in (1, 2, 4)
    )
    fleet = estimate(workload, [(an_offer(), 4, False)], estimates=ESTIMATES)
    expected = 10 + 100 * four + 50 * one + 10 * (one + two)
    assert fleet.time_s.median == pytest.approx(expected)
    # At the greatest width each training has one machine.
    assert (fleet.machines[0].batch, fleet.step_s.median) == (32, one)


def test_a_study_gives_a_training_as_many_machines_as_its_samples_need():
    # 16 samples need 5 GiB and 6 MB of gradients, out of 15 sixteenths of the device.
    offer = an_offer(accelerator_memory_gib=5.375)
    fleet = estimate(
        a_workload(parallelism_phases=((4, 50),), accumulation="never"),
        [(offer, 4, False)],
        estimates=ESTIMATES,
    )
    two = estimate(a_workload(), [(offer, 2, False)], estimates=ESTIMATES)
    assert fleet.machines[0].batch == 16
    assert fleet.time_s.median == pytest.approx(180 + 2 * 50 * two.step_s.median)


def test_a_study_in_packs():
    # 10 steps of 12 trainings in packs of four on 2 machines are 10 and 10 joint steps.
    packs = PackCurve(backend="fused", step_s={1: 0.5, 2: 0.75, 4: 1.0})
    phases = {"parallelism_phases": ((12, 10),), "global_batch": 8, "setup_s": 0.0}

    def in_packs(**changes):
        offer = an_offer(**{"accelerator_memory_gib": 16.0, **changes})
        workload = a_workload(**phases, packs=packs)
        alone = a_workload(global_batch=8)
        one_s = estimate(alone, [(offer, 1, False)], estimates=ESTIMATES).step_s.median
        found = estimate(workload, [(offer, 2, False)], estimates=ESTIMATES).time_s.median
        return found / one_s

    # One wave of eight, and one of four.
    assert in_packs() == pytest.approx(10 * (2.0 + 1.5))
    # 8 samples need 3 GiB and 6 MB, of 15 sixteenths: two trainings fit, or one.
    assert in_packs(accelerator_memory_gib=7.0) == pytest.approx(10 * 3 * 1.5)
    assert in_packs(accelerator_memory_gib=4.0) == pytest.approx(10 * 6)
    # Devices of one machine train together, and pack nothing.
    assert in_packs(accelerator_count=2) == pytest.approx(10 * 6)


def test_packs_of_measured_memory():
    packs = PackCurve(backend="fused", step_s={1: 1.0, 2: 1.0}, memory_bytes={1: 1e9, 2: 1.25e9})
    workload = a_workload(parallelism_phases=((2, 10),), packs=packs, global_batch=8, setup_s=0.0)
    offer = an_offer(accelerator_memory_gib=4.25)
    fleet = estimate(workload, [(offer, 1, False)], estimates=ESTIMATES)
    assert fleet.time_s.median == pytest.approx(10 * fleet.step_s.median)


def test_a_narrow_study_has_the_step_of_many_machines():
    workload = a_workload(parallelism_phases=((2, 50),))
    fleet = estimate(workload, [(an_offer(), 5, False)], estimates=ESTIMATES)
    two = estimate(a_workload(), [(an_offer(), 2, False)], estimates=ESTIMATES)
    assert (fleet.step_s, fleet.machines[0].batch) == (two.step_s, 16)


def test_machines_that_a_study_cannot_feed_stay_idle():
    workload = a_workload(global_batch=2, parallelism_phases=((1, 50),))
    two, many = (
        estimate(workload, [(an_offer(), num, False)], estimates=ESTIMATES) for num in (2, 5)
    )
    assert (many.time_s, many.step_s) == (two.time_s, two.step_s)
    assert many.usd_h > two.usd_h


# -- errors ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machines", "message"),
    [
        ([], "`machines` must name offers"),
        ([(an_offer(), 0, False)], "each at least once"),
        (
            [(an_offer(), 1, False), (an_offer(region="west"), 1, False)],
            "machines of one fleet are in one region, not in aws east, aws west",
        ),
        ([(an_offer(), 1, True)], "v1 in east is not offered as spot"),
        (
            [(an_offer(price_usd_h=None, spot_usd_h=1.0), 1, False)],
            "v1 in east is offered as spot only",
        ),
        (
            [(an_offer(), 33, False)],
            "a global batch of 32 samples feeds as many devices, not the 33",
        ),
        (
            [(an_offer(accelerator_memory_gib=1.0), 1, False)],
            r"1\.2 GiB \(at most 1\.3 GiB\), a device of aws v1 .* 1\.0 GiB \(at least 960\.0 MiB",
        ),
        (
            [(an_offer(accelerator_memory_gib=2.5), 2, False)],
            r"16 samples need 5\.0 GiB .* 2\.5 GiB .*: rent more of .*, allow accumulation, or",
        ),
        (
            [(an_offer(), 1, False), (an_offer("v2", accelerator_memory_gib=1.0), 1, False)],
            r"one sample needs 1\.2 GiB .* of aws v2 in east has 1\.0 GiB .*: leave it out",
        ),
        (
            [
                (an_offer("v1", accelerator_memory_gib=2.75), 2, False),
                (an_offer("v2", accelerator_memory_gib=3.25), 1, False),
            ],
            r"32 samples does not fit .* of 3 devices, which hold 20: .*, allow accumulation, or",
        ),
    ],
)
def test_fleets_that_cannot_train(machines, message):
    with pytest.raises(CloudError, match=message):
        estimate(a_workload(accumulation="never"), machines, estimates=ESTIMATES)


def test_without_room_for_a_sample_accumulation_does_not_help():
    small = an_offer(accelerator_memory_gib=1.0)
    other = an_offer("t4", accelerator="T4")
    with pytest.raises(CloudError, match=r"one sample needs .*: rent more of them or others, or"):
        estimate(a_workload(), [(small, 1, False)], estimates=ESTIMATES)
    with pytest.raises(CloudError, match=r"one sample needs .*: leave it out"):
        estimate(a_workload(), [(small, 1, False), (other, 1, False)], estimates=ESTIMATES)


def test_a_study_on_several_types():
    with pytest.raises(CloudError, match="a study is planned for machines of one type"):
        estimate(
            a_workload(parallelism_phases=((2, 10),)),
            [(an_offer(), 1, False), (an_offer("v2", baseline_gbps=1.0), 1, False)],
            estimates=ESTIMATES,
        )


def test_a_batch_that_may_not_fit_is_refused():
    # 16 samples need 5 GiB, at most 6, and 6 MB of gradients.
    profile = a_profile(peak_error=0.2)
    workload = a_workload(profile=profile, global_batch=16, accumulation="never")
    roomy, tight = (an_offer(accelerator_memory_gib=gib) for gib in (6.5, 6.25))
    assert estimate(workload, [(roomy, 1, False)], estimates=ESTIMATES).machines[0].batch == 16
    message = r"16 samples need 5.0 GiB \(at most 6.0 GiB\), .* 6.2 GiB \(at least 5.9 GiB usable"
    with pytest.raises(CloudError, match=message):
        estimate(workload, [(tight, 1, False)], estimates=ESTIMATES)


def test_memory_that_nobody_knows_limits_nothing():
    offer = an_offer(accelerator_memory_gib=None)
    workload = a_workload(profile=a_profile(peak_bytes=(1000.0 * GIB, 2000.0 * GIB)))
    assert estimate(workload, [(offer, 1, False)], estimates=ESTIMATES).machines[0].batch == 32


def test_wide_estimates_make_wide_forecasts():
    def width(high):
        estimates = HardwareEstimates(
            profiled="V100", measured_compute={"T4": Interval(median=1.0, low=1.0, high=high)}
        )
        offer = an_offer("t4", accelerator="T4")
        return estimate(a_workload(), [(offer, 1, False)], estimates=estimates).time_s.high

    assert width(2.0) - 180 == pytest.approx(2 * (width(1.0) - 180))


# --- measured sums


def timings(name, *, nodes=(2, 4), factor=1.0):
    return tuple(
        CollectiveTiming(
            name=name, num_bytes=size, nodes=num, seconds=factor * (1e-3 + size * num / 1e9)
        )
        for num in nodes
        for size in (1e6, 1e7, 1e8)
    )


def measured_fleet(num, *, sums=(), offers=None):
    profile = StepProfile(
        device="V100",
        batches=(8, 16),
        forward_s=(0.1, 0.2),
        backward_s=(0.2, 0.4),
        optimizer_s=0.0,
        peak_bytes=(2e9, 4e9),
        bucket_bytes=(1e8,),
        bucket_ready=(1.0,),
    )
    work = Workload(profile=profile, steps=10, global_batch=8 * num, setup_s=0.0)
    offer = Offer(
        cloud="aws",
        region="us-east-1",
        instance_type="p3.2xlarge",
        accelerator="V100",
        price_usd_h=3.06,
        baseline_gbps=10,
    )
    estimates = HardwareEstimates(profiled="V100", networks=AS_NAMED, measured_sums=tuple(sums))
    return estimate(work, [(offer, num, False)], estimates=estimates)


@pytest.mark.parametrize("num", [2, 4])
def test_measured_sums_count_instead_of_the_network_s_name(num):
    fleet = measured_fleet(num, sums=timings("p3.2xlarge"))
    assert fleet.step_s.median == pytest.approx(0.3 + 1e-3 + 1e8 * num / 1e9, rel=1e-6)
    assert fleet.step_s.low < fleet.step_s.median < fleet.step_s.high


def test_one_machine_sums_nothing():
    assert measured_fleet(1, sums=timings("p3.2xlarge")).step_s.median == pytest.approx(0.3)


def test_sums_of_another_type_say_nothing():
    assert measured_fleet(4, sums=timings("g5.xlarge")) == measured_fleet(4)


def test_sums_that_were_measured_are_no_more_to_be_probed():
    estimates = HardwareEstimates(measured_sums=timings("vm"))
    offer = Offer(cloud="aws", region="r", instance_type="vm", price_usd_h=1.0, peak_gbps=10)
    assert estimates.network(offer) == Interval(median=1.0, low=1.0, high=1.0)
    assert estimates.collectives([]) is None
