"""What the model of learning curves sees of schedules: what they have done so far."""

import numpy as np
import pytest

from thrifty.search import History, Proposal
from thrifty.search._curve_view import Candidate, CurveView, StageForest
from thrifty.space import Choice, Constant, Cosine, Float, MultiStep, Space, Step


RUNGS = (1, 3, 9, 27)


def seen(space, *values, name="lr"):
    """Return the points at each rung, ``[values, rungs, d]``, of configurations of ``name``."""
    history = History()
    for place, value in enumerate(values):
        number = history.record_decision(Proposal(target=3, config={name: value}))
        history.record_scores(number, [0.1 * place, 0.2 * place, 0.3 * place])
    view = CurveView(space, StageForest.of(history, epochs=RUNGS[-1]), RUNGS)
    view.model(list(history), history, [])
    candidates = [Candidate({name: value}, None, (), 0) for value in values]
    places = [view.places(candidates, [rung] * len(values)).points for rung in RUNGS]
    return np.stack(places, axis=1)


def test_kinds_of_schedules_that_do_the_same_are_at_the_same_place():
    same = [Step(0.1, [9]), MultiStep([0.1, 0.01], milestones=[9])]
    points = seen(Space(lr=Choice([*same, Constant(0.3)])), *same, Constant(0.3))
    assert points[0] == pytest.approx(points[1])
    assert abs(points[0] - points[2]).min() > 0.1


def test_schedule_before_its_drop_is_where_the_constant_is():
    options = [Constant(0.1), Step(0.1, [9]), Constant(0.3)]
    constant, step, _ = seen(Space(lr=Choice(options)), *options)
    assert step[:3] == pytest.approx(constant[:3])
    assert step[3] != pytest.approx(constant[3])


def test_place_is_the_largest_and_the_mean_value_in_decades():
    options = [Constant(0.1), Step(0.1, [9]), Constant(1.0)]
    constant, step, high = seen(Space(lr=Choice(options)), *options)
    assert constant[3] == pytest.approx(high[3] - 1.0)
    assert step[3, 0] == pytest.approx(constant[3, 0])
    mean = (9 * 0.1 + 18 * 0.01) / 27
    assert 10 ** (step[3, 1] - constant[3, 1]) * 0.1 == pytest.approx(mean, rel=0.1)


def test_plain_number_beside_schedules_is_a_schedule_that_stays():
    options = [0.1, Constant(0.1), Cosine(0.3, epochs=27.0)]
    number, constant, _ = seen(Space(lr=Choice(options)), *options)
    assert number == pytest.approx(constant)


def test_schedule_of_names_keeps_its_coordinate():
    options = [MultiStep(["a", "b"], milestones=[3]), MultiStep(["b", "a"], milestones=[3]), "a"]
    points = seen(Space(kind=Choice(options)), *options, name="kind")
    assert points.shape == (3, 4, 1)
    assert len(np.unique(points)) == 3


def test_hyper_parameters_without_schedules_keep_their_coordinates():
    points = seen(Space(lr=Float(0.0, 1.0)), 0.25, 0.5, 1.0)
    assert points[:, 0, 0] == pytest.approx([0.25, 0.5, 1.0])
