"""Plans from profiles of several devices, against planning each device by its own profile."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from tests.cloud._drawn_fleets import AS_NAMED, a_profile, a_workload, an_offer, drawn, offers
from thrifty.cloud import (
    FleetOptions,
    HardwareEstimates,
    Interval,
    Probes,
    StepTiming,
    calibrate,
    estimate,
    plan_fleet,
    replan,
)
from thrifty.core import CloudError


pytestmark = pytest.mark.slow

KNOWN = HardwareEstimates(profiled="V100", networks=AS_NAMED)
OF_T4 = replace(a_profile(forward_s=(0.4, 0.75), backward_s=(1.0, 2.0)), device="Tesla T4")
BOTH = a_workload(other_profiles={"T4": OF_T4})
T4 = an_offer("t4", accelerator="T4", price_usd_h=0.5)


@given(st.lists(offers, min_size=1, max_size=6), st.sampled_from(["deadline_s", "budget_usd"]))
@settings(drawn, max_examples=50)
def test_a_plan_is_the_best_of_the_plans_by_each_profile(catalogue, aim):
    free = FleetOptions(estimates=KNOWN, max_nodes=4)
    separate = [
        (a_workload(), KNOWN, [each for each in catalogue if each.accelerator != "T4"]),
        (
            a_workload(profile=OF_T4),
            replace(KNOWN, profiled="T4"),
            [each for each in catalogue if each.accelerator == "T4"],
        ),
    ]
    fleets = []
    for workload, known, mine in separate:
        try:
            fleets += plan_fleet(workload, mine, replace(free, estimates=known)).front
        except CloudError:
            continue
    if not fleets:
        with pytest.raises(CloudError):
            plan_fleet(BOTH, catalogue, free)
        return
    together = plan_fleet(BOTH, catalogue, free).front
    assert {(f.time_s, f.cost_usd) for f in together} <= {(f.time_s, f.cost_usd) for f in fleets}
    assert together[0].time_s.median == min(f.time_s.median for f in fleets)
    assert together[-1].cost_usd.median == min(f.cost_usd.median for f in fleets)
    of = "time_s" if aim == "deadline_s" else "cost_usd"
    limit = sorted(getattr(f, of).high for f in fleets)[len(fleets) // 2]
    options = replace(free, **{aim: limit})
    if limit > 0:
        plan = plan_fleet(BOTH, catalogue, options)
        assert getattr(plan.best, of).high <= limit
        (rented,) = plan.best.machines
        machines = [(rented.offer, rented.num, rented.spot)]
        assert plan.best == estimate(BOTH, machines, estimates=KNOWN)


def test_a_device_is_forecast_from_its_own_profile():
    other = estimate(BOTH, [(T4, 2, False)], estimates=KNOWN)
    alone = estimate(
        a_workload(profile=OF_T4), [(T4, 2, False)], estimates=replace(KNOWN, profiled="T4")
    )
    assert other == alone
    assert other.step_s.high / other.step_s.median < 1.3
    guessed = estimate(a_workload(), [(T4, 2, False)], estimates=KNOWN)
    assert guessed.step_s.high / guessed.step_s.median > 1.5
    # A factor relative to the first profile no longer counts.
    probed = KNOWN.probed(compute={"T4": Interval(median=9.0, low=9.0, high=9.0)})
    assert estimate(BOTH, [(T4, 2, False)], estimates=probed) == alone


def test_a_device_of_unknown_speed_may_have_a_profile():
    strange = an_offer("x", accelerator="Abacus", price_usd_h=0.1)
    work = a_workload(other_profiles={"Abacus": OF_T4})
    options = FleetOptions(estimates=KNOWN, deadline_s=1e6, max_nodes=2)
    plan = plan_fleet(work, [an_offer(), strange], options)
    assert str(plan.best) == "1 x x (1 Abacus)"
    assert not any("left out" in note for note in plan.notes)
    later = replan(plan.best, work, [strange], options=options, done_steps=10)
    assert later.best.step_s == plan.best.step_s


def test_measured_steps_count_for_their_own_profile():
    steps = [StepTiming(offer=T4, num=1, batch=32, seconds=20.0)]
    known = calibrate(OF_T4, steps, estimates=replace(KNOWN, profiled="T4"))
    slow = estimate(BOTH, [(T4, 1, False)], estimates=known).step_s.median
    assert slow > 1.2 * estimate(BOTH, [(T4, 1, False)], estimates=KNOWN).step_s.median
    here = [(an_offer(), 1, False)]
    by_both = estimate(BOTH, here, estimates=replace(known, profiled="V100")).step_s
    assert by_both == estimate(a_workload(), here, estimates=KNOWN).step_s
    with pytest.raises(CloudError, match="calibrated to another profile"):
        estimate(BOTH, here, estimates=replace(known, calibrated_to=a_profile(optimizer_s=1.0)))


def test_what_takes_one_profile_says_so():
    options = FleetOptions(estimates=KNOWN, deadline_s=1e6, mixed=True)
    with pytest.raises(CloudError, match=r"planned by one profile, and .* has T4: leave it out"):
        plan_fleet(BOTH, [T4], options)
    with pytest.raises(CloudError, match="probes compare devices by one profile"):
        Probes(BOTH, [T4], replace(options, mixed=False), cap_usd=1, cap_s=600)
