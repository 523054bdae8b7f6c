import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from thrifty.core import ScheduleError, SpaceError, UsageError
from thrifty.space import (
    REX,
    WSD,
    Amount,
    Choice,
    Cosine,
    CosineRestarts,
    Cyclic,
    EpochSize,
    Int,
    MultiStep,
    OneCycle,
    Space,
    Step,
    Timeline,
    TimeUnit,
    Warmup,
    common_prefix,
    cooldowns,
    epochs,
    schedule_for,
    steps,
    tokens,
)
from thrifty.space._pieces import values_at


pytestmark = pytest.mark.slow


sizes = st.integers(1, 5_000)
counts = st.integers(0, 10**12)


def test_numbers_are_exact_as_written():
    assert epochs(0.1).number == Fraction(1, 10)
    assert tokens(2e9) == tokens(2_000_000_000) == tokens(np.int64(2_000_000_000))
    assert steps(5_000) * 0.1 == 0.1 * steps(5_000) == steps(500)


@given(counts, sizes)
def test_an_amount_is_read_back_from_its_text(number, per_epoch):
    for amount in (steps(number), tokens(number), Amount(Fraction(number, per_epoch), "epochs")):
        names = {"steps": steps, "tokens": tokens, "epochs": epochs, "Fraction": Fraction}
        assert eval(repr(amount), names) == amount


@given(counts, sizes)
def test_what_is_shown_means_the_same_number_of_epochs(number, per_epoch):
    size = EpochSize(steps=per_epoch)
    resolved = size.in_epochs(steps(number))
    assert size.unit("steps").amount(resolved) == steps(number)
    assert isinstance(resolved, int) == (number % per_epoch == 0)


@given(counts, counts, sizes)
def test_amounts_are_ordered_as_their_epochs(a, b, per_epoch):
    size = EpochSize(tokens=per_epoch)
    assert (tokens(a) < tokens(b)) == (size.fraction(tokens(a)) < size.fraction(tokens(b)))


def test_units_do_not_mix():
    with pytest.raises(UsageError, match=r"steps\(5\) and tokens\(5\) have different units"):
        steps(5) < tokens(5)  # noqa: B015 (the comparison raises)
    with pytest.raises(UsageError, match="the plain number counts epochs"):
        steps(5) + 3
    assert steps(5) != tokens(5)
    assert sum([steps(5), steps(6)]) == steps(11)
    assert steps(5) > 0


@pytest.mark.parametrize("number", [-1, float("nan"), float("inf"), "5", True, None])
def test_an_amount_is_a_number_of_at_least_0(number):
    with pytest.raises(UsageError, match=r"give a number of steps, 0 or more"):
        steps(number)


def test_steps_and_tokens_are_whole():
    with pytest.raises(UsageError, match=r"must be whole; the nearest are 2 and 3"):
        steps(2.5)
    with pytest.raises(TypeError):
        steps(5) * "x"
    with pytest.raises(TypeError):
        steps(5) < "x"  # noqa: B015 (the comparison raises)


def test_whole_epochs_or_the_nearest_two():
    size = EpochSize(steps=500)
    assert size.whole(steps(5_000), what="horizon") == 10
    with pytest.raises(UsageError) as caught:
        size.whole(steps(5_250), what="horizon")
    assert str(caught.value) == (
        "horizon steps(5_250) is 10.5 epochs of 500 steps; use steps(5_000) or steps(5_500), or "
        "choose steps_per_epoch=250"
    )
    with pytest.raises(
        UsageError, match=r"max_epochs epochs\(0.5\) is 0.5 epochs; use epochs\(1\)"
    ):
        size.whole(epochs(0.5), what="max_epochs")
    with pytest.raises(UsageError, match=r"is 0.5 epochs of 500 steps; use steps\(500\), or"):
        size.whole(steps(250), what="max_epochs")


def test_an_unknown_size_says_what_to_do():
    with pytest.raises(UsageError, match="steps of an epoch is unknown: set steps_per_epoch"):
        EpochSize().fraction(steps(5))
    with pytest.raises(UsageError, match="tokens of an epoch is unknown: samples vary"):
        EpochSize(why_no_tokens="samples vary").fraction(tokens(5))


def test_units_as_text():
    unit = TimeUnit(name="steps", per_epoch=1)
    assert [unit.text(1), TimeUnit().text(2), TimeUnit().text(0.5)] == [
        "1 step (1 epoch)",
        "2 epochs",
        "0.5 epochs",
    ]
    assert TimeUnit.from_json(unit.to_json()) == unit
    assert TimeUnit.from_json(None) == TimeUnit.from_json({"name": "parsecs"}) == TimeUnit()


TIMES = {
    "Step": lambda t: Step(0.1, [t(300), t(1_300)]),
    "every": lambda t: Step(0.1, every=t(130)),
    "MultiStep": lambda t: MultiStep([1.0, 2.0, 3.0], milestones=[t(299), t(1_000)]),
    "Cosine": lambda t: Cosine(0.1, epochs=t(1_150)),
    "Cyclic": lambda t: Cyclic(0.0, 0.1, period=t(170)),
    "CosineRestarts": lambda t: CosineRestarts(0.1, period=t(90), growth=2.0),
    "OneCycle": lambda t: OneCycle(0.1, epochs=t(1_000)),
    "REX": lambda t: REX(0.1, epochs=t(900)),
    "Warmup": lambda t: Warmup(t(70), Step(0.1, [t(230)])),
    "WSD": lambda t: WSD(0.1, cooldown=t(150), warmup=t(30), epochs=t(1_000)),
    "Then": lambda t: Warmup(t(110), 0.5).then(Step(0.1, [t(90)]), at=t(660)),
}
"""A schedule of each kind that has times, given what makes a time out of a number of steps."""


@pytest.mark.parametrize("kind", TIMES)
@pytest.mark.parametrize("per_epoch", [1, 7, 50, 100, 130, 512])
def test_a_schedule_in_steps_is_the_same_in_epochs(kind, per_epoch):
    num_epochs = 2_100 // per_epoch + 1
    size = EpochSize(steps=per_epoch, tokens=per_epoch * 8)
    in_steps = TIMES[kind](steps)
    assert in_steps.amounts()
    resolved = in_steps.in_epochs(size)
    by_hand = TIMES[kind](lambda n: n / per_epoch if n % per_epoch else n // per_epoch)
    assert resolved == by_hand == TIMES[kind](lambda n: tokens(8 * n)).in_epochs(size)
    a, b = (Timeline({"lr": each}, epochs=num_epochs) for each in (resolved, by_hand))
    assert a == b
    assert common_prefix(a, b) == num_epochs


def value_at(segments, step, per_epoch):
    """Return the value at a step: the piece by integers, the value at the step's time."""
    time = step // per_epoch + (step % per_epoch) / per_epoch
    for segment in reversed(segments):
        first = math.ceil(Fraction(segment.start).limit_denominator(10_000) * per_epoch)
        if first <= step:
            return values_at((segment,), np.array([max(time, segment.start)]))[0]
    raise AssertionError


@pytest.mark.sample(12)
@pytest.mark.parametrize("kind", TIMES)
@pytest.mark.parametrize("per_epoch", [7, 130, 499])
def test_each_step_has_the_value_of_a_plain_loop_over_steps(kind, per_epoch):
    num_epochs = 2_100 // per_epoch + 1
    schedule = TIMES[kind](steps).in_epochs(EpochSize(steps=per_epoch))
    timeline = Timeline({"lr": schedule}, epochs=num_epochs)
    segments = schedule.segments(num_epochs)
    for epoch in range(num_epochs):
        used = timeline.values("lr", epoch, num_steps=per_epoch)
        used = used if isinstance(used, list) else [used] * per_epoch
        for step in range(0, per_epoch, max(per_epoch // 90, 1)):
            assert used[step] == value_at(segments, epoch * per_epoch + step, per_epoch)


@settings(max_examples=50)
@given(per_epoch=st.integers(1, 3_000), milestone=st.integers(1, 1_500), warmup=st.integers(1, 900))
def test_a_milestone_in_steps_takes_effect_at_that_step(per_epoch, milestone, warmup):
    plain = MultiStep([1.0, 2.0], milestones=[steps(milestone)])
    warmed = Warmup(steps(warmup), plain, start=1.0)
    for schedule, first in ((plain, milestone), (warmed, warmup + milestone)):
        num_epochs = (warmup + milestone) // per_epoch + 2
        values = schedule.in_epochs(EpochSize(steps=per_epoch)).values(
            0, num_epochs, epochs=num_epochs, steps_per_epoch=per_epoch
        )
        assert np.flatnonzero(values == 2.0)[0] == first


def test_times_alone_may_be_amounts():
    with pytest.raises(ScheduleError, match="value is not a time"):
        Step(steps(5), [3])
    with pytest.raises(ScheduleError, match="gamma is not a time"):
        Step(0.1, [3], gamma=Choice([steps(5), 0.1]))
    with pytest.raises(SpaceError, match="'batch_size' is steps"):
        Space(batch_size=Choice([steps(5), 32]))
    with pytest.raises(SpaceError, match=r"low must be a plain number; list the amounts: Choice"):
        Int(steps(5), steps(10))
    with pytest.raises(ScheduleError, match="counts steps, tokens or epochs of an unknown size"):
        Step(0.1, [steps(5)]).segments(10)
    with pytest.raises(ScheduleError, match="cannot be stored"):
        Step(0.1, [steps(5)]).to_json()


def test_a_space_turns_all_its_times_into_epochs():
    def space(t):
        late = WSD(0.1, cooldown=t(500))
        return Space(
            lr=Choice([0.1, Step(Choice([0.1, 0.2]), [Choice([t(500), t(750)])]), late]),
            momentum=Choice([0.8, 0.9]).when(lr=late),
        )

    size = EpochSize(steps=500)
    assert space(steps).amounts()
    found = space(steps).in_epochs(size)
    assert repr(found) == repr(space(lambda n: {500: 1, 750: 1.5}[n]))
    assert found.in_epochs(size) is found
    with pytest.raises(ScheduleError, match="milestones must be positive and ascending"):
        Space(lr=Step(0.1, [steps(500), epochs(1)])).in_epochs(size)


def test_budgets_in_steps():
    assert schedule_for(0.1, epochs=steps(1_001), extendable=True, warmup=steps(10)) == WSD(
        0.1, cooldown=steps(201), warmup=steps(10), epochs=steps(1_001)
    )
    assert schedule_for(0.1, epochs=steps(100), warmup=steps(10)) == Warmup(
        steps(10), REX(0.1, epochs=steps(90))
    )
    assert cooldowns(0.1, ends=[tokens(1e6), tokens(2e6)], cooldown=0.1).options == (
        WSD(0.1, cooldown=tokens(1e5), epochs=tokens(1e6)),
        WSD(0.1, cooldown=tokens(2e5), epochs=tokens(2e6)),
    )
    with pytest.raises(ScheduleError, match="fewer than the run has"):
        schedule_for(0.1, epochs=steps(100), warmup=steps(100))
    with pytest.raises(UsageError, match="the plain number counts epochs"):
        schedule_for(0.1, epochs=steps(100), warmup=1)
