"""The part of an interval that a decision must leave as a margin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy.stats import binom

from tests.perf._draw import drawn
from thrifty.core import UsageError
from thrifty.perf.steptime import smallest_margin
from thrifty.perf.steptime._model import _at_most


@settings(drawn, max_examples=60)
@given(st.integers(1, 500), st.integers(0, 500), st.floats(0.01, 0.99))
def test_the_bound_is_binomial(of, num, share):
    assert _at_most(min(num, of), of, share) == pytest.approx(
        binom.cdf(min(num, of), of, share), rel=1e-8, abs=1e-12
    )


@settings(drawn, max_examples=60)
@given(st.integers(0, 99), st.integers(1, 400))
def test_no_smaller_margin_would_do(seed, num):
    needed = np.random.default_rng(seed).beta(1, 5, num)
    found = smallest_margin(lambda margin: needed > margin, risk=0.1, confidence=0.9)

    def safe(margin):
        return binom.cdf((needed > margin).sum(), num, 0.1) <= 0.1

    tried = np.linspace(0, 1, 21)
    assert found == next((margin for margin in tried if safe(margin)), 1.0)


def test_a_few_decisions_prove_nothing():
    assert smallest_margin(lambda _: [False] * 58) == 1.0
    assert smallest_margin(lambda _: [False] * 59) == 0.0
    assert smallest_margin(lambda _: []) == 1.0


@pytest.mark.parametrize("name", ["risk", "confidence"])
@pytest.mark.parametrize("value", [0, 1, -0.1, 1.5])
def test_shares_that_are_none(name, value):
    with pytest.raises(UsageError, match=f"`{name}` must be between 0 and 1, got {value}"):
        smallest_margin(lambda _: [False], **{name: value})
