"""Properties of every model of step times."""

from __future__ import annotations

import math
import random
import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from bench.cloud.step_time_models import Boosting, Pollux
from tests.perf._draw import drawn
from thrifty.core import MissingExtraError, UsageError
from thrifty.perf.steptime import Hybrid, Overlapping, Setup
from thrifty.perf.steptime._hybrid import _fit

from . import _draw
from ._draw import ALL, CLOSED, GROWN, SEARCHED, forecast, grid, noisy


pytestmark = pytest.mark.slow


QUERIES = grid([(1,), (3,), (2, 2), (8, 8), (1,) * 16], (4, 8, 20, 64))
NEAR = {**dict.fromkeys(CLOSED, 1e-6), **dict.fromkeys(SEARCHED, 1e-2)}
NEAR |= {**dict.fromkeys(GROWN, 1e-2), "transfer": 1e-6}

every = pytest.mark.parametrize("name", ALL)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "examples"),
    [*[(name, 100) for name in CLOSED], *[(name, 40) for name in SEARCHED], ("transfer", 25)],
)
def test_forecasts_are_positive_whatever_was_measured(name, examples):
    @settings(drawn, max_examples=examples)
    @given(_draw.tables, st.lists(_draw.setups, min_size=1, max_size=5))
    def check(table, queries):
        guessed = forecast(ALL[name], *zip(*table, strict=True), queries)
        assert guessed.shape == (len(queries),)
        assert np.isfinite(guessed).all()
        assert (guessed > 0).all()

    check()


@pytest.mark.parametrize("name", GROWN)
@settings(drawn, max_examples=4)
@given(st.lists(st.tuples(_draw.setups, st.floats(1e-6, 1e6)), min_size=1, max_size=20))
def test_forecasts_of_trees_are_positive(name, table):
    guessed = forecast(GROWN[name], *zip(*table, strict=True), QUERIES)
    assert np.isfinite(guessed).all()
    assert (guessed > 0).all()


@pytest.mark.sample(6)
@every
@pytest.mark.parametrize("unit", [1e-9, 1e3, 1e9])
def test_other_units_of_time_give_the_same_forecasts(name, unit):
    setups = grid()
    times = noisy(setups)
    seconds = forecast(ALL[name], setups, times, QUERIES)
    if name == "transfer":  # references keep their unit: stay within the grid
        unit = min(max(unit, 0.1), 10.0)
    other = forecast(ALL[name], setups, unit * times, QUERIES)
    assert other == pytest.approx(unit * seconds, rel=0.02 if name == "transfer" else NEAR[name])


@pytest.mark.sample(3)
@every
def test_the_order_of_measurements_does_not_matter(name):
    setups = grid()
    times = noisy(setups)
    order = np.random.default_rng(1).permutation(len(setups))
    shuffled = forecast(ALL[name], [setups[at] for at in order], times[order], QUERIES)
    assert shuffled == pytest.approx(forecast(ALL[name], setups, times, QUERIES), rel=NEAR[name])


@pytest.mark.sample(3)
@every
def test_the_order_of_machines_does_not_matter(name):
    setups = grid([(1,), (4, 2), (4, 2, 1), (2, 1)], (8, 16, 32))
    turned = [Setup(placement=s.placement[::-1], batch=s.batch) for s in setups]
    times = noisy(setups)
    one, other = (forecast(ALL[name], each, times, each) for each in (setups, turned))
    assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.sample(3)
@every
def test_each_setup_is_foretold_on_its_own(name):
    model = ALL[name]()
    setups = grid()
    model.fit(setups, noisy(setups))
    single = [model.predict([query])[0] for query in QUERIES]
    assert model.predict(QUERIES) == pytest.approx(single, rel=1e-12)


@pytest.mark.sample(3)
@every
def test_a_second_fit_forgets_the_first(name):
    setups = grid()
    model = ALL[name]()
    model.fit(setups, noisy(setups, seed=1))
    model.fit(setups[:15], noisy(setups, seed=2)[:15])
    again = forecast(ALL[name], setups[:15], noisy(setups, seed=2)[:15], QUERIES)
    assert model.predict(QUERIES).tolist() == again.tolist()
    model.fit(setups[:4], noisy(setups)[:4])
    few = forecast(ALL[name], setups[:4], noisy(setups)[:4], QUERIES)
    assert model.predict(QUERIES).tolist() == few.tolist()


@pytest.mark.sample(3)
@every
def test_nothing_is_random_and_nothing_given_is_changed(name):
    setups = grid()
    times = noisy(setups)
    before = times.copy()
    states = np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    first = forecast(ALL[name], setups, times, QUERIES)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states  # noqa: NPY002
    np.random.seed(99)  # noqa: NPY002
    assert forecast(ALL[name], setups, times, QUERIES).tolist() == first.tolist()
    assert times.tolist() == before.tolist()


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [Boosting, Hybrid])
def test_seeds_tell_trees_apart_and_nothing_else(make):
    setups = grid()
    one, same, other = (
        forecast(lambda seed=seed: make(seed=seed), setups, noisy(setups), QUERIES).tolist()
        for seed in (1, 1, 2)
    )
    assert one == same
    if make is Hybrid:
        assert one != other


@every
@pytest.mark.parametrize("placement", [(1,), (4,), (2, 2)])
def test_a_single_measurement_is_foretold(name, placement):
    setup = Setup(placement=placement, batch=8)
    assert forecast(ALL[name], [setup], [0.4], [setup]) == pytest.approx([0.4], rel=0.03)


@pytest.mark.sample(8)
@every
@pytest.mark.parametrize("placement", [(1,), (4,), (2, 2)])
def test_one_placement_alone_is_foretold(name, placement):
    setups = grid([placement], (8, 16, 32, 64))
    times = noisy(setups, size=0.0)
    assert forecast(ALL[name], setups, times, setups) == pytest.approx(times, rel=0.03)
    others = forecast(ALL[name], setups, times, QUERIES)
    assert (others > times.min() / 1e3).all()
    assert (others < times.max() * 1e3).all()


@pytest.mark.sample(3)
@every
def test_one_device_need_not_be_measured(name):
    setups = [setup for setup in grid() if setup.num_devices > 1]
    times = noisy(setups, size=0.0)
    others = forecast(ALL[name], setups, times, QUERIES)
    assert (others > times.min() / 1e6).all()
    # These models do not distinguish machines.
    if name not in ("perfect", "ernest", "transfer"):
        guessed = forecast(ALL[name], setups, times, setups)
        assert np.mean(np.abs(guessed / times - 1)) < 0.1


@every
@pytest.mark.parametrize(
    ("setups", "times", "message"),
    [
        ([], [], "one time for each of at least one setup"),
        (QUERIES[:2], [1.0], "one time for each of at least one setup"),
        (QUERIES[:2], [[1.0, 2.0]], "one time for each of at least one setup"),
        (QUERIES[:2], [1.0, 0.0], "step times are positive and finite"),
        (QUERIES[:2], [1.0, -1.0], "step times are positive and finite"),
        (QUERIES[:2], [1.0, math.nan], "step times are positive and finite"),
        (QUERIES[:2], [1.0, math.inf], "step times are positive and finite"),
    ],
)
def test_measurements_that_are_none(name, setups, times, message):
    with pytest.raises(UsageError, match=message):
        ALL[name]().fit(setups, times)


@pytest.mark.parametrize("name", [*CLOSED, *SEARCHED])
def test_without_scipy(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtraError, match=r"scipy is not installed.*\.\[cloud\]"):
        ALL[name]().fit(QUERIES[:1], [1.0])


def test_the_search_for_an_overlap_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtraError, match="scipy is not installed"):
        _fit(np.ones((1, 12)), np.ones(1), np.ones(1))


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(MissingExtraError, match=r"scikit-learn is not.*\.\[cloud\]"):
        Boosting()
    setups = grid()
    Hybrid().fit(setups[:11], noisy(setups)[:11])  # too few measurements for trees
    with pytest.raises(MissingExtraError, match=r"scikit-learn is not.*\.\[cloud\]"):
        Hybrid().fit(setups[:12], noisy(setups)[:12])
    for physics in (Overlapping(), Pollux()):
        physics.fit(setups, noisy(setups))
