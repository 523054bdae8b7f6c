"""Least squares with non-negative coefficients."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.perf._draw import drawn
from thrifty.core import MissingExtraError
from thrifty.perf.steptime._model import relative_fit


coefficients = st.lists(st.floats(0, 100), min_size=1, max_size=4).filter(
    lambda found: max(found) > 0.1
)


def drawn_basis(seed, rows, terms):
    return np.random.default_rng(seed).uniform(0.1, 1.0, (rows, terms))


@settings(drawn, max_examples=50)
@given(coefficients, st.integers(0, 99))
def test_coefficients_that_made_the_times_are_found(wanted, seed):
    basis = drawn_basis(seed, 12, len(wanted))
    times = basis @ np.array(wanted)
    found = relative_fit(basis, times)
    assert basis @ found == pytest.approx(times, rel=1e-5)
    assert found == pytest.approx(wanted, rel=1e-3, abs=1e-4 * (1 + max(wanted)))


@settings(drawn, max_examples=50)
@given(st.integers(0, 999), st.integers(1, 3))
def test_no_step_aside_fits_better(seed, terms):
    rng = np.random.default_rng(seed)
    basis, times = drawn_basis(seed, 6, terms), rng.uniform(0.5, 2.0, 6)

    def miss(weights):
        return float(np.sum((basis @ weights / times - 1) ** 2))

    found = relative_fit(basis, times)
    assert (found >= 0).all()
    for aside in rng.normal(0, 0.05, (40, terms)):
        assert miss(found) <= miss(np.maximum(found + aside, 0)) + 1e-9


@settings(drawn, max_examples=50)
@given(st.floats(1e-3, 1e3), st.integers(1, 4))
def test_terms_that_cannot_be_told_apart_share(time, copies):
    basis = np.array([[1.0, 8.0]] * copies)
    found = relative_fit(basis, np.full(copies, time))
    assert found * [1, 8] == pytest.approx([time / 2, time / 2], rel=1e-3)


def test_a_term_that_is_always_zero_has_no_part():
    basis = np.array([[1.0, 0.0], [2.0, 0.0]])
    assert relative_fit(basis, np.array([3.0, 6.0])) == pytest.approx([3.0, 0.0])


def test_without_scipy(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MissingExtraError, match=r"scipy is not installed.*\.\[cloud\]"):
        relative_fit(np.ones((1, 1)), np.ones(1))
