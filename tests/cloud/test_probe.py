"""Measurements that are worth their cost before renting."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from tests.cloud._drawn_fleets import (
    AS_NAMED,
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
from thrifty.cloud import FleetOptions, HardwareEstimates, Interval, StepTiming
from thrifty.cloud._probe import ProbeResult, Probes, measured_interval, outcomes
from thrifty.cloud.planning._estimate import estimate
from thrifty.cloud.planning._planner import plan_fleet
from thrifty.core import CloudError, derive_seed


pytestmark = pytest.mark.slow


HOUR = 3600.0
SURE = an_offer("sure", accelerator="V100", price_usd_h=3.0)
RIVAL = an_offer("rival", accelerator="A10", price_usd_h=3.0)
HOPELESS = an_offer("hopeless", accelerator="T4", price_usd_h=3.0)
WORKLOAD = a_workload(steps=100_000, profile=a_profile(bucket_bytes=(0.0, 0.0)))
NOTHING_TO_SUM = {
    "measured_network": {name: exactly(1.0) for name in ("sure", "rival", "hopeless")}
}
UNSURE = HardwareEstimates(
    profiled="V100",
    networks=AS_NAMED,
    measured_compute={
        "V100": exactly(1.0),
        "A10": Interval(median=1.2, low=0.8, high=1.8),
        "T4": Interval(median=4.0, low=2.0, high=8.0),
    },
    **NOTHING_TO_SUM,
)


def probes_of(catalogue, workload=WORKLOAD, *, cap_usd=100.0, cap_s=10 * HOUR, **changes):
    probing = {name: changes.pop(name) for name in ("probe_s", "draws", "seed") if name in changes}
    goal = {} if "budget_usd" in changes else {"deadline_s": 1000 * HOUR}
    options = FleetOptions(**{"estimates": UNSURE, "max_nodes": 4, **goal, **changes})
    return Probes(workload, catalogue, options, cap_usd=cap_usd, cap_s=cap_s, **probing)


def measure(probe, truth):
    """Return exactly the values of a table, or 1 where it has none."""
    return ProbeResult(**{
        what: (truth.get(probe.offer.device if what == "compute" else what, 1.0),)
        for what in probe.finds
    })


def run_all(probes, truth):
    done = []
    while (probe := probes.next()) is not None:
        done.append(probe)
        probes.record(probe, measure(probe, truth))
    return done


def test_the_probe_is_the_one_that_can_change_the_choice():
    probe = probes_of([SURE, RIVAL, HOPELESS]).next()
    assert (probe.offer, probe.num, probe.finds, probe.spot) == (RIVAL, 1, ("compute",), False)
    assert probe.seconds == 180 + 60
    assert probe.usd == pytest.approx(3.0 * 240 / HOUR)
    assert probe.gain > probe.usd
    assert "mostly 1 x rival (1 A10)" in probe.why
    assert str(probe) == "compute on 1 x rival (1 A10)"


def test_what_cannot_change_the_choice_is_not_measured():
    probes = probes_of([SURE, HOPELESS])
    assert probes.next() is None
    assert probes.ended == "no probe is worth its price"
    contenders = probes._contenders()
    judged = {
        probe.offer: probes._judged(probe, contenders).gain
        for probe in probes._possible(contenders)
    }
    assert judged[HOPELESS] == 0.0


def test_the_present_choice_is_measured_where_it_may_be_worse_than_another():
    known = replace(
        UNSURE,
        measured_compute={"V100": exactly(1.0), "A10": Interval(median=0.9, low=0.6, high=1.8)},
    )
    probes = probes_of([SURE, RIVAL], estimates=known)
    assert str(probes.plan.best) == "1 x rival (1 A10)"
    probe = probes.next()
    assert probe.offer == RIVAL
    assert "mostly 1 x sure (1 V100)" in probe.why


def test_what_costs_more_is_a_rival_of_a_choice_that_may_miss_the_deadline():
    """A dearer fleet is a rival where the choice may miss the deadline.

    Its price is above the choice's highest cost, but it is taken where the choice is too slow.
    """
    known = replace(
        UNSURE,
        measured_compute={"V100": exactly(1.0), "A10": Interval(median=0.9, low=0.85, high=1.8)},
    )
    dear = replace(SURE, instance_type="dear", price_usd_h=40.0)
    probes = probes_of([RIVAL, dear], estimates=known)
    assert str(probes.plan.best) == "1 x rival (1 A10)"
    assert dear in probes._contenders().rivals


def test_certain_knowledge_is_worth_nothing():
    certain = replace(
        UNSURE, measured_compute={"V100": exactly(1.0), "A10": exactly(1.2), "T4": exactly(4.0)}
    )
    assert probes_of([SURE, RIVAL, HOPELESS], estimates=certain).next() is None


def test_no_probe_costs_more_than_it_brings():
    # All of the training costs a few dollars, so no probe can pay for itself.
    little = a_workload(steps=100, profile=a_profile(bucket_bytes=(0.0, 0.0)))
    assert probes_of([SURE, RIVAL], little).next() is None


def test_both_caps_bind():
    price = 3.0 * 240 / HOUR
    assert probes_of([SURE, RIVAL], cap_usd=price, cap_s=240.0).next() is not None
    for cap in ({"cap_usd": price - 1e-6}, {"cap_s": 239.0}):
        probes = probes_of([SURE, RIVAL], **cap)
        assert probes.next() is None
        assert "the cap leaves" in probes.ended
        assert "compute on 1 x rival (1 A10)" in probes.ended


def test_caps_are_of_all_probes_together():
    known = replace(
        UNSURE,
        measured_compute={
            "V100": exactly(1.0),
            "A10": Interval(median=1.2, low=0.8, high=1.8),
            "L4": Interval(median=1.2, low=0.8, high=1.8),
        },
    )
    other = replace(RIVAL, accelerator="L4")
    price = 3.0 * 240 / HOUR
    truth = {"A10": 1.2, "L4": 1.2}
    for most, num in [({}, 2), ({"cap_usd": 1.9 * price}, 1), ({"cap_s": 479.0}, 1)]:
        probes = probes_of([SURE, RIVAL, other], estimates=known, **most)
        assert len(run_all(probes, truth)) == num


def test_of_two_probes_the_one_that_brings_more_for_a_dollar_is_first():
    known = replace(
        UNSURE,
        measured_compute={
            "V100": exactly(1.0),
            "A10": Interval(median=1.2, low=0.8, high=1.8),
            "L4": Interval(median=1.1, low=0.4, high=3.0),
        },
    )
    large = an_offer("sure", accelerator="L4", accelerator_count=8, price_usd_h=24.0)
    probes = probes_of([SURE, RIVAL, large], estimates=known)
    contenders = probes._contenders()
    gains = {
        probe.offer.device: probes._judged(probe, contenders).gain
        for probe in probes._possible(contenders)
    }
    assert gains["L4"] > gains["A10"] > gains["L4"] / 8
    assert probes.next().offer == RIVAL


def test_a_device_is_not_measured_where_the_quota_is_used_up():
    used_up = an_offer("used-up", accelerator="A10", price_usd_h=1.0)
    assert probes_of([SURE, used_up, RIVAL], quotas={"used-up": 0}).next().offer == RIVAL


def test_of_very_many_rivals_the_most_promising_are_compared():
    many = [
        replace(RIVAL, instance_type=f"rival{at}", price_usd_h=3.0 + at / 100) for at in range(90)
    ]
    contenders = probes_of([SURE, *many[::-1]])._contenders()
    assert set(contenders.rivals) == {SURE, *many[:60]}
    assert probes_of([SURE, *many]).next().offer == many[0]


def test_a_result_is_believed_and_paid():
    probes = probes_of([SURE, RIVAL])
    assert str(probes.plan.best) == "1 x sure (1 V100)"
    probe = probes.next()
    probes.record(probe, ProbeResult(compute=(0.5, 0.52, 0.51)))
    assert probes.estimates.measured_compute["A10"] == measured_interval((0.5, 0.52, 0.51))
    assert probes.estimates.measured_compute["T4"] == UNSURE.measured_compute["T4"]
    assert (probes.spent_usd, probes.spent_s) == (probe.usd, probe.seconds)
    assert str(probes.plan.best) == "1 x rival (1 A10)"
    assert probes.next() is None


def test_a_noisy_result_is_not_measured_again():
    probes = probes_of([SURE, RIVAL])
    probes.record(probes.next(), ProbeResult(compute=(0.6, 1.0, 1.7)))
    believed = probes.estimates.compute(RIVAL)
    assert believed.high / believed.low > 2
    assert probes.next() is None


def test_repeats_make_the_interval():
    assert measured_interval((2.0,)) == Interval(
        median=2.0, low=2.0 / 1.03, high=pytest.approx(2.0 * 1.03)
    )
    wide = measured_interval((1.0, 2.0, 4.0))
    # The standard deviation is ln 2, and the interval has 1.645 of them to each side.
    assert wide.median == 2.0
    assert (wide.low, wide.high) == pytest.approx((2 / 2**1.6449, 2 * 2**1.6449), rel=1e-4)


def test_networks_are_measured_on_four_machines_or_on_as_many_as_are_allowed():
    heavy = a_workload(steps=100_000, profile=a_profile(bucket_bytes=(2e9, 2e9)))
    known = replace(
        UNSURE,
        measured_network={"sure": exactly(1.0), "rival": Interval(median=1.0, low=0.05, high=5.0)},
        measured_compute={"V100": exactly(1.0), "A10": exactly(1.05)},
    )
    cheap = replace(RIVAL, price_usd_h=2.0)
    given = {"estimates": known, "deadline_s": 150 * HOUR}
    probes = probes_of([SURE, cheap], heavy, **given)
    probe = probes.next()
    assert (probe.offer, probe.num, probe.finds) == (cheap, 4, ("network",))
    assert probe.usd == pytest.approx(4 * 2.0 * 240 / HOUR)
    probes.record(probe, ProbeResult(network=(0.1,)))
    assert probes.estimates.network(cheap) == measured_interval((0.1,))
    assert str(probes.plan.best) == "2 x rival (1 A10 each)"
    assert probes_of([SURE, cheap], heavy, **given, quotas={"rival": 2}).next().num == 2
    # A quota of one does not allow the two machines that this probe needs at least.
    assert probes_of([SURE, cheap], heavy, **given, quotas={"rival": 1}).next() is None


def unsure_of_a_network():
    """Return probes, the first of which is of the offer's network, and that offer."""
    heavy = a_workload(steps=100_000, profile=a_profile(bucket_bytes=(2e9, 2e9)))
    known = replace(
        UNSURE,
        measured_network={"sure": exactly(1.0), "rival": Interval(median=1.0, low=0.05, high=5.0)},
        measured_compute={"V100": exactly(1.0), "A10": exactly(1.05)},
    )
    cheap = replace(RIVAL, price_usd_h=2.0)
    return probes_of([SURE, cheap], heavy, estimates=known, deadline_s=150 * HOUR), cheap


def test_a_probe_may_be_told_as_seconds_of_steps():
    probes, cheap = unsure_of_a_network()
    before = probes.estimates
    probe = probes.next()
    assert probe.num == 4
    timings = [
        StepTiming(offer=cheap, num=num, batch=16, seconds=seconds)
        for num, seconds in [(1, 3.2), (4, 5.0)]
    ]
    probes.record(probe, timings)
    assert probes.estimates.calibrated_to == probes._workload.profile
    wide, narrow = before.network(cheap), probes.estimates.network(cheap)
    assert narrow.high / narrow.low < wide.high / wide.low
    assert probes.spent_usd == probe.usd
    assert str(probes.next()) != str(probe)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offer": SURE}, "a step was recorded on 4 x sure"),
        ({"num": 5}, "a step was recorded on 5 x rival"),
        ({"num": 1}, "all steps are of one machine"),
    ],
)
def test_steps_of_other_machines_than_the_probes_are_refused(change, message):
    probes, cheap = unsure_of_a_network()
    timing = StepTiming(offer=cheap, num=4, batch=16, seconds=0.9)
    with pytest.raises(CloudError, match=message):
        probes.record(probes.next(), [replace(timing, **change)])
    assert probes.spent_usd == 0


def test_two_machines_show_what_one_does():
    known = replace(UNSURE, measured_network={"sure": exactly(1.0)})
    sums = a_workload(steps=100_000, profile=a_profile(bucket_bytes=(1e9, 1e9)))
    probes = probes_of([SURE, replace(RIVAL, baseline_gbps=None)], sums, estimates=known)
    found = {probe.finds for probe in probes._possible(probes._contenders())}
    assert found == {("compute",), ("compute", "network")}


def test_a_device_is_measured_where_it_is_cheapest():
    big = an_offer("big", accelerator="A10", accelerator_count=4, price_usd_h=13.0)
    west = replace(RIVAL, region="west", price_usd_h=3.5, spot_usd_h=2.8)
    probe = probes_of([SURE, big, west, RIVAL]).next()
    assert (probe.offer, probe.spot) == (RIVAL, False)
    probe = probes_of([SURE, big, west, RIVAL], spot=True).next()
    assert (probe.offer, probe.spot, str(probe)) == (
        west,
        True,
        "compute on 1 x rival (1 A10, spot)",
    )
    market = History(rival=(2.7, 0.01))
    probe = probes_of([SURE, big, west, RIVAL], spot=True, market=AnyMarket(market)).next()
    assert probe.usd == pytest.approx(2.7 * 240 / HOUR)


class AnyMarket:
    """A market that raises ``CloudError`` where it has no data."""

    def __init__(self, market):
        self.market = market

    def spot_usd_h(self, offer):
        try:
            return self.market.spot_usd_h(offer)
        except KeyError as error:
            raise CloudError("not known") from error

    def evictions_per_h(self, offer):
        return self.market.evictions_per_h(offer)


def test_with_a_budget_gains_are_seconds():
    probes = probes_of([SURE, RIVAL], budget_usd=1000.0, probe_s=0.0)
    probe = probes.next()
    assert probe.gain > probe.seconds
    # A probe may not take longer than it saves, but dollars are not compared with seconds.
    given = {"budget_usd": 1000.0, "cap_s": 1e9, "cap_usd": 1e9}
    last = probe.gain - WORKLOAD.setup_s
    assert probes_of([SURE, RIVAL], probe_s=last - 1, **given).next() is not None
    assert probes_of([SURE, RIVAL], probe_s=last + 1, **given).next() is None


def test_machines_that_were_not_to_be_had_are_not_asked_for_again():
    probes = probes_of([SURE, RIVAL])
    probes.missed(probes.next(), usd=0.1, seconds=30.0)
    assert (probes.spent_usd, probes.spent_s) == (0.1, 30.0)
    assert probes.next() is None
    assert probes.ended == "no probe is worth its price"


def test_one_machine_may_be_had_where_two_are_not():
    probes = probes_of([SURE, RIVAL])
    probe = replace(probes.next(), num=2, finds=("compute", "network"))
    probes.missed(probe)
    assert probes.next().finds == ("compute",)


def test_the_median_is_enough_where_no_fleet_is_sure():
    end = plan_fleet(
        WORKLOAD, [RIVAL], FleetOptions(budget_usd=1e6, estimates=UNSURE, max_nodes=1)
    ).best.time_s
    given = {"max_nodes": 1, "deadline_s": (end.median + end.high) / 2, "cap_usd": 1.0}
    probes = probes_of([RIVAL], **given)
    assert str(probes.plan.best) == "1 x rival (1 A10)"
    assert "by its median" in probes.plan.notes[-1]
    assert probes.next() is None
    assert "by its median" not in str(probes_of([SURE]).plan.notes)


def test_no_fleet_is_left_after_bad_news():
    end = plan_fleet(
        WORKLOAD, [RIVAL], FleetOptions(budget_usd=1e6, estimates=UNSURE, max_nodes=1)
    ).best.time_s
    probes = probes_of(
        [RIVAL, replace(SURE, price_usd_h=40.0)],
        deadline_s=end.high * 1.01,
        max_nodes=1,
        quotas={"V100": 0},
    )
    probe = replace(probes_of([SURE, RIVAL]).next(), offer=RIVAL)
    with pytest.raises(CloudError, match="over the deadline"):
        probes.record(probe, ProbeResult(compute=(10.0,)))
    with pytest.raises(CloudError, match="even by the medians"):
        probes.next()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"deadline_s": None}, "give a deadline or a budget"),
        ({"cap_usd": -1.0}, "must be at least 0 and `draws`"),
        ({"cap_s": -1.0}, "must be at least 0 and `draws`"),
        ({"probe_s": -1.0}, "must be at least 0 and `draws`"),
        ({"draws": 0}, "`draws` at least 1"),
        ({"deadline_s": 1.0}, "over the deadline"),
    ],
)
def test_what_makes_no_sense_is_said(changes, message):
    with pytest.raises(CloudError, match=message):
        probes_of([SURE, RIVAL], **changes)


def test_a_result_has_what_the_probe_finds():
    probes = probes_of([SURE, RIVAL])
    probe = probes.next()
    for wrong in (
        ProbeResult(),
        ProbeResult(network=(1.0,)),
        ProbeResult(compute=(1.0,), network=(1.0,)),
    ):
        with pytest.raises(CloudError, match="the probe finds compute"):
            probes.record(probe, wrong)
    assert probes.spent_usd == 0
    for factor in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(CloudError, match="positive and finite"):
            ProbeResult(compute=(factor,))


def test_draws_are_those_of_the_seed():
    def gain(seed):
        return probes_of([SURE, RIVAL], seed=seed).next().gain

    assert gain(1) == gain(1) != gain(2)


def test_other_offers_do_not_change_the_draws():
    assert probes_of([SURE, RIVAL]).next() == probes_of([HOPELESS, SURE, RIVAL]).next()


@pytest.mark.parametrize(
    "interval", [Interval(median=2.0, low=1.0, high=3.0), Interval(median=1.0, low=0.1, high=1.5)]
)
def test_outcomes_lie_in_the_interval_nine_times_of_ten(interval):
    values = outcomes(interval, 1000, rng=np.random.default_rng(0))
    assert (values < interval.low).mean() == pytest.approx(0.05, abs=0.001)
    assert (values > interval.high).mean() == pytest.approx(0.05, abs=0.001)
    assert (values < interval.median).mean() == pytest.approx(0.5, abs=0.001)
    # The order is random, so that the outcomes of two estimates are independent.
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.1


def slow_gain(probe, workload, catalogue, *, goal, seed, draws, **options):
    """Compute the gain with a whole plan for each outcome and both fleets under it."""
    before = plan_fleet(workload, catalogue, FleetOptions(estimates=ESTIMATES, **goal, **options))
    rng = np.random.default_rng(derive_seed(seed, "probe", str(probe)))
    name = probe.offer.instance_type
    subjects = {"compute": probe.offer.device, "inner": name, "network": name}
    cases = zip(
        *(outcomes(getattr(ESTIMATES, what)(probe.offer), draws, rng=rng) for what in probe.finds),
        strict=True,
    )
    market = options.get("market")

    def score(fleet, estimates):
        machines = [(each.offer, each.num, each.spot) for each in fleet.machines]
        now = estimate(workload, machines, estimates=estimates, spot_market=market)
        time_s, usd = now.time_s.median, now.cost_usd.median
        if "deadline_s" in goal:
            return usd * max(1.0, time_s / goal["deadline_s"])
        return time_s * max(1.0, usd / goal["budget_usd"])

    gains = []
    for values in cases:
        estimates = ESTIMATES.probed(**{
            what: {subjects[what]: measured_interval((float(value),))}
            for what, value in zip(probe.finds, values, strict=True)
        })
        try:
            after = plan_fleet(
                workload, catalogue, FleetOptions(estimates=estimates, **goal, **options)
            )
        except CloudError:
            gains.append(0.0)
            continue
        gains.append(score(before.best, estimates) - score(after.best, estimates))
    return sum(gains) / len(gains)


@pytest.mark.thorough
@given(
    workloads,
    st.lists(offers, min_size=2, max_size=5),
    st.floats(1.1, 3.0),
    st.sampled_from(["deadline_s", "budget_usd"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, History(v1=(0.5, 0.2), t4=(0.1, 1.5), big=(2.0, 0.0))]),
)
@settings(drawn, max_examples=draws(20, 60))
def test_gains_are_those_of_whole_plans(
    workload, catalogue, room, which, spot, conservative, market
):
    workload = replace(workload, steps=100_000)
    options = {"spot": spot, "market": market, "max_nodes": 4, "conservative": conservative}
    try:
        front = plan_fleet(workload, catalogue, FleetOptions(estimates=ESTIMATES, **options)).front
    except CloudError:
        assume(False)
    some = front[len(front) // 2]
    ends = some.time_s if which == "deadline_s" else some.cost_usd
    goal = {which: (ends.high if conservative else ends.median) * room}
    probes = Probes(
        workload,
        catalogue,
        FleetOptions(estimates=ESTIMATES, **goal, **options),
        cap_usd=1e9,
        cap_s=1e9,
        draws=6,
        seed=3,
    )
    contenders = probes._contenders()
    for probe in probes._possible(contenders):
        judged = probes._judged(probe, contenders)
        expected = slow_gain(probe, workload, catalogue, goal=goal, seed=3, draws=6, **options)
        assert judged.gain == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(
    st.lists(offers, min_size=1, max_size=6),
    st.floats(0.0, 3.0),
    st.floats(0.0, 2000.0),
    st.integers(0, 10),
)
@settings(drawn, max_examples=draws(15, 60))
def test_the_caps_are_never_passed(catalogue, cap_usd, cap_s, seed):
    rng = np.random.default_rng(seed)
    truth = {
        name: float(outcomes(interval, 1, rng=rng)[0])
        for name, interval in ESTIMATES.measured_compute.items()
    }
    try:
        probes = probes_of(catalogue, estimates=ESTIMATES, spot=True, cap_usd=cap_usd, cap_s=cap_s)
    except CloudError:
        assume(False)
    done = run_all(probes, truth)
    assert probes.spent_usd == pytest.approx(sum(probe.usd for probe in done))
    assert probes.spent_s == sum(probe.seconds for probe in done)
    assert probes.spent_usd <= cap_usd
    assert probes.spent_s <= cap_s
    assert all(one != other for one, other in pairwise(done))


@pytest.mark.parametrize("seed", range(12))
def test_probes_lead_to_the_truly_best(seed):
    """Probing gives nearly the cost of a plan that knows the truth from the start."""
    rng = np.random.default_rng(seed)
    names = ["K80", "T4", "A10", "L4", "A100"]
    catalogue = [
        an_offer(name.lower(), accelerator=name, price_usd_h=price * float(rng.uniform(0.8, 1.2)))
        for name, price in zip(names, [0.9, 0.8, 2.2, 1.6, 6.0], strict=True)
    ]
    believed = HardwareEstimates(profiled="V100")
    truth = {
        offer.device: float(outcomes(believed.compute(offer), 1, rng=rng)[0]) for offer in catalogue
    }
    network = {offer.instance_type: exactly(1.0) for offer in catalogue}
    believed = believed.probed(network=network)
    full = believed.probed(compute={name: exactly(factor) for name, factor in truth.items()})
    long = a_workload(steps=10**6)

    def true_usd(fleet):
        machines = [(each.offer, each.num, each.spot) for each in fleet.machines]
        return estimate(long, machines, estimates=full).cost_usd.median

    probes = probes_of(catalogue, long, estimates=believed, deadline_s=1e9)
    best = plan_fleet(
        long, catalogue, FleetOptions(estimates=full, deadline_s=1e9, max_nodes=4)
    ).best
    first = true_usd(probes.plan.best)
    run_all(probes, truth)
    assert true_usd(probes.plan.best) <= first
    # The small remaining loss is less than a probe may gain on average.
    assert true_usd(probes.plan.best) <= 1.02 * true_usd(best)
