"""The choice among fleets, against trying all of them."""

from __future__ import annotations

from dataclasses import replace
from datetime import date

import pytest
from hypothesis import assume, given, settings, strategies as st

from tests.cloud._drawn_fleets import (
    ESTIMATES,
    History,
    a_profile,
    a_workload,
    an_offer,
    drawn,
    exactly,
    offers,
    workloads,
)
from tests.depth import draws
from thrifty.cloud import FleetOptions, HardwareEstimates
from thrifty.cloud.planning._estimate import estimate
from thrifty.cloud.planning._planner import plan_fleet
from thrifty.core import CloudError


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


MARKET = History(v1=(0.5, 0.2), t4=(0.1, 1.5), big=(2.0, 0.0))


def all_fleets(workload, catalogue, *, spot, quotas, max_nodes, market=None):
    """Return fleets with every number of every offer, on demand and as spot."""
    found = []
    for offer in catalogue:
        limits = [quotas.get(offer.instance_type), quotas.get(offer.accelerator), max_nodes]
        for num in range(1, min(limit for limit in limits if limit is not None) + 1):
            for as_spot in (False, True)[: 1 + spot]:
                try:
                    machines = [(offer, num, as_spot)]
                    found.append(
                        estimate(workload, machines, estimates=ESTIMATES, spot_market=market)
                    )
                except CloudError:
                    continue
    return found


def points(fleets):
    return {(fleet.time_s.median, fleet.cost_usd.median) for fleet in fleets}


def front_of(fleets):
    """Return the Pareto front of time and cost."""
    some = points(fleets)
    return {
        (time_s, usd)
        for time_s, usd in some
        if not any(
            other_s <= time_s and other_usd <= usd and (other_s, other_usd) != (time_s, usd)
            for other_s, other_usd in some
        )
    }


cases = st.fixed_dictionaries({
    "spot": st.booleans(),
    "quotas": st.dictionaries(
        st.sampled_from(["v1", "t4", "V100", "T4"]), st.integers(0, 3), max_size=2
    ),
    "max_nodes": st.integers(1, 5),
    "market": st.sampled_from([None, MARKET]),
})


@given(workloads, st.lists(offers, min_size=1, max_size=6), cases, st.data())
@settings(drawn, max_examples=draws(50, 200))
def test_no_fleet_is_better(workload, catalogue, options, data):
    fleets = all_fleets(workload, catalogue, **options)
    assume(fleets)
    conservative = data.draw(st.booleans())
    end = "high" if conservative else "median"
    goal = data.draw(st.sampled_from(["time_s", "cost_usd"]))
    other = "cost_usd" if goal == "time_s" else "time_s"
    limits = sorted({getattr(getattr(fleet, goal), end) for fleet in fleets})
    limit = data.draw(st.sampled_from(limits))
    assume(limit > 0)
    meeting = [fleet for fleet in fleets if getattr(getattr(fleet, goal), end) <= limit]
    # Fleets within 2 % of the best are one choice, and of those the cheapest counts.
    least = min(getattr(fleet, other).median for fleet in meeting)
    expected = min(
        (fleet.cost_usd.median, getattr(fleet, goal).median, getattr(fleet, other).median)
        for fleet in meeting
        if getattr(fleet, other).median <= 1.02 * least
    )
    plan = plan_fleet(
        workload,
        catalogue,
        FleetOptions(
            **{"deadline_s" if goal == "time_s" else "budget_usd": limit},
            estimates=ESTIMATES,
            conservative=conservative,
            **options,
        ),
    )
    found = plan.best.cost_usd, getattr(plan.best, goal), getattr(plan.best, other)
    assert tuple(each.median for each in found) == expected
    assert getattr(getattr(plan.best, goal), end) <= limit
    assert points(plan.front) == front_of(fleets)
    assert len(plan.front) == len(points(plan.front))
    assert plan.num_considered == len(fleets)


@given(workloads, st.lists(offers, min_size=1, max_size=4), cases)
@drawn
def test_what_it_shows_is_what_the_forecast_says(workload, catalogue, options):
    try:
        plan = plan_fleet(workload, catalogue, FleetOptions(estimates=ESTIMATES, **options))
    except CloudError:
        assert not all_fleets(workload, catalogue, **options)
        return
    assert plan.best is None
    for fleet in plan.front:
        (rented,) = fleet.machines
        machines = [(rented.offer, rented.num, rented.spot)]
        market = options["market"]
        assert fleet == estimate(workload, machines, estimates=ESTIMATES, spot_market=market)


def test_the_front_goes_from_the_fastest_to_the_cheapest():
    catalogue = [an_offer(), an_offer("t4", accelerator="T4", price_usd_h=0.5)]
    front = plan_fleet(
        a_workload(), catalogue, FleetOptions(estimates=ESTIMATES, max_nodes=8)
    ).front
    assert len(front) > 2
    times = [fleet.time_s.median for fleet in front]
    costs = [fleet.cost_usd.median for fleet in front]
    assert times == sorted(times)
    assert costs == sorted(costs, reverse=True)


def test_quotas_hold_for_types_and_for_accelerators():
    catalogue = [an_offer("v1"), an_offer("v2", accelerator_count=2)]
    tight = {"estimates": ESTIMATES, "deadline_s": 600.0, "conservative": False}
    with pytest.raises(CloudError, match=r"\(3 x v2 \(2 V100 each\)\)"):
        plan_fleet(a_workload(), catalogue, FleetOptions(quotas={"v2": 3}, max_nodes=4, **tight))
    with pytest.raises(CloudError, match=r"\(2 x v2 \(2 V100 each\)\)"):
        plan_fleet(
            a_workload(), catalogue, FleetOptions(quotas={"V100": 2, "v2": 3}, max_nodes=4, **tight)
        )


@pytest.mark.parametrize(
    ("slow", "fast"),
    [
        ({"baseline_gbps": 1.0}, {"baseline_gbps": 100.0}),
        ({"baseline_gbps": None, "peak_gbps": 1.0}, {"baseline_gbps": None, "peak_gbps": 100.0}),
    ],
)
def test_one_type_with_two_networks_is_two_kinds(slow, fast):
    catalogue = [an_offer(**slow, price_usd_h=1.0), an_offer(**fast, price_usd_h=2.0)]
    workload = a_workload(profile=a_profile(bucket_bytes=(1e9, 1e9)))
    front = plan_fleet(workload, catalogue, FleetOptions(estimates=ESTIMATES, max_nodes=8)).front
    assert front[0].machines[0].offer == catalogue[1]
    assert front[-1].machines[0].offer == catalogue[0]


# -- errors ----------------------------------------------------------------------------


def refused(catalogue=None, *, workload=None, **options):
    with pytest.raises(CloudError) as caught:
        plan_fleet(
            workload or a_workload(profile=a_profile(bucket_bytes=(0.0, 0.0))),
            [an_offer()] if catalogue is None else catalogue,
            FleetOptions(**{"estimates": ESTIMATES, "max_nodes": 2, **options}),
        )
    return str(caught.value)


def test_the_fastest_fleet_is_too_slow():
    # 1,000 steps of 3 s, plus 0.125 s for the optimizer.
    message = refused(deadline_s=1800.0)
    assert message.startswith(
        "the fastest fleet (2 x v1 (1 V100 each)) takes 55.1 min at the 90 % end, "
        "25.1 min over the deadline of 30.0 min: "
    )
    assert "allow more than 2 machines" in message
    assert "by the median" in refused(deadline_s=1800.0, conservative=False)


def test_the_cheapest_fleet_is_too_dear():
    # One machine: 1,000 steps of 6.125 s, and 180 s of setup.
    catalogue = [an_offer(), an_offer("v2", price_usd_h=4.0)]
    assert refused(catalogue, budget_usd=4.0).startswith(
        "the cheapest fleet (1 x v1 (1 V100)) costs $5.25 at the 90 % end, "
        "$1.25 over the budget of $4.00: "
    )


def test_no_device_holds_a_sample():
    small = [an_offer(accelerator_memory_gib=0.5), an_offer("v2", accelerator_memory_gib=1.0)]
    assert refused(small).startswith(
        "one sample needs 1.2 GiB (at most 1.2 GiB), a device of aws v2 in east has 1.0 GiB "
        "(at least 960.0 MiB usable), and no other has more"
    )


def test_all_devices_together_do_not_hold_the_batch():
    # 32 samples on two devices: 16 of them need 5 GiB.
    small = [an_offer(accelerator_memory_gib=2.5), an_offer("v2", accelerator_memory_gib=2.0)]
    message = refused(small, workload=a_workload(accumulation="never"))
    assert "on 2 machines 16 samples need 5.0 GiB (at most 5.0 GiB), " in message
    assert "a device of aws v1 in east has 2.5 GiB (at least 2.3 GiB usable)" in message
    assert message.endswith("allow more machines, allow accumulation, or lower the global batch")


def test_machines_that_the_batch_cannot_feed():
    message = refused([an_offer(accelerator_count=8)], workload=a_workload(global_batch=4))
    assert message.startswith("a global batch of 4 samples feeds as many devices")
    assert "the smallest machine has 8" in message


def test_quotas_that_allow_nothing():
    assert refused(quotas={"V100": 0}).startswith("the quotas allow no machine of any offer")


def test_offers_that_are_not_there():
    assert refused([]).startswith("there are no offers to choose among")


def test_offers_as_spot_only():
    only = [an_offer(price_usd_h=None, spot_usd_h=1.0)]
    assert refused(only).startswith("no offer has a price on demand: allow spot machines")
    assert plan_fleet(a_workload(), only, FleetOptions(estimates=ESTIMATES, spot=True)).front


def test_speeds_that_nobody_knows():
    message = refused([an_offer(accelerator="Abacus"), an_offer("c1", accelerator="")])
    assert message.startswith("thrifty knows no speed of these devices: Abacus, c1;")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadline_s": 1.0, "budget_usd": 1.0}, "give a deadline or a budget, not both"),
        ({"deadline_s": 0.0}, "`deadline_s` and `budget_usd` must be positive and finite, got 0.0"),
        (
            {"budget_usd": float("inf")},
            "`deadline_s` and `budget_usd` must be positive and finite, got inf",
        ),
        ({"max_nodes": 0}, "a fleet has at least one machine, not max_nodes=0"),
        ({"quotas": {"V100": -1}}, "a quota must be at least 0, got -1 for 'V100'"),
    ],
)
def test_what_makes_no_sense(options, message):
    assert refused(**options).startswith(message)


# -- notes -----------------------------------------------------------------------------


def notes(catalogue, *, workload=None, **options):
    plan = plan_fleet(
        workload or a_workload(),
        catalogue,
        FleetOptions(**{"estimates": ESTIMATES, "deadline_s": 1e7, "max_nodes": 2, **options}),
    )
    return plan.notes


def test_all_is_known():
    dated = an_offer(accelerator="", priced_on=date(2024, 6, 1), vcpus=8, memory_gib=64)
    assert notes([dated]) == ("the chosen fleet's price is of 2024-06-01",)
    assert notes([replace(dated, priced_on=None)]) == ("the chosen fleet's price has no date",)
    assert notes([dated], deadline_s=None) == ()


def test_a_plan_says_that_capacity_is_not_known():
    found = notes([an_offer("own.type", cloud="else")])
    assert found == (
        "capacity: whether 1 x own.type (1 V100) can be rented now is not known",
        "the chosen fleet's price has no date",
    )


def test_a_plan_names_the_quotas_it_takes():
    big = an_offer("p3.8xlarge", accelerator_count=4, vcpus=32)
    assert notes([big])[0] == (
        "quota: 1 x p3.8xlarge in east take 32 vCPUs of the quota 'Running On-Demand P instances'; "
        "check it, because a new account may have none"
    )
    assert not any("quota" in note for note in notes([big], quotas={"V100": 2}))


def test_left_out_are_devices_of_unknown_speed():
    found = notes([an_offer(), an_offer("x", accelerator="Abacus", price_usd_h=0.01)])
    assert "left out, because their speed is unknown: Abacus" in found


def test_a_measured_device_is_not_left_out():
    estimates = HardwareEstimates(profiled="V100", measured_compute={"Abacus": exactly(1.0)})
    plan = plan_fleet(
        a_workload(), [an_offer(accelerator="Abacus")], FleetOptions(estimates=estimates)
    )
    assert plan.front
    assert plan.notes == ()


def test_memory_that_is_not_known():
    unmeasured = a_workload(profile=a_profile(peak_bytes=(0.0, 0.0)))
    assert any(
        "the model's memory was not measured" in note
        for note in notes([an_offer()], workload=unmeasured)
    )
    unknown = an_offer(accelerator_memory_gib=None)
    assert any(
        "the memory of aws v1 in east is not known: whether 32" in note for note in notes([unknown])
    )


def test_accumulation_is_named():
    # 5 samples fit, of 32.
    found = notes([an_offer(accelerator_memory_gib=2.5)])
    assert any("is 7 micro-batches of up to 5 samples: the script has to" in note for note in found)


def test_spot_rests_on_assumptions():
    spot = an_offer(spot_usd_h=0.3)
    found = notes([spot], spot=True)
    assert any("no history of spot machines" in note and "0.1" in note for note in found)
    assert any("the time is the expected one" in note for note in found)
    known = notes([spot], spot=True, market=History(v1=(9.0, 0.1)))
    assert not any("history" in note or "the expected one" in note for note in known)


def test_spot_machines_without_history_are_left_out():
    class Market(History):
        def evictions_per_h(self, offer):
            raise CloudError("never seen")

    spot = an_offer(spot_usd_h=0.1)
    plan = plan_fleet(
        a_workload(),
        [spot],
        FleetOptions(estimates=ESTIMATES, spot=True, market=Market(v1=(0.1, 0.1))),
    )
    assert not any(rented.spot for fleet in plan.front for rented in fleet.machines)
