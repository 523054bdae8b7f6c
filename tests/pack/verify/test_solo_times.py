"""Solo time of an epoch, estimated from the steps that verify trials."""

from __future__ import annotations

import pytest

from thrifty.pack.verify import SoloTimes, median_interval


def times(steps, evaluations=(0.5, 0.5)):
    found = SoloTimes()
    for seconds in steps:
        found.note_step("a", seconds)
    for seconds in evaluations:
        found.note_evaluation("a", seconds)
    return found


@pytest.mark.parametrize("steps", [[], [9.0], [9.0, 1.0, 1.0]])
def test_fewer_than_three_warm_steps_say_nothing(steps):
    assert times(steps).epoch("a", num_steps=10) is None


def test_the_first_step_of_a_kind_does_not_count():
    alone = times([1000.0, 1.0, 2.0, 4.0]).epoch("a", num_steps=10)
    assert (alone.seconds, alone.low, alone.high) == (20.5, 10.5, 40.5)


def test_other_kinds_do_not_count():
    assert times([1.0] * 9).epoch("b", num_steps=10) is None


def test_an_epoch_needs_an_evaluation():
    assert times([1.0] * 9, []).epoch("a", num_steps=10) is None


@pytest.mark.parametrize(("evaluations", "wanted"), [([7.0], 7.0), ([7.0, 1.0, 3.0], 2.0)])
def test_the_first_evaluation_counts_while_there_is_no_other(evaluations, wanted):
    assert times([0.0] * 4, evaluations).epoch("a", num_steps=1).seconds == wanted


def test_the_interval_of_many_samples_leaves_out_the_ends():
    found = median_interval([float(k) for k in range(101)])
    assert found.seconds == 50.0
    assert (found.low, found.high) == (40.0, 60.0)
