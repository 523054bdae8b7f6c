"""Spaces with very many variants are checked by their extreme ones."""

import numpy as np
import pytest

from thrifty.core import ScheduleError
from thrifty.space import (
    WSD,
    Choice,
    Constant,
    Cosine,
    Float,
    Int,
    Linear,
    Space,
    Step,
    Timeline,
    Warmup,
    common_prefix,
)


MANY = Float(0.1, 0.9)
DIGITS = [Int(10 * i + 1, 10 * i + 9) for i in range(14)]
TOO_LONG = {
    "many values": Step(MANY, [Int(1, 5000), Int(5001, 9999)]),
    "many fields": Step(MANY, DIGITS),
    "a warm-up": Warmup(Int(1, 5000), Step(Choice([0.1, 0.2]), [Int(1, 10), Int(11, 99)])),
    "an inner schedule": Warmup(5, Choice([0.1, Cosine(0.1, epochs=Int(1, 9999))])),
    "an option": Choice([0.1, *(Linear(0.1, epochs=e) for e in range(1, 5000))]),
    "no number": WSD(0.1, cooldown=Int(1, 90), warmup=Int(1, 90), epochs=Choice([None, 100])),
    "two parts": Constant(0.1).then(Cosine(0.1, epochs=Choice([5, 20])), at=Int(1, 5000)),
}


@pytest.mark.parametrize("kind", TOO_LONG)
def test_a_schedule_longer_than_the_run_is_found_among_any_number(kind):
    space = Space(width=64, lr=TOO_LONG[kind])
    with pytest.raises(ScheduleError, match="hyper-parameter 'lr'"):
        space.check(max_epochs=99)


@pytest.mark.parametrize("kind", ["many values", "many fields", "an option", "two parts"])
def test_a_run_that_is_long_enough_is_taken(kind):
    space = Space(lr=TOO_LONG[kind])
    space.check(max_epochs=10_000)
    for seed in range(20):
        Timeline(space.sample(np.random.default_rng(seed)), epochs=10_000)


def test_variants_that_are_not_well_formed_are_found_among_any_number():
    space = Space(lr=Step(0.1, [Int(1, 600), Int(500, 999)]))
    with pytest.raises(ScheduleError, match=r"'lr'.*milestones must be positive and ascending"):
        space.check(max_epochs=1000)


def test_what_changes_over_time_is_known_among_any_number():
    space = Space(lr=TOO_LONG["many fields"], width=Constant(Int(1, 9999)))
    assert space.changes_over_time("lr", max_epochs=999)
    assert not space.changes_over_time("width", max_epochs=999)


# -- times that are drawn from an interval -------------------------------------------------


def intervals(max_epochs=50, **params):
    found = Space(**params).branches(max_epochs=max_epochs)
    return found.epochs, [(i.name, i.first, i.last) for i in found.intervals]


def test_trials_may_part_anywhere_in_an_interval():
    assert intervals(lr=Step(0.1, [Float(10, 30)])) == ((), [("lr", 10, 30)])
    assert intervals(lr=Step(0.1, [5, Float(10, 30)]), width=Int(1, 4)) == (
        (),
        [("lr", 5, 5), ("lr", 10, 30)],
    )


def test_each_value_of_a_choice_has_an_interval_of_its_own():
    space = Space(lr=Step(Choice([0.1, 0.2]), [Float(10, 30)]))
    first, second = space.branches(max_epochs=50).intervals
    assert first.piece != second.piece


def test_what_comes_after_one_interval_is_shared_by_no_two_trials():
    epochs, found = intervals(lr=Step(0.1, [Float(10, 20), Float(30, 40)]))
    assert found == [("lr", 10, 20)]
    assert epochs == (30, 40)


@pytest.mark.parametrize("other", [Float(0.0, 1.0), Cosine(Float(0.1, 0.2)), (1, Float(0, 1))])
def test_where_another_hyper_parameter_differs_anyway_nothing_is_kept_for_an_interval(other):
    assert intervals(lr=Step(0.1, [Float(10, 30)]), other=other)[1] == []
    assert intervals(lr=Step(0.1, [Float(10, 30)]), other=Choice([3, other]))[1] != []


def test_the_piece_of_an_interval_is_that_of_the_trials():
    space = Space(lr=Choice([0.5, Step(0.1, [Float(10, 30)])]))
    (interval,) = space.branches(max_epochs=50).intervals
    rng = np.random.default_rng(0)
    lines = [Timeline(space.sample(rng), epochs=50) for _ in range(20)]
    parted = {common_prefix(a, b) for a in lines for b in lines} - {0, 50}
    assert parted <= set(range(interval.first, interval.last + 1))
    for line in lines:
        follows = line.piece("lr", 0) == interval.piece
        assert follows == (line.config["lr"] != 0.5)
