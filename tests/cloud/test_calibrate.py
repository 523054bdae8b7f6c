"""Estimates corrected by measured steps of the training."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.cloud._drawn_fleets import a_profile, a_workload, an_offer, exactly
from thrifty.cloud import (
    FleetOptions,
    HardwareEstimates,
    Interval,
    NetworkPriors,
    StepTiming,
    UncertaintyFactor,
    calibrate,
    estimate,
    plan_fleet,
)
from thrifty.cloud._workload import ObservedSteps
from thrifty.core import CloudError


pytestmark = pytest.mark.slow


TRUE = NetworkPriors(
    straggling=exactly(0.0), step=UncertaintyFactor(faster=1.0, slower=1.0), observed=1.0
)
PROFILE = a_profile(
    batches=(4, 16, 64),
    forward_s=(0.1, 0.4, 1.6),
    backward_s=(0.2, 0.8, 3.2),
    peak_bytes=(1e9, 4e9, 16e9),
    bucket_bytes=(2e9, 2e9),
)
OFFER = an_offer("v4", accelerator_count=4, accelerator_memory_gib=None, baseline_gbps=5.0)
GUESSED = HardwareEstimates(profiled="V100", networks=NetworkPriors(widths={}, observed=1.0))


def actual(**factors):
    """Return a world with these factors, in which nothing is left to chance."""
    return HardwareEstimates(
        profiled="V100",
        networks=TRUE,
        measured_compute={"V100": exactly(factors.get("compute", 1.0))},
        measured_inner={"v4": exactly(factors.get("inner", 1.0))},
        measured_network={"v4": exactly(factors.get("network", 1.0))},
    )


def step_on(offer, num, batch, *, known):
    """Return the interval of a step."""
    work = a_workload(
        profile=PROFILE, global_batch=batch * num * offer.accelerator_count, setup_s=0.0
    )
    return estimate(work, [(offer, num, False)], estimates=known).step_s


def runs(*placements, offer=OFFER, world=None, times=1.0):
    """Return the steps that were measured in a world."""
    return [
        StepTiming(
            offer=offer,
            num=num,
            batch=batch,
            seconds=times * step_on(offer, num, batch, known=world or actual()).median,
        )
        for num, batch in placements
    ]


def width(interval):
    return math.log(interval.high / interval.low)


TWO_RUNS = [(1, 4), (1, 16), (1, 64), (3, 4), (3, 16), (3, 64)]


def test_two_runs_find_both_sums_of_which_one_is_slow():
    world = actual(inner=4.0, network=1.5)
    found = calibrate(PROFILE, runs(*TWO_RUNS, world=world), estimates=GUESSED)
    assert found.inner(OFFER).median == pytest.approx(4.0, rel=0.15)
    assert found.network(OFFER).median == pytest.approx(1.5, rel=0.15)
    for num, batch in [(2, 8), (4, 16), (8, 32)]:
        true = step_on(OFFER, num, batch, known=world).median
        before, after = (step_on(OFFER, num, batch, known=each) for each in (GUESSED, found))
        assert abs(math.log(after.median / true)) < 0.1 < abs(math.log(before.median / true))
        assert after.low < true < after.high


def test_a_run_on_one_machine_says_nothing_of_sums_between_machines():
    found = calibrate(PROFILE, runs((1, 4), (1, 16), world=actual(inner=3.0)), estimates=GUESSED)
    assert found.inner(OFFER).median > 2
    assert found.network(OFFER).median == pytest.approx(GUESSED.network(OFFER).median)
    assert width(found.network(OFFER)) == pytest.approx(width(GUESSED.network(OFFER)))


def test_contradicting_steps_do_not_widen_what_they_say_nothing_of():
    sure = GUESSED.probed(compute={"V100": Interval(median=1.0, low=0.99, high=1.01)})
    measured = runs((1, 4), (1, 16), (1, 64), times=6.0)
    found = calibrate(PROFILE, measured, estimates=sure)
    assert found.observed["v4"].scale > 1.5
    assert width(found.network(OFFER)) <= width(sure.network(OFFER)) * (1 + 1e-9)
    # The steps themselves are doubted: their interval is wider than that of a factor.
    assert width(step_on(OFFER, 1, 16, known=found)) > width(sure.compute(OFFER))


def test_intervals_narrow_near_the_measured_steps_and_never_close():
    found = calibrate(PROFILE, runs(*TWO_RUNS), estimates=GUESSED)
    measured, near, far = (width(step_on(OFFER, num, 16, known=found)) for num in (3, 4, 32))
    assert math.log(1.03) < measured < near < far
    assert near < width(step_on(OFFER, 4, 16, known=GUESSED))


def test_a_batch_that_the_profile_has_wrong_is_wrong_at_its_neighbours_too():
    measured = [*runs((1, 4), times=0.8), *runs((1, 64))]
    found = calibrate(PROFILE, measured, estimates=GUESSED)
    shorter = [
        step_on(OFFER, 2, batch, known=found).median
        / step_on(OFFER, 2, batch, known=GUESSED).median
        for batch in (4, 6, 32, 64)
    ]
    assert shorter[0] < shorter[1] < shorter[2]
    assert shorter[0] < 0.9


def test_what_is_known_well_moves_less():
    measured = runs(*TWO_RUNS, world=actual(network=3.0))
    surer = GUESSED.probed(network={"v4": Interval(median=1.0, low=0.9, high=1.1)})
    believed, guessed = (
        calibrate(PROFILE, measured, estimates=each).network(OFFER).median
        for each in (surer, GUESSED)
    )
    assert 1 < believed < 1.4 < guessed


def test_estimates_are_refused_for_another_training_than_was_measured():
    found = calibrate(PROFILE, runs(*TWO_RUNS), estimates=GUESSED)
    other = replace(PROFILE, forward_s=(0.2, 0.8, 3.2))
    with pytest.raises(CloudError, match="calibrated to another profile"):
        calibrate(other, runs((2, 8)), estimates=found)
    with pytest.raises(CloudError, match="call `calibrate` with this one"):
        estimate(a_workload(profile=other), [(OFFER, 2, False)], estimates=found)
    again = calibrate(replace(PROFILE), runs((2, 8)), estimates=found)
    assert len(again.observed["v4"].timings) == len(TWO_RUNS) + 1


def test_steps_that_contradict_each_other_widen_the_interval():
    scattered = [
        replace(each, seconds=each.seconds * (3.0 if place % 2 else 1 / 3.0))
        for place, each in enumerate(runs(*TWO_RUNS))
    ]
    smooth, rough = (
        calibrate(PROFILE, timings, estimates=GUESSED) for timings in (runs(*TWO_RUNS), scattered)
    )
    assert width(step_on(OFFER, 2, 8, known=rough)) > 2 * width(step_on(OFFER, 2, 8, known=smooth))


def test_the_interval_after_measurements_is_as_wide_as_asked():
    found = calibrate(PROFILE, runs(*TWO_RUNS), estimates=GUESSED)
    doubled = replace(found, networks=replace(found.networks, observed=2.0))
    plain, wide = (step_on(OFFER, 8, 16, known=each) for each in (found, doubled))
    assert wide.median == plain.median
    assert width(wide) == pytest.approx(2 * width(plain))


def test_later_steps_add_to_earlier_ones():
    measured = runs(*TWO_RUNS, world=actual(inner=2.0))
    at_once = calibrate(PROFILE, measured, estimates=GUESSED)
    in_turn = calibrate(
        PROFILE, measured[3:], estimates=calibrate(PROFILE, measured[:3], estimates=GUESSED)
    )
    assert step_on(OFFER, 5, 8, known=in_turn) == step_on(OFFER, 5, 8, known=at_once)


def test_other_machines_with_the_device_profit_and_keep_their_networks():
    other = an_offer("v1", accelerator_memory_gib=None)
    slow = replace(GUESSED, profiled="T4")
    found = calibrate(PROFILE, runs((1, 4), (1, 64)), estimates=slow)
    assert width(found.compute(other)) < width(slow.compute(other)) / 2
    assert found.compute(other).median == pytest.approx(1.0, rel=0.15)
    assert found.network(other) == slow.network(other)
    assert found.speed_from(other) == found.speed_from(OFFER) == "probe"


def test_several_types_are_corrected_apart():
    one = an_offer("v1", accelerator_memory_gib=None)
    world = replace(actual(inner=4.0), measured_network={"v4": exactly(1.0), "v1": exactly(2.0)})
    both = [*runs(*TWO_RUNS, world=world), *runs((2, 4), (2, 16), offer=one, world=world)]
    found = calibrate(PROFILE, both, estimates=GUESSED)
    alone = calibrate(PROFILE, both[:6], estimates=GUESSED)
    assert step_on(OFFER, 2, 8, known=found) == step_on(OFFER, 2, 8, known=alone)
    assert found.network(one).median > 1.2


@pytest.mark.parametrize("what", ["compute", "inner", "network"])
def test_a_later_probe_replaces_what_steps_have_shown(what):
    found = calibrate(PROFILE, runs(*TWO_RUNS), estimates=GUESSED)
    subject = "V100" if what == "compute" else "v4"
    probed = found.probed(**{what: {subject: exactly(2.0)}})
    assert getattr(probed, what)(OFFER) == exactly(2.0)
    assert found.probed(network={"another": exactly(2.0)}).network(OFFER) == found.network(OFFER)


def test_the_planner_uses_the_measured_steps():
    found = calibrate(PROFILE, runs(*TWO_RUNS, world=actual(inner=4.0)), estimates=GUESSED)
    work = a_workload(profile=PROFILE, global_batch=128)
    best = plan_fleet(work, [OFFER], FleetOptions(deadline_s=1e9, estimates=found)).best
    num = best.machines[0].num
    alone = estimate(work, [(OFFER, num, False)], estimates=found).step_s
    # The planner forecasts all fleets together, so sums may be in another order.
    for end in ("median", "low", "high"):
        assert getattr(best.step_s, end) == pytest.approx(getattr(alone, end), rel=1e-9)


def test_machines_that_lend_some_of_their_devices_use_the_measured_steps():
    found = calibrate(PROFILE, runs(*TWO_RUNS, world=actual(inner=4.0)), estimates=GUESSED)
    work = a_workload(profile=PROFILE, global_batch=6 * 16)
    lends = replace(OFFER, accelerator_count=2)
    machines = [(OFFER, 1, False), (lends, 1, False)]
    before, after = (estimate(work, machines, estimates=each).step_s for each in (GUESSED, found))
    true = estimate(work, machines, estimates=actual(inner=4.0)).step_s.median
    assert width(after) < width(before)
    assert after.low < true < after.high


def test_the_posterior_is_that_of_the_joint_distribution():
    # The slow twin writes the covariance of all steps, measured and forecast, as one matrix.
    rng = np.random.default_rng(0)
    places = [(1, 4, 8), (1, 4, 32), (2, 4, 8), (4, 2, 16), (4, 4, 32)]
    slopes = rng.uniform(0, 1, (5, 3))
    prior = (Interval(median=1.0, low=0.5, high=2.0),) * 3
    sd = math.log(2) / 1.6448536
    whole = np.array([
        [
            sd**2 * slopes[i] @ slopes[j]
            + 0.02**2 * math.log2(n * d) * math.log2(m * e)
            + 0.12**2 * math.exp(-0.5 * (math.log2(b / c) / 1.5) ** 2)
            + 0.05**2 * (b == c)
            + 0.1**2 * math.exp(-0.5 * (math.log2(n / m) ** 2 + math.log2(d / e) ** 2) / 0.7**2)
            + 0.05**2 * ((n, d) == (m, e))
            + 0.03**2 * (i == j)
            for j, (m, e, c) in enumerate(places)
        ]
        for i, (n, d, b) in enumerate(places)
    ])
    away = np.array([0.1, 0.05, 0.2])
    timings = tuple(
        StepTiming(offer=replace(OFFER, accelerator_count=d), num=n, batch=b, seconds=math.exp(by))
        for (n, d, b), by in zip(places, away, strict=False)
    )
    seen = ObservedSteps.of(timings, prior=prior, slopes=slopes[:3], residuals=away)
    solved = np.linalg.solve(whole[:3, :3], np.column_stack([away, whole[:3, 3:]]))
    moved = np.log([each.median for each in seen.posterior])
    nodes, per_node, batch = np.array(places[3:]).T
    found = seen.ends(
        np.exp(slopes[3:] @ moved), slopes[3:], nodes=nodes, per_node=per_node, batch=batch
    )
    variances = np.diag(whole[3:, 3:] - whole[3:, :3] @ solved[:, 1:])
    assert np.log(found[0]) == pytest.approx(whole[3:, :3] @ solved[:, 0])
    # As far as these steps go, they are as near to the replay as expected.
    assert np.log(found[2] / found[0]) == pytest.approx(1.6448536 * np.sqrt(variances))


def test_there_are_steps_to_learn_from():
    with pytest.raises(CloudError, match="`timings` must have at least one measured step"):
        calibrate(PROFILE, [], estimates=GUESSED)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num": 0}, "must be at least 1, got num=0, batch=8"),
        ({"batch": 0}, "must be at least 1, got num=1, batch=0"),
        ({"seconds": 0.0}, "must be positive and finite, got 0.0"),
        ({"seconds": math.inf}, "must be positive and finite, got inf"),
    ],
)
def test_a_timing_that_is_none(changes, says):
    with pytest.raises(CloudError, match=says):
        StepTiming(**{"offer": OFFER, "num": 1, "batch": 8, "seconds": 1.0, **changes})
