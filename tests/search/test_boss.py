import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.depth import draws
from tests.search._drive import ask, ends, follow, to_the_end
from tests.search._slow_sub_sampling import slow_ahead, slow_decisions
from thrifty.core import AlgorithmError
from thrifty.search import (
    BOSS,
    GridSampler,
    History,
    RandomForestSampler,
    RandomSampler,
    SubSampling,
    WideBOSS,
)
from thrifty.space import Choice, Space
from thrifty.testing import FakeStudy


RANDOM = BOSS(max_epochs=9, sampler=RandomSampler())


def slow_verdicts(algorithm, history, *, num):
    """Return the trials that go on by the definition, trial by trial."""
    out = []
    for group, (size, rungs) in enumerate(algorithm.brackets()):
        trials = [t for t in history if t.group == group]
        if len(trials) == size and not any(
            t.state == "running" and t.target == rungs[0] for t in trials
        ):
            found = slow_decisions(trials, rungs=rungs, algorithm=algorithm)
            if not found and not any(t.state == "running" for t in trials):
                found = slow_ahead(trials, rungs=rungs)
            out += found[: num - len(out)]
    return out


OPTIONS = [
    {"max_epochs": 27},
    {"max_epochs": 9, "threshold": 1, "num_trials": 30},
    {"max_epochs": 8, "threshold": "log", "eta": 2, "num_trials": 40},
]


@settings(max_examples=draws(37, 150), deadline=None)
@given(st.integers(0, 2**32), st.sampled_from(OPTIONS), st.booleans())
def test_decides_as_defined_in_any_history(seed, options, learns):
    sampler = RandomForestSampler(min_points=10**6) if learns else RandomSampler()
    algorithm = BOSS(**options, sampler=sampler)
    rng, history, curves = np.random.default_rng(seed), History(), {}
    for _ in range(100):
        num = int(rng.integers(1, 9))
        decisions = ask(algorithm, history, num=num)
        old = [d for d in decisions if d.trial is not None]
        if old or (learns and not decisions):
            assert old == decisions == slow_verdicts(algorithm, history, num=num)
        # An interruption comes when part of an answer is recorded.
        for decision in decisions[: rng.integers(len(decisions) + 1)]:
            history.record_decision(decision)
        running = [t for t in history if t.state == "running"]
        for trial in running[: rng.integers(len(running) + 1)]:
            curve = curves.setdefault(trial.number, [])
            curve += rng.choice([0.1, 0.2, 0.3, math.nan], trial.target - len(curve)).tolist()
            if rng.random() < 0.05:
                history.record_failure(trial.number)
            else:
                history.record_scores(trial.number, curve)


def test_the_model_is_a_random_forest_that_draws_a_bracket_at_once():
    assert BOSS(max_epochs=9).sampler == RandomForestSampler()
    assert len(ask(BOSS(max_epochs=9), num=2)) == 9


def test_all_is_proposed_at_once_if_nothing_is_learnt():
    assert Counter(p.group for p in ask(RANDOM)) == {0: 9, 1: 5, 2: 3}


def test_a_bracket_begins_together_and_goes_on_without_rounds():
    history = History()
    for decision in ask(RANDOM, history):
        history.record_decision(decision)
    for number in range(8):
        history.record_scores(number, [number])
    assert ask(RANDOM, history, num=2) == [], "the last trial of the first round still trains"
    history.record_scores(8, [8])
    (first,) = ask(RANDOM, history, num=1)
    assert (first.trial, first.target, first.group) == (8, 3, 0)
    history.record_decision(first)
    history.record_scores(8, [8, 8, 8])
    # The threshold is above 1, so all other trials get another epoch.
    assert [d.trial for d in ask(RANDOM, history, num=3)] == [7, 6, 5]


def test_good_trials_go_on_beyond_the_share_of_a_round():
    greedy = BOSS(max_epochs=9, num_trials=9, threshold=1, sampler=RandomSampler())
    history = History()
    follow(history, ask(greedy, history), score=lambda k, e: 0.5)
    # The leader gets worse, so all others are as good as its worst epoch.
    follow(history, ask(greedy, history, num=1), score=lambda k, e: 0.5 - e / 100)
    assert len(ask(greedy, history, num=9)) == 9


def test_whoever_would_idle_begins_with_the_next_bracket():
    learning = BOSS(max_epochs=9, sampler=RandomForestSampler())
    history = History()
    for decision in ask(learning, history, num=9):
        history.record_decision(decision)
    for number in range(8):
        history.record_scores(number, [number])
    asked = ask(learning, history, num=2)
    assert [(d.group, d.target) for d in asked] == [(1, 3)] * 5


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("options", OPTIONS)
def test_every_bracket_has_a_trial_that_is_trained_to_the_end(options, num_workers):
    algorithm = BOSS(**options, sampler=RandomSampler())
    study = FakeStudy(algorithm, num_workers=num_workers)
    study.run()
    for group in range(len(algorithm.brackets())):
        assert ends(study.history, group=group).get(options["max_epochs"], 0) >= 1
    assert len(study.history) == sum(b.num_trials for b in algorithm.brackets())


def test_small_grid_ends_in_the_first_bracket():
    space = Space(lr=Choice([0.1, 0.2, 0.3]))
    history = to_the_end(BOSS(max_epochs=9, sampler=GridSampler()), space=space)
    assert len(history) == 3
    assert max(t.reached for t in history) == 9


def test_one_bracket_is_sub_sampling_after_its_first_round():
    boss = BOSS(max_epochs=9, num_trials=9, sampler=RandomSampler())
    alone = SubSampling(max_epochs=9, num_trials=9)
    history = History()
    follow(history, ask(boss, history), score=lambda k, e: -abs(k - 4) - 1 / e)
    while decisions := ask(boss, history, num=1):
        assert decisions == ask(alone, history, num=1)
        follow(history, decisions, score=lambda k, e: -abs(k - 4) - 1 / e)
    assert ask(alone, history, num=1) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_epochs": 0}, "max_epochs=0"),
        ({"num_trials": 0}, "num_trials=0"),
        ({"threshold": 0}, "threshold=0"),
        ({"sampler": 3}, "give a sampler"),
    ],
)
def test_is_refused(options, message):
    with pytest.raises(AlgorithmError, match=message):
        BOSS(**{"max_epochs": 9, **options})


def test_its_brackets_are_hyperbands_and_those_of_its_variant_are_as_wide_as_the_first():
    assert BOSS(max_epochs=9).brackets() == ((9, (1, 3, 9)), (5, (3, 9)), (3, (9,)))
    assert WideBOSS(max_epochs=9).brackets() == ((9, (1, 3, 9)),) * 3
