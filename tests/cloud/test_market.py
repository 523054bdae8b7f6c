"""Prices and evictions as known at a given time."""

from __future__ import annotations

import math
import sys
import time

import numpy as np
import pytest
from hypothesis import given, strategies as st

from thrifty.cloud import Offer
from thrifty.cloud._market import ObservedLifetime, PriceSeries, SpotMarket
from thrifty.core import CloudError, MissingExtraError


pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("device")]


HOUR, DAY = 3600.0, 86400.0


def offer(zone="us-east-1a", kind="p2.xlarge", **options):
    return Offer(
        cloud="aws", region="us-east-1", zone=zone, instance_type=kind, price_usd_h=0.9, **options
    )


def life(begin_h, end_h, *, evicted, zone="us-east-1a", kind="p2.xlarge"):
    return ObservedLifetime(
        instance_type=kind, zone=zone, begin_s=begin_h * HOUR, end_s=end_h * HOUR, evicted=evicted
    )


def series(*changes):
    return PriceSeries(
        times_s=tuple(float(moment) for moment, _ in changes),
        usd_h=tuple(float(price) for _, price in changes),
    )


histories = st.dictionaries(st.integers(0, 60), st.integers(1, 5), min_size=1, max_size=8).map(
    lambda changes: series(*sorted(changes.items()))
)


def each_second(prices, begin, end):
    """Return the price in each second."""
    return [
        [
            price
            for moment, price in zip(prices.times_s, prices.usd_h, strict=True)
            if moment <= second
        ][-1]
        for second in range(begin, end)
    ]


# -- one price over time ---------------------------------------------------------------------


@given(histories, st.integers(0, 40), st.integers(0, 60))
def test_a_price_holds_until_the_next(prices, after, seconds):
    begin = int(prices.times_s[0]) + after
    each = each_second(prices, begin, begin + seconds)
    assert prices.usd(begin, begin + seconds) * HOUR == pytest.approx(sum(each))
    assert [prices.at(begin + index) for index in range(seconds)] == each


@given(histories, st.integers(0, 40), st.integers(1, 60), st.integers(1, 20))
def test_a_quantile_counts_time_not_changes(prices, after, seconds, twentieths):
    begin = int(prices.times_s[0]) + after
    each = sorted(each_second(prices, begin, begin + seconds))
    share = twentieths / 20
    wanted = each[math.ceil(share * seconds - 1e-9) - 1]
    assert prices.quantile(share, begin, begin + seconds) == wanted


def test_quantiles_begin_with_the_first_price():
    prices = series((100, 1.0), (130, 2.0))
    assert prices.quantile(0.5, -1e9, 200.0) == 2.0
    assert prices.quantile(0.0, -1e9, 200.0) == 1.0
    assert prices.quantile(1.0, 0.0, 120.0) == 1.0
    # 0.1 * 3 is slightly above 0.3.
    assert prices.quantile(0.1 * 3, 121.0, 151.0) == 1.0


def test_there_is_no_price_before_the_first():
    prices = series((3600, 1.0))
    message = r"1970-01-01T00:59:00\+00:00: they begin at 1970-01-01T01:00:00"
    with pytest.raises(CloudError, match=message):
        prices.at(3540.0)
    with pytest.raises(CloudError, match=message):
        prices.usd(3540.0, 9999.0)
    with pytest.raises(CloudError, match="no prices before"):
        prices.quantile(0.5, 0.0, 3600.0)


@pytest.mark.parametrize(
    ("times", "prices", "message"),
    [
        ((), (), "not 0 moments and 0 prices"),
        ((1.0,), (1.0, 2.0), "not 1 moments and 2 prices"),
        ((1.0, 1.0), (1.0, 2.0), "moments of prices ascend"),
        ((1.0,), (-1.0,), "finite and not negative"),
        ((1.0,), (math.inf,), "finite and not negative"),
    ],
)
def test_prices_that_do_not_fit(times, prices, message):
    with pytest.raises(CloudError, match=message):
        PriceSeries(times_s=times, usd_h=prices)


# -- files -----------------------------------------------------------------------------------

HEAD = "instance_type,az,timestamp,usd_per_hour,product\n"


def test_a_file_of_aws(tmp_path):
    file = tmp_path / "prices.csv"
    file.write_text(
        HEAD
        + "p2.xlarge,us-east-1a,1970-01-01T02:00:00.000Z,0.5,Linux/UNIX\n"
        + "p2.xlarge,us-east-1a,1970-01-01T01:00:00,0.25,Linux/UNIX\n"
        + "p2.xlarge,us-east-1a,1970-01-01T01:30:00Z,9.0,Windows\n"
        + "p3.2xlarge,us-east-1b,1970-01-01T01:00:00+01:00,1.0,Linux/UNIX\n"
    )
    prices = SpotMarket.from_aws_csv(file).prices
    assert prices == {
        ("p2.xlarge", "us-east-1a"): series((3600, 0.25), (7200, 0.5)),
        ("p3.2xlarge", "us-east-1b"): series((0, 1.0)),
    }
    windows = SpotMarket.from_aws_csv(file, product="Windows").prices
    assert windows == {("p2.xlarge", "us-east-1a"): series((5400, 9.0))}


def test_a_file_without_products(tmp_path):
    file = tmp_path / "prices.csv"
    file.write_text("az,usd_per_hour,timestamp,instance_type\na,2.0,1970-01-01T00:00:00Z,x\n")
    assert SpotMarket.from_aws_csv(file).prices == {("x", "a"): series((0, 2.0))}


@pytest.mark.skipif(not hasattr(time, "tzset"), reason="the zone of the process cannot be set")
def test_times_are_utc_wherever_one_is(tmp_path, monkeypatch):
    file = tmp_path / "prices.csv"
    file.write_text(HEAD + "x,a,1970-01-01T01:00:00,1.0,Linux/UNIX\n")
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        found = SpotMarket.from_aws_csv(file).prices
    time.tzset()
    assert found == {("x", "a"): series((3600, 1.0))}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "lacks the columns instance_type, az, timestamp, usd_per_hour; it has none"),
        (
            "az,price\n",
            "lacks the columns instance_type, timestamp, usd_per_hour; it has az, price",
        ),
        (HEAD, "no line of the product 'Linux/UNIX'"),
        (HEAD + "x,a,yesterday,1.0,Linux/UNIX\n", "line 2: .*yesterday"),
        (HEAD + "x,a,2020-01-01,cheap,Linux/UNIX\n", "line 2: .*cheap"),
        (HEAD + "x,a,2020-01-01\n", "line 2: "),
        (HEAD + "x,a,2020-01-01,-1,Linux/UNIX\n", "line 2: -1.0 is no price"),
        (HEAD + "x,a,2020-01-01,nan,Linux/UNIX\n", "line 2: nan is no price"),
        (HEAD + "x,a,2020-01-01,inf,Linux/UNIX\n", "line 2: inf is no price"),
    ],
)  # fmt: skip
def test_files_that_are_wrong(tmp_path, text, message):
    file = tmp_path / "prices.csv"
    file.write_text(text)
    with pytest.raises(CloudError, match=message):
        SpotMarket.from_aws_csv(file)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(CloudError, match=r"none\.csv cannot be read: "):
        SpotMarket.from_aws_csv(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CloudError, match=r"binary\.csv cannot be read: "):
        SpotMarket.from_aws_csv(tmp_path / "binary.csv")


# -- prices of offers ------------------------------------------------------------------------


def test_a_price_is_the_median_of_the_last_days():
    prices = series((0, 9.0), (10 * DAY, 1.0), (13 * DAY, 2.0), (16 * DAY, 3.0), (17 * DAY, 7.0))
    market = SpotMarket(prices={("p2.xlarge", "us-east-1a"): prices}, days=7.0)
    assert market.at(17 * DAY).spot_usd_h(offer()) == 2.0
    assert market.at(17 * DAY).price_quantile(offer(), 1.0) == 3.0
    assert market.at(17 * DAY).price_quantile(offer(), 3 / 7) == 1.0
    assert market.at(12 * DAY).spot_usd_h(offer()) == 9.0
    # The whole history ends at its last change, so that change counts for a moment only.
    assert market.spot_usd_h(offer()) == 2.0
    assert market.price_quantile(offer(), 1.0) == 7.0


def test_an_offer_without_a_zone_is_in_the_cheapest_of_its_region():
    market = SpotMarket(
        prices={
            ("p2.xlarge", "us-east-1a"): series((0, 3.0)),
            ("p2.xlarge", "us-east-1b"): series((0, 2.0)),
            ("p2.xlarge", "us-west-2a"): series((0, 1.0)),
            ("p2.8xlarge", "us-east-1a"): series((0, 1.0)),
        }
    )
    assert market.spot_usd_h(offer(zone="")) == 2.0
    assert market.spot_usd_h(offer(zone="us-east-1a")) == 3.0


def test_without_history_the_catalogue_counts():
    market = SpotMarket(prices={("p2.xlarge", "us-east-1a"): series((DAY, 3.0))}, until_s=DAY)
    assert market.spot_usd_h(offer(spot_usd_h=0.4)) == 0.4
    with pytest.raises(
        CloudError, match=r"us-east-1a: no spot price is known, .* give Offer.spot_usd_h"
    ):
        market.spot_usd_h(offer())
    with pytest.raises(CloudError, match=r"between 0 and 1, got 1.5"):
        market.price_quantile(offer(), 1.5)


# -- evictions -------------------------------------------------------------------------------


def test_machines_that_were_not_taken_away_count_with_their_time():
    lifetimes = [life(0, 4, evicted=True), life(0, 6, evicted=False)]
    assert SpotMarket.from_lifetimes(lifetimes).evictions_per_h(offer()) == pytest.approx(1.5 / 10)
    # As known after 3 h, both machines still run.
    early = SpotMarket.from_lifetimes(lifetimes).at(3 * HOUR)
    assert early.evictions_per_h(offer()) == pytest.approx(0.5 / 6)


def test_few_lives_are_helped_out_by_those_elsewhere():
    there = [life(0, 1, evicted=True, zone="us-east-1b") for _ in range(100)]
    other_kind = [life(0, 1000, evicted=False, kind="p3.2xlarge")]
    market = SpotMarket.from_lifetimes([*there, *other_kind])
    elsewhere = 100.5 / 100
    assert market.evictions_per_h(offer()) == pytest.approx(elsewhere)
    one = market.with_lifetimes([life(0, 3, evicted=True)])
    assert one.evictions_per_h(offer()) == pytest.approx(1.5 / (3 + 0.5 / elsewhere))
    many = market.with_lifetimes([life(0, 50, evicted=True) for _ in range(200)])
    assert many.evictions_per_h(offer()) == pytest.approx(0.02, rel=0.01)
    # Without a zone, all lifetimes in the region count as the offer's own.
    assert one.evictions_per_h(offer(zone="")) == pytest.approx(101.5 / 103)


def test_what_was_never_seen_has_to_be_said():
    market = SpotMarket.from_lifetimes([life(0, 3, evicted=True, kind="p3.2xlarge")])
    with pytest.raises(
        CloudError, match=r"p2.xlarge in us-east-1a: its eviction rate .* unknown_evictions_per_h"
    ):
        market.evictions_per_h(offer())
    said = SpotMarket(unknown_evictions_per_h=0.2)
    assert said.evictions_per_h(offer()) == pytest.approx(0.2)
    assert SpotMarket(unknown_evictions_per_h=0.0).evictions_per_h(offer()) == 0.0


@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40), st.booleans()), max_size=8),
    st.integers(1, 100),
)
def test_what_comes_after_a_moment_changes_nothing(drawn, moment_h):
    lifetimes = [life(begin, begin + hours, evicted=evicted) for begin, hours, evicted in drawn]
    cut = [
        life(begin, min(begin + hours, moment_h), evicted=evicted and begin + hours < moment_h)
        for begin, hours, evicted in drawn
        if begin < moment_h
    ]
    options = {"unknown_evictions_per_h": 0.3}
    now = SpotMarket(**options).with_lifetimes(lifetimes).at(moment_h * HOUR)
    then = SpotMarket(**options).with_lifetimes(cut)
    assert now.evictions_per_h(offer()) == pytest.approx(then.evictions_per_h(offer()))


@given(histories, histories, st.integers(1, 50))
def test_prices_after_a_moment_change_nothing(past, future, moment):
    begin = past.times_s[0] + moment
    known = [(at, price) for at, price in zip(past.times_s, past.usd_h, strict=True) if at < begin]
    later = [(begin + at, price) for at, price in zip(future.times_s, future.usd_h, strict=True)]
    place = ("p2.xlarge", "us-east-1a")

    def median(*changes):
        # Another zone continues, so that both histories have the same length.
        other = ("p2.xlarge", "us-east-1z")
        prices = {place: series(*changes), other: series((0, 1), (1e6, 1))}
        return SpotMarket(prices=prices).at(begin).spot_usd_h(offer())

    assert median(*known) == median(*known, *later)


def test_the_rate_is_in_its_interval_nine_times_of_ten():
    rng = np.random.default_rng(3)
    rate, inside = 0.25, 0
    for _ in range(400):
        spans = rng.exponential(1 / rate, size=6)
        lifetimes = [life(0, min(span, 5.0), evicted=span < 5.0) for span in spans]
        found = SpotMarket.from_lifetimes(lifetimes).evictions(offer())
        assert found.low < found.median < found.high
        inside += found.low <= rate <= found.high
    assert 0.86 <= inside / 400 <= 0.95


def test_the_interval_of_machines_that_were_never_taken_away():
    found = SpotMarket.from_lifetimes([life(0, 100, evicted=False)]).evictions(offer())
    # Half of the 95 % quantile of chi-square with one degree of freedom, 3.841, in 100 h.
    assert found.median == pytest.approx(0.005)
    assert found.high == pytest.approx(3.8415 / 200, rel=1e-4)


def test_intervals_need_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(MissingExtraError, match=r"\.\[cloud\]"):
        SpotMarket.from_lifetimes([life(0, 1, evicted=True)]).evictions(offer())


def test_numbers_that_make_no_sense():
    with pytest.raises(CloudError, match=r"ends at 3600.0, before it begins at 7200.0"):
        life(2, 1, evicted=True)
    with pytest.raises(CloudError, match="must be greater than 0, got 0"):
        SpotMarket(days=0)
    with pytest.raises(CloudError, match="must be at least 0, got -1"):
        SpotMarket(unknown_evictions_per_h=-1)
