"""What to rent for the remaining steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, strategies as st

from tests.cloud._drawn_fleets import (
    ESTIMATES,
    History,
    a_workload,
    an_offer,
    drawn,
    exactly,
    offers,
    workloads,
)
from tests.depth import draws
from thrifty.cloud import Fleet, FleetOptions, MachineGroup
from thrifty.cloud.planning._estimate import estimate
from thrifty.cloud.planning._planner import plan_fleet, replan
from thrifty.core import CloudError


pytestmark = pytest.mark.slow


HOUR = 3600.0
CHEAP = an_offer("cheap", price_usd_h=3.0, spot_usd_h=1.0)
DEAR = an_offer("dear", accelerator_count=2, price_usd_h=8.0)
WORKLOAD = a_workload(steps=1000, setup_s=600.0)
GIVEN = {"deadline_s": 100 * HOUR, "estimates": ESTIMATES, "max_nodes": 4}


def a_fleet(offer, num=1, spot=False):
    """Return a fleet as if it had been chosen."""
    whole = estimate(WORKLOAD, [(offer, num, spot)], estimates=ESTIMATES)
    return replace(whole, step_s=exactly(1.0), time_s=exactly(1.0), cost_usd=exactly(1.0))


def left_after(steps):
    return replace(WORKLOAD, steps=WORKLOAD.steps - steps)


def test_the_present_fleet_needs_no_setup():
    fleet = a_fleet(CHEAP)
    plan = replan(fleet, WORKLOAD, [CHEAP, DEAR], options=FleetOptions(**GIVEN), done_steps=400)
    anew = estimate(left_after(400), [(CHEAP, 1, False)], estimates=ESTIMATES)
    assert str(plan.best) == "1 x cheap (1 V100)"
    for end in ("median", "low", "high"):
        assert getattr(plan.best.time_s, end) == pytest.approx(getattr(anew.time_s, end) - 600)
        saved = getattr(anew.cost_usd, end) - getattr(plan.best.cost_usd, end)
        assert saved == pytest.approx(3.0 * 600 / HOUR)
    assert plan.best in plan.front
    first = plan_fleet(left_after(400), [CHEAP, DEAR], FleetOptions(**GIVEN))
    assert plan.num_considered == first.num_considered + 1
    assert plan.notes == first.notes


def test_it_is_left_where_another_saves_more_than_its_setup():
    little, much = (
        replan(
            a_fleet(DEAR), WORKLOAD, [CHEAP, DEAR], options=FleetOptions(**GIVEN), done_steps=done
        ).best
        for done in (950, 0)
    )
    assert (str(little), str(much)) == ("1 x dear (2 V100)", "1 x cheap (1 V100)")


def test_a_machine_that_is_gone_is_not_chosen():
    fleet = a_fleet(CHEAP)
    plan = replan(
        fleet,
        WORKLOAD,
        [CHEAP, DEAR],
        options=FleetOptions(**GIVEN),
        done_steps=0,
        gone=fleet.machines,
    )
    assert str(plan.best) == "1 x dear (2 V100)"
    assert all("cheap" not in str(each) for each in plan.front)
    with pytest.raises(CloudError, match="there are no offers"):
        replan(
            fleet,
            WORKLOAD,
            [CHEAP],
            options=FleetOptions(**GIVEN),
            done_steps=0,
            gone=fleet.machines,
        )


@pytest.mark.parametrize("market", [None, History(cheap=(0.5, 0.1), dear=(9.0, 0.1))])
def test_an_evicted_spot_machine_may_be_had_on_demand(market):
    fleet = a_fleet(CHEAP, spot=True)
    options = FleetOptions(**GIVEN, spot=True, market=market)
    stays = replan(fleet, WORKLOAD, [CHEAP, DEAR], options=options, done_steps=0)
    assert str(stays.best) == "1 x cheap (1 V100, spot)"
    evicted = replan(
        fleet, WORKLOAD, [CHEAP, DEAR], options=options, done_steps=0, gone=fleet.machines
    )
    assert str(evicted.best) == "1 x cheap (1 V100)"
    # A machine also lost on demand is unavailable, in any order of ``gone``.
    both = (MachineGroup(offer=CHEAP, num=1, batch=32), *fleet.machines)
    for gone in (both, both[::-1]):
        assert str(
            replan(fleet, WORKLOAD, [CHEAP, DEAR], options=options, done_steps=0, gone=gone).best
        ) in {"1 x dear (2 V100)", "1 x dear (2 V100, spot)"}


def test_other_spot_machines_may_be_had():
    other = replace(DEAR, spot_usd_h=1.0)
    fleet = a_fleet(CHEAP, spot=True)
    plan = replan(
        fleet,
        WORKLOAD,
        [CHEAP, other],
        options=FleetOptions(spot=True, **GIVEN),
        done_steps=0,
        gone=fleet.machines,
    )
    assert str(plan.best) == "1 x dear (2 V100, spot)"


def test_an_offer_of_spot_only_is_gone_with_its_spot_machines():
    only = replace(CHEAP, price_usd_h=None)
    fleet = a_fleet(only, spot=True)
    plan = replan(
        fleet,
        WORKLOAD,
        [only, DEAR],
        options=FleetOptions(spot=True, **GIVEN),
        done_steps=0,
        gone=fleet.machines,
    )
    assert str(plan.best) == "1 x dear (2 V100)"


def test_spot_machines_that_are_gone_do_not_end_those_on_demand():
    gone = a_fleet(CHEAP, spot=True).machines
    plan = replan(
        a_fleet(CHEAP), WORKLOAD, [CHEAP], options=FleetOptions(**GIVEN), done_steps=0, gone=gone
    )
    assert (
        plan.best.time_s.median
        < plan_fleet(WORKLOAD, [CHEAP], FleetOptions(**GIVEN)).best.time_s.median
    )


def test_another_zone_is_another_place():
    here, there = replace(CHEAP, zone="a"), replace(CHEAP, zone="b")
    fleet = a_fleet(here)
    plan = replan(
        fleet,
        WORKLOAD,
        [here, there],
        options=FleetOptions(**GIVEN),
        done_steps=0,
        gone=fleet.machines,
    )
    assert plan.best.machines[0].offer == there


def test_a_machine_is_known_by_its_place_not_by_its_price():
    fleet = a_fleet(CHEAP)
    now = replace(CHEAP, price_usd_h=2.0)
    with pytest.raises(CloudError, match="there are no offers"):
        replan(
            fleet, WORKLOAD, [now], options=FleetOptions(**GIVEN), done_steps=0, gone=fleet.machines
        )


def test_the_present_fleet_may_be_the_only_one_in_time():
    fleet = a_fleet(CHEAP, 4)
    needs = estimate(WORKLOAD, [(CHEAP, 4, False)], estimates=ESTIMATES).time_s.high
    given = {**GIVEN, "deadline_s": needs - 300}
    with pytest.raises(CloudError, match="over the deadline"):
        plan_fleet(WORKLOAD, [CHEAP], FleetOptions(**given))
    plan = replan(fleet, WORKLOAD, [CHEAP], options=FleetOptions(**given), done_steps=0)
    assert str(plan.best) == "4 x cheap (1 V100 each)"
    assert plan.front == (plan.best,)
    with pytest.raises(CloudError, match="over the deadline"):
        replan(
            fleet,
            WORKLOAD,
            [CHEAP],
            options=FleetOptions(**{**given, "deadline_s": needs - 700}),
            done_steps=0,
        )


def test_drift_changes_the_estimates():
    slower = ESTIMATES.probed(compute={"V100": exactly(3.0)})
    given = {**GIVEN, "deadline_s": 1.2 * HOUR}
    fleet = a_fleet(CHEAP)
    plan = replan(
        fleet,
        WORKLOAD,
        [CHEAP],
        options=FleetOptions(**{**given, "estimates": slower}),
        done_steps=500,
    )
    assert plan.best.num_devices > 1
    assert (
        str(replan(fleet, WORKLOAD, [CHEAP], options=FleetOptions(**given), done_steps=500).best)
        == "1 x cheap (1 V100)"
    )


def test_of_a_study_the_first_phases_are_done():
    study = replace(WORKLOAD, parallelism_phases=((1, 100), (5, 50), (2, 30)))
    for done, left in [
        (0, ((1, 100), (5, 50), (2, 30))),
        (100, ((5, 50), (2, 30))),
        (120, ((5, 30), (2, 30))),
        (179, ((2, 1),)),
    ]:
        gone = a_fleet(CHEAP).machines
        plan = replan(
            a_fleet(CHEAP), study, [DEAR], options=FleetOptions(**GIVEN), done_steps=done, gone=gone
        )
        assert plan == plan_fleet(
            replace(study, parallelism_phases=left), [DEAR], FleetOptions(**GIVEN)
        )
    with pytest.raises(CloudError, match="all 180 steps are trained"):
        replan(a_fleet(CHEAP), study, [CHEAP], options=FleetOptions(**GIVEN), done_steps=180)


@pytest.mark.parametrize(
    ("done", "message"), [(1000, "all 1000 steps are trained"), (-1, "must be at least 0")]
)
def test_something_is_left(done, message):
    with pytest.raises(CloudError, match=message):
        replan(a_fleet(CHEAP), WORKLOAD, [CHEAP], options=FleetOptions(**GIVEN), done_steps=done)


def test_without_a_goal_there_is_a_front():
    plan = replan(
        a_fleet(CHEAP),
        WORKLOAD,
        [CHEAP, DEAR],
        options=FleetOptions(estimates=ESTIMATES),
        done_steps=0,
    )
    assert plan.best is None
    assert any(
        str(each) == "1 x cheap (1 V100)" and each.time_s.median < 6126 for each in plan.front
    )


@given(workloads, st.lists(offers, min_size=1, max_size=5), st.integers(0, 4), st.booleans())
@settings(drawn, max_examples=draws(20, 80))
def test_going_on_is_never_worse_than_a_plan_for_the_rest(workload, catalogue, part, spot):
    """Compare with a plan for the rest as if no fleet were running."""
    options = {"estimates": ESTIMATES, "max_nodes": 3, "spot": spot, "deadline_s": 1e7}
    try:
        fleet = plan_fleet(workload, catalogue, FleetOptions(**options)).best
    except CloudError:
        assume(False)
    assert isinstance(fleet, Fleet)
    whole = (
        workload.steps
        if workload.parallelism_phases is None
        else sum(steps for _, steps in workload.parallelism_phases)
    )
    plan = replan(
        fleet, workload, catalogue, options=FleetOptions(**options), done_steps=whole * part // 5
    )
    assert plan.best.cost_usd.median <= fleet.cost_usd.median * (1 + 1e-9)
    if part == 0:
        saved = fleet.usd_h * workload.setup_s / HOUR
        assert plan.best.cost_usd.median == pytest.approx(fleet.cost_usd.median - saved)
        assert str(plan.best) == str(fleet)
