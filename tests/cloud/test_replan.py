"""What to rent for the steps that are left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, strategies as st

from tests.cloud._drawn_fleets import (
    BELIEFS,
    History,
    a_workload,
    an_offer,
    drawn,
    exactly,
    offers,
    workloads,
)
from thrifty.cloud import Fleet, Rented
from thrifty.cloud._estimate import estimate
from thrifty.cloud._planner import plan_fleet
from thrifty.cloud._replan import replan
from thrifty.core import CloudError


HOUR = 3600.0
CHEAP = an_offer("cheap", price_usd_h=3.0, spot_usd_h=1.0)
DEAR = an_offer("dear", accelerator_count=2, price_usd_h=8.0)
WORKLOAD = a_workload(steps=1000, setup_s=600.0)
GIVEN = {"deadline_s": 100 * HOUR, "beliefs": BELIEFS, "max_nodes": 4}


def a_fleet(offer, num=1, spot=False):
    """As if it had been chosen."""
    whole = estimate(WORKLOAD, [(offer, num, spot)], beliefs=BELIEFS)
    return replace(whole, step_s=exactly(1.0), time_s=exactly(1.0), cost_usd=exactly(1.0))


def left_after(steps):
    return replace(WORKLOAD, steps=WORKLOAD.steps - steps)


def test_the_present_fleet_needs_no_setup():
    fleet = a_fleet(CHEAP)
    plan = replan(fleet, WORKLOAD, [CHEAP, DEAR], done_steps=400, **GIVEN)
    anew = estimate(left_after(400), [(CHEAP, 1, False)], beliefs=BELIEFS)
    assert str(plan.best) == "1 x cheap"
    for end in ("median", "low", "high"):
        assert getattr(plan.best.time_s, end) == pytest.approx(getattr(anew.time_s, end) - 600)
        saved = getattr(anew.cost_usd, end) - getattr(plan.best.cost_usd, end)
        assert saved == pytest.approx(3.0 * 600 / HOUR)
    assert plan.best in plan.front
    first = plan_fleet(left_after(400), [CHEAP, DEAR], **GIVEN)
    assert plan.num_considered == first.num_considered + 1
    assert plan.notes == first.notes


def test_it_is_left_where_another_saves_more_than_its_setup():
    little, much = (
        replan(a_fleet(DEAR), WORKLOAD, [CHEAP, DEAR], done_steps=done, **GIVEN).best
        for done in (950, 0)
    )
    assert (str(little), str(much)) == ("1 x dear", "1 x cheap")


def test_a_machine_that_is_gone_is_not_chosen():
    fleet = a_fleet(CHEAP)
    plan = replan(fleet, WORKLOAD, [CHEAP, DEAR], done_steps=0, gone=fleet.machines, **GIVEN)
    assert str(plan.best) == "1 x dear"
    assert all("cheap" not in str(each) for each in plan.front)
    with pytest.raises(CloudError, match="there are no offers"):
        replan(fleet, WORKLOAD, [CHEAP], done_steps=0, gone=fleet.machines, **GIVEN)


@pytest.mark.parametrize("market", [None, History(cheap=(0.5, 0.1), dear=(9.0, 0.1))])
def test_an_evicted_spot_machine_may_be_had_on_demand(market):
    fleet = a_fleet(CHEAP, spot=True)
    given = {**GIVEN, "spot": True, "market": market, "done_steps": 0}
    stays = replan(fleet, WORKLOAD, [CHEAP, DEAR], **given)
    assert str(stays.best) == "1 x cheap (spot)"
    evicted = replan(fleet, WORKLOAD, [CHEAP, DEAR], gone=fleet.machines, **given)
    assert str(evicted.best) == "1 x cheap"
    # Not to be had at all, whatever else is told.
    both = (Rented(offer=CHEAP, num=1, batch=32), *fleet.machines)
    for gone in (both, both[::-1]):
        assert str(replan(fleet, WORKLOAD, [CHEAP, DEAR], gone=gone, **given).best) in {
            "1 x dear",
            "1 x dear (spot)",
        }


def test_other_spot_machines_may_be_had():
    other = replace(DEAR, spot_usd_h=1.0)
    fleet = a_fleet(CHEAP, spot=True)
    plan = replan(
        fleet, WORKLOAD, [CHEAP, other], done_steps=0, gone=fleet.machines, spot=True, **GIVEN
    )
    assert str(plan.best) == "1 x dear (spot)"


def test_an_offer_of_spot_only_is_gone_with_its_spot_machines():
    only = replace(CHEAP, price_usd_h=None)
    fleet = a_fleet(only, spot=True)
    plan = replan(
        fleet, WORKLOAD, [only, DEAR], done_steps=0, gone=fleet.machines, spot=True, **GIVEN
    )
    assert str(plan.best) == "1 x dear"


def test_spot_machines_that_are_gone_do_not_end_those_on_demand():
    gone = a_fleet(CHEAP, spot=True).machines
    plan = replan(a_fleet(CHEAP), WORKLOAD, [CHEAP], done_steps=0, gone=gone, **GIVEN)
    assert plan.best.time_s.median < plan_fleet(WORKLOAD, [CHEAP], **GIVEN).best.time_s.median


def test_another_zone_is_another_place():
    here, there = replace(CHEAP, zone="a"), replace(CHEAP, zone="b")
    fleet = a_fleet(here)
    plan = replan(fleet, WORKLOAD, [here, there], done_steps=0, gone=fleet.machines, **GIVEN)
    assert plan.best.machines[0].offer == there


def test_a_machine_is_known_by_its_place_not_by_its_price():
    fleet = a_fleet(CHEAP)
    now = replace(CHEAP, price_usd_h=2.0)
    with pytest.raises(CloudError, match="there are no offers"):
        replan(fleet, WORKLOAD, [now], done_steps=0, gone=fleet.machines, **GIVEN)


def test_the_present_fleet_may_be_the_only_one_in_time():
    fleet = a_fleet(CHEAP, 4)
    needs = estimate(WORKLOAD, [(CHEAP, 4, False)], beliefs=BELIEFS).time_s.high
    given = {**GIVEN, "deadline_s": needs - 300}
    with pytest.raises(CloudError, match="over the deadline"):
        plan_fleet(WORKLOAD, [CHEAP], **given)
    plan = replan(fleet, WORKLOAD, [CHEAP], done_steps=0, **given)
    assert str(plan.best) == "4 x cheap"
    assert plan.front == (plan.best,)
    with pytest.raises(CloudError, match="over the deadline"):
        replan(fleet, WORKLOAD, [CHEAP], done_steps=0, **{**given, "deadline_s": needs - 700})


def test_drift_is_a_belief():
    slower = BELIEFS.probed(compute={"V100": exactly(3.0)})
    given = {**GIVEN, "deadline_s": 1.2 * HOUR}
    fleet = a_fleet(CHEAP)
    plan = replan(fleet, WORKLOAD, [CHEAP], done_steps=500, **{**given, "beliefs": slower})
    assert plan.best.num_devices > 1
    assert str(replan(fleet, WORKLOAD, [CHEAP], done_steps=500, **given).best) == "1 x cheap"


def test_of_a_study_the_first_phases_are_done():
    study = replace(WORKLOAD, widths=((1, 100), (5, 50), (2, 30)))
    for done, left in [
        (0, ((1, 100), (5, 50), (2, 30))),
        (100, ((5, 50), (2, 30))),
        (120, ((5, 30), (2, 30))),
        (179, ((2, 1),)),
    ]:
        gone = a_fleet(CHEAP).machines
        plan = replan(a_fleet(CHEAP), study, [DEAR], done_steps=done, gone=gone, **GIVEN)
        assert plan == plan_fleet(replace(study, widths=left), [DEAR], **GIVEN)
    with pytest.raises(CloudError, match="all 180 steps are trained"):
        replan(a_fleet(CHEAP), study, [CHEAP], done_steps=180, **GIVEN)


@pytest.mark.parametrize(
    ("done", "message"), [(1000, "all 1000 steps are trained"), (-1, "done_steps is 0 or more")]
)
def test_something_is_left(done, message):
    with pytest.raises(CloudError, match=message):
        replan(a_fleet(CHEAP), WORKLOAD, [CHEAP], done_steps=done, **GIVEN)


def test_without_a_goal_there_is_a_front():
    plan = replan(a_fleet(CHEAP), WORKLOAD, [CHEAP, DEAR], done_steps=0, beliefs=BELIEFS)
    assert plan.best is None
    assert any(str(each) == "1 x cheap" and each.time_s.median < 6126 for each in plan.front)


@given(workloads, st.lists(offers, min_size=1, max_size=5), st.integers(0, 4), st.booleans())
@settings(drawn, max_examples=80)
def test_going_on_is_never_worse_than_a_plan_for_the_rest(workload, catalogue, part, spot):
    """Against planning as if nothing ran."""
    options = {"beliefs": BELIEFS, "max_nodes": 3, "spot": spot, "deadline_s": 1e7}
    try:
        fleet = plan_fleet(workload, catalogue, **options).best
    except CloudError:
        assume(False)
    assert isinstance(fleet, Fleet)
    whole = (
        workload.steps
        if workload.widths is None
        else sum(steps for _, steps in workload.widths)
    )
    plan = replan(fleet, workload, catalogue, done_steps=whole * part // 5, **options)
    assert plan.best.cost_usd.median <= fleet.cost_usd.median * (1 + 1e-9)
    if part == 0:
        saved = fleet.usd_h * workload.setup_s / HOUR
        assert plan.best.cost_usd.median == pytest.approx(fleet.cost_usd.median - saved)
        assert str(plan.best) == str(fleet)
