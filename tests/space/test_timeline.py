from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from tests import naive
from tests.depth import draws
from tests.strategies import EPOCHS, configs, schedules
from thrifty.core import ScheduleError
from thrifty.space import (
    Constant,
    Cosine,
    Exponential,
    Linear,
    MultiStep,
    Step,
    Timeline,
    Warmup,
    common_prefix,
)


pytestmark = pytest.mark.slow


def prefix(a, b, *, epochs=EPOCHS):
    return common_prefix(Timeline({"lr": a}, epochs=epochs), Timeline({"lr": b}, epochs=epochs))


# Eight steps an epoch, because all the strategies' changes are at eighths.
@settings(max_examples=draws(250, 1000), deadline=None)
@given(schedules, schedules)
def test_prefix_is_as_long_as_values_are_equal(a, b):
    one, other = Timeline({"lr": a}, epochs=EPOCHS), Timeline({"lr": b}, epochs=EPOCHS)
    assert common_prefix(one, other) == naive.common_prefix(one, other, steps=8)


def test_lines_that_happen_to_coincide_are_not_shared():
    # 0.5 t twice, but from other numbers, which need not round alike at every number of steps. It
    # is safer to share too little.
    one, other = (
        Timeline({"lr": lr}, epochs=4) for lr in (Linear(2.0), Linear(2.0, floor=1, epochs=2))
    )
    assert naive.common_prefix(one, other, steps=8) == 2
    assert common_prefix(one, other) == 0


@settings(max_examples=draws(50, 200), deadline=None)
@given(configs, configs)
def test_prefix_of_whole_configurations(a, b):
    one, other = Timeline(a, epochs=EPOCHS), Timeline(b, epochs=EPOCHS)
    assert common_prefix(one, other) == naive.common_prefix(one, other, steps=8)


@given(schedules, schedules, schedules)
def test_prefix_is_symmetric_and_like_a_tree(a, b, c):
    assert prefix(a, b) == prefix(b, a)
    assert prefix(a, a) == EPOCHS
    assert prefix(a, c) >= min(prefix(a, b), prefix(b, c))


@given(configs)
def test_runs_cover_all_epochs_and_differ_from_their_neighbours(config):
    runs = Timeline(config, epochs=EPOCHS).runs
    assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
    assert runs[-1].stop == EPOCHS
    assert all(a.key != b.key for a, b in pairwise(runs))


@given(configs)
def test_equal_configurations_are_equal_timelines(config):
    one, other = Timeline(config, epochs=EPOCHS), Timeline(dict(config), epochs=EPOCHS)
    assert one == other
    assert hash(one) == hash(other)
    assert one != Timeline(config, epochs=EPOCHS + 1)
    assert one != config


@settings(deadline=None)
@given(schedules)
def test_values_are_those_of_the_schedule(schedule):
    timeline = Timeline({"lr": schedule}, epochs=EPOCHS)
    for epoch in range(EPOCHS):
        values = timeline.values("lr", epoch, num_steps=4)
        expected = schedule.values(epoch, epoch + 1, epochs=EPOCHS, steps_per_epoch=4)
        assert np.broadcast_to(values, 4).tolist() == expected.tolist()
        assert timeline.at(epoch) == {"lr": expected[0]}


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        (Step(0.1, [30]), Constant(0.1), 30),
        (Step(0.1, [30]), 0.1, 30),
        (Step(0.1, [30.5]), 0.1, 30),
        (Step(0.1, [30, 60]), Step(0.1, [30, 70]), 60),
        (Step(1.0, every=30, gamma=0.5), MultiStep([1.0, 0.5, 0.25], milestones=[30, 60]), 90),
        (Warmup(5, Cosine(0.1)), Warmup(5, Exponential(0.1, gamma=0.9)), 5),
        (Warmup(5, Cosine(0.1)), Warmup(5, Cosine(0.2)), 0),
        (Cosine(0.1), Cosine(0.1, epochs=90), 90),
        (Linear(0.1, epochs=40), Linear(0.1, epochs=50), 0),
        (Linear(0.1, epochs=40).then(0.1, at=60), Linear(0.1, epochs=40), 60),
        (Linear(0.1, epochs=60).then(0.1, at=60), Linear(0.1, epochs=60), 60),
        (MultiStep([1, 2], milestones=[9]), MultiStep([1.0, 2.0], milestones=[9]), 0),
        (MultiStep(["a", "b"], milestones=[9]), "a", 9),
    ],
)
def test_prefixes_that_people_know(a, b, shared):
    assert prefix(a, b, epochs=90) == prefix(b, a, epochs=90) == shared


def test_other_names_share_nothing():
    a, b = Timeline({"lr": 0.1}, epochs=9), Timeline({"lr": 0.1, "width": 1}, epochs=9)
    assert common_prefix(a, b) == 0


def test_shorter_run_is_a_prefix():
    assert common_prefix(Timeline({"x": 1}, epochs=5), Timeline({"x": 1}, epochs=9)) == 5


def test_order_of_names_does_not_matter():
    a, b = Timeline({"x": 1, "y": 2}, epochs=9), Timeline({"y": 2, "x": 1}, epochs=9)
    assert a == b


def test_beyond_the_run():
    with pytest.raises(IndexError, match="epoch 9 is beyond the run"):
        Timeline({"lr": Constant(0.1)}, epochs=9).at(9)


def test_too_short_a_run():
    with pytest.raises(ScheduleError, match="needs at least 31 epochs"):
        Timeline({"lr": Step(0.1, [30])}, epochs=30)


def test_repr_says_what_it_is_of():
    assert repr(Timeline({"lr": 0.1}, epochs=9)) == "Timeline({'lr': 0.1}, epochs=9)"
