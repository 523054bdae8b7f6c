"""Fleets of several types, against trying all of them."""

from __future__ import annotations

import itertools
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from tests.cloud._drawn_fleets import (
    AS_NAMED,
    ESTIMATES,
    a_profile,
    a_workload,
    an_offer,
    drawn,
    exactly,
)
from tests.depth import draws
from thrifty.cloud import FleetOptions, HardwareEstimates
from thrifty.cloud.planning._estimate import estimate
from thrifty.cloud.planning._mixed import mix_of
from thrifty.cloud.planning._planner import plan_fleet
from thrifty.core import CloudError, MissingExtraError


pytestmark = pytest.mark.slow


# Compute times depend on the batch alone and optimizers take no time, so machines of all types can
# end together.
PROFILE = a_profile(optimizer_s=0.0, bucket_bytes=(1e8, 3e8))
EACH = HardwareEstimates(
    profiled="V100",
    networks=AS_NAMED,
    measured_compute={
        "V100": exactly(1.0),
        "T4": exactly(3.0),
        "A10": exactly(0.5),
        "K80": exactly(5.0),
    },
)
MOST = 4

types = st.lists(
    st.builds(
        an_offer,
        accelerator=st.sampled_from(["V100", "T4", "A10", "K80"]),
        accelerator_count=st.sampled_from([1, 1, 2]),
        price_usd_h=st.integers(1, 30).map(float),
        baseline_gbps=st.sampled_from([1.0, 10.0, 25.0]),
        accelerator_memory_gib=st.sampled_from([2.5, 16.0]),
    ),
    min_size=2,
    max_size=4,
    unique_by=lambda offer: offer.accelerator,
).map(lambda some: [renamed(offer, f"type-{place}") for place, offer in enumerate(some)])


def renamed(offer, name):
    return an_offer(
        name,
        **{
            field: getattr(offer, field)
            for field in (
                "accelerator",
                "accelerator_count",
                "price_usd_h",
                "baseline_gbps",
                "accelerator_memory_gib",
            )
        },
    )


def all_mixes(workload, offers, *, quotas=None, most=MOST):
    """Return fleets with every number of machines of each type, at most ``most`` in total."""
    found = []
    for nums in itertools.product(range(most + 1), repeat=len(offers)):
        by_device = {
            name: sum(num for num, o in zip(nums, offers, strict=True) if o.accelerator == name)
            for name in (quotas or {})
        }
        over = any(by_device[name] > limit for name, limit in (quotas or {}).items())
        if not 0 < sum(nums) <= most or over:
            continue
        machines = [(offer, num, False) for offer, num in zip(offers, nums, strict=True) if num]
        try:
            found.append(estimate(workload, machines, estimates=EACH))
        except CloudError:
            continue
    return found


@given(types, st.integers(6, 24), st.data())
@settings(drawn, max_examples=draws(15, 60))
def test_no_fleet_of_this_step_time_costs_less_an_hour(offers, global_batch, data):
    workload = a_workload(profile=PROFILE, global_batch=global_batch)
    quotas = data.draw(
        st.dictionaries(st.sampled_from(["V100", "T4", "A10"]), st.integers(0, 3), max_size=2)
    )
    fleets = all_mixes(workload, offers, quotas=quotas)
    mix = mix_of(workload, offers, FleetOptions(estimates=EACH, quotas=quotas, max_nodes=MOST))
    assume(fleets)
    step_s = data.draw(st.sampled_from(sorted({fleet.step_s.high for fleet in fleets})))
    cheapest = min(fleet.usd_h for fleet in fleets if fleet.step_s.high <= step_s)
    nums = mix.cheapest(step_s * (1 + 1e-9))
    machines = [(o, int(num), False) for o, num in zip(offers, nums, strict=True) if num]
    found = estimate(workload, machines, estimates=EACH)
    assert found.step_s.high <= step_s * (1 + 1e-6)
    assert cheapest <= found.usd_h <= cheapest * 1.01 + 1e-9


@given(types, st.integers(6, 24), st.floats(0.05, 0.9))
@settings(drawn, max_examples=25)
def test_the_choice_is_close_to_the_best(offers, global_batch, share):
    workload = a_workload(profile=PROFILE, global_batch=global_batch)
    fleets = all_mixes(workload, offers)
    assume(fleets)
    times = sorted(fleet.time_s.high for fleet in fleets)
    deadline_s = times[int(share * len(times))]
    best = min(fleet.cost_usd.median for fleet in fleets if fleet.time_s.high <= deadline_s)
    plan = plan_fleet(
        workload,
        offers,
        FleetOptions(
            deadline_s=deadline_s * (1 + 1e-9), estimates=EACH, max_nodes=MOST, mixed=True
        ),
    )
    assert plan.best.time_s.high <= deadline_s * (1 + 1e-6)
    assert best * (1 - 1e-9) <= plan.best.cost_usd.median <= best * 1.03


def test_what_one_type_cannot_do_two_can():
    offers = [an_offer(), an_offer("a10", accelerator="A10", price_usd_h=4.0)]
    options = {
        "estimates": EACH,
        "max_nodes": 4,
        "quotas": {"v1": 2, "a10": 1},
        "deadline_s": 2400.0,
    }
    with pytest.raises(CloudError, match="the fastest fleet"):
        plan_fleet(a_workload(profile=PROFILE), offers, FleetOptions(**options))
    plan = plan_fleet(a_workload(profile=PROFILE), offers, FleetOptions(**options, mixed=True))
    assert str(plan.best) == "1 x a10 (1 A10) + 2 x v1 (1 V100 each)"
    assert plan.best.time_s.high <= 2400.0
    with pytest.raises(
        CloudError, match=r"the fastest fleet \(1 x a10 \(1 A10\) \+ 2 x v1 \(1 V100 each\)\)"
    ):
        plan_fleet(
            a_workload(profile=PROFILE),
            offers,
            FleetOptions(**{**options, "deadline_s": 900.0}, mixed=True),
        )


def test_a_quota_of_an_accelerator_is_shared():
    # Three machines train 8 samples each in 1.5 s.
    workload = a_workload(
        profile=a_profile(optimizer_s=0.0, bucket_bytes=(0.0, 0.0)), global_batch=24
    )
    offers = [an_offer(), an_offer("v2", price_usd_h=4.0)]

    def machines(quotas):
        mix = mix_of(
            workload,
            offers,
            FleetOptions(estimates=EACH, conservative=False, quotas=quotas, max_nodes=4),
        )
        nums = mix.cheapest(1.6)
        return None if nums is None else nums.tolist()

    assert machines({}) == [3, 0]
    assert machines({"v1": 2}) == [2, 1]
    assert machines({"v1": 2, "V100": 3}) == [2, 1]
    assert machines({"V100": 2}) is None


def test_machines_are_mixed_within_a_region():
    offers = [an_offer(), an_offer("a10", accelerator="A10", price_usd_h=4.0, region="west")]
    # Two of the first and one of the second in one region would meet the deadline.
    with pytest.raises(CloudError, match="the fastest fleet"):
        plan_fleet(
            a_workload(profile=PROFILE),
            offers,
            FleetOptions(
                estimates=EACH,
                max_nodes=4,
                quotas={"v1": 2, "a10": 1},
                deadline_s=2400.0,
                mixed=True,
            ),
        )


def test_a_faster_mix_for_a_budget():
    offers = [
        an_offer(),
        an_offer("a10", accelerator="A10", price_usd_h=4.0),
        an_offer("k80", accelerator="K80", price_usd_h=None, spot_usd_h=0.1),
    ]
    options = {"estimates": EACH, "max_nodes": 4, "quotas": {"a10": 1}, "budget_usd": 9.0}
    workload = a_workload(profile=a_profile(optimizer_s=0.0, bucket_bytes=(0.0, 0.0)))
    equal = plan_fleet(workload, offers, FleetOptions(**options))
    mixed = plan_fleet(workload, offers, FleetOptions(**options, mixed=True))
    assert mixed.best.time_s.median < equal.best.time_s.median
    assert mixed.best.cost_usd.high <= 9.0
    assert mixed.num_considered > equal.num_considered


def test_a_study_on_mixed_machines_is_refused():
    with pytest.raises(CloudError, match="a study is planned for machines of one type"):
        plan_fleet(
            a_workload(parallelism_phases=((2, 10),)),
            [an_offer()],
            FleetOptions(estimates=ESTIMATES, max_nodes=2, mixed=True),
        )


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    offers = [an_offer(price_usd_h=5.0), an_offer("a10", accelerator="A10", price_usd_h=4.0)]
    mix = mix_of(
        a_workload(),
        offers,
        FleetOptions(estimates=EACH, conservative=False, quotas={"A10": 1}, max_nodes=3),
    )
    with pytest.raises(MissingExtraError, match=r"\.\[cloud\]"):
        mix.cheapest(2.5)


def test_steps_that_no_fleet_makes():
    offers = [an_offer(), an_offer("a10", accelerator="A10")]
    mix = mix_of(
        a_workload(), offers, FleetOptions(estimates=EACH, conservative=False, max_nodes=3)
    )
    assert mix.cheapest(1e-3) is None
    assert np.sum(mix.cheapest(1e3)) == 1
