from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from thrifty.store import StudyInfo, TrialRecord, best_trials, nondominated


pytestmark = pytest.mark.slow


def dominates(one, other) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True)) and tuple(one) != tuple(other)


def brute_force(points) -> list[int]:
    return [
        index
        for index, point in enumerate(points)
        if not any(dominates(other, point) for other in points)
    ]


@given(
    st.integers(1, 4).flatmap(
        lambda d: st.lists(st.tuples(*[st.integers(-3, 3)] * d), min_size=0, max_size=30)
    )
)
def test_the_front_is_what_nobody_dominates(points):
    assert nondominated(points) == brute_force(points)


@pytest.mark.parametrize("num_objectives", [2, 3])
def test_a_front_of_many_is_found_at_once(num_objectives):
    points = np.random.default_rng(0).normal(size=(3000, num_objectives))
    assert nondominated(points) == brute_force_numpy(points)


def brute_force_numpy(points) -> list[int]:
    return [
        i
        for i, p in enumerate(points)
        if not ((points >= p).all(axis=1) & (points > p).any(axis=1)).any()
    ]


def info(**spec) -> StudyInfo:
    return StudyInfo(id=1, name="s", plan=1, spec=spec, state="done", created_at=0.0)


def trial(number, value, *, state="waiting", violation=None, **objectives) -> TrialRecord:
    return TrialRecord(
        number=number,
        config={},
        node=0,
        group=0,
        parent=None,
        state=state,
        target=1,
        reached=1,
        value=value,
        error=("", "", ""),
        objectives=objectives or None,
        violation=violation,
    )


@pytest.mark.parametrize(("mode", "best"), [("max", 1), ("min", 0)])
def test_one_objective_has_one_best_trial(mode, best):
    trials = [trial(0, 1.0), trial(1, 2.0), trial(2, 2.0), trial(3, None)]
    trials += [trial(4, 0.0, state="failed"), trial(5, 9.0, violation=0.1)]
    trials += [trial(6, -9.0, violation=0.1)]
    assert [t.number for t in best_trials(info(metric="a", mode=mode), trials)] == [best]


def test_several_objectives_have_a_front():
    spec = {"metric": ["a", "b"], "mode": ["max", "min"]}
    trials = [
        trial(0, 1.0, a=1.0, b=1.0),
        trial(1, 2.0, a=2.0, b=2.0),
        trial(2, 1.0, a=1.0, b=2.0),
        trial(3, 9.0, a=9.0, b=0.0, violation=0.5),
    ]
    assert [t.number for t in best_trials(info(**spec), trials)] == [0, 1]


def test_nothing_is_the_best_of_nothing():
    assert best_trials(info(metric="a", mode="max"), [trial(0, 1.0, violation=1.0)]) == []
