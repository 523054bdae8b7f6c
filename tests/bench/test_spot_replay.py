"""One job on spot machines, replayed against history."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from bench.cloud.spot_replay import ByExpectedCost, Cheapest, SpotJob, SpotPlace, replay
from thrifty.cloud import Offer
from thrifty.cloud._market import ObservedLifetime, PriceSeries, SpotMarket, spot_seconds
from thrifty.core import CloudError


HOUR, MINUTE = 3600.0, 60.0


def place(*up, usd_h=1.0, zone="a", prices=None):
    return SpotPlace(
        offer=Offer(cloud="aws", region="r", zone=zone, instance_type="x", price_usd_h=3.0),
        prices=prices or PriceSeries(times_s=(0.0,), usd_h=(usd_h,)),
        up=tuple((float(begin), float(end)) for begin, end in up),
    )


def job(**options):
    numbers = {
        "start_s": 0.0,
        "work_s": 2 * HOUR,
        "save_s": MINUTE,
        "restart_s": 10 * MINUTE,
        "on_demand_usd_h": 3.0,
    }
    return SpotJob(**{**numbers, **options})


ups = st.lists(st.integers(0, 12), min_size=2, max_size=9).map(
    lambda gaps: [
        (sum(gaps[:index]), sum(gaps[: index + 1]))
        for index in range(1, len(gaps), 2)
        if gaps[index]
    ]
)


def by_minutes(up, work, save, restart, interval):
    """Replay the same minute by minute and return the cost and the counts.

    A minute costs 1 USD on spot and 3 USD on demand.
    """
    now = saved = cost = evictions = checkpoints = waited = 0
    while True:
        ends = [end for begin, end in up if begin <= now < end]
        if not ends:
            if all(begin <= now for begin, _ in up):
                rest = restart + work - saved
                return now + rest, cost + 3 * rest, evictions, checkpoints, waited
            now, waited = now + 1, waited + 1
            continue
        kept, first = [saved] * restart, saved
        while first < work:
            piece = min(interval, work - first)
            last = first + piece == work
            kept += [first] * (piece + (0 if last else save) - 1) + [first + piece]
            first += piece
        for each in kept:
            if now == ends[0]:
                evictions += 1
                break
            now, cost = now + 1, cost + 1
            if each > saved:
                saved = each
                checkpoints += saved < work
        else:
            return now, cost, evictions, checkpoints, waited


@given(ups, st.integers(1, 15), st.integers(0, 2), st.integers(0, 3), st.integers(1, 20))
def test_a_replay_is_what_happens_minute_by_minute(up, work, save, restart, interval):
    spot = place(*[(MINUTE * begin, MINUTE * end) for begin, end in up], usd_h=60.0)
    todo = job(
        work_s=work * MINUTE,
        save_s=save * MINUTE,
        restart_s=restart * MINUTE,
        on_demand_usd_h=180.0,
    )
    run = replay(todo, [spot], Cheapest(interval_s=interval * MINUTE))
    counted = (
        run.finish_s / MINUTE, run.cost_usd, run.evictions, run.checkpoints, run.waited_s / MINUTE
    )  # fmt: skip
    assert counted == pytest.approx(by_minutes(up, work, save, restart, interval))


@given(
    st.lists(ups, max_size=3),
    st.integers(1, 30),
    st.integers(0, 3),
    st.integers(0, 4),
    st.one_of(st.integers(0, 40), st.just(math.inf)),
    st.integers(0, 60),
)
def test_the_deadline_holds_if_it_can(zones, work, save, restart, interval, slack):
    places = [
        place(*[(5 * MINUTE * begin, 5 * MINUTE * end) for begin, end in up], usd_h=index)
        for index, up in enumerate(zones)
    ]
    deadline = (restart + work + slack) * MINUTE
    todo = job(
        work_s=work * MINUTE, save_s=save * MINUTE, restart_s=restart * MINUTE, deadline_s=deadline
    )
    run = replay(todo, places, Cheapest(interval_s=interval * MINUTE))
    assert (restart + work) * MINUTE - 1e-6 <= run.finish_s <= deadline + 1e-6


def test_a_machine_is_billed_at_the_price_of_each_second():
    prices = PriceSeries(times_s=(0.0, HOUR), usd_h=(1.0, 2.0))
    run = replay(
        job(start_s=0.5 * HOUR, work_s=HOUR, restart_s=0.0),
        [place((0, math.inf), prices=prices)],
        Cheapest(),
    )
    assert run.finish_s == 1.5 * HOUR
    assert run.cost_usd == pytest.approx(0.5 + 1.0)


def test_without_checkpoints_all_work_is_lost():
    spot = place((0, HOUR), (2 * HOUR, 9 * HOUR))
    lost = replay(job(restart_s=0.0), [spot], Cheapest())
    assert (lost.finish_s, lost.evictions, lost.waited_s) == (4 * HOUR, 1, HOUR)
    kept = replay(job(restart_s=0.0), [spot], Cheapest(interval_s=29 * MINUTE))
    # Two checkpoints of 29 + 1 minutes in the first hour, two later.
    assert kept.finish_s == 2 * HOUR + 62 * MINUTE + 2 * MINUTE
    assert kept.checkpoints == 4


def test_without_a_deadline_a_job_waits_as_long_as_there_is_hope():
    run = replay(job(), [place((99 * HOUR, 199 * HOUR))], Cheapest())
    assert (run.waited_s, run.on_demand_s) == (99 * HOUR, 0.0)
    hopeless = replay(job(), [place()], Cheapest())
    assert (hopeless.waited_s, hopeless.on_demand_s) == (0.0, 2 * HOUR + 10 * MINUTE)
    assert hopeless.cost_usd == pytest.approx(6.5)


def test_a_job_waits_until_its_deadline_is_in_danger():
    run = replay(job(deadline_s=4 * HOUR), [place((3 * HOUR, 9 * HOUR))], Cheapest())
    assert run.finish_s == 4 * HOUR
    assert run.waited_s == 4 * HOUR - 2 * HOUR - 10 * MINUTE


def test_a_deadline_that_cannot_be_met_is_missed_by_as_little_as_can_be():
    run = replay(job(deadline_s=HOUR), [place((0, math.inf))], Cheapest())
    assert run.finish_s == run.on_demand_s == 2 * HOUR + 10 * MINUTE
    assert run.waited_s == 0.0
    closed = replay(job(deadline_s=HOUR), [place((HOUR, math.inf))], Cheapest())
    assert closed == run


def test_a_job_saves_more_often_near_its_deadline():
    run = replay(job(deadline_s=3 * HOUR), [place((0, math.inf))], Cheapest())
    # After 10 minutes, 39 are to spare, and each checkpoint costs one of them: pieces of 39, 38, 37
    # and 6 minutes.
    assert (run.checkpoints, run.on_demand_s) == (3, 0.0)
    assert run.finish_s == 2 * HOUR + 13 * MINUTE


def test_a_job_leaves_when_saving_would_take_as_long_as_work():
    # There is room for pieces of 4, 3 and 2 minutes, then for one minute, where saving does not
    # pay.
    run = replay(
        job(restart_s=0.0, deadline_s=2 * HOUR + 5 * MINUTE), [place((0, 9 * HOUR))], Cheapest()
    )
    assert run.checkpoints == 3
    assert run.on_demand_s == 2 * HOUR - 9 * MINUTE
    assert run.finish_s == 2 * HOUR + 3 * MINUTE
    assert run.evictions == 0
    assert run.cost_usd == pytest.approx(0.2 + 3 * 111 / 60)


def test_nobody_saves_more_than_once_a_minute():
    free = job(save_s=0.0, restart_s=0.0, work_s=HOUR)
    run = replay(free, [place((0, 9 * HOUR))], Cheapest(interval_s=0.0))
    assert run.checkpoints == 59
    hasty = job(save_s=0.0, restart_s=0.0, work_s=HOUR, deadline_s=HOUR + 59.0)
    assert replay(hasty, [place((0, 9 * HOUR))], Cheapest()).on_demand_s == HOUR
    calm = job(save_s=0.0, restart_s=0.0, work_s=HOUR, deadline_s=HOUR + 60.0)
    assert replay(calm, [place((0, 9 * HOUR))], Cheapest()).on_demand_s == 0.0


def test_nothing_is_rented_that_the_deadline_has_no_time_for():
    run = replay(job(deadline_s=2 * HOUR + 15 * MINUTE), [place((0, 9 * HOUR))], Cheapest())
    assert run.cost_usd == pytest.approx(6.5)
    assert run.finish_s == 2 * HOUR + 10 * MINUTE


def test_the_cheapest_now_is_chosen():
    falling = PriceSeries(times_s=(0.0, HOUR), usd_h=(5.0, 0.5))
    places = [place((0, 99 * HOUR)), place((0, 99 * HOUR), prices=falling), place(usd_h=0.1)]
    early = replay(job(work_s=HOUR, restart_s=0.0), places, Cheapest())
    assert early.cost_usd == pytest.approx(1.0)
    late = replay(job(start_s=HOUR, work_s=HOUR, restart_s=0.0), places, Cheapest())
    assert late.cost_usd == pytest.approx(0.5)


# -- by expected cost ------------------------------------------------------------------------


def market(**evictions):
    """Return a market with evictions in 1,000 h by zone."""
    return SpotMarket.from_lifetimes(
        ObservedLifetime(
            instance_type="x",
            zone=zone,
            begin_s=0.0,
            end_s=1000 * HOUR / max(count, 1),
            evicted=count > 0,
        )
        for zone, count in evictions.items()
        for _ in range(max(count, 1))
    )


def test_a_steady_place_may_be_worth_its_price():
    policy = ByExpectedCost(market=market(a=4000, b=1))
    dear = place((0, math.inf), zone="b", usd_h=1.2)
    for usd_h, better in ((1.1, "b"), (0.4, "a")):
        cheap = place((0, math.inf), zone="a", usd_h=usd_h)
        found, interval = policy.choose(job(), [cheap, dear], now_s=0.0, left_s=2 * HOUR)
        assert found.offer.zone == better
        rate = policy.market.evictions_per_h(found.offer)
        assert interval == spot_seconds(
            2 * HOUR, evictions_per_h=rate, save_s=60.0, restart_s=600.0
        )[1]  # fmt: skip


def test_on_demand_is_chosen_where_spot_is_dearer():
    policy = ByExpectedCost(market=market(a=4000))
    here = place((0, math.inf), zone="a", usd_h=1.5)
    run = replay(job(), [here], policy)
    assert run.on_demand_s == 2 * HOUR + 10 * MINUTE
    assert replay(job(on_demand_usd_h=9.0), [here], policy).on_demand_s == 0.0


def test_a_little_cheaper_is_cheaper():
    policy = ByExpectedCost(market=market(a=1))
    here = place((0, math.inf), zone="a", usd_h=2.9)
    assert replay(job(), [here], policy).on_demand_s == 0.0


def test_the_price_is_that_of_the_moment():
    policy = ByExpectedCost(market=market(a=1))
    prices = PriceSeries(times_s=(0.0, HOUR), usd_h=(1.0, 4.0))
    here = place((0, math.inf), zone="a", prices=prices)
    assert policy.choose(job(), [here], now_s=0.0, left_s=HOUR) is not None
    assert policy.choose(job(), [here], now_s=HOUR, left_s=HOUR) is None


# -- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"work_s": 0.0},
        {"work_s": math.inf},
        {"save_s": -1.0},
        {"restart_s": math.nan},
        {"on_demand_usd_h": -1.0},
    ],
)
def test_jobs_that_make_no_sense(wrong):
    with pytest.raises(CloudError, match="a job has some work, and neither seconds nor prices"):
        job(**wrong)


def test_a_deadline_is_not_before_the_start():
    with pytest.raises(CloudError, match=r"the deadline, 5.0, is before the start, 6.0"):
        job(start_s=6.0, deadline_s=5.0)


@pytest.mark.parametrize("up", [[(5, 5)], [(0, 2), (1, 3)], [(4, 5), (0, 1)]])
def test_stretches_of_time_that_do_not_ascend(up):
    with pytest.raises(CloudError, match="aws x in a: stretches of time ascend"):
        place(*up)
