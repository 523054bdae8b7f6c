"""Runs of user code are compared with a plain loop that works."""

from __future__ import annotations

import pytest

from bench.trust.cases import CORPUS, MOVING
from bench.trust.packed import run_packed
from bench.trust.studied import MEASURED, run_moving, run_studied


pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["nesterov_with_weight_decay_and_clipping", "weight_norm"])
def test_packed_by_the_function(name):
    verdict = run_packed(CORPUS[name])
    assert verdict.how == "fused"
    assert not verdict.is_silent_deviation


def test_a_plain_loop_that_fails_is_no_success(monkeypatch):
    def broken(*_):
        raise TypeError("no such thing")

    monkeypatch.setattr("bench.trust.packed._plain", broken)
    monkeypatch.setattr("bench.trust.studied._plain", broken)
    for verdict in (
        run_packed(CORPUS["perceptron"]),
        run_studied(CORPUS["perceptron"], pack="solo"),
    ):
        assert verdict.is_crash
        assert "only the plain loop fails: TypeError: no such thing" in verdict.why


@pytest.mark.sample(1)
@pytest.mark.parametrize("pack", ["fused", MEASURED])
def test_packed_in_a_study(pack):
    verdict = run_studied(CORPUS["nesterov_with_weight_decay_and_clipping"], pack=pack)
    assert verdict.how == "trained"
    assert not verdict.is_silent_deviation
    verdict = run_moving(MOVING["weights_given_other_memory_by_adapt"], pack=pack)
    assert verdict.how == "trained"
    assert not verdict.is_silent_deviation
