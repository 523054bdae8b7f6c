"""Regions where predictions have larger errors than elsewhere."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from thrifty.core import MissingExtraError
from thrifty.perf.steptime._model import LocalErrors

from ._draw import grid


pytestmark = pytest.mark.usefixtures("device")


SETUPS = grid([(n,) for n in range(1, 26)], (8, 16, 32, 64))
ERRORS = np.array([0.5 if setup.num_devices > 12 else 0.05 for setup in SETUPS])


def test_few_errors_are_alike_everywhere():
    assert LocalErrors(SETUPS[:99], ERRORS[:99])(SETUPS).tolist() == [1.0] * 100
    assert LocalErrors([], np.zeros(0))(SETUPS[:2]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("unit", [1e-3, 1.0, 50.0])
def test_factors_are_large_where_errors_are_and_one_on_the_whole(unit):
    found = LocalErrors(SETUPS, unit * ERRORS)(SETUPS)
    assert (found[ERRORS > 0.1].min()) > 3 * found[ERRORS < 0.1].max()
    assert np.exp(np.log(found).mean()) == pytest.approx(1.0, rel=0.1)


def test_no_errors_at_all_are_alike():
    assert LocalErrors(SETUPS, np.zeros(100))(SETUPS) == pytest.approx(np.ones(100))


def test_nothing_asked_is_nothing_answered():
    assert LocalErrors(SETUPS, ERRORS)([]).shape == (0,)


def test_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    assert LocalErrors(SETUPS[:99], ERRORS[:99])(SETUPS[:1]).tolist() == [1.0]
    with pytest.raises(MissingExtraError, match=r"scikit-learn is not.*\.\[cloud\]"):
        LocalErrors(SETUPS, ERRORS)
