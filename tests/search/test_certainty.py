"""Decisions between means over several seeds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from thrifty.search import History, Proposal, Stop
from thrifty.search._halving import halve
from thrifty.search._scores import (
    MAX_COMPARED,
    not_surely_worse,
    probability_best,
    probability_worse,
    shared_variances,
)


pytestmark = pytest.mark.slow


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def rung(scores, errors) -> History:
    """Return a history whose trials wait at epoch 1."""
    history = History()
    for number, (score, error) in enumerate(zip(scores, errors, strict=True)):
        history.record_decision(Proposal(target=1, config={"lr": number}))
        history.record_scores(number, [score], standard_errors=[error])
    return history


def kept_of(history) -> set[int | None]:
    decisions = halve(history, (1, 3, 9), eta=3)
    stopped = {each.trial for each in decisions if isinstance(each, Stop)}
    return {each.trial for each in decisions} - stopped


def test_probabilities_of_two_trials_add_up_to_one():
    there = probability_worse(0.3, 0.2, than=0.5, than_variance=0.1)
    back = probability_worse(0.5, 0.1, than=0.3, than_variance=0.2)
    assert there + back == pytest.approx(1)
    assert there > 0.5


def test_without_variance_the_lower_mean_is_surely_worse():
    assert probability_worse(0.3, 0.0, than=0.5, than_variance=0.0) == 1
    assert probability_worse(0.5, 0.0, than=0.3, than_variance=0.0) == 0
    assert probability_worse(0.5, 0.0, than=0.5, than_variance=0.0) == 0.5


def test_what_is_not_finite_decides_only_if_it_is_lower():
    assert probability_worse(-math.inf, 0.1, than=0.0, than_variance=0.1) == 1
    assert probability_worse(0.0, math.inf, than=1.0, than_variance=0.1) == 0.5
    assert shared_variances([math.inf, 1.0]).tolist() == [math.inf, 1.0]
    assert shared_variances([math.inf]).tolist() == [math.inf]


def test_an_exact_tie_is_no_reason_to_go_on():
    assert not_surely_worse([1.0, 1.0, 0.99], [0.1] * 3, cut=1) == [2]
    assert not_surely_worse([1.0, 1.0], [0.1] * 2, cut=1) == []


def test_a_rung_grows_to_twice_its_size_at_most():
    assert not_surely_worse([1 - i / 1000 for i in range(9)], [0.1] * 9, cut=3) == [3, 4, 5]


def test_the_probabilities_of_being_the_best_add_up_to_one():
    found = probability_best([1.0, 1.4, 0.9, -5.0], [0.1] * 4, rng=rng())
    assert found.sum() == pytest.approx(1)
    assert found.argmax() == 1
    assert found[3] == 0


def test_equal_trials_are_equally_likely_the_best():
    assert probability_best([1.0] * 4, [0.0] * 4, rng=rng()).tolist() == [0.25] * 4
    noise = probability_best([1.0, 1.001, 0.999], [1.0] * 3, rng=rng())
    assert noise.tolist() == pytest.approx([1 / 3] * 3, abs=0.05)


def test_trials_about_to_diverge_do_not_decide_about_the_others():
    scores, errors = [0.93, 0.90, 0.5, 0.4], [0.01] * 4
    wild = ([*scores, -1e16, -1e5], [*errors, 1e16, 1e5])
    assert not_surely_worse(scores, errors, cut=1) == not_surely_worse(*wild, cut=1) == []
    calm = probability_best(scores, errors, rng=rng())
    assert calm[0] > 0.95
    assert probability_best(*wild, rng=rng())[0] == pytest.approx(calm[0], abs=0.02)


def test_a_single_trial_is_surely_the_best():
    assert probability_best([1.0], [0.5], rng=rng()).tolist() == [1.0]
    assert probability_best([1.0, math.nan], [0.5, 0.1], rng=rng()).tolist() == [1.0, 0.0]
    assert probability_best([math.nan], [0.1], rng=rng()).tolist() == [0.0]


def test_only_the_best_of_very_many_trials_are_compared():
    found = probability_best([*range(2 * MAX_COMPARED)], [1e3] * 2 * MAX_COMPARED, rng=rng())
    assert np.flatnonzero(found).min() >= MAX_COMPARED


def normal(draws, num):
    return draws.standard_normal(num)


def skewed(draws, num):
    return -draws.gamma(2.0, size=num)


@pytest.mark.sample(2)
@pytest.mark.parametrize("truths", [normal, skewed])
@pytest.mark.parametrize(("num_seeds", "noise"), [(3, 0.5), (5, 0.3), (5, 1.0)])
def test_a_certainty_is_right_as_often_as_it_says(truths, num_seeds, noise):
    # A claim of p must hold in a share p of the cases, also of the claims above 90 % alone.
    draws, claimed, right = rng(), [], []
    for _ in range(400):
        truth = truths(draws, 12)
        runs = truth + noise * draws.standard_normal((num_seeds, 12))
        errors = runs.std(axis=0, ddof=1) / math.sqrt(num_seeds)
        found = probability_best(runs.mean(axis=0), errors, rng=draws)
        claimed.append(found.max())
        right.append(found.argmax() == truth.argmax())
    claimed, right = np.array(claimed), np.array(right)
    assert claimed.mean() < right.mean() + 0.05
    assert claimed.mean() > right.mean() - 0.12  # it may be cautious
    sure = claimed > 0.9
    assert sure.sum() < 20 or right[sure].mean() > 0.85


def test_a_rung_of_several_seeds_keeps_what_is_not_surely_worse():
    scores = [0.9, 0.89, 0.2, 0.1, 0.3, 0.25]
    assert kept_of(rung(scores, [0.001] * 6)) == {0, 1}
    assert kept_of(rung(scores, [0.1] * 6)) == {0, 1}
    assert kept_of(rung(scores, [0.4] * 6)) == {0, 1, 4, 5}


def test_the_next_rung_waits_for_all_that_were_kept():
    history = rung([0.9, 0.89, 0.88, 0.1, 0.1, 0.1], [0.02] * 6)
    for decision in halve(history, (1, 3, 9), eta=3):
        history.record_decision(decision)
    for number in (0, 1, 2):
        assert halve(history, (1, 3, 9), eta=3) == []
        history.record_scores(number, [0.9, 0.9, 0.9 + number], standard_errors=[0.02] * 3)
    last = halve(history, (1, 3, 9), eta=3)
    assert [each.trial for each in last if isinstance(each, Proposal)] == [2]
