"""Compute and exchange that partly overlap."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.perf._draw import drawn
from thrifty.perf.steptime import Overlapping, Setup
from thrifty.perf.steptime._hybrid import _Loss, overlapped, terms
from thrifty.perf.steptime._model import Columns

from ._draw import grid, noisy


seconds = st.floats(1e-6, 1e6)


@drawn
@given(seconds, seconds, st.floats(1.0, 20.0), st.floats(1.0, 20.0))
def test_overlap_lies_between_the_sum_and_the_larger(compute, exchange, one, other):
    low, high = sorted([one, other])
    less, more = overlapped(compute, exchange, high), overlapped(compute, exchange, low)
    assert max(compute, exchange) <= less <= more * (1 + 1e-12)
    assert more <= (compute + exchange) * (1 + 1e-12)
    assert overlapped(exchange, compute, low) == pytest.approx(more)
    assert overlapped(compute, exchange, 1.0) == pytest.approx(compute + exchange)


@drawn
@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.floats(1.0, 8.0))
def test_overlap_is_a_norm(compute, exchange, overlap):
    naive = (compute**overlap + exchange**overlap) ** (1 / overlap)
    assert overlapped(compute, exchange, overlap) == pytest.approx(naive)


@pytest.mark.parametrize("size", [1e-300, 1e300])
def test_no_power_overflows(size):
    both = overlapped(np.array([size, size]), np.array([size, 0.0]), 20.0)
    assert both / size == pytest.approx([2 ** (1 / 20), 1.0])


@settings(drawn, max_examples=60)
@given(st.integers(0, 10_000), st.floats(1.0, 8.0), st.floats(0.9, 1.15), st.floats(0.01, 3.0))
def test_the_gradient_is_that_of_finite_differences(seed, overlap, factor, size):
    rng = np.random.default_rng(seed)
    setups = grid()
    loss = _Loss(
        terms(Columns.of(setups)) / 8,
        rng.uniform(0.1, 1, len(setups)),
        rng.normal(size=len(setups)),
    )
    weights = size * rng.uniform(0.1, 1, loss.basis.shape[1])
    params = np.concatenate([weights, [overlap, factor]])
    _, gradient = loss(params)
    for at, slope in enumerate(gradient):
        aside = np.zeros_like(params)
        aside[at] = 1e-5 * params[at]
        rise = (loss(params + aside)[0] - loss(params - aside)[0]) / (2 * aside[at])
        assert slope == pytest.approx(rise, rel=1e-4, abs=1e-8)


def test_an_outlier_counts_by_its_size():
    setups = grid(batches=(8, 16, 32, 64))
    times = noisy(setups, size=0.0)
    clean, robust = Overlapping(), Overlapping()
    clean.fit(setups, times)
    bad = times.copy()
    bad[[20, 33]] *= [20.0, 8.0]
    robust.fit(setups, bad)
    others = grid([(2, 2), (4, 4), (2,)], (8, 16))
    assert robust.predict(others) == pytest.approx(clean.predict(others), rel=0.1)


def test_what_no_measurement_shows_costs_nothing():
    setups = grid([(1,), (2,), (4,)])
    model = Overlapping()
    model.fit(setups, noisy(setups))
    apart = [Setup(placement=p, batch=16) for p in ((1, 1), (4, 4), (4, 1))]
    assert model.exchange_s(apart).tolist() == [0.0, 0.0, 0.0]
    assert model.exchange_s([Setup(placement=(4,), batch=16)])[0] > 0


def test_overlap_and_exchange_are_those_of_the_forecast():
    setups = grid()
    model = Overlapping()
    model.fit(setups, noisy(setups))
    exchange = model.exchange_s(setups)
    assert 1.0 <= model.overlap <= 20.0
    assert (model.predict(setups) >= exchange).all()
    one = [setup for setup in setups if setup.num_devices == 1]
    assert not model.exchange_s(one).any()


def test_the_search_does_not_stop_early():
    setups = grid(batches=(8, 32, 128))
    times = []
    for setup in setups:
        nodes, num = len(setup.placement), setup.num_devices
        exchange = 0.08 * (nodes - 1) if nodes > 1 else 0.02 * np.log2(num)
        times.append(0.05 + 0.004 * setup.batch + exchange)
    model = Overlapping()
    model.fit(setups, times)
    assert model.predict(setups) == pytest.approx(times, rel=0.005)
