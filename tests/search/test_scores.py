import math

import numpy as np
import pytest

from tests.search._sampling import FLAT, NESTED, filled
from thrifty.search import History, Proposal, Trial
from thrifty.search._scores import coordinates_of, observe, points_of
from thrifty.space import Choice, Float, Space


LINE = Space(x=Float(0.0, 1.0))


def history_of(*trials, prior=()):
    """Return a history of ``(target, scores, violation)``.

    Scores of None mean running, and "failed" means failed.
    """
    history = History(prior=prior)
    for index, (target, scores, *violation) in enumerate(trials):
        number = history.record_decision(Proposal(target=target, config={"x": index / 10}))
        if scores == "failed":
            history.record_failure(number)
        elif scores is not None:
            history.record_scores(number, scores, violation=sum(violation))
    return history


def seen(history, *, min_points=1, space=LINE):
    return observe(history, coordinates_of(space), min_points=min_points)


def test_takes_the_largest_epoch_that_enough_have_reached():
    history = history_of((1, [0.1]), (3, [0.2, 0.3, 0.4]), (3, [0.5, 0.6, 0.7]), (9, [0.8] * 9))
    depths = {
        k: (len(seen(history, min_points=k)), seen(history, min_points=k).epoch)
        for k in (1, 2, 3, 4)
    }
    assert depths == {1: (1, 9), 2: (3, 3), 3: (3, 3), 4: (4, 1)}
    np.testing.assert_equal(seen(history, min_points=3).scores, [0.4, 0.7, 0.8])
    np.testing.assert_allclose(seen(history, min_points=3).points, [[0.1], [0.2], [0.3]])


def test_takes_the_epoch_with_most_where_there_are_too_few():
    history = history_of((1, [0.1]), (3, [0.2, 0.3, 0.4]))
    assert (seen(history, min_points=9).epoch, len(seen(history, min_points=9))) == (1, 2)


def test_nothing_to_see():
    nothing = seen(history_of((1, None)))
    assert (len(nothing), nothing.epoch, nothing.points.shape) == (0, 0, (0, 1))
    assert nothing.pending == ({"x": 0.0},)


def test_pending_is_what_runs_and_was_not_seen():
    history = history_of((1, [0.5]), (1, [0.6]), (1, None))
    history.record_decision(Proposal(target=3, trial=1))
    assert seen(history).pending == ({"x": 0.2},)
    history.record_scores(1, [0.6, 0.6, 0.6])
    assert seen(history).epoch == 3
    assert seen(history).pending == ({"x": 0.2},)
    history.record_decision(Proposal(target=3, trial=0))
    assert seen(history).pending == ({"x": 0.0}, {"x": 0.2})


def test_failed_trials_are_the_worst_seen():
    history = history_of(
        (3, [0.5, 0.6, 0.7]), (3, "failed"), (3, [0.1, 0.2, 0.3]), (3, [0.1, 0.2, math.nan])
    )
    np.testing.assert_equal(seen(history).scores, [0.7, 0.3, 0.3, 0.3])


def test_a_trial_that_failed_later_counts_as_failed():
    history = history_of((1, [0.9]), (1, [0.5]), (1, [0.7]))
    history.record_decision(Proposal(target=3, trial=0))
    history.record_failure(0)
    np.testing.assert_equal(seen(history, min_points=2).scores, [0.5, 0.5, 0.7])


def test_scores_that_are_no_numbers_are_the_worst_seen():
    history = history_of((2, [math.nan, 0.9]), (1, [0.4]), (1, [math.inf]), (1, [0.5]))
    np.testing.assert_equal(seen(history, min_points=4).scores, [0.4, 0.4, 0.4, 0.5])


def test_infeasible_trials_are_the_worst_seen():
    history = history_of((1, [0.9], 2.0), (1, [0.5]), (1, [0.6]))
    np.testing.assert_equal(seen(history).scores, [0.5, 0.5, 0.6])


def test_where_none_is_feasible_the_violation_counts():
    history = history_of((1, [0.9], 2.0), (1, [0.5], 0.5), (1, "failed"))
    np.testing.assert_equal(seen(history).scores, [-2.0, -0.5, -2.0])


def test_all_failed():
    np.testing.assert_equal(seen(history_of((1, "failed"), (1, "failed"))).scores, [0.0, 0.0])


def test_earlier_studies_count():
    prior = [
        Trial(
            number=7,
            config={"x": 0.9},
            target=3,
            reached=3,
            scores=(0.1, 0.2, 0.3),
            state="stopped",
        )
    ]
    history = history_of((3, [0.5, 0.6, 0.7]), prior=prior)
    assert seen(history, min_points=2).epoch == 3
    np.testing.assert_equal(seen(history).scores, [0.3, 0.7])


def test_trials_of_another_space_are_left_out():
    config = {"y": 0.9}
    prior = [Trial(number=0, config=config, target=1, reached=1, scores=(0.1,), state="stopped")]
    assert seen(history_of((1, [0.7]), prior=prior)).configs == ({"x": 0.0},)
    np.testing.assert_equal(points_of([config, {"x": 0.5}], coordinates_of(LINE)), [[0.5]])


@pytest.mark.parametrize("space", [FLAT, NESTED])
def test_points_are_those_of_the_coordinates(space):
    history = filled(space, num=20)
    expected = [coordinates_of(space).to_unit(trial.config) for trial in history]
    for _ in range(2):  # the second result is cached
        np.testing.assert_equal(seen(history, space=space).points, expected)


def test_a_space_without_coordinates():
    space, history = Space(x=1), History()
    history.record_scores(history.record_decision(Proposal(target=1, config={"x": 1})), [0.5])
    assert seen(history, space=space).points.shape == (1, 0)


def test_memory_is_bounded(monkeypatch):
    monkeypatch.setattr("thrifty.search._scores._MAX_REMEMBERED", 3)
    space = Space(x=Choice([0, 1]), y=Float(0.0, 1.0))
    history = filled(space, num=10)
    expected = [coordinates_of(space).to_unit(trial.config) for trial in history]
    np.testing.assert_equal(seen(history, space=space).points, expected)
