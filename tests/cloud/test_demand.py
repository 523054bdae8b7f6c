"""A study's width, and how its trainings share machines, compared with every way of sharing."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.cloud._drawn_fleets import a_workload, drawn
from thrifty.cloud._workload import parallelism_phases_of, study_s
from thrifty.core import CloudError
from thrifty.perf import PackCurve
from thrifty.plan import ForestStage, SearchPlan, stage_forest
from thrifty.space import Constant, Step, Timeline


pytestmark = pytest.mark.slow


# -- sharing machines ------------------------------------------------------------------


PACKS = PackCurve(backend="fused", step_s={1: 0.5, 2: 0.625, 4: 1.0})


def shortest(step_s, machines, trainings, ratio=(1.0,)):
    """Return the shortest time over all ways to train in waves with equal machines each.

    A machine may also train a pack, in a step of its ratio to that of one training.
    """

    @cache
    def left(some):
        if not some:
            return 0.0
        ways = [
            (wave, min(step_s[: machines // wave])) for wave in range(1, min(some, machines) + 1)
        ]
        ways += [(machines * k, step_s[0] * ratio[k - 1]) for k in range(2, len(ratio) + 1)]
        return min(seconds + left(max(0, some - wave)) for wave, seconds in ways)

    return left(trainings)


times = st.one_of(st.integers(1, 40).map(float), st.just(np.inf))
steps = st.lists(times, min_size=1, max_size=7)


@given(steps, st.data())
@drawn
def test_no_waves_end_sooner(step_s, data):
    machines = len(step_s)
    width = data.draw(st.integers(1, 2 * machines))
    assert study_s(np.array(step_s), [(width, 1)])[-1] == shortest(step_s, machines, width)


@given(steps, st.lists(st.sampled_from([1.0, 1.5, 3.0, np.inf]), max_size=3), st.data())
@drawn
def test_no_waves_of_packs_end_sooner(step_s, more, data):
    ratio = [1.0, *more]
    width = data.draw(st.integers(1, 2 * len(step_s) * len(ratio)))
    taken = study_s(np.array(step_s), [(width, 1)], np.array(ratio))[-1]
    assert taken == shortest(step_s, len(step_s), width, tuple(ratio))


@given(steps, st.integers(1, 60))
@drawn
def test_wide_phases_are_close_to_the_shortest(step_s, width):
    machines = len(step_s)
    taken = study_s(np.array(step_s), [(width, 1)])[-1]
    least = shortest(step_s, machines, width)
    waves = [min(step_s[: machines // wave]) for wave in range(1, machines + 1)]
    fastest_wave = min(seconds / wave for wave, seconds in enumerate(waves, 1))
    # The time is at least the minimum, and at most a wave more than all trainings at the best pace.
    if not np.isfinite(least):
        assert taken == least
        return
    assert least <= taken
    assert taken <= width * fastest_wave + 2 * max(each for each in waves if np.isfinite(each))


@given(steps, st.integers(1, 2))
@drawn
def test_more_machines_are_never_slower(step_s, width):
    taken = study_s(np.array(step_s), [(width, 3)]).tolist()
    assert taken == sorted(taken, reverse=True)


def test_each_training_has_its_own_machine_where_they_do_not_suffice():
    assert study_s(np.array([1.0, 0.7, 0.6]), [(6, 10)]).tolist() == [60.0, 30.0, 20.0]


def test_machines_that_outnumber_the_trainings_share_them():
    step_s = np.array([1.0, 0.7, 0.6, 0.5])
    assert study_s(step_s, [(2, 10)]).tolist() == [20.0, 10.0, 10.0, 7.0]


def test_the_last_training_gets_all_machines():
    assert study_s(np.array([1.0, 0.5, 0.25, 0.25]), [(5, 1)])[-1] == 1.25


def test_few_trainings_are_not_rushed_into_the_widest_wave():
    # Five and one would take 1.45 s.
    step_s = np.array([1.0, 0.45, 0.45, 0.45, 0.45])
    assert study_s(step_s, [(6, 1)])[-1] == pytest.approx(3 * 0.45)


def test_more_machines_than_help_stay_idle():
    assert study_s(np.array([1.0, 3.0, 0.5, 9.0]), [(1, 1)]).tolist() == [1.0, 1.0, 0.5, 0.5]


def test_phases_follow_one_another():
    step_s = np.array([1.0, 0.5])
    alone = [study_s(step_s, [phase]) for phase in ((3, 7), (50, 2), (1, 9))]
    together = study_s(step_s, [(3, 7), (50, 2), (1, 9)])
    assert together.tolist() == np.sum(alone, axis=0).tolist()


def test_trainings_that_need_several_machines():
    step_s = np.array([np.inf, np.inf, 1.0, 0.5, 0.5, 0.25])
    assert study_s(step_s, [(20, 1)]).tolist() == [np.inf, np.inf, 20.0, 10.0, 10.0, 5.0]


@given(st.lists(steps.filter(lambda some: len(some) >= 5), min_size=2, max_size=3))
@drawn
def test_one_call_answers_for_many_kinds(kinds):
    table = np.array([some[:5] for some in kinds]).T
    phases = [(3, 2), (40, 1)]
    together = study_s(table, phases)
    for column in range(table.shape[1]):
        assert together[:, column].tolist() == study_s(table[:, column], phases).tolist()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "must be at least 1, got steps=0"),
        ({"global_batch": 0}, "must be at least 1, .*global_batch=0"),
        ({"state_bytes": -1.0}, "bytes and seconds are not negative: state_bytes=-1.0"),
        ({"setup_s": math.nan}, "bytes and seconds are not negative: .*setup_s=nan"),
        ({"accumulation": "often"}, '`accumulation` must be "allowed" or "never", got \'often\''),
        ({"packs": PACKS}, "packs are trainings of a study: give its parallelism_phases, or"),
        ({"parallelism_phases": ()}, "are pairs .trainings, steps., both 1 or more"),
        ({"parallelism_phases": ((0, 1),)}, "are pairs .trainings, steps., both 1 or more"),
    ],
)
def test_workloads_that_cannot_be(changes, message):
    with pytest.raises(CloudError, match=message):
        a_workload(**changes)


# -- width -----------------------------------------------------------------------------


def stage(index, parent, stop, *, start=0, state="pending"):
    return ForestStage(
        index=index,
        parent=parent,
        node=index,
        start=start,
        stop=stop,
        state=state,
        num_trials=1,
        metrics=None,
    )


def epoch_by_epoch(stages):
    """Train an epoch of every ready stage at a time and return how many ran each time."""
    left = {each.index: each.stop - each.start for each in stages}
    counts = []
    while any(left.values()):
        now = [
            each.index
            for each in stages
            if left[each.index] and (each.parent is None or not left[each.parent])
        ]
        counts.append(len(now))
        for index in now:
            left[index] -= 1
    return counts


@st.composite
def forests(draw):
    plan = SearchPlan()
    for trial in range(draw(st.integers(1, 6))):
        milestones = sorted(draw(st.sets(st.integers(1, 8), max_size=3)))
        lr = draw(st.sampled_from([0.1, 0.2]))
        epochs = draw(st.integers(1, 9))
        inside = [each for each in milestones if each < epochs]
        schedule = Step(lr, inside) if inside else Constant(lr)
        plan.request(trial, plan.insert(Timeline({"lr": schedule}, epochs=epochs)), epochs)
    return stage_forest(plan, ends={})


@given(forests(), st.integers(1, 50))
@drawn
def test_the_width_is_what_runs_with_enough_machines(stages, steps_per_epoch):
    unrolled = [
        width
        for width, steps in parallelism_phases_of(stages, steps_per_epoch=steps_per_epoch)
        for _ in range(steps // steps_per_epoch)
    ]
    assert unrolled == epoch_by_epoch(stages)


def test_neighbouring_phases_differ():
    stages = [stage(0, None, 3), stage(1, 0, 5, start=3), stage(2, None, 5)]
    assert parallelism_phases_of(stages) == ((2, 5),)


def test_what_is_trained_counts_no_more():
    stages = [
        stage(0, None, 10, state="done"),
        stage(1, 0, 20, start=10),
        stage(2, 0, 15, start=10, state="running"),
        stage(3, None, 5, state="failed"),
        stage(4, 3, 50, start=5),
        stage(5, 4, 60, start=50),
        stage(6, None, 3),
    ]
    assert parallelism_phases_of(stages, steps_per_epoch=2) == ((3, 6), (2, 4), (1, 10))


@pytest.mark.parametrize("stages", [[], [stage(0, None, 3, state="done")]])
def test_nothing_is_left(stages):
    with pytest.raises(CloudError, match="no stage is left to train"):
        parallelism_phases_of(stages)


def test_an_epoch_without_steps():
    with pytest.raises(CloudError, match="an epoch has at least one step, not steps_per_epoch=0"):
        parallelism_phases_of([stage(0, None, 3)], steps_per_epoch=0)
