from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings

from tests import naive
from tests.strategies import EPOCHS, schedules
from thrifty.core import ScheduleError, SpaceError
from thrifty.space import (
    REX,
    WSD,
    Choice,
    Constant,
    Cosine,
    CosineRestarts,
    Cyclic,
    Exponential,
    Float,
    Linear,
    MultiStep,
    OneCycle,
    Polynomial,
    Step,
    Then,
    Trunk,
    Warmup,
    schedule_from_json,
)


pytestmark = pytest.mark.slow


def quarters(schedule, epochs: int = 8) -> list[float]:
    return schedule.values(0, epochs, epochs=epochs, steps_per_epoch=4).tolist()


@given(schedules)
def test_json_gives_it_back(schedule):
    assert schedule_from_json(json.loads(json.dumps(schedule.to_json()))) == schedule


@given(schedules, schedules)
def test_equality_is_that_of_what_is_written(a, b):
    assert (a == b) == (repr(a) == repr(b))
    assert a != b or hash(a) == hash(b)


@given(schedules)
def test_all_steps_at_once_are_each_step_alone(schedule):
    together = schedule.values(0, EPOCHS, epochs=EPOCHS, steps_per_epoch=5)
    alone = [
        schedule.values(epoch, epoch + 1, epochs=EPOCHS, steps_per_epoch=5)
        for epoch in range(EPOCHS)
    ]
    assert together.tolist() == np.concatenate(alone).tolist()


@given(schedules)
def test_segments_cover_the_run_and_neighbours_differ(schedule):
    segments = schedule.segments(EPOCHS)
    assert segments[0].start == 0.0
    assert segments[-1].stop >= EPOCHS
    for a, b in itertools.pairwise(segments):
        assert a.stop == b.start
        assert a.piece != b.piece


@given(schedules)
def test_a_repr_is_python(schedule):
    names = {
        kind.__name__: kind
        for kind in (
            REX,
            WSD,
            Constant,
            Cosine,
            CosineRestarts,
            Cyclic,
            Exponential,
            Linear,
            MultiStep,
            OneCycle,
            Polynomial,
            Step,
            Then,
            Trunk,
            Warmup,
        )
    }
    assert eval(repr(schedule), names) == schedule


@settings(max_examples=200)
@given(schedules)
def test_values_are_what_the_definition_says(schedule):
    times = np.arange(0.0, EPOCHS, 0.25)
    expected = [naive.value_at(schedule, time, EPOCHS) for time in times]
    assert quarters(schedule, EPOCHS) == pytest.approx(expected, abs=1e-9)


def test_rex_oracle():
    expected = [1.0, 0.8889, 0.75, 0.5714, 0.3333]
    assert REX(1.0).values(0, 5, epochs=5).round(4).tolist() == expected


def test_growing_restarts():
    segments = CosineRestarts(1.0, period=1, growth=2).segments(7)
    assert [segment.stop for segment in segments] == [1, 3, 7]


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ("epoch", [1.0, 0.75, 0.5, 0.25]),
        (0.5, [1.0, 1.0, 0.5, 0.5]),
        ((0.25,), [1.0, 0.75, 0.75, 0.75]),
    ],
)
def test_sampling_rates_hold_in_between(rate, expected):
    values = Linear(1.0, sample=rate).values(0, 4, epochs=4, steps_per_epoch=3)
    assert values.tolist() == np.repeat(expected, 3).tolist()


def test_every_epoch_is_what_the_finest_rate_says_at_its_start():
    assert Cosine(1.0, sample="epoch").values(0, 8, epochs=8).tolist() == quarters(Cosine(1.0))[::4]


@pytest.mark.parametrize(
    "schedule", [Linear(1.0, epochs=4), REX(1.0, epochs=4), WSD(1.0, cooldown=2, epochs=4)]
)
def test_shorter_than_the_run_it_ends_at_its_floor(schedule):
    for rate in ("step", "epoch"):
        held = type(schedule)(**{**vars_of(schedule), "sample": rate})
        assert held.values(4, 8, epochs=8).tolist() == [0.0] * 4


def vars_of(schedule) -> dict:
    return {name: getattr(schedule, name) for name in type(schedule).__slots__}


def test_plain_values_become_constants():
    assert Warmup(2, 0.1) == Warmup(2, Constant(0.1))
    assert Constant(1).then("adam", at=2).values(0, 3, epochs=3).tolist() == ["1", "1", "adam"]


def test_types_are_part_of_equality():
    assert len({Constant(1), Constant(1.0), Constant(True)}) == 3
    assert Constant(1) != 1


def test_templates_say_so():
    template = Constant(0.1).then(Step(Float(0.1, 0.2), [2]), at=3)
    assert template.is_template()
    assert not Constant(0.1).is_template()
    with pytest.raises(ScheduleError, match="sample the space first"):
        template.segments(9)


@pytest.mark.parametrize("schedule", [Step(1.0, [9]), Linear(1.0, epochs=10), Warmup(8.5, 1.0)])
def test_too_long_for_the_run(schedule):
    with pytest.raises(ScheduleError, match="needs at least"):
        schedule.segments(9)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear("fast"), "value must be a number"),
        (lambda: Linear(True), "value must be a number"),
        (lambda: Linear(1.0, epochs="all"), "epochs must be a number"),
        (lambda: Step(1.0, 30), "milestones must be a list"),
        (lambda: Step(1.0, ["30"]), "milestones must be numbers"),
        (lambda: Step(1.0, [3, 2]), "positive and ascending"),
        (lambda: Step(1.0, [0, 2]), "positive and ascending"),
        (lambda: Step(1.0, [2], every=2), "not both"),
        (lambda: Step(1.0, every=0), "every must be positive"),
        (lambda: MultiStep([1, 2], milestones=[]), "2 values need 1 milestones"),
        (lambda: MultiStep([1], milestones=[1]), "1 values need 1 milestones"),
        (lambda: Linear(1.0, epochs=-1), "epochs must be positive"),
        (lambda: Cosine(1.0, sample="week"), "sample must be"),
        (lambda: Cosine(1.0, sample=2.0), "sample must be"),
        (lambda: Cosine(1.0, sample=(0.5, 0.5)), "sample must be"),
        (lambda: Polynomial(1.0, power=0), "power must be positive"),
        (lambda: Exponential(1.0, gamma=0.0), "gamma must be positive"),
        (lambda: REX(1.0, d=1.0), "d must be in"),
        (lambda: CosineRestarts(1.0, period=0), "period must be positive"),
        (lambda: CosineRestarts(1.0, period=1, growth=0.5), "growth must be at least 1"),
        (lambda: Cyclic(0.0, 1.0, period=-1), "period must be positive"),
        (lambda: OneCycle(1.0, warmup=1.0), "warmup is a fraction"),
        (lambda: OneCycle(1.0, shape="round"), "shape must be"),
        (lambda: OneCycle(1.0, div=0), "div must be positive"),
        (lambda: Warmup(0, 1.0), "epochs must be positive"),
        (lambda: WSD(1.0, cooldown=0), "cooldown must be positive"),
        (lambda: WSD(1.0, cooldown=1, warmup=-1), "warmup must not be negative"),
        (lambda: WSD(1.0, cooldown=3, warmup=3, epochs=5), "do not fit"),
        (lambda: WSD(1.0, cooldown=1, shape="round"), "shape must be"),
        (lambda: WSD(1.0, cooldown=1, shape="exp"), "never reaches 0"),
        (lambda: Trunk(1.0, epochs=2, warmup=3, average="ema"), "warmup must be"),
        (lambda: Trunk(1.0, epochs=2, average="mean"), '"ema" or "swa"'),
        (lambda: Constant(1.0).then(2.0, at=0), "at must be positive"),
        (lambda: Linear(1.0, epochs=5).then(2.0, at=3), "hand over later"),
        (lambda: schedule_from_json({"schedule": "Spiral"}), "unknown schedule 'Spiral'"),
        (lambda: schedule_from_json({}), "unknown schedule None"),
        (lambda: schedule_from_json({"schedule": "Constant", "fields": {"speed": 1}}), "got speed"),
        (lambda: schedule_from_json({"schedule": "Constant"}), "needs value; got none"),
    ],
)
def test_what_makes_no_schedule(make, message):
    with pytest.raises(ScheduleError, match=message):
        make()


def test_values_that_json_cannot_hold():
    with pytest.raises(SpaceError, match="cannot be a value"):
        Constant(object())


def test_a_template_is_checked_when_it_is_resolved():
    template = Step(1.0, Choice([[2, 1]]))
    assert template.is_template()
    with pytest.raises(ScheduleError, match="ascending"):
        Step(1.0, template.milestones.options[0])
