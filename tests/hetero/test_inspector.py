"""When a loss is checked: at first, then at seeded steps that cost at most 1 % of the time."""

from __future__ import annotations

from itertools import pairwise

import pytest

from thrifty.hetero._loss_check import CheckSchedule


def checked_at(schedule, *, num_steps, check_s, step_s):
    steps = []
    for step in range(num_steps):
        if schedule.is_due(step):
            steps.append(step)
            schedule.checked(step + 1, check_s=check_s, step_s=step_s)
    return steps


def test_the_first_step_is_checked_whatever_it_costs():
    assert checked_at(CheckSchedule(seed=0), num_steps=9, check_s=1e9, step_s=1.0) == [0]


@pytest.mark.parametrize("check_s", [1.0, 4.0, 30.0])
def test_all_others_cost_one_percent_at_most(check_s):
    steps = checked_at(CheckSchedule(seed=0), num_steps=100_000, check_s=check_s, step_s=1.0)
    assert 0.004 < (len(steps) - 1) * check_s / 100_000 <= 0.01


def test_checks_that_cost_nothing_are_not_made_at_each_step():
    assert len(checked_at(CheckSchedule(seed=0), num_steps=1000, check_s=0.0, step_s=0.0)) <= 10


def test_steps_follow_the_seed():
    one, again, other = (
        checked_at(CheckSchedule(seed=seed), num_steps=5000, check_s=3.0, step_s=1.0)
        for seed in (1, 1, 2)
    )
    assert one == again != other
    gaps = {b - a for a, b in pairwise(one)}
    assert len(gaps) > 1  # a loss cannot predict when it is checked


def test_a_change_is_followed_by_a_check():
    schedule = CheckSchedule(seed=0)
    schedule.checked(1, check_s=3.0, step_s=1.0)
    assert not schedule.is_due(2)
    schedule.restart()
    assert schedule.is_due(2)
