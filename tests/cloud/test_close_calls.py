"""Choices that a small error of the profile would change, against planning once more in full."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, strategies as st

from tests.cloud._drawn_fleets import (
    ESTIMATES,
    a_profile,
    a_workload,
    an_offer,
    drawn,
    offers,
    workloads,
)
from tests.depth import draws
from thrifty.cloud import FleetOptions, StepTiming, calibrate, plan_fleet, replan
from thrifty.core import CloudError


pytestmark = pytest.mark.slow


def machines(fleet):
    return None if fleet is None else [(m.offer, m.num, m.spot) for m in fleet.machines]


def planned_anew(workload, catalogue, options, factor):
    """Return the choice of a whole plan with slower or faster steps."""
    slowed = replace(workload, profile=workload.profile.slowed(factor, device="here"))
    try:
        return machines(plan_fleet(slowed, catalogue, options).best)
    except CloudError:
        return None


@given(workloads, st.lists(offers, min_size=1, max_size=6), st.data())
@settings(drawn, max_examples=draws(15, 60))
def test_they_are_what_a_whole_plan_would_choose(workload, catalogue, data):
    noise = data.draw(st.sampled_from([0.0, 0.08, 0.9]))
    workload = replace(workload, profile=replace(workload.profile, noise=noise))
    margin = {0.0: 0.05, 0.08: 0.08, 0.9: 0.15}[noise]
    spot = data.draw(st.booleans())
    free = FleetOptions(estimates=ESTIMATES, max_nodes=4, spot=spot)
    try:
        front = plan_fleet(workload, catalogue, free).front
    except CloudError:
        assume(False)
    aim = data.draw(st.sampled_from(["deadline_s", "budget_usd"]))
    of = "time_s" if aim == "deadline_s" else "cost_usd"
    limit = getattr(data.draw(st.sampled_from(front)), of).high
    limit *= data.draw(st.sampled_from([1.0, 1.03, 1.2]))
    assume(limit > 0)
    options = replace(free, **{aim: limit})
    plan = plan_fleet(workload, catalogue, options)
    expected = {}
    for factor in (1 + margin, 1 - margin):
        choice = planned_anew(workload, catalogue, options, factor)
        if choice != machines(plan.best):
            expected[factor] = choice
    assert {call.factor: machines(call.fleet) for call in plan.close_calls} == expected


# A machine takes 1,000 steps of 6.125 s, and 180 s of setup: 105.1 min. A T4 takes twice as long.
STEADY = a_workload(profile=a_profile(bucket_bytes=(0.0, 0.0)))
TWO = [an_offer(price_usd_h=1.0), an_offer("quick", accelerator="A10", price_usd_h=9.0)]


def plan(minutes, **changes):
    options = FleetOptions(
        **{"deadline_s": 60 * minutes, "estimates": ESTIMATES, "max_nodes": 1, **changes},
        conservative=False,
    )
    return plan_fleet(STEADY, TWO, options)


def test_a_plan_says_what_longer_steps_would_change():
    (call,) = plan(106).close_calls
    assert str(call) == "with steps 5 % longer than profiled, it is 1 x quick (1 A10)"
    # The forecast of the other fleet is by the profile as it is.
    assert call.fleet.time_s.median == pytest.approx(180 + 1000 * 0.75 * 6.125)
    assert str(plan(106)) == (
        "1 x v1 (1 V100): 105.1 min, $1.75; at the 90 % ends 105.1 min, $1.75\n"
        "close call: with steps 5 % longer than profiled, it is 1 x quick (1 A10)"
    )
    assert str(plan(104.9).close_calls[0]).startswith("with steps 5 % shorter than profiled, it is")


def test_most_choices_are_no_close_calls():
    assert plan(200).close_calls == ()
    assert str(plan(200)).count("\n") == 0
    free = FleetOptions(estimates=ESTIMATES, max_nodes=1)
    assert plan_fleet(STEADY, TWO, free).close_calls == ()
    assert str(plan_fleet(STEADY, TWO, free)) == "no goal; 2 of 2 fleets are on the front"


def test_a_goal_that_is_only_just_met_or_missed():
    one = [TWO[0]]
    options = FleetOptions(deadline_s=60 * 106, estimates=ESTIMATES, max_nodes=1)
    (call,) = plan_fleet(STEADY, one, options).close_calls
    assert str(call) == "with steps 5 % longer than profiled, no fleet would meet the goal"
    with pytest.raises(CloudError, match=r"offers; a close call: with steps 5 % shorter .* 1 x v1"):
        plan_fleet(STEADY, one, replace(options, deadline_s=60 * 104.0))
    with pytest.raises(CloudError, match=r"or take other offers$"):
        plan_fleet(STEADY, one, replace(options, deadline_s=60 * 50.0))


def test_estimates_may_be_calibrated():
    measured = StepTiming(offer=TWO[0], num=1, batch=32, seconds=6.125)
    known = calibrate(STEADY.profile, [measured], estimates=ESTIMATES)
    assert [str(call.fleet) for call in plan(106, estimates=known).close_calls] == [
        "1 x quick (1 A10)"
    ]


def test_mixed_fleets_are_compared():
    both = [an_offer(price_usd_h=3.0), an_offer("t4", accelerator="T4", price_usd_h=0.4)]
    free = FleetOptions(estimates=ESTIMATES, max_nodes=3, mixed=True, conservative=False)
    mixed = next(f for f in plan_fleet(STEADY, both, free).front if len(f.machines) > 1)
    tight = replace(free, deadline_s=1.001 * mixed.time_s.median)
    found = plan_fleet(STEADY, both, tight)
    assert found.best == mixed
    (longer, *_) = found.close_calls
    assert longer.factor == 1.05
    assert longer.fleet is None or longer.fleet.time_s.median < mixed.time_s.median


def test_a_plan_that_keeps_its_machines_has_none():
    first = plan(106)
    options = FleetOptions(
        deadline_s=60 * 106, estimates=ESTIMATES, max_nodes=1, conservative=False
    )
    later = replan(first.best, STEADY, TWO, options=options, done_steps=500)
    assert machines(later.best) == machines(first.best)
    assert later.close_calls == ()
