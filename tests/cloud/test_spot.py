"""The cost of evictions, and how often to save because of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from thrifty.cloud._market import daly_s, spot_seconds, young_s
from thrifty.core import CloudError


works = st.floats(60.0, 1e6)
rates = st.floats(1e-4, 20.0)
saves = st.floats(0.1, 600.0)
restarts = st.floats(0.0, 600.0)


def simulated(rng, work_s, interval_s, evictions_per_h, save_s, restart_s):
    """Simulate one job, eviction by eviction."""
    now, left = 0.0, work_s
    restarting = False
    while left > 1e-6:
        piece = min(interval_s, left)
        ends = piece >= left - 1e-6
        needed = piece + (0.0 if ends else save_s) if not restarting else restart_s
        until_eviction = rng.exponential(3600 / evictions_per_h)
        if until_eviction < needed:
            now += until_eviction
            restarting = True
            continue
        now += needed
        if not restarting:
            left -= piece
        restarting = False
    return now


def expected(work_s, pieces, evictions_per_h, save_s, restart_s):
    """Return the expected seconds by Daly's complete formula, piece by piece."""
    mtbf = 3600 / evictions_per_h
    piece = work_s / pieces
    spans = [piece + save_s] * (pieces - 1) + [piece]
    return sum(mtbf * math.exp(restart_s / mtbf) * (math.exp(span / mtbf) - 1) for span in spans)


@pytest.mark.parametrize(
    ("work_s", "evictions_per_h", "save_s", "restart_s"),
    [(8 * 3600, 0.5, 30, 300), (3600, 6.0, 10, 120), (3600, 1.0, 1500, 60)],
)
def test_expected_seconds_are_the_mean_of_many_runs(work_s, evictions_per_h, save_s, restart_s):
    seconds, interval = spot_seconds(
        work_s, evictions_per_h=evictions_per_h, save_s=save_s, restart_s=restart_s
    )
    rng = np.random.default_rng(1)
    runs = [
        simulated(rng, work_s, interval, evictions_per_h, save_s, restart_s) for _ in range(3000)
    ]
    error = np.std(runs) / math.sqrt(len(runs))
    assert abs(seconds - np.mean(runs)) < 4 * error
    assert error < 0.03 * seconds


@given(st.floats(600.0, 36000.0), st.floats(0.05, 10.0), st.floats(1.0, 300.0), restarts)
def test_no_other_number_of_checkpoints_is_much_better(work, rate, save, restart):
    seconds, interval = spot_seconds(work, evictions_per_h=rate, save_s=save, restart_s=restart)
    pieces = round(work / interval)
    assert seconds == pytest.approx(expected(work, pieces, rate, save, restart))
    counts, mtbf = np.arange(1, 3 * pieces + 20), 3600 / rate
    saved = (counts - 1) * np.expm1((work / counts + save) / mtbf)
    all_s = mtbf * math.exp(restart / mtbf) * (saved + np.expm1(work / counts / mtbf))
    assert seconds <= 1.002 * all_s.min()


@given(works, rates, saves, restarts)
def test_evictions_only_cost_time(work, rate, save, restart):
    options = {"save_s": save, "restart_s": restart}
    seconds, interval = spot_seconds(work, evictions_per_h=rate, **options)
    fewer, _ = spot_seconds(work, evictions_per_h=rate / 2, **options)
    assert work <= fewer <= seconds
    assert 0 < interval <= work


def test_without_evictions_nothing_is_saved():
    assert spot_seconds(100.0, evictions_per_h=0.0, save_s=9.0, restart_s=9.0) == (100.0, math.inf)
    assert spot_seconds(0.0, evictions_per_h=3.0, save_s=9.0, restart_s=9.0) == (0.0, math.inf)


def test_a_job_that_is_short_is_not_saved():
    seconds, interval = spot_seconds(600.0, evictions_per_h=0.1, save_s=30.0, restart_s=0.0)
    assert interval == 600.0
    assert seconds == pytest.approx(36000 * math.expm1(600 / 36000))


def test_free_checkpoints_leave_only_restarts():
    seconds, interval = spot_seconds(3600.0, evictions_per_h=2.0, save_s=0.0, restart_s=180.0)
    assert interval == 0.0
    assert seconds == pytest.approx(3600 * math.exp(0.1))
    nearly, _ = spot_seconds(3600.0, evictions_per_h=2.0, save_s=1e-6, restart_s=180.0)
    assert nearly == pytest.approx(seconds, rel=1e-3)


def test_a_job_that_never_ends_takes_for_ever():
    seconds, interval = spot_seconds(1e9, evictions_per_h=3600.0, save_s=1e6, restart_s=0.0)
    assert seconds == math.inf
    assert interval > 0
    assert spot_seconds(60.0, evictions_per_h=60.0, save_s=1.0, restart_s=1e6)[0] == math.inf


def test_both_rules_by_hand():
    assert young_s(50.0, 10000.0) == 1000.0
    assert daly_s(50.0, 10000.0) == pytest.approx(1000 * (1 + 0.05 / 3 + 0.0025 / 9) - 50)
    assert daly_s(200.0, 100.0) == 100.0
    assert daly_s(0.0, 100.0) == young_s(0.0, 100.0) == 0.0
    assert daly_s(10.0, math.inf) == young_s(10.0, math.inf) == math.inf


@given(st.floats(1e-4, 0.5))
def test_dalys_interval_is_the_best_of_an_endless_job(ratio):
    save, mtbf = 2 * ratio * 3600.0, 3600.0

    def waste(interval):
        return (math.exp((interval + save) / mtbf) - 1) / interval

    tried = min(waste(young_s(save, mtbf) * factor) for factor in np.linspace(0.3, 2, 300))
    assert waste(daly_s(save, mtbf)) <= 1.001 * tried


@given(st.floats(1e4, 1e7))
def test_dalys_interval_is_youngs_where_evictions_are_rare(mtbf):
    assert daly_s(1e-3, mtbf) == pytest.approx(young_s(1e-3, mtbf), rel=1e-3)


@pytest.mark.parametrize("rule", [young_s, daly_s])
@pytest.mark.parametrize(
    ("save", "mtbf"), [(-1.0, 9.0), (math.inf, 9.0), (1.0, 0.0), (1.0, math.nan)]
)
def test_times_that_make_no_sense(rule, save, mtbf):
    with pytest.raises(CloudError, match=f"not save_s={save}, mtbf_s={mtbf}"):
        rule(save, mtbf)


@pytest.mark.parametrize(
    "wrong",
    [{"work_s": -1.0}, {"evictions_per_h": math.inf}, {"save_s": math.nan}, {"restart_s": -1.0}],
)
def test_numbers_that_make_no_sense(wrong):
    right = {"work_s": 1.0, "evictions_per_h": 1.0, "save_s": 1.0, "restart_s": 1.0}
    (name, value), *_ = wrong.items()
    numbers = {**right, **wrong}
    with pytest.raises(CloudError, match=f"finite and not negative, .*{name}={value}"):
        spot_seconds(numbers.pop("work_s"), **numbers)
