"""The model of learning curves: what it learns, and what it does without data to learn from."""

import math

import numpy as np
import pytest

from thrifty.search import _curve_model
from thrifty.search._curve_model import (
    CannotFit,
    CurveModel,
    Relations,
    Rows,
    Setting,
    prior_variance,
)


NUMBER = np.array([False])


def rows(points, times, *, decays=None, paths=None):
    times = np.asarray(times, float)
    return Rows(
        points=np.asarray(points, float).reshape(len(times), -1),
        times=times,
        decays=np.zeros((len(times), 0)) if decays is None else np.asarray(decays)[:, None],
        paths=np.arange(len(times))[:, None] if paths is None else np.asarray(paths),
    )


def curves(num, times, score):
    """Return rows of ``num`` curves at all ``times``, and ``score(point, time)`` there."""
    points = np.repeat(np.linspace(0, 1, num), len(times))
    at = np.tile(times, num)
    paths = np.repeat(np.arange(num), len(times))[:, None]
    return rows(points, at, paths=paths), np.array([
        score(*p) for p in zip(points, at, strict=True)
    ])


def test_interpolates_over_configurations():
    model = CurveModel(*curves(8, [1.0], lambda x, t: (x - 0.4) ** 2), is_choice=NUMBER)
    mean, deviation = model.predict(rows([0.5], [1.0], paths=[[99]]))
    assert mean[0] == pytest.approx(0.01, abs=0.03)
    assert deviation[0] < 0.2


def test_follows_slopes_that_depend_on_the_configuration():
    """Curves with x > 0.5 rise and the others fall: they cross at the middle."""
    seen, scores = curves(10, [0.1, 0.3, 0.6, 1.0], lambda x, t: (x - 0.5) * (math.log(t) + 1))
    model = CurveModel(seen, scores, is_choice=NUMBER)
    ahead = rows([0.05, 0.95], [1.0, 1.0], paths=[[98], [99]])
    falls, rises = model.predict(ahead)[0]
    assert rises > falls + 0.2


def test_own_curve_counts_beyond_the_configuration():
    """Levels are random, so only a trial's own scores say where it goes."""
    levels = np.random.default_rng(0).normal(size=12)
    seen, scores = curves(12, [0.1, 0.5], lambda x, t: levels[round(x * 11)] + t)
    model = CurveModel(seen, scores, is_choice=NUMBER)
    at_end = rows(np.linspace(0, 1, 12), np.ones(12), paths=np.arange(12)[:, None])
    mean, _ = model.predict(at_end)
    assert np.corrcoef(mean, levels)[0, 1] > 0.9


def test_decay_is_not_credited_to_the_trial():
    """All trials gain 1 by their decay; one that has not decayed yet is expected to gain it."""
    points = np.linspace(0, 1, 8)
    before = rows(points, np.full(8, 0.7), decays=np.zeros(8), paths=np.arange(8)[:, None])
    after = rows(points[:6], np.full(6, 1.0), decays=np.ones(6), paths=np.arange(6)[:, None])
    model = CurveModel(
        before.joined(after), np.concatenate([points, points[:6] + 1.0]), is_choice=NUMBER
    )
    late = rows(points[6:], np.ones(2), decays=np.ones(2), paths=np.array([[6], [7]]))
    mean, deviation = model.predict(late)
    assert mean == pytest.approx(points[6:] + 1.0, abs=0.2)
    assert (deviation < 0.5).all()


def test_options_of_a_choice_are_equally_far_apart():
    where = rows([0.0, 0.5, 1.0, math.nan], np.ones(4))
    squares = Relations(where, where, is_choice=np.array([True])).squares[0]
    assert squares.tolist() == [[0, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 1], [1, 1, 1, 0]]


def test_absent_coordinates_are_alike():
    where = rows([[0.2, math.nan], [0.2, math.nan], [0.4, 0.1]], np.ones(3))
    squares = Relations(where, where, is_choice=np.array([False, False])).squares
    assert squares[1].tolist() == [[0, 0, 1], [0, 0, 1], [1, 1, 0]]


def test_kinship_is_the_common_start_of_paths():
    where = rows([0.0, 0.0, 0.0], np.ones(3), paths=[[1, 2, 3, 4], [1, 2, 8, 4], [7, 2, 3, 4]])
    kinship = Relations(where, where, is_choice=NUMBER).kinship
    assert kinship.tolist() == [[1, 0.5, 0], [0.5, 1, 0], [0, 0, 1]]


def test_prior_variance_is_the_diagonal_of_the_covariance():
    where = rows([0.0, 0.3, 1.0], [0.1, 0.5, 1.0], decays=[0.0, 0.2, 0.9])
    covariance = Relations(where, where, is_choice=NUMBER).covariance(Setting(lengths=(1,)))
    assert prior_variance(where, Setting(lengths=(1,))) == pytest.approx(np.diag(covariance))


def test_covariances_of_trees_are_positive():
    rng = np.random.default_rng(0)
    paths = rng.integers(3, size=(40, 5)).cumsum(axis=1) * 7 + rng.integers(2, size=(40, 5))
    where = rows(rng.random(40), 0.01 + rng.random(40), decays=rng.random(40), paths=paths)
    covariance = Relations(where, where, is_choice=NUMBER).covariance(Setting(lengths=(1,)))
    assert np.linalg.eigvalsh(covariance).min() > -1e-9


def test_what_is_assumed_is_more_certain_and_not_better():
    seen, scores = curves(6, [0.1, 0.5], lambda x, t: x + t)
    model = CurveModel(seen, scores, is_choice=NUMBER)
    place = rows([0.55], [1.0], paths=[[99]])
    mean, deviation = model.predict(place)
    model.assume(place)
    assert model.predict(place)[0] == pytest.approx(mean, abs=0.05)
    assert model.predict(place)[1] < deviation


def test_chances_are_those_of_a_normal_variable():
    seen, scores = curves(6, [0.1, 0.5], lambda x, t: x + t)
    model = CurveModel(seen, scores, is_choice=NUMBER)
    place = rows([0.5], [1.0], paths=[[99]])
    mean, _ = model.predict(place)
    assert np.exp(model.exceeds(place, float(mean[0]))) == pytest.approx([0.5], abs=0.1)
    assert np.exp(model.exceeds(place, float(mean[0]) + 99.0)) == pytest.approx([0.0])


@pytest.mark.parametrize("scores", [[0.0], [0.0, math.nan], [0.0, math.inf]])
def test_cannot_fit_what_is_not_finite_or_too_little(scores):
    with pytest.raises(CannotFit):
        CurveModel(
            rows([0.0] * len(scores), [1.0] * len(scores)), np.array(scores), is_choice=NUMBER
        )


def test_cannot_fit_a_matrix_that_is_not_positive(monkeypatch):
    monkeypatch.setattr(Relations, "covariance", lambda self, setting: -np.eye(2))
    with pytest.raises(CannotFit):
        CurveModel(rows([0.0, 0.5], [1.0, 1.0]), np.array([0.0, 1.0]), is_choice=NUMBER)


def test_cannot_predict_from_a_matrix_that_is_not_positive(monkeypatch):
    """Settings are compared on some rows and fitted to all of them."""
    monkeypatch.setattr(_curve_model, "_log_evidence", lambda *args: 0.0)
    monkeypatch.setattr(Relations, "covariance", lambda self, setting: -np.eye(2))
    with pytest.raises(CannotFit):
        CurveModel(rows([0.0, 0.5], [1.0, 1.0]), np.array([0.0, 1.0]), is_choice=NUMBER)


def test_what_cannot_be_assumed_changes_nothing(monkeypatch):
    seen, scores = curves(6, [0.1, 0.5], lambda x, t: x + t)
    model = CurveModel(seen, scores, is_choice=NUMBER)
    place = rows([0.55], [1.0], paths=[[99]])
    before = model.predict(place)
    with monkeypatch.context() as patch:
        patch.setattr(_curve_model, "JITTER", -99.0)
        with pytest.raises(CannotFit):
            model.assume(place)
    assert np.concatenate(model.predict(place)) == pytest.approx(np.concatenate(before))
